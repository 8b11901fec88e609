"""Which tiles of a call hold allowed pairs, as lists whose length is their number, never the square of the length.

A mask that can, says which tiles of 64 x 64 pairs may hold any (`Mask.tiles`), and which of them it allows whole. From
the tiles of its parts follow those of ``&`` and ``|``. Pairs are looked at only in tiles that remain undecided, each of
which keeps a bit for each of its pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from regard.coordinates import TileBounds, TileIndices

__all__ = ["TILE", "TileGrid", "TileLists", "Tiles", "box_tiles", "diagonal_tiles", "tile_lists"]

TILE = 64  # rows and columns of a tile
AT_ONCE = 256  # tiles whose pairs are looked at together


@dataclass(frozen=True)
class TileGrid:
    """The tiles of a call whose rows start at one slot."""

    batch: int
    heads: int
    q_len: int
    k_len: int
    q_start: int

    @property
    def rows(self) -> int:
        """Rows of tiles."""
        return -(-self.q_len // TILE)

    @property
    def columns(self) -> int:
        """Columns of tiles."""
        return -(-self.k_len // TILE)


@dataclass(frozen=True)
class Tiles:
    """Some tiles, by rising code ``((b H + h) rows + row) columns + column``, and whether all of a tile is allowed.

    `lead` is (B | 1, H | 1): the tiles are the same along axes of one entry.
    """

    grid: TileGrid
    lead: tuple[int, int]
    codes: Tensor  # int64 (n,)
    whole: Tensor  # bool (n,)

    @classmethod
    def of(cls, grid: TileGrid, lead: tuple[int, int], codes: Tensor, whole: Tensor) -> Tiles:
        """From codes in any order; a tile that is there twice is whole where one of them is."""
        codes, place = torch.unique(codes, return_inverse=True)
        every = torch.zeros(codes.shape, dtype=torch.bool)
        every[place[whole]] = True
        return cls(grid, lead, codes, every)

    def __or__(self, other: Tiles) -> Tiles:
        one, two = self.spread(other.lead), other.spread(self.lead)
        return Tiles.of(self.grid, one.lead, torch.cat([one.codes, two.codes]), torch.cat([one.whole, two.whole]))

    def __and__(self, other: Tiles) -> Tiles:
        one, two = self.spread(other.lead), other.spread(self.lead)
        if not two.codes.numel():
            return two
        place = torch.searchsorted(two.codes, one.codes).clamp(max=two.codes.numel() - 1)
        both = two.codes[place] == one.codes
        return Tiles(self.grid, one.lead, one.codes[both], (one.whole & two.whole[place])[both])

    def undecided(self) -> Tiles:
        """The same tiles, none of them known to be whole."""
        return Tiles(self.grid, self.lead, self.codes, torch.zeros_like(self.whole))

    def places(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(batch row, head, row of tiles, column of tiles) of each."""
        rows, columns = max(self.grid.rows, 1), max(self.grid.columns, 1)
        pair, line = self.codes // (rows * columns), self.codes // columns
        return pair // self.lead[1], pair % self.lead[1], line % rows, self.codes % columns

    def spread(self, lead: tuple[int, int]) -> Tiles:
        """The tiles for all batch rows and heads that `lead` tells apart."""
        batch, heads = max(self.lead[0], lead[0]), max(self.lead[1], lead[1])
        if (batch, heads) == self.lead:
            return self
        area = self.grid.rows * self.grid.columns
        b, h, _, _ = self.places()
        more_b = torch.arange(batch if self.lead[0] == 1 else 1).view(-1, 1, 1)
        more_h = torch.arange(heads if self.lead[1] == 1 else 1).view(1, -1, 1)
        codes = ((b + more_b) * heads + h + more_h) * area + self.codes % area
        return Tiles.of(self.grid, (batch, heads), codes.flatten(), self.whole.expand(codes.shape).flatten())


