"""Masks of positions alone: the distance ``i - j``, or how far the key stands from the start."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from regard.checks import UNKNOWN, describe, pick, whole
from regard.coordinates import TileBounds, TileIndices, can_read
from regard.masks.base import Mask
from regard.masks.intervals import EVERYTHING, PAST, Intervals
from regard.masks.tiles import TileGrid, Tiles, box_tiles, diagonal_tiles

__all__ = ["Band", "Causal", "Dilated", "Full", "KeyLengths", "Prefix", "Window"]


class _Offset(Mask):
    exact_bounds: ClassVar[bool] = True
    lists_tiles = True

    def tiles(self, grid: TileGrid) -> Tiles:
        return diagonal_tiles(grid, self.bounds)

    def allows_at(self, indices: TileIndices) -> Tensor:
        intervals = self.offsets()
        assert intervals is not None
        return intervals.contains(indices.i - indices.j)

    def bounds(self, box: TileBounds) -> tuple[bool, bool]:
        intervals = self.offsets()
        assert intervals is not None
        return intervals.meet(*box.distance)


@dataclass(frozen=True, eq=False)
class Full(_Offset):
    """Every query may attend to every key."""

    def offsets(self) -> Intervals:
        return EVERYTHING


@dataclass(frozen=True, eq=False)
class Causal(_Offset):
    """``j <= i``: a query sees the keys up to its own slot (bottom-right aligned by default)."""

    def offsets(self) -> Intervals:
        return PAST


@dataclass(frozen=True, eq=False)
class Window(_Offset):
    """``0 <= i - j < w``: the `w` latest keys, the query's own included; causal by itself."""

    w: int
    _offsets: Intervals = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_offsets", Intervals.of((0, whole("w", self.w, 1) - 1)))

    def offsets(self) -> Intervals:
        return self._offsets


@dataclass(frozen=True, eq=False)
class Dilated(_Offset):
    """``0 <= i - j < window * step`` where `step` divides ``i - j``: every `step`-th key back, `window` keys in all.

    Causal by itself; the query's own key is the first of them. Raises ValueError or TypeError unless both are whole
    numbers of 1 or more. Beltagy et al. 2020, arXiv:2004.05150.

    >>> print(Dilated(2, 2).draw(5))
    #....
    .#...
    #.#..
    .#.#.
    ..#.#
    """

    window: int
    step: int
    _offsets: Intervals = field(init=False, repr=False)

    def __post_init__(self) -> None:
        reach = whole("window", self.window, 1) * whole("step", self.step, 1)
        object.__setattr__(self, "_offsets", Intervals.of(*((d, d) for d in range(0, reach, self.step))))

    def offsets(self) -> Intervals:
        return self._offsets

    def allows_at(self, indices: TileIndices) -> Tensor:
        distance = indices.i - indices.j  # one remainder, instead of a comparison for each of the intervals
        return (distance >= 0) & (distance < self.window * self.step) & (distance % self.step == 0)

    def bounds(self, box: TileBounds) -> tuple[bool, bool]:
        low, high = box.distance
        first, last = max(low, 0), min(high, self.window * self.step - 1)
        some = -(-first // self.step) * self.step <= last
        return some, some and (first, last) == (low, high) and (self.step == 1 or low == high)


@dataclass(frozen=True, eq=False)
class Band(_Offset):
    """``-left <= j - i <= right``; None leaves that side open."""

    left: int | None
    right: int | None
    _offsets: Intervals = field(init=False, repr=False)

    def __post_init__(self) -> None:
        for name in ("left", "right"):
            if getattr(self, name) is not None:
                whole(name, getattr(self, name), None)
        bounds = (None if self.right is None else -self.right, self.left)
        object.__setattr__(self, "_offsets", Intervals.of(bounds))

    def offsets(self) -> Intervals:
        return self._offsets


@dataclass(frozen=True, eq=False)
class _KeysBefore(Mask):
    n: int | Tensor
    exact_bounds: ClassVar[bool] = True
    lists_tiles = True

    def tiles(self, grid: TileGrid) -> Tiles:
        ends = torch.as_tensor(self.n).long().view(-1)
        row, nothing = torch.arange(len(ends)), torch.zeros_like(ends)
        return box_tiles(grid, (len(ends), 1), (row, 0), (nothing, nothing + grid.q_len), (nothing, ends))

    def __post_init__(self) -> None:
        if not isinstance(self.n, Tensor):
            whole("n", self.n, 0)
        elif self.n.ndim != 1 or self.n.dtype == torch.bool or self.n.is_floating_point():
            raise ValueError(f"n: expected an int or an integer tensor (B,), got {describe(self.n)}")

    def check(self, batch: int, heads: int, q_len: int, k_len: int) -> None:
        if isinstance(self.n, Tensor) and self.n.shape[0] not in (1, batch):
            raise ValueError(
                f"{type(self).__name__}.n: expected {batch} numbers, one per batch row, got {self.n.shape[0]}"
            )

    def allows_at(self, indices: TileIndices) -> Tensor:
        n = self.n
        return indices.j < (pick(n, indices.b) if isinstance(n, Tensor) else n)

    def bounds(self, box: TileBounds) -> tuple[bool, bool]:
        n = self.n
        if not isinstance(n, Tensor):
            return box.j_low < n, box.j_high < n
        if not can_read(n) or not n.numel():
            return UNKNOWN
        if "range" not in self._memo:
            self._memo["range"] = (int(n.min()), int(n.max()))
        low, high = self._memo["range"]
        return box.j_low < high, box.j_high < low


class Prefix(_KeysBefore):
    """``j < n[b]``: the first `n` keys (an int, or one per batch row); prefix-LM is ``Causal() | Prefix(n)``."""


class KeyLengths(_KeysBefore):
    """``j < n[b]``: hides the keys from `n` on (an int, or one per batch row); it moves nothing."""
