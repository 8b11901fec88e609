"""What transformers models pass to their attention function beside the tensors: which of it counts, which does not.

An option that is not listed here may change the result, so it is refused by name.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from regard.checks import describe
from regard.coordinates import can_read
from regard.masks import Dense, Segments

__all__ = [
    "PACKED",
    "check_options",
    "documents",
    "named",
    "packed",
    "selected_keys",
    "wants_weights",
    "weights_omit_sinks",
]

PACKED = "_regard_parts_documents"  # on attention layers beside accelerated ones: packed documents stay apart in both

# read by `attention_forward`
READ = {
    "softcap",
    "s_aux",  # a logit per head that joins the softmax
    "sinks",  # the same, per query and head
    "indices",  # the keys that a sparse model chose for each query
    "block_indices",  # blocks of them
    "output_attentions",
    "cu_seq_lens_q",
    "seq_idx",
}
# in the mask already, or of no effect on attention
IDLE = {
    "sliding_window",  # the mask function gets it too
    "position_ids",
    "cache_position",
    "past_key_values",  # the layer has put their keys before the new ones
    "cu_seq_lens_k",  # those of the queries count
    "max_length_q",
    "max_length_k",
    "max_seqlen_q",
    "max_seqlen_k",
    "use_cache",
    "logits_to_keep",
    "num_items_in_batch",
    "labels",
    "shift_labels",
    "deterministic",  # of FlashAttention's backward pass
    "target_dtype",  # what FlashAttention casts to
    "use_top_left_mask",  # FlashAttention's old alignment
    "position_embeddings",  # applied to the queries and keys already
    "token_type_ids",  # applied to the embeddings, or in the mask
    "mm_token_type_ids",
    "input_ids",  # what the model itself was given
    "inputs_embeds",
    "pixel_values",
    "grid_thw",
    "image_grid_thw",
    "video_grid_thw",
    "interpolate_pos_encoding",
}
SINKS_BESIDE = {"granite_swa", "granitemoe_swa"}  # their eager weights are those before the sink's share


def named(module: nn.Module) -> str:
    """How errors call the model that a layer is of."""
    kind = getattr(getattr(module, "config", None), "model_type", None)
    return type(module).__name__ if kind is None else f"{kind}'s {type(module).__name__}"


def check_options(module: nn.Module, options: dict[str, Any]) -> None:
    """Raise where an option may change the result in a way that is not known here."""
    for name, value in options.items():
        if value is None or value is False or name in READ or name in IDLE:
            continue
        if isinstance(value, (bool, int, list)) and name.startswith(("output_", "return_")):
            continue  # what the model returns
        raise ValueError(
            f'{name}: {named(module)} passes an option that attn_implementation="regard" does not know '
            f'({describe(value)}); run the model with "eager"'
        )


def wants_weights(module: nn.Module, options: dict[str, Any]) -> bool:
    """Whether the call must return weights: asked for here, by the configuration, or by transformers' recorder."""
    asked = options.get("output_attentions")
    if asked is None:
        asked = getattr(getattr(module, "config", None), "output_attentions", None)
    if asked:
        return True
    from transformers.utils import output_capturing

    collector = output_capturing._active_collector
    if torch.compiler.is_compiling() and not collector.compiling and not module._forward_hooks:
        return False  # a layer compiled alone, which nothing records; a context variable cannot be traced
    recorded = collector.get()
    return recorded is not None and any(name.endswith("attentions") for name in recorded)


def weights_omit_sinks(module: nn.Module) -> bool:
    """Whether the model's own returned weights sum to one, its sinks being a factor on the output."""
    return getattr(getattr(module, "config", None), "model_type", None) in SINKS_BESIDE


def selected_keys(module: nn.Module, options: dict[str, Any], heads: int, keys: int) -> Dense | None:
    """The keys that the model's indexer chose for each query; None where it chose none."""
    indices: Tensor | None = options.get("indices")
    size = 1
    if indices is not None:
        indices = indices.unsqueeze(1)  # (B, Tq, chosen): the same for all heads
    elif (indices := options.get("block_indices")) is not None:
        size = getattr(getattr(module, "indexer", None), "block_size", 0)
        if not size:
            raise ValueError(
                f"block_indices: {named(module)} does not say how large its blocks are (indexer.block_size)"
            )
    if indices is None:
        return None
    blocks = -(-keys // size)
    chosen = torch.zeros(*indices.shape[:3], blocks + 1, dtype=torch.bool, device=indices.device)
    slots = indices.long()
    chosen = chosen.scatter(-1, torch.where(slots < 0, blocks, slots), True)[..., :blocks]  # < 0 stands for none
    if size > 1:
        chosen = chosen.repeat_interleave(size, dim=-1)[..., :keys]
    if chosen.shape[1] > 1:
        chosen = chosen.repeat_interleave(heads // chosen.shape[1], dim=1)
    return Dense(chosen)


def documents(cu_seqlens: Tensor, batch: int, tokens: int, before: bool = False) -> Tensor:
    """The numbers (B, T), from 1, of the documents that tokens are of, from where documents begin.

    As in FlashAttention, borders count through all batch rows. With `before`, the borders may cover the last columns
    of each row alone; the others are of its first document.
    """
    total = cu_seqlens[-1]
    if can_read(cu_seqlens):
        have, want = int(total), batch * tokens
        if have != want and not (before and have < want and have % batch == 0):
            raise ValueError(f"cu_seq_lens_q: expected borders that end at {want} tokens, got {have}")
    own = torch.div(total, batch, rounding_mode="floor")
    slots = (torch.arange(tokens, device=cu_seqlens.device) - (tokens - own)).clamp(min=0)
    rows = torch.arange(batch, device=cu_seqlens.device)[:, None] * own
    return torch.searchsorted(cu_seqlens.to(slots.dtype), (rows + slots).contiguous(), right=True)


def packed(
    module: nn.Module, options: dict[str, Any], batch: int, q_len: int, k_len: int, q_start: int | Tensor | None
) -> Segments | None:
    """The documents of a packed call beside accelerated layers; None where it is not packed.

    Cached keys before the call's own are of the first document. Elsewhere such marks do what they do in transformers'
    eager attention: nothing, since masks go by ``position_ids``.
    """
    ids, borders = options.get("seq_idx"), options.get("cu_seq_lens_q")
    if (ids is None and borders is None) or not getattr(module, PACKED, False):
        return None
    first = k_len - q_len if q_start is None else q_start
    if isinstance(first, Tensor):
        raise ValueError(f"cu_seq_lens_q: {named(module)} got packed documents with a cache whose length is a tensor")
    if ids is None:
        ids = documents(borders, batch, q_len)  # type: ignore[arg-type]
    ids = ids.expand(batch, -1)
    behind = k_len - first - q_len
    return Segments(ids, torch.cat([ids[:, :1].expand(-1, first), ids, ids[:, -1:].expand(-1, behind)], 1))
