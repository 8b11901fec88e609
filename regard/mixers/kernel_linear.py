"""Kernel linear attention: weights are products of features, so sums over the tokens do for the tokens.

    M_ts = phi(q_t) . phi(k_s),   o_t = sum_s M_ts v_s / (sum_s M_ts + eps)
    causal (s <= t):  S_t = S_{t-1} + phi(k_t) [v_t | 1]^T,   [o'_t | n_t] = S_t^T phi(q_t),   o_t = o'_t / (n_t + eps)

A last column of ones among the values makes the sum of the weights. Nothing is scaled but by the feature map.
Katharopoulos et al. 2020, arXiv:2006.16236 (elu + 1); Arora et al. 2024, arXiv:2402.18668 (Based); Aksenov et al. 2024,
arXiv:2402.10644 (ReBased).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from regard.caches import StateCache
from regard.checks import describe, whole
from regard.feature_maps import EluPlusOne, Rebased, Taylor
from regard.masks import Mask
from regard.mixers.attention_parts import context_tokens
from regard.mixers.base import Record, Traits, check_tokens, floating
from regard.mixers.kernel_layer import CANCELLING, PLAIN_PRODUCTS, LinearAttention
from regard.mixers.kernel_sums import KernelHeads, MapFactory, read, written
from regard.mixers.recurrent import check_cache, empty_states
from regard.mixers.sequence import TokenSequence, compute_dtype, identity
from regard.ops.checks import without_autocast
from regard.tokens import TokenLayout

__all__ = ["LinearAttention", "LinearCrossAttention", "records"]


class LinearCrossAttention(KernelHeads):
    """Kernel linear attention over a context: its sums are made once, whatever the number of queries.

    ``layer(x, context)`` is (B, T, dim); the arguments are those of `LinearAttention` but for `context_dim`, the width
    of the context (`dim` by default). `keep` (B, Tk) marks the context's real tokens. With a cache the sums are written
    by the call that brings the context, and later calls pass ``context=None``. Nothing depends on the queries' places:
    `positions` change nothing, masks and segments are a ValueError. An empty context gives 0.

    Cost: 2 Tk H F Dv FLOPs for the context, 2 T H F Dv for the queries; the state is (F, Dv + 1) per head.

    >>> import torch
    >>> layer = LinearCrossAttention(64, 4, context_dim=32)
    >>> cache = layer.init_cache(batch=2, capacity=0)
    >>> first = layer(torch.randn(2, 1, 64), torch.randn(2, 500, 32), cache=cache)
    >>> layer(torch.randn(2, 1, 64), cache=cache).shape, cache.states["state"].shape
    (torch.Size([2, 1, 64]), torch.Size([2, 4, 16, 17]))
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        key_heads: int | None = None,
        key_dim: int | None = None,
        value_dim: int | None = None,
        context_dim: int | None = None,
        feature_map: MapFactory = EluPlusOne,
        eps: float | None = 1e-6,
    ) -> None:
        source = dim if context_dim is None else whole("context_dim", context_dim, 1)
        super().__init__(dim, source, heads, key_heads, key_dim, value_dim, feature_map, eps)
        self.context_dim = source  # of what keys and values are made from

    @property
    def traits(self) -> Traits:
        """What the layer promises."""
        off = CANCELLING if self.feature_map.cancels else PLAIN_PRODUCTS
        return Traits("kernel", causal=False, cached=True, context=True, off_kernels=off)

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        mask: Mask | None = None,
        keep: Tensor | None = None,
        positions: Tensor | None = None,
        segments: Tensor | None = None,
        cache: StateCache | None = None,
    ) -> Tensor:
        """The mixed tokens (B, T, dim)."""
        seq, layout = self._context(x, context, mask, keep, segments, cache)
        q = self.query_features(x)
        if seq is not None:
            state = self._written(seq, self.values(seq.x))
        else:
            assert cache is not None
            state = cache.states["state"]
        out = self.project_output(x, self._read(q, state, x), None)
        if cache is not None and seq is not None:
            cache.commit({"state": state.to(compute_dtype(x))}, None, layout, seq.x.shape[1])
            cache.context = True
        return out

    def mixed(self, x: Tensor, context: Tensor | None = None, **arguments: Any) -> Tensor:
        """What the layer mixes of a context (B, H, T, Dv), before norm and output projection."""
        seq = self._given(x, context, **arguments)
        return self._read(self.query_features(x), self._written(seq, self.values(seq.x)), x)

    def mixing(self, x: Tensor, context: Tensor | None = None, **arguments: Any) -> tuple[Tensor, Tensor]:
        """(M (B, H, Tq, Tk), V (B, H, Tk, Dv)) with ``M @ V`` what the layer mixes; the context is to be given."""
        seq = self._given(x, context, **arguments)
        values = self.values(seq.x)
        unit = self._written(seq, identity(seq, self.heads))
        return self._read(self.query_features(x), unit, values), values

    def init_cache(
        self, batch: int, capacity: int, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None
    ) -> StateCache:
        """Room for the sums of a context; `capacity` and `dtype` change nothing: size and precision are fixed."""
        return empty_states(self, self.state_shapes(), batch, floating(self.k_proj, self), device)

    def _given(self, x: Tensor, context: Tensor | None, **arguments: Any) -> TokenSequence:
        arguments.pop("positions", None)
        seq, _ = self._context(x, context, **arguments)
        if seq is None:
            raise ValueError("context: the sums in a cache do not remember their tokens; give the context itself")
        return seq

    def _read(self, q: Tensor, state: Tensor, like: Tensor) -> Tensor:
        with without_autocast(q):
            return self.finished(read(q, state.to(q.dtype)), like)

    def _written(self, seq: TokenSequence, values: Tensor) -> Tensor:
        k, v = self.key_features(seq.x), self.summed(values)
        with without_autocast(v):
            return written(k, seq.mask_padding(v, 2))

    def _context(
        self,
        x: Tensor,
        context: Tensor | None = None,
        mask: Mask | None = None,
        keep: Tensor | None = None,
        segments: Tensor | None = None,
        cache: StateCache | None = None,
    ) -> tuple[TokenSequence | None, TokenLayout]:
        """The context's tokens, or None where the cache holds their sums."""
        check_tokens(self, "x", x, self.dim)
        if mask is not None:
            raise ValueError(f"mask: expected None, the sums are over the whole context; got {describe(mask)}")
        check_cache(self, cache, self.state_shapes())
        layout = context_tokens(self, x, context, self.context_dim, keep=keep, segments=segments, cache=cache)
        if context is None:
            return None, layout
        seq = TokenSequence(context, layout.positions, layout.keep)
        return TokenSequence(seq.mask_padding(context), layout.positions, layout.keep), layout


