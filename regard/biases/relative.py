"""Learned tables of relative positions: T5's buckets, and one number per offset on a grid, alone or behind a token."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from regard.biases.base import Bias, needs_heads
from regard.checks import describe, whole
from regard.coordinates import TileIndices

__all__ = ["ClassTable", "RelativeBuckets", "RelativeTable", "relative_bucket"]


class _Table(Bias):
    """``table[index(i, j), h]``."""

    table: Tensor

    def index(self, indices: TileIndices) -> Tensor:
        raise NotImplementedError

    def scores(self, indices: TileIndices, dtype: torch.dtype) -> Tensor:
        return self.table.to(dtype)[self.index(indices), indices.h]

    def accumulate(self, indices: TileIndices, grad: Tensor, out: Sequence[Tensor]) -> None:
        index = self.index(indices).expand(grad.shape[0], 1, *grad.shape[2:])[:, 0]
        out[0].index_add_(0, index.flatten(), grad.permute(0, 2, 3, 1).flatten(0, 2).to(out[0].dtype))

    def check(self, batch: int, heads: int, q_len: int, k_len: int) -> None:
        needs_heads(f"{type(self).__name__}.table", self.table.shape[1], heads)

    def head_count(self) -> int:
        return self.table.shape[1]


def relative_bucket(offset: Tensor, buckets: int, *, bidirectional: bool = True, max_distance: int = 128) -> Tensor:
    """T5's bucket of every relative position ``offset = j - i``: exact near, logarithmic far.

    Bidirectional: the upper half of the buckets is for keys after the query. Otherwise later keys share bucket 0. With
        ``n`` buckets on a side and ``m = n // 2``, a distance ``a`` below ``m`` is its own bucket, else ``min(n - 1, m
        + floor(ln(a / m) / ln(max_distance / m) * (n - m)))``, computed in float32 as the published models do.

    Raffel et al. 2020, arXiv:1910.10683, and the authors' code.

    >>> relative_bucket(torch.tensor([0, -1, 1, -8, 8, 128]), 32).tolist()
    [0, 1, 17, 8, 24, 31]
    """
    first = torch.zeros_like(offset)
    if bidirectional:
        buckets //= 2
        first = (offset > 0).long() * buckets
        distance = offset.abs()
    else:
        distance = (-offset).clamp(min=0)
    exact = buckets // 2
    # float32, in this order: at the borders (16, 32, 64 …) float64 floors to another bucket than the models use
    far = torch.log(distance.clamp(min=1).float() / exact) / math.log(max_distance / exact) * (buckets - exact)
    far = (exact + far.long()).clamp(max=buckets - 1)
    return first + torch.where(distance < exact, distance, far)


@dataclass(frozen=True, eq=False)
class RelativeBuckets(_Table):
    """T5's relative position bias ``table[bucket(j - i), h]``; `table` is (buckets, H). See `relative_bucket`."""

    table: Tensor
    bidirectional: bool = True
    max_distance: int = 128
    relative: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _is_table(self.table, "(buckets, H)")
        exact = self.table.shape[0] // (4 if self.bidirectional else 2)
        if exact < 1 or self.max_distance <= exact:
            raise ValueError(
                f"RelativeBuckets: {self.table.shape[0]} buckets keep {exact} distances exact; it takes at least 1, and"
                f" a max_distance above that, got {self.max_distance}"
            )

    def with_tensors(self, tensors: Sequence[Tensor]) -> RelativeBuckets:
        return RelativeBuckets(tensors[0], self.bidirectional, self.max_distance)

    def index(self, indices: TileIndices) -> Tensor:
        return relative_bucket(
            indices.j - indices.i, self.table.shape[0], bidirectional=self.bidirectional, max_distance=self.max_distance
        )


