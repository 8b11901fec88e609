"""What the layers of softmax attention share: what their queries may read, their contexts, what they promise."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn

from regard.caches import KVView
from regard.masks import And, Causal, KeyPadding, Mask, Segments, as_mask
from regard.mixers.base import Traits, check_tokens
from regard.tokens import TokenLayout, resolve_tokens

__all__ = ["attention_traits", "context_tokens", "hide_unread", "read_mask", "window_words"]


class ContextCache(Protocol):
    """What `context_tokens` asks of a cache."""

    context: bool
    length: int

    def resolve_tokens(
        self, batch: int, tokens: int, device: torch.device, *, keep: Tensor | None = None
    ) -> TokenLayout: ...


def read_mask(own: Mask | None, given: Mask | Tensor | None, view: KVView, x: Tensor) -> Mask | None:
    """What the queries of tokens `x` (B, T, dim) may read of `view`: a layer's own pattern, one given at the call (both
    count every token seen), no padding, nothing of other segments.
    """
    pattern, extra = None if own is None else own.to(x.device), as_mask(given)
    if extra is not None:
        pattern = extra if pattern is None else pattern & extra
    parts = [] if pattern is None else [pattern.shifted(view.first)]
    if view.keep is not None:
        parts.append(KeyPadding(view.keep))
    if view.segments is not None:
        last = view.segments.shape[1] - x.shape[1]
        parts.append(Segments(view.segments[:, last:], view.segments))
    mask = parts[0] if parts else None
    for part in parts[1:]:
        assert mask is not None
        mask = mask & part
    return mask


def hide_unread(weights: Tensor, v: Tensor) -> Tensor:
    """The values (B, H, Tk, D) in the weights' dtype, with 0 for keys that no query of their row reads (B, H, Tq, Tk).

    Such keys may hold anything, and 0 times infinity is not 0.
    """
    read = (weights != 0).any(-2).any(1)[:, None, :, None]
    return torch.where(read, v.to(weights.dtype), torch.zeros((), dtype=weights.dtype, device=v.device))


def context_tokens(
    layer: nn.Module,
    x: Tensor,
    context: Tensor | None,
    context_dim: int,
    *,
    keep: Tensor | None,
    segments: Tensor | None,
    cache: ContextCache | None,
) -> TokenLayout:
    """The layout of a context's tokens, checked; of none where `context` is None and `cache` holds what they gave."""
    if segments is not None:
        raise ValueError("segments: with a context they have no meaning; mask the context with keep or mask")
    if context is None:
        if cache is None or not cache.context:
            raise ValueError("context: expected the tokens to read, or a cache that holds what they gave")
        if keep is not None:
            raise ValueError("keep: it describes the context's tokens, and the context was written by an earlier call")
        return cache.resolve_tokens(x.shape[0], 0, x.device)
    if cache is not None and (cache.context or cache.length):
        raise ValueError(
            "context: the cache holds one already (or a sequence); later calls pass context=None, or reset it first"
        )
    check_tokens(layer, "context", context, context_dim, x)
    sizes = (context.shape[0], context.shape[1], context.device)
    return resolve_tokens(*sizes, keep=keep) if cache is None else cache.resolve_tokens(*sizes, keep=keep)


def attention_traits(kind: str, mask: Mask | None, *, bias: bool = False, context: bool = False) -> Traits:
    """What a layer promises by its own pattern."""
    causal = not context and mask is not None and _looks_back(mask)
    counts = bias or not (mask is None or isinstance(mask, Causal))
    return Traits(kind, causal=causal, cached=causal or context, counts_slots=counts, context=context)


def _looks_back(mask: Mask) -> bool:
    """Whether a mask shows no query a later key, as far as its distances tell."""
    offsets = mask.offsets()
    if offsets is not None:
        return all(low >= 0 for low, _ in offsets.ranges)
    return isinstance(mask, And) and any(_looks_back(part) for part in mask.parts)


def window_words(window: int | None) -> list[str]:
    """For a layer's label."""
    return [] if window is None else [f"window {window}"]
