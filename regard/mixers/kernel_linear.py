"""Kernel linear attention: weights are products of features, so sums over the tokens do for the tokens.

    M_ts = phi(q_t) . phi(k_s),   o_t = sum_s M_ts v_s / (sum_s M_ts + eps)
    causal (s <= t):  S_t = S_{t-1} + phi(k_t) [v_t | 1]^T,   [o'_t | n_t] = S_t^T phi(q_t),   o_t = o'_t / (n_t + eps)

A last column of ones among the values makes the sum of the weights. Nothing is scaled but by the feature map.
Katharopoulos et al. 2020, arXiv:2006.16236 (elu + 1); Arora et al. 2024, arXiv:2402.18668 (Based); Aksenov et al. 2024,
arXiv:2402.10644 (ReBased).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from regard.caches import StateCache
from regard.checks import describe, is_factory, positive, whole
from regard.feature_maps import EluPlusOne, FeatureMap, Rebased, Taylor
from regard.masks import Mask
from regard.mixers.base import Record, check_tokens, floating
from regard.mixers.parts import RMSNorm, merge_heads, split_heads
from regard.mixers.recurrent import (
    RecurrentLayer,
    States,
    TokenSequence,
    check_cache,
    compute_dtype,
    empty_states,
    identity,
)
from regard.ops.checks import without_autocast
from regard.tokens import TokenLayout, resolve_tokens
from regard.transitions import Decay

__all__ = ["LinearAttention", "LinearCrossAttention", "divided", "read", "records", "with_ones", "written"]

MapFactory = Callable[[int, int], FeatureMap]


def with_ones(v: Tensor) -> Tensor:
    """The values (..., D) with a last column of ones: what is mixed of it is the sum of the weights."""
    return torch.cat((v, torch.ones_like(v[..., :1])), -1)


def divided(sums: Tensor, eps: float) -> Tensor:
    """Weighted sums (..., D + 1) of `with_ones` values, divided by the sums of the weights plus `eps`: (..., D).

    >>> divided(torch.tensor([[3.0, 5.0, 2.0], [0.0, 0.0, 0.0]]), 1e-6).tolist()
    [[1.4999992847442627, 2.4999988079071045], [0.0, 0.0]]
    """
    return sums[..., :-1] / (sums[..., -1:] + eps)


def written(k: Tensor, v: Tensor) -> Tensor:
    """``sum_s k_s v_s^T`` (B, Hv, F, D) of all tokens; k (B, Hk, T, F) are features, v is (B, Hv, T, D)."""
    groups = v.unflatten(1, (k.shape[1], v.shape[1] // k.shape[1]))
    state: Tensor = (k.transpose(-1, -2).unsqueeze(2) @ groups).flatten(1, 2)
    return state


def read(q: Tensor, state: Tensor) -> Tensor:
    """``S^T q_t`` (B, Hv, T, D) for every query's features (B, Hk, T, F)."""
    groups = state.unflatten(1, (q.shape[1], state.shape[1] // q.shape[1]))
    sums: Tensor = (q.unsqueeze(2) @ groups).flatten(1, 2)
    return sums


class _Kernel(nn.Module):
    """Projections, feature map and normaliser of a layer whose keys and values come from `source` channels."""

    def __init__(
        self,
        dim: int,
        source: int,
        heads: int,
        key_heads: int | None,
        key_dim: int | None,
        value_dim: int | None,
        feature_map: MapFactory,
        eps: float | None,
    ) -> None:
        super().__init__()
        self.dim, self.heads = whole("dim", dim, 1), whole("heads", heads, 1)
        self.key_heads = heads if key_heads is None else whole("key_heads", key_heads, 1)
        if heads % self.key_heads:
            raise ValueError(f"key_heads: expected a divisor of heads={heads}, got {key_heads}")
        self.key_dim = whole("key_dim", dim // heads if key_dim is None else key_dim, 1)
        self.value_dim = whole("value_dim", dim // heads if value_dim is None else value_dim, 1)
        self.eps = None if eps is None else positive("eps", eps)  # None divides by nothing
        is_factory("feature_map", feature_map)
        self.feature_map = feature_map(self.key_heads, self.key_dim)
        if not isinstance(self.feature_map, FeatureMap):
            raise TypeError(f"feature_map: expected a factory of a FeatureMap, got one of {describe(self.feature_map)}")
        keys, values = self.key_heads * self.key_dim, heads * self.value_dim
        self.q_proj = nn.Linear(dim, keys, bias=False)
        self.k_proj = nn.Linear(source, keys, bias=False)
        self.v_proj = nn.Linear(source, values, bias=False)
        self.norm = RMSNorm(self.value_dim) if eps is None else None
        self.o_proj = nn.Linear(values, dim, bias=False)

    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        return {"state": (self.heads, self.feature_map.features, self.value_dim + (self.eps is not None))}

    def query_features(self, x: Tensor) -> Tensor:
        """phi(q) (B, key heads, T, features) in the compute dtype."""
        q = split_heads(self.q_proj(x), self.key_heads)
        with without_autocast(q):
            return self.feature_map.queries(self._wide(q))

    def key_features(self, x: Tensor) -> Tensor:
        """phi(k), as `query_features`."""
        k = split_heads(self.k_proj(x), self.key_heads)
        with without_autocast(k):
            return self.feature_map.keys(self._wide(k))

    def values(self, x: Tensor) -> Tensor:
        """(B, heads, T, value_dim)."""
        return split_heads(self.v_proj(x), self.heads)

    def summed(self, v: Tensor) -> Tensor:
        """The values as the sums take them."""
        return self._wide(v if self.eps is None else with_ones(v))

    def _wide(self, x: Tensor) -> Tensor:
        return x.to(torch.float64 if self.feature_map.cancels else compute_dtype(x))

    def finished(self, sums: Tensor, like: Tensor) -> Tensor:
        """What is mixed, from the sums, in the compute dtype of `like`."""
        return (sums if self.eps is None else divided(sums, self.eps)).to(compute_dtype(like))

    def project(self, mixed: Tensor, dtype: torch.dtype) -> Tensor:
        """The output (B, T, dim) from what was mixed, which is rounded to `dtype` after its norm."""
        out: Tensor = self.o_proj(merge_heads(mixed if self.norm is None else self.norm(mixed)).to(dtype))
        return out


class LinearAttention(_Kernel, RecurrentLayer):
    """Kernel linear attention over the layer's own tokens; ``(B, T, dim)`` in and out, causal or not.

    Args:
        dim: width of the tokens.
        heads: value heads H.
        key_heads: heads of queries and keys, a divisor of `heads`; `heads` by default.
        key_dim: Dk of a head, before the feature map; ``dim // heads`` by default.
        value_dim: Dv of a head; ``dim // heads`` by default.
        feature_map: ``feature_map(key_heads, key_dim)`` gives the `regard.feature_maps.FeatureMap`; elu + 1 by default.
        eps: added to the sum of the weights, which divides: a row whose weights sum to n is a mean of values times
            ``n / (n + eps)``, so 0 where n is 0. None divides by nothing; an RMS norm of each head follows instead.
        bidirectional: every token reads all real tokens of its segment; then there is neither a cache nor a mask.

    Parameters: ``q_proj k_proj v_proj o_proj`` (heads contiguous), ``feature_map.*``, ``norm`` (Dv) without `eps`. The
    state is (F, Dv + 1) per head for F features, its last column the sum of the keys' features. Features, sums and the
    division are float32, or float64 in float64 layers and for maps whose products cancel (`Quadratic`, `Rebased`); a
    cache's state is float32 outside float64 layers. Raises ValueError for sizes below 1 and numbers out of range.

    Cost: 2 T H (C (F + Dv) + 2 F Dv) FLOPs beside the projections with chunks of C tokens; 4 T H F Dv where
    bidirectional, without segments.

    >>> import torch
    >>> LinearAttention(64, 4)(torch.randn(2, 10, 64)).shape
    torch.Size([2, 10, 64])
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        key_heads: int | None = None,
        key_dim: int | None = None,
        value_dim: int | None = None,
        feature_map: MapFactory = EluPlusOne,
        eps: float | None = 1e-6,
        bidirectional: bool = False,
    ) -> None:
        super().__init__(dim, dim, heads, key_heads, key_dim, value_dim, feature_map, eps)
        self.bidirectional = bidirectional

    def mix_tokens(self, seq: TokenSequence, states: States) -> tuple[Tensor, Tensor | None, dict[str, Tensor]]:
        mixed, state = self._mixed(seq, self.values(seq.x), states.get("state"))
        return mixed, None, {"state": state}

    def project_output(self, x: Tensor, mixed: Tensor, gate_input: Tensor | None) -> Tensor:
        return self.project(mixed, x.dtype)

    def matrix(self, seq: TokenSequence) -> tuple[Tensor, Tensor]:
        return self._mixed(seq, identity(seq, self.heads), None)[0], self.values(seq.x)

    def _mixed(self, seq: TokenSequence, values: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        q, k, v = self.query_features(seq.x), self.key_features(seq.x), self.summed(values)
        with without_autocast(v):
            if not self.bidirectional:
                sums, state = seq.recur(q, k, v, Decay(), state, 1.0)
                return self.finished(sums, values), state.to(compute_dtype(values))
            if seq.segments is None:
                sums = read(q, written(k, seq.mask_padding(v, 2)))
            else:
                sums = seq.recur_both_ways(q, k, v, Decay(), 1.0)
            return self.finished(sums, values), sums.new_zeros(0)  # no cache keeps a state


class LinearCrossAttention(_Kernel):
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
        out = self.project(self._read(q, state, x), x.dtype)
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
        if segments is not None:
            raise ValueError("segments: with a context they have no meaning; mask the context with keep")
        check_cache(self, cache, self.state_shapes())
        if context is None:
            if cache is None or not cache.context:
                raise ValueError("context: expected the tokens to read, or a cache that holds their sums")
            if keep is not None:
                raise ValueError("keep: it describes the context's tokens, which an earlier call has written")
            return None, cache.resolve_tokens(x.shape[0], 0, x.device)
        if cache is not None and cache.context:
            raise ValueError("context: the cache holds one already; later calls pass context=None, or reset it first")
        check_tokens(self, "context", context, self.context_dim, x)
        sizes = (context.shape[0], context.shape[1], context.device)
        layout = resolve_tokens(*sizes, keep=keep) if cache is None else cache.resolve_tokens(*sizes, keep=keep)
        seq = TokenSequence(context, layout.positions, layout.keep)
        return TokenSequence(seq.mask_padding(context), layout.positions, layout.keep), layout


records = (
    Record(
        name="linear",
        summary="kernel linear attention with elu + 1, divided by the sums of its weights",
        source="Katharopoulos et al. 2020, arXiv:2006.16236",
        build=lambda dim, heads: LinearAttention(dim, heads),
        causal=True,
        kind="recurrent",
        counts_slots=False,
    ),
    Record(
        name="linear_bidirectional",
        off_kernels="it mixes all tokens in two plain products, which are torch's own",
        summary="kernel linear attention over all tokens",
        source="Katharopoulos et al. 2020, arXiv:2006.16236",
        build=lambda dim, heads: LinearAttention(dim, heads, bidirectional=True),
        causal=False,
        cached=False,
        kind="kernel",
        counts_slots=False,
    ),
    Record(
        name="linear_cross",
        off_kernels="it mixes all tokens in two plain products, which are torch's own",
        summary="kernel linear attention over a context, whose sums are written to the cache once",
        source="Katharopoulos et al. 2020, arXiv:2006.16236",
        build=lambda dim, heads: LinearCrossAttention(dim, heads, context_dim=dim + 4),
        causal=False,
        kind="kernel",
        context=True,
        counts_slots=False,
    ),
    Record(
        name="linear_unnormalised",
        summary="kernel linear attention with a norm per head instead of the division",
        source="Katharopoulos et al. 2020, arXiv:2006.16236; Qin et al. 2022, arXiv:2210.10340",
        build=lambda dim, heads: LinearAttention(dim, heads, eps=None),
        causal=True,
        kind="recurrent",
        counts_slots=False,
    ),
    Record(
        name="based",
        summary="linear attention with the second-order Taylor polynomial of exp",
        source="Arora et al. 2024, arXiv:2402.18668",
        build=lambda dim, heads: LinearAttention(dim, heads, key_dim=16, feature_map=Taylor, eps=1e-12),
        causal=True,
        kind="recurrent",
        counts_slots=False,
    ),
    Record(
        name="rebased",
        off_kernels="its features cancel, so they are summed in float64, and the kernels compute in float32",
        summary="linear attention with a learned parabola of normalised queries and keys",
        source="Aksenov et al. 2024, arXiv:2402.10644",
        build=lambda dim, heads: LinearAttention(dim, heads, key_dim=16, feature_map=Rebased, eps=1e-12),
        causal=True,
        kind="recurrent",
        counts_slots=False,
    ),
)
