"""Cross-attention of one head with scores of its own kind: what Bahdanau's and Luong's layers share.

A layer states its queries, its keys, its scores and what is done with the context vector; values are the context's
tokens as they are.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from regard.caches import KVCache, KVView
from regard.checks import describe, whole
from regard.masks import Mask
from regard.mixers.attention_parts import context_tokens, hide_unread, read_mask
from regard.mixers.base import Traits, check_tokens, floating
from regard.ops.additive import attend_by_scores, weights_of_scores

__all__ = ["ScoredCrossAttention"]


class ScoredCrossAttention(nn.Module):
    """``y_i = finish(sum_j softmax_j(scores(q_i, k_j)) c_j, x_i)`` over the tokens c_j of a context."""

    def __init__(self, dim: int, context_dim: int | None, key_dim: int) -> None:
        super().__init__()
        self.dim = whole("dim", dim, 1)
        self.context_dim = dim if context_dim is None else whole("context_dim", context_dim, 1)
        self.key_dim = whole("key_dim", key_dim, 1)

    # ---- what a layer states -----------------------------------------------------------------------------------------

    def queries(self, x: Tensor) -> Tensor:
        """(B, T, key_dim)."""
        raise NotImplementedError

    def keys(self, context: Tensor) -> Tensor:
        """(B, Tk, key_dim), computed once for a context."""
        raise NotImplementedError

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        """(B, 1, T, Tk), float32 at least."""
        raise NotImplementedError

    def finish(self, mixed: Tensor, x: Tensor) -> Tensor:
        """The output (B, T, out) from the context vectors (B, T, context_dim) and the tokens."""
        raise NotImplementedError

    def pattern(self, x: Tensor, view: KVView, start: int) -> tuple[Mask | None, Tensor | None]:
        """(which keys may be read, factors (B, 1, T, Tk) on the weights); queries begin at slot `start`."""
        return None, None

    # ---- the call ----------------------------------------------------------------------------------------------------

    @property
    def traits(self) -> Traits:
        """What the layer promises."""
        return Traits("softmax", causal=False, cached=True, context=True)

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        mask: Mask | Tensor | None = None,
        keep: Tensor | None = None,
        positions: Tensor | None = None,
        segments: Tensor | None = None,
        cache: KVCache | None = None,
    ) -> Tensor:
        """What the tokens (B, T, dim) read of the context; `keep` (B, Tk) describes the context's tokens."""
        given: dict[str, Any] = {"mask": mask, "keep": keep, "segments": segments, "cache": cache}
        scores, view, options, factors = self._read(x, context, **given)
        y = self.finish(self._mixed(scores, view, options, factors)[:, 0], x)
        if cache is not None:
            cache.commit_context(x.shape[1], *view.fresh)
        return y

    def mixed(self, x: Tensor, context: Tensor | None = None, **arguments: Any) -> Tensor:
        """The context vectors (B, 1, T, context_dim); a cache stays as it is."""
        arguments.pop("positions", None)
        return self._mixed(*self._read(x, context, **arguments))

    def mixing(self, x: Tensor, context: Tensor | None = None, **arguments: Any) -> tuple[Tensor, Tensor]:
        """(M (B, 1, T, Tk), V (B, 1, Tk, context_dim)): the alignment, and what it mixes; a cache stays as it is."""
        arguments.pop("positions", None)
        scores, view, options, factors = self._read(x, context, **arguments)
        weights = weights_of_scores(scores, view.v, **options)
        weights = weights if factors is None else weights * factors
        return weights, hide_unread(weights, view.v)

    def init_cache(
        self, batch: int, capacity: int, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None
    ) -> KVCache:
        """Room for the keys and tokens of a context of up to `capacity` tokens, which are written once."""
        like = floating(self)
        where = dtype or like.dtype, device or like.device
        return KVCache(batch, capacity, 1, self.key_dim, self.context_dim, *where)

    def _mixed(self, scores: Tensor, view: KVView, options: dict[str, Any], factors: Tensor | None) -> Tensor:
        if factors is None:
            return attend_by_scores(scores, view.v, **options)
        weights = weights_of_scores(scores, view.v, **options) * factors
        return (weights @ hide_unread(weights, view.v)).to(view.v.dtype)

    def _read(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        mask: Mask | Tensor | None = None,
        keep: Tensor | None = None,
        segments: Tensor | None = None,
        cache: KVCache | None = None,
    ) -> tuple[Tensor, KVView, dict[str, Any], Tensor | None]:
        check_tokens(self, "x", x, self.dim)
        if cache is not None and not isinstance(cache, KVCache):
            raise TypeError(f"cache: expected what init_cache gives, or None, got {describe(cache)}")
        layout = context_tokens(self, x, context, self.context_dim, keep=keep, segments=segments, cache=cache)
        if context is None:
            k, v = (x.new_zeros(x.shape[0], 1, 0, width) for width in (self.key_dim, self.context_dim))
        else:
            context = layout.real(context)
            k, v = self.keys(context)[:, None], context[:, None]
        view = KVView.alone(k, v, layout) if cache is None else cache.extend(k, v, layout)
        view = dataclasses.replace(view, segments=None)
        start = 0 if cache is None else cache.asked
        own, factors = self.pattern(x, view, start)
        options = {"mask": read_mask(own, mask, view, x), "q_start": start}
        return self.scores(self.queries(x)[:, None], view.k), view, options, factors
