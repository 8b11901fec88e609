"""Masks of whole blocks of pairs, and of tokens that everybody sees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from regard.checks import UNKNOWN, any_all, fits, is_bool, is_ids, pick, whole
from regard.coordinates import TileBounds, TileIndices
from regard.masks.base import Mask
from regard.masks.tiles import TileGrid, Tiles, box_tiles

__all__ = ["BlockColumns", "Blocks", "Global", "RandomBlocks"]


@dataclass(frozen=True, eq=False)
class Blocks(Mask):
    """``layout[…, i // size, j // size]``, bool (rows, columns) or (B, H, rows, columns); the last may be ragged."""

    layout: Tensor
    size: int
    exact_bounds: ClassVar[bool] = True
    lists_tiles = True

    def __post_init__(self) -> None:
        is_bool("layout", self.layout, (2, 4), "(rows, columns) or (B, H, rows, columns)")
        whole("size", self.size, 1)

    def check(self, batch: int, heads: int, q_len: int, k_len: int) -> None:
        if self.layout.ndim == 4:
            fits(f"{type(self).__name__}.layout", self.layout, (batch, heads, *self.layout.shape[2:]))
        rows = -(-q_len // self.size)
        if self.layout.shape[-2] < rows:
            raise ValueError(
                f"layout: {q_len} queries in blocks of {self.size} need {rows} rows, got {self.layout.shape[-2]}"
            )
        need = -(-k_len // self.size)
        if self.layout.shape[-1] < need:
            raise ValueError(
                f"layout: {k_len} keys in blocks of {self.size} need {need} columns, got {self.layout.shape[-1]}"
            )

    def allows_at(self, indices: TileIndices) -> Tensor:
        rows = self.layout.shape[-2]
        i, j = indices.i // self.size, indices.j // self.size
        inside = (i >= 0) & (i < rows)
        index = (i.clamp(0, max(rows - 1, 0)), j)
        return (
            pick(self.layout, indices.b, indices.h, *index) if self.layout.ndim == 4 else self.layout[index]
        ) & inside

    def bounds(self, box: TileBounds) -> tuple[bool, bool]:
        first, last = box.i_low // self.size, box.i_high // self.size + 1
        if first < 0 or last > self.layout.shape[-2]:
            return UNKNOWN
        return any_all(
            self, self.layout, (..., slice(first, last), slice(box.j_low // self.size, box.j_high // self.size + 1))
        )

    def tiles(self, grid: TileGrid) -> Tiles:
        layout = self.layout if self.layout.ndim == 4 else self.layout[None, None]
        b, h, row, column = layout.nonzero().unbind(1)
        return _block_tiles(grid, layout.shape[:2], (b, h), row, column, self.size)


@dataclass(frozen=True, eq=False)
class BlockColumns(Mask):
    """Each query block has a list of key blocks: ``j // size`` is in ``columns[h, i // size]``.

    `columns`: whole numbers (rows, n) or (H, rows, n); -1 stands for none. The same as a `Blocks` of these, at the cost
    and memory of the lists alone, for any length.
    """

    columns: Tensor
    size: int
    lists_tiles = True

    def __post_init__(self) -> None:
        is_ids("columns", self.columns, (2, 3))
        whole("size", self.size, 1)

    def check(self, batch: int, heads: int, q_len: int, k_len: int) -> None:
        rows = -(-q_len // self.size)
        if self.columns.shape[-2] < rows:
            raise ValueError(
                f"columns: {q_len} queries in blocks of {self.size} need {rows} rows, got {self.columns.shape[-2]}"
            )
        if self.columns.ndim == 3 and self.columns.shape[0] not in (1, heads):
            raise ValueError(f"columns: expected lists for {heads} heads, got {self.columns.shape[0]}")

    @property
    def layout(self) -> Tensor:
        """The blocks as a bool tensor (1, H | 1, rows, rows), for a sequence with itself."""
        columns = self.columns if self.columns.ndim == 3 else self.columns[None]
        rows = columns.shape[1]
        listed = torch.zeros(len(columns), rows, rows + 1, dtype=torch.bool, device=columns.device)
        return listed.scatter(2, torch.where(columns < 0, rows, columns), True)[None, ..., :rows]

    def allows_at(self, indices: TileIndices) -> Tensor:
        rows = self.columns.shape[-2]
        i, j = indices.i // self.size, indices.j // self.size
        row = i.clamp(0, max(rows - 1, 0))
        found = torch.zeros_like(i == j)
        for n in range(self.columns.shape[-1] if rows else 0):  # FlexAttention has no reductions
            column = self.columns[..., n]
            found = found | ((column[row] if column.ndim == 1 else pick(column, indices.h, row)) == j)
        return found & (i >= 0) & (i < rows)

    def tiles(self, grid: TileGrid) -> Tiles:
        columns = self.columns if self.columns.ndim == 3 else self.columns[None]
        h, row, _ = (columns >= 0).nonzero().unbind(1)
        return _block_tiles(grid, (1, len(columns)), (0, h), row, columns[columns >= 0], self.size)


def _block_tiles(
    grid: TileGrid, lead: Sequence[int], place: tuple[Tensor | int, Tensor], row: Tensor, column: Tensor, size: int
) -> Tiles:
    top, left = row * size - grid.q_start, column * size
    return box_tiles(grid, (lead[0], lead[1]), place, (top, top + size), (left, left + size))


class RandomBlocks(BlockColumns):
    """`per_row` random key blocks for each query block of a sequence; drawn from `seed`, kept in ``columns``.

    Drawn separately for each of `heads` heads, without replacement, from a generator of its own (Floyd's method: one
    number a block). Raises ValueError or TypeError for numbers out of range.
    """

    def __init__(self, per_row: int, size: int, length: int, *, heads: int = 1, seed: int = 0) -> None:
        whole("size", size, 1)
        whole("heads", heads, 1)
        blocks = -(-whole("length", length, 0) // size)
        if not 0 <= whole("per_row", per_row, 0) <= blocks:
            raise ValueError(f"per_row: expected 0 to {blocks}, the number of key blocks, got {per_row}")
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.empty(heads, blocks, 0, dtype=torch.long)
        for last in range(blocks - per_row, blocks):
            one = torch.randint(last + 1, (heads, blocks, 1), generator=generator)
            taken = (drawn == one).any(-1, keepdim=True)
            drawn = torch.cat([drawn, torch.where(taken, last, one)], -1)
        super().__init__(drawn.sort(-1).values, size)


@dataclass(frozen=True, eq=False)
class Global(Mask):
    """i or j is global. `which`: the global slots as a sequence of ints, or bool (T,) or (B, T) over slots."""

    which: Tensor | Sequence[int]
    lists_tiles = True

    def __post_init__(self) -> None:
        if isinstance(self.which, Tensor):
            is_bool("which", self.which, (1, 2), "(T,) or (B, T), or a sequence of slots")
            return
        slots = [whole("which", slot, 0) for slot in self.which]
        flags = torch.zeros(max(slots, default=-1) + 1, dtype=torch.bool)
        flags[slots] = True
        object.__setattr__(self, "which", flags)

    def check(self, batch: int, heads: int, q_len: int, k_len: int) -> None:
        if self.which.ndim == 2 and self.which.shape[0] not in (1, batch):  # type: ignore[union-attr]
            raise ValueError(f"Global.which: expected {batch} rows, one per batch row, got {self.which.shape[0]}")  # type: ignore[union-attr]

    def _flag(self, indices: TileIndices, slot: Tensor) -> Tensor:
        which = self.which
        assert isinstance(which, Tensor)
        length = which.shape[-1]
        if length == 0:
            return torch.zeros_like(slot, dtype=torch.bool)
        inside = (slot >= 0) & (slot < length)  # slots past the list are ordinary
        slot = slot.clamp(0, length - 1)
        return (pick(which, indices.b, slot) if which.ndim == 2 else which[slot]) & inside

    def allows_at(self, indices: TileIndices) -> Tensor:
        return self._flag(indices, indices.i) | self._flag(indices, indices.j)

    def bounds(self, box: TileBounds) -> tuple[bool, bool]:
        which = self.which
        assert isinstance(which, Tensor)
        some_i, _ = any_all(self, which, (..., slice(max(box.i_low, 0), max(box.i_high + 1, 0))))
        some_j, _ = any_all(self, which, (..., slice(max(box.j_low, 0), max(box.j_high + 1, 0))))
        return some_i or some_j, False

    def tiles(self, grid: TileGrid) -> Tiles:
        which = self.which
        assert isinstance(which, Tensor)
        flags = which if which.ndim == 2 else which[None]
        b, slot = flags.nonzero().unbind(1)
        lead, ends = (len(flags), 1), (torch.zeros_like(slot), torch.full_like(slot, max(grid.q_len, grid.k_len)))
        row = slot - grid.q_start
        wide = box_tiles(grid, lead, (b, 0), (row, row + 1), ends, whole=False)
        return wide | box_tiles(grid, lead, (b, 0), ends, (slot, slot + 1), whole=False)
