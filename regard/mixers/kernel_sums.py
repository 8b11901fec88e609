"""What the two layers of kernel linear attention share: features, and sums over tokens that their products read.

A last column of ones among the values makes the sum of the weights. Nothing is scaled but by the feature map.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from regard.checks import describe, is_factory, positive
from regard.feature_maps import FeatureMap
from regard.mixers.matrix_state import HeadProjections
from regard.mixers.parts import RMSNorm, split_heads
from regard.mixers.sequence import compute_dtype
from regard.ops.checks import without_autocast

__all__ = ["KernelHeads", "MapFactory", "divided", "read", "with_ones", "written"]

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


class KernelHeads(HeadProjections):
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
        self.make_projections(dim, heads, key_heads=key_heads, key_dim=key_dim, value_dim=value_dim, source=source)
        self.eps = None if eps is None else positive("eps", eps)  # None divides by nothing
        is_factory("feature_map", feature_map)
        self.feature_map = feature_map(self.key_heads, self.key_dim)
        if not isinstance(self.feature_map, FeatureMap):
            raise TypeError(f"feature_map: expected a factory of a FeatureMap, got one of {describe(self.feature_map)}")
        self.norm = RMSNorm(self.value_dim) if eps is None else None
        self.o_proj = nn.Linear(heads * self.value_dim, dim, bias=False)

    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of the sums over tokens."""
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