def diagonal_tiles(grid: TileGrid, bounds: Callable[[TileBounds], tuple[bool, bool]]) -> Tiles:
    """The tiles of a mask of ``i - j`` alone: those of a diagonal are alike."""
    alive, whole = [], []
    for n in range(1 - grid.columns, grid.rows):
        first = grid.q_start + n * TILE
        some, every = bounds(TileBounds(first, first + TILE - 1, 0, TILE - 1, (0, TILE), (0, TILE)))
        if some:
            alive.append(n)
            whole.append(every)
    row = torch.arange(grid.rows).expand(len(alive), -1)
    column = row - torch.tensor(alive, dtype=torch.int64).view(-1, 1)
    inside = (column >= 0) & (column < grid.columns)
    full = torch.tensor(whole, dtype=torch.bool).view(-1, 1).expand(inside.shape)[inside]
    return Tiles.of(grid, (1, 1), (row * grid.columns + column)[inside], full)


def box_tiles(
    grid: TileGrid,
    lead: tuple[int, int],
    place: tuple[Tensor | int, Tensor | int],
    rows: tuple[Tensor, Tensor],
    columns: tuple[Tensor, Tensor],
    whole: Tensor | bool = True,
) -> Tiles:
    """The tiles that boxes of pairs touch, int64 (n,) each: rows ``rows[0] <= r < rows[1]``, columns alike.

    `place` is the batch row and head of each box; `whole`: whether all of a box is allowed.
    """
    (top, end), (left, right) = _clipped(rows, grid.q_len), _clipped(columns, grid.k_len)
    first, high = top // TILE, (end + TILE - 1) // TILE - top // TILE
    begin, wide = left // TILE, (right + TILE - 1) // TILE - left // TILE
    count = torch.where((top < end) & (left < right), high * wide, 0)
    box = torch.repeat_interleave(torch.arange(len(count)), count)
    step = torch.arange(len(box)) - (count.cumsum(0) - count)[box]
    row, column = first[box] + step // wide[box], begin[box] + step % wide[box]
    inside = _covers(row, top[box], end[box], grid.q_len) & _covers(column, left[box], right[box], grid.k_len)
    b, h = (one[box] if isinstance(one, Tensor) else one for one in place)
    codes = ((b * lead[1] + h) * grid.rows + row) * grid.columns + column
    return Tiles.of(grid, lead, codes, inside & (whole[box] if isinstance(whole, Tensor) else whole))


def _clipped(ends: tuple[Tensor, Tensor], length: int) -> tuple[Tensor, Tensor]:
    low, high = torch.broadcast_tensors(*ends)
    return low.clamp(0, length), high.clamp(0, length)


def _covers(tile: Tensor, low: Tensor, high: Tensor, length: int) -> Tensor:
    """Whether ``low .. high`` holds all that exists of a tile's rows or columns."""
    return (low <= tile * TILE) & (high >= (tile * TILE + TILE).clamp(max=length))


