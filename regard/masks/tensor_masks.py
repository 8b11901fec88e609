"""Masks that tensors spell out: padding, edges of a graph, dense masks, any predicate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from regard.checks import any_all, describe, fits, fits_tile, is_bool, is_dense, pick
from regard.coordinates import TileBounds, TileIndices, can_read
from regard.masks.base import Mask
from regard.masks.tiles import TileGrid, Tiles, box_tiles

__all__ = ["Dense", "Edges", "KeyPadding", "Predicate", "as_mask"]


@dataclass(frozen=True, eq=False)
class KeyPadding(Mask):
    """``keep[b, j]``: bool (B, Tk), True where the key is a real token."""

    keep: Tensor
    exact_bounds: ClassVar[bool] = True

    def __post_init__(self) -> None:
        is_bool("keep", self.keep, (2,), "(B, Tk)")

    def check(self, batch: int, heads: int, q_len: int, k_len: int) -> None:
        fits("KeyPadding.keep", self.keep, (batch, k_len))

    def allows_at(self, indices: TileIndices) -> Tensor:
        return pick(self.keep, indices.b, indices.col)

    def bounds(self, box: TileBounds) -> tuple[bool, bool]:
        return any_all(self, self.keep, (..., slice(*box.cols)))


@dataclass(frozen=True, eq=False)
class Edges(Mask):
    """Edges of a graph, an integer tensor (2, E): row 0 the source j, row 1 the target i. Repeated edges count once."""

    index: Tensor
    traceable: ClassVar[bool] = False
    lists_tiles = True

    def tiles(self, grid: TileGrid) -> Tiles:
        source, target = self.index.long()
        row = target - grid.q_start
        return box_tiles(grid, (1, 1), (0, 0), (row, row + 1), (source, source + 1), whole=False)

    def __post_init__(self) -> None:
        if (
            self.index.ndim != 2
            or self.index.shape[0] != 2
            or self.index.is_floating_point()
            or self.index.dtype == torch.bool
        ):
            raise ValueError(
                f"index: expected an integer tensor (2, E), row 0 sources, row 1 targets, got {describe(self.index)}"
            )
        if can_read(self.index) and self.index.numel() and int(self.index.min()) < 0:
            raise ValueError(f"index: expected slots from 0 on, got {int(self.index.min())}")

    def allows_at(self, indices: TileIndices) -> Tensor:
        i, j = torch.broadcast_tensors(indices.i, indices.j)
        if not self.index.shape[1]:
            return torch.zeros_like(i, dtype=torch.bool)
        width, codes = self._codes()
        wanted = i * width + j
        at = torch.searchsorted(codes, wanted.contiguous()).clamp(max=codes.numel() - 1)
        inside = (i >= 0) & (j >= 0) & (i < width) & (j < width)
        found: Tensor = (codes[at] == wanted) & inside
        return found

    def _codes(self) -> tuple[int | Tensor, Tensor]:
        """(one more than the largest slot, the sorted numbers ``i * that + j`` of the edges)."""
        if (known := self._memo.get("codes")) is not None:
            return known  # type: ignore[no-any-return]
        source, target = self.index.long()
        largest = self.index.max() + 1
        width = int(largest) if can_read(self.index) else largest
        found = width, (target * width + source).sort().values
        if can_read(self.index):
            self._memo["codes"] = found
        return found


@dataclass(frozen=True, eq=False)
class Dense(Mask):
    """A bool tensor over the call's rows and columns, (Tq, Tk) or (B, H, Tq, Tk), either side broadcasting."""

    tensor: Tensor

    def __post_init__(self) -> None:
        if isinstance(self.tensor, Tensor):
            is_dense("mask", self.tensor)
        if isinstance(self.tensor, Tensor) and self.tensor.ndim == 3:
            raise ValueError(
                f"mask: a 3-D mask is ambiguous, got {describe(self.tensor)}; add the missing axis:"
                " mask[:, None] for one per batch row, mask[None] for one per head"
            )
        if isinstance(self.tensor, Tensor) and self.tensor.is_floating_point():
            raise TypeError(
                f"mask: expected a bool tensor, got {describe(self.tensor)}; a float tensor is a bias: pass it as bias="
            )
        is_bool("mask", self.tensor, (2, 4), "(Tq, Tk) or (B, H, Tq, Tk)")

    def check(self, batch: int, heads: int, q_len: int, k_len: int) -> None:
        fits("mask", self.tensor, (batch, heads, q_len, k_len)[-self.tensor.ndim :])

    def allows_at(self, indices: TileIndices) -> Tensor:
        t = self.tensor
        return (
            pick(t, indices.row, indices.col)
            if t.ndim == 2
            else pick(t, indices.b, indices.h, indices.row, indices.col)
        )

    def bounds(self, box: TileBounds) -> tuple[bool, bool]:
        rows = slice(*box.rows) if self.tensor.shape[-2] != 1 else slice(None)
        cols = slice(*box.cols) if self.tensor.shape[-1] != 1 else slice(None)
        return any_all(self, self.tensor, (..., rows, cols))


@dataclass(frozen=True, eq=False)
class Predicate(Mask):
    """Any ``fn(b, h, i, j) -> bool tensor`` on broadcasting index tensors; runs on `reference` and `chunked`."""

    fn: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
    traceable: ClassVar[bool] = False

    def allows_at(self, indices: TileIndices) -> Tensor:
        allowed = self.fn(indices.b, indices.h, indices.i, indices.j)
        if not isinstance(allowed, Tensor) or allowed.dtype != torch.bool:
            raise TypeError(f"Predicate.fn: expected a bool tensor, got {describe(allowed)}")
        fits_tile("Predicate.fn", allowed, indices)
        return allowed


def as_mask(mask: Any) -> Mask | None:
    """A mask from what the `mask` argument accepts: a Mask, a bool tensor (2-D or 4-D), or None."""
    if mask is None or isinstance(mask, Mask):
        return mask
    if not isinstance(mask, Tensor):
        raise TypeError(f"mask: expected a Mask, a bool tensor or None, got {describe(mask)}")
    return Dense(mask)
