"""``attn_implementation="regard"`` for transformers models: importing this module registers it.

    import regard.integrations.transformers
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="regard")

and ``accelerate(model)`` does the same for recurrent layers.

The mask function turns transformers' predicates into `regard.masks` (a causal mask stays a rule, never a tensor), so
windows, padding, packed rows (by ``position_ids``), static and sliding caches skip what they don't need. Softcaps,
sinks, position biases, grouped heads, dropout, training and returned weights work, in every model that asks its
configuration for an attention function (Bloom, for one, does not). A query that may attend to nothing gives 0
(transformers' eager path spreads it evenly). Returned weights are those before dropout.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from regard.integrations.acceleration import NAME, Acceleration, accelerate
from regard.masks import Band, Causal, Dense, Full, KeyPadding, Mask, Segments
from regard.ops.attention import attention, attention_weights
from regard.sites import can_read

__all__ = ["NAME", "Acceleration", "Handed", "accelerate", "attention_forward", "make_mask", "register"]


@dataclass(frozen=True)
class Handed:
    """What `make_mask` hands through a model to `attention_forward`: the mask, and where the queries stand."""

    mask: Mask | None
    q_start: int | Tensor
    ndim: int = 4  # transformers asks this, and to be contiguous, of anything it takes for a mask

    def contiguous(self) -> Handed:
        """Itself."""
        return self


def make_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | Handed | None = None,
    **options: Any,
) -> Handed:
    """transformers' mask interface: its predicate ``(b, h, q, kv)`` and its 2-D padding mask as one rule."""
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
        options.pop("allow_is_causal_skip", None)
        sizes = (batch_size, q_length, kv_length, q_offset, kv_offset, function, attention_mask)
        return Handed(Dense(masking_utils.sdpa_mask(*sizes, allow_is_causal_skip=False, **options)), start)
    if keep is not None:
        keep = keep[:, kv_offset : kv_offset + kv_length].bool()
        if not (can_read(keep) and bool(keep.all())):
            mask = mask & KeyPadding(keep)
    return Handed(mask, start)


def _read(function: Callable[..., Any], first: int) -> Mask | None:
    """A predicate of transformers' masking_utils as a mask for keys from slot `first`; None if it can't be read."""
    from transformers import masking_utils

    if function is masking_utils.causal_mask_function:
        return Causal()
    if function is masking_utils.bidirectional_mask_function:
        return Full()
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
    call: dict[str, Any] = {
        "scale": scaling,
        "softcap": options.get("softcap"),
        "sink": options.get("s_aux"),
        "dropout_p": dropout,
        "bias": position_bias,
    }
    if isinstance(attention_mask, Handed):
        call |= {"mask": attention_mask.mask, "q_start": attention_mask.q_start}
    elif attention_mask is not None:
        mask, bias = _dense(attention_mask[..., : key.shape[2]])
        call["mask"] = mask
        if bias is not None:
            call["bias"] = bias if position_bias is None else bias + position_bias
    elif is_causal if is_causal is not None else getattr(module, "is_causal", False):
        call |= {"mask": Causal(), "q_start": 0 if query.shape[2] > 1 else None}  # top-left, as transformers means it
    if options.get("output_attentions"):
        out, weights, _ = attention_weights(query, key, value, **call)
        return out.transpose(1, 2).contiguous(), weights.to(query.dtype)
    return attention(query, key, value, **call).transpose(1, 2).contiguous(), None


def _dense(mask: Tensor) -> tuple[Tensor, Tensor | None]:
    """A 4-D mask that a model or user made as (allowed, bias); in a float one its dtype's minimum masks."""
    if mask.dtype == torch.bool:
        return mask, None
    allowed = mask > torch.finfo(mask.dtype).min / 2
    return allowed, torch.where(allowed, mask, torch.zeros((), dtype=mask.dtype, device=mask.device))


def register() -> None:
    """Make ``"regard"`` known to transformers, attention and masks; importing this module does so."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, make_mask)


register()