@dataclass(frozen=True, eq=False)
class RelativeTable(_Table):
    """One learned number per offset and head on a grid (Swin, CoAtNet, and 1-D): ``table[index(i - j), h]``.

    Slots run row-major over a grid of `size` (``(T,)``, ``(height, width)``, …); `table` has ``prod(2 n - 1)`` rows,
    row-major over the offsets query minus key plus ``n - 1``: for two axes ``(dy + H - 1) * (2 W - 1) + dx + W - 1``.

    Liu et al. 2021, arXiv:2103.14030.
    """

    table: Tensor
    size: tuple[int, ...]

    def __post_init__(self) -> None:
        _is_table(self.table, "(offsets, H)")
        object.__setattr__(self, "size", tuple(whole("size", n, 1) for n in self.size))
        offsets = math.prod([2 * n - 1 for n in self.size])  # a list: torch.compile follows no generator here
        if self.table.shape[0] != offsets:
            raise ValueError(f"table: a grid of {self.size} has {offsets} offsets, got {self.table.shape[0]} rows")

    def with_tensors(self, tensors: Sequence[Tensor]) -> RelativeTable:
        return RelativeTable(tensors[0], self.size)

    def check(self, batch: int, heads: int, q_len: int, k_len: int) -> None:
        super().check(batch, heads, q_len, k_len)
        if max(q_len, k_len) > math.prod(self.size):
            raise ValueError(
                f"RelativeTable.size: a grid of {self.size} has {math.prod(self.size)} slots, got {max(q_len, k_len)}"
            )

    def index(self, indices: TileIndices) -> Tensor:
        return _grid_index(indices.i, indices.j, self.size)


@dataclass(frozen=True, eq=False)
class ClassTable(_Table):
    """`RelativeTable` of a grid whose slots start at 1: slot 0 is a class token, with three rows of its own (BEiT).

    `table` has the grid's ``(2 H - 1) (2 W - 1)`` rows and then those of (class token, grid), (grid, class token) and
    (class token, class token), query first.

    Bao et al. 2021, arXiv:2106.08254.
    """

    table: Tensor
    size: tuple[int, ...]

    def __post_init__(self) -> None:
        _is_table(self.table, "(offsets, H)")
        if self.table.shape[0] < 3:
            raise ValueError(f"table: a class token has 3 rows, got {self.table.shape[0]}")
        object.__setattr__(self, "size", RelativeTable(self.table[:-3], self.size).size)

    def with_tensors(self, tensors: Sequence[Tensor]) -> ClassTable:
        return ClassTable(tensors[0], self.size)

    def check(self, batch: int, heads: int, q_len: int, k_len: int) -> None:
        super().check(batch, heads, q_len, k_len)
        if max(q_len, k_len) > 1 + math.prod(self.size):
            raise ValueError(
                f"ClassTable.size: a class token and a grid of {self.size} have {1 + math.prod(self.size)} slots, got"
                f" {max(q_len, k_len)}"
            )

    def index(self, indices: TileIndices) -> Tensor:
        first, last = self.table.shape[0] - 3, self.table.shape[0] - 1
        i, j = indices.i, indices.j
        inside = _grid_index((i - 1).clamp(min=0), (j - 1).clamp(min=0), self.size)
        of_keys = torch.where(j == 0, first + 1, inside)
        return torch.where(i == 0, torch.where(j == 0, last, first), of_keys)


def _grid_index(i: Tensor, j: Tensor, size: tuple[int, ...]) -> Tensor:
    """The row of a grid's table for query minus key of places that run row-major."""
    index, below = torch.zeros_like(i - j), math.prod(size)
    for n in size:
        below //= n
        index = index * (2 * n - 1) + (i // below - j // below) + (n - 1)
        i, j = i % below, j % below
    return index


def _is_table(table: Any, shape: str) -> None:
    if not isinstance(table, Tensor) or not table.is_floating_point() or table.ndim != 2:
        raise ValueError(f"table: expected a float tensor {shape}, got {describe(table)}")