records = (
    Record(
        name="linear",
        summary="kernel linear attention with elu + 1, divided by the sums of its weights",
        source="Katharopoulos et al. 2020, arXiv:2006.16236",
        build=lambda dim, heads: LinearAttention(dim, heads),
    ),
    Record(
        name="linear_bidirectional",
        summary="kernel linear attention over all tokens",
        source="Katharopoulos et al. 2020, arXiv:2006.16236",
        build=lambda dim, heads: LinearAttention(dim, heads, bidirectional=True),
    ),
    Record(
        name="linear_cross",
        summary="kernel linear attention over a context, whose sums are written to the cache once",
        source="Katharopoulos et al. 2020, arXiv:2006.16236",
        build=lambda dim, heads: LinearCrossAttention(dim, heads, context_dim=dim + 4),
    ),
    Record(
        name="linear_unnormalised",
        summary="kernel linear attention with a norm per head instead of the division",
        source="Katharopoulos et al. 2020, arXiv:2006.16236; Qin et al. 2022, arXiv:2210.10340",
        build=lambda dim, heads: LinearAttention(dim, heads, eps=None),
    ),
    Record(
        name="based",
        summary="linear attention with the second-order Taylor polynomial of exp",
        source="Arora et al. 2024, arXiv:2402.18668",
        build=lambda dim, heads: LinearAttention(dim, heads, key_dim=16, feature_map=Taylor, eps=1e-12),
    ),
    Record(
        name="rebased",
        summary="linear attention with a learned parabola of normalised queries and keys",
        source="Aksenov et al. 2024, arXiv:2402.10644",
        build=lambda dim, heads: LinearAttention(dim, heads, key_dim=16, feature_map=Rebased, eps=1e-12),
    ),
)