class TileLists(NamedTuple):
    """Tiles as the kernels read them (csrc/regard.h)."""

    lines: Tensor  # int64 (B | 1, H | 1, rows of tiles, 2): where a line's tiles begin and end
    columns: Tensor  # int32 (n,)
    numbers: Tensor  # int32 (n,): of a tile's words in `bits`; -1 where all of it is allowed
    bits: Tensor | None  # int64 (m, 64): a word for each row of a tile, a bit for each of its columns; None for none

    def dense(self, q_len: int, k_len: int) -> Tensor:
        """The pairs as a bool tensor (B | 1, H | 1, Tq, Tk)."""
        batch, heads, rows, _ = self.lines.shape
        ends = self.lines.flatten(0, 2)
        line = torch.repeat_interleave(torch.arange(len(ends)), ends[:, 1] - ends[:, 0])
        bits = self.lines.new_empty(0, TILE) if self.bits is None else self.bits
        words = torch.cat([bits, bits.new_full((1, TILE), -1)])[self.numbers.flatten().long()]  # the last for -1
        pairs = (words[:, :, None] >> torch.arange(TILE)) & 1 > 0
        wide = -(-k_len // TILE)
        found = torch.zeros(len(ends), wide, TILE, TILE, dtype=torch.bool)
        found[line, self.columns.long()] = pairs
        whole = found.view(batch, heads, rows, wide, TILE, TILE).transpose(3, 4)
        return whole.reshape(batch, heads, rows * TILE, wide * TILE)[..., :q_len, :k_len]


def tile_lists(tiles: Tiles, rules: Sequence[Callable[[TileIndices], Tensor]]) -> TileLists:
    """The lists of `tiles` with the pairs that all of the rules allow; tiles without any are left out."""
    grid = tiles.grid
    for rule in rules:
        tiles = tiles.spread(_lead(grid, rule))
    b, h, row, column = tiles.places()
    open_ones = (~tiles.whole).nonzero().flatten()
    alive, whole, words = torch.ones_like(tiles.whole), tiles.whole.clone(), []
    for some in open_ones.split(AT_ONCE):
        allowed, exists = _pairs(grid, rules, *(x[some] for x in (b, h, row, column)))
        alive[some] = allowed.flatten(1).any(1)
        whole[some] = (allowed | ~exists).flatten(1).all(1)
        by_byte = allowed[alive[some] & ~whole[some]].view(-1, TILE, TILE // 8, 8).to(torch.uint8)
        powers = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8)
        words.append((by_byte * powers).sum(-1, dtype=torch.uint8).view(torch.int64).view(-1, TILE))
    by_bits = alive & ~whole
    numbers = torch.where(by_bits, by_bits.cumsum(0) - 1, -1)[alive]
    codes, lines = tiles.codes[alive], tiles.lead[0] * tiles.lead[1] * grid.rows
    ends = torch.searchsorted(codes, torch.arange(lines + 1) * grid.columns)
    pairs = torch.stack([ends[:-1], ends[1:]], -1).view(*tiles.lead, grid.rows, 2)
    bits = torch.cat(words) if words else torch.zeros(0, TILE, dtype=torch.int64)
    return TileLists(pairs, column[alive].to(torch.int32), numbers.to(torch.int32), bits)


def _lead(grid: TileGrid, rule: Callable[[TileIndices], Tensor]) -> tuple[int, int]:
    """(B | 1, H | 1): whether batch rows, and heads, have rules of their own, from the shape of an answer for all."""
    b, h = torch.arange(grid.batch).view(-1, 1, 1, 1), torch.arange(grid.heads).view(1, -1, 1, 1)
    first = torch.zeros(1, 1, 1, 1, dtype=torch.long)
    answer = rule(TileIndices(b, h, first + grid.q_start, first, first, first))
    shape = (1,) * (4 - answer.ndim) + tuple(answer.shape)
    return shape[0], shape[1]


def _pairs(grid: TileGrid, rules: Sequence[Callable[[TileIndices], Tensor]], *places: Tensor) -> tuple[Tensor, Tensor]:
    """(allowed, existing) pairs of some tiles, bool (n, 64, 64) each; a tile that stands over an edge repeats its last
    row or column."""
    b, h, tile_row, tile_column = (x.view(-1, 1, 1, 1) for x in places)
    row = tile_row * TILE + torch.arange(TILE).view(1, 1, -1, 1)
    column = tile_column * TILE + torch.arange(TILE)
    exists = (row < grid.q_len) & (column < grid.k_len)
    row, column = row.clamp(max=grid.q_len - 1), column.clamp(max=grid.k_len - 1)
    allowed = exists
    for rule in rules:
        allowed = allowed & rule(TileIndices(b, h, row + grid.q_start, column, row, column))
    return allowed.squeeze(1), exists.squeeze(1)
