"""``attn_implementation="regard"`` for transformers models: importing this module registers it.

    import regard.integrations.transformers
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="regard")

and ``accelerate(model)`` does the same for recurrent layers.

The mask function turns transformers' predicates into `regard.masks` (a causal mask stays a rule, never a tensor), so
windows, padding, packed rows (by ``position_ids``, ``cu_seq_lens_q`` or ``seq_idx``), static and sliding caches skip
what they don't need. A model that computes with its mask gets a tensor the moment it does. Softcaps, sinks, chosen
keys, position biases, grouped heads, dropout, training and returned weights work, in every model that asks its
configuration for an attention function; others (Bloom, for one) run their own. An option that is not known is refused
by name. A query that may attend to nothing gives 0 (transformers' eager path spreads it evenly). Returned weights are
those before dropout.
"""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from regard.backends.call import sink_share
from regard.coordinates import can_read
from regard.integrations.acceleration import NAME, Acceleration, accelerate, undo
from regard.integrations.handed import Handed
from regard.integrations.options import check_options, named, packed, selected_keys, wants_weights, weights_omit_sinks
from regard.masks import Band, Causal, Dense, Full, KeyPadding, Mask, Segments
from regard.ops.attention import attention, attention_weights

__all__ = ["NAME", "Acceleration", "Handed", "accelerate", "attention_forward", "make_mask", "register", "undo"]

ASK_FOR_TENSORS = {"deepseek_v4"}  # they lengthen their mask if it is a tensor, and only then


def make_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | Handed | None = None,
    **options: Any,
) -> Handed | Tensor | None:
    """transformers' mask interface: its predicate ``(b, h, q, kv)`` and its 2-D padding mask as one rule.

    None where eager attention would get none: every query of an encoder may attend to every key.
    """
    if isinstance(attention_mask, Handed):
        return attention_mask
    from transformers import masking_utils

    function = masking_utils.causal_mask_function if mask_function is None else mask_function
    start = q_offset - kv_offset
    if isinstance(start, Tensor):
        start = int(start) if can_read(start) else start.reshape(1).expand(batch_size)
    keep = masking_utils.prepare_padding_mask(attention_mask, kv_length, kv_offset)
    mask = _read(function, kv_offset)
    if mask is None:  # a pattern of the model's own: evaluated whole, padding included
        whole = {**options, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        sizes = (batch_size, q_length, kv_length, q_offset, kv_offset, function, attention_mask)
        mask = Dense(masking_utils.sdpa_mask(*sizes, **whole))
    elif keep is not None:
        keep = keep[:, kv_offset : kv_offset + kv_length].bool()
        if not (can_read(keep) and bool(keep.all())):
            mask = mask & KeyPadding(keep)
    dtype, device = options.get("dtype", torch.float32), torch.device(options.get("device", "cpu"))
    free = bool(options.get("allow_is_bidirectional_skip")) and isinstance(mask, Full)
    config = options.get("config")
    if free and getattr(config, "is_causal", None) is not False:
        return None  # as for eager attention; a decoder that is told not to be causal has layers that do not know
    handed = Handed(mask, start, (batch_size, q_length, kv_length), dtype, device, free)
    return handed.dense() if getattr(config, "model_type", None) in ASK_FOR_TENSORS else handed


def _read(function: Callable[..., Any], first: int) -> Mask | None:
    """A predicate of transformers' masking_utils as a mask for keys from slot `first`; None if it can't be read."""
    from transformers import masking_utils

    if function is masking_utils.causal_mask_function:
        return Causal()
    if function is masking_utils.bidirectional_mask_function:
        return Full()
    if torch.compiler.is_compiling():
        return None  # what a function made inside a traced region encloses cannot be looked at
    held = inspect.getclosurevars(function).nonlocals if inspect.isfunction(function) else {}
    maker = getattr(function, "__qualname__", "").partition(".")[0]
    if getattr(function, "__module__", None) != masking_utils.__name__:
        return None
    if maker == "and_masks":
        parts = [_read(part, first) for part in held["mask_functions"]]
        mask = parts[0]
        for part in parts[1:]:
            mask = None if mask is None or part is None else mask & part
        return mask
    if maker == "sliding_window_overlay":
        return Band(held["sliding_window"] - 1, None)
    if maker == "sliding_window_bidirectional_overlay":
        return Band(held["sliding_window"], held["sliding_window"])
    if maker == "packed_sequence_mask_function" and first == 0:
        return Segments(held["packed_sequence_mask"])
    if maker == "remap_positions_for_packed_sequence":
        inner = _read(held["mask_function"], first)
        # inside a packed sequence positions rise by one, so a rule of distances alone reads the same in slots
        return inner if inner is not None and inner.offsets() is not None else None
    return None


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Handed | Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """transformers' attention interface: ``(B, H, T, D)`` in, ``(B, T, H, D)`` and the weights (when asked for) out."""
    check_options(module, options)
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", False)
    call: dict[str, Any] = {
        "scale": scaling,
        "softcap": options.get("softcap"),
        "sink": options.get("s_aux"),
        "dropout_p": dropout,
        "bias": position_bias,
    }
    if isinstance(attention_mask, Handed) and attention_mask.is_rule and _fits(module, attention_mask, query, key):
        call |= {"mask": attention_mask.mask, "q_start": attention_mask.q_start}
    elif attention_mask is not None:
        dense = attention_mask.dense() if isinstance(attention_mask, Handed) else attention_mask
        call["mask"], bias = _dense(module, dense, query, key)
        if bias is not None:
            call["bias"] = bias if position_bias is None else bias + position_bias
    elif causal:
        call |= {"mask": Causal(), "q_start": 0 if query.shape[2] > 1 else None}  # top-left, as transformers means it
    parts = [call.get("mask"), selected_keys(module, options, query.shape[1], key.shape[2])]
    if causal:
        parts.append(packed(module, options, query.shape[0], query.shape[2], key.shape[2], call.get("q_start")))
    call["mask"] = _all_of([part for part in parts if part is not None])
    sinks = options.get("sinks")
    return _attend(query, key, value, call, sinks, wants_weights(module, options), weights_omit_sinks(module))


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    call: dict[str, Any],
    sinks: Tensor | None,
    weighed: bool,
    omit_sinks: bool,
) -> tuple[Tensor, Tensor | None]:
    """The output as transformers lays it out, and the weights where they are wanted; `sinks` (B, H, Tq, 1)."""
    weights: Tensor | None = None
    lse: Any = None
    if weighed:
        out, weights, lse = attention_weights(query, key, value, **call)
        if omit_sinks and call["sink"] is not None:
            weights = attention_weights(query, key, value, **{**call, "sink": None})[1]
    else:
        made: Any = attention(query, key, value, return_lse=sinks is not None, **call)
        out, lse = (made, None) if sinks is None else made
    if sinks is not None:
        share = sink_share(lse, sinks.squeeze(-1)).unsqueeze(-1)
        out = (out * share).to(query.dtype)
        weights = None if weights is None else weights * share
    out = out.transpose(1, 2).contiguous()
    return out, None if weights is None else weights.to(query.dtype)


def _fits(module: nn.Module, handed: Handed, query: Tensor, key: Tensor) -> bool:
    """Whether a mask was made for these queries and keys; for keys of another number, an error.

    One made for a single query spreads over all of them, as a tensor does.
    """
    _, rows, columns = handed.sizes
    if handed.free:
        return True
    if columns != key.shape[2] or rows not in (1, query.shape[2]):
        raise ValueError(_sizes(module, (rows, columns), query, key))
    return rows == query.shape[2]


def _sizes(module: nn.Module, made: tuple[int, ...], query: Tensor, key: Tensor) -> str:
    return (
        f"attention_mask: {named(module)} hands over a mask for (queries, keys) {tuple(made)} "
        f"with {query.shape[2]} queries and {key.shape[2]} keys"
    )


def _dense(module: nn.Module, mask: Tensor, query: Tensor, key: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """A mask that a model or user made as (allowed, bias); in a float one its dtype's minimum masks."""
    if mask.ndim > 4:
        raise ValueError(f"attention_mask: {named(module)} hands over a mask of {mask.ndim} axes, expected at most 4")
    mask = mask[(None,) * (4 - mask.ndim)]
    if mask.shape[2] not in (1, query.shape[2]) or mask.shape[3] not in (1, key.shape[2]):
        raise ValueError(_sizes(module, mask.shape[2:], query, key))
    if mask.dtype == torch.bool:
        return mask, None
    if not mask.is_floating_point():
        return None, mask.to(query.dtype)  # added to the scores, as any number
    allowed = mask > torch.finfo(mask.dtype).min / 2
    return allowed, torch.where(allowed, mask, torch.zeros((), dtype=mask.dtype, device=mask.device))


def _all_of(masks: list[Mask | Tensor]) -> Mask | None:
    """Masks and bool tensors as one mask."""
    parts = [Dense(mask) if isinstance(mask, Tensor) else mask for mask in masks]
    return functools.reduce(operator.and_, parts) if parts else None


def register() -> None:
    """Make ``"regard"`` known to transformers, attention and masks; importing this module does so."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, make_mask)


register()
