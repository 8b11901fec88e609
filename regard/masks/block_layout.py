"""From a mask to its block layout: empty, partial and full blocks, without holding the dense mask."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from regard.coordinates import Coordinates, TileBounds, TileIndices

__all__ = ["EMPTY", "FULL", "PARTIAL", "block_layout", "tile_kind", "tiles"]

EMPTY, PARTIAL, FULL = 0, 1, 2


class Rule(Protocol):
    """What a layout asks of a mask (`regard.masks.Mask`)."""

    def allows_at(self, indices: TileIndices) -> Tensor:
        """The truth on the pairs of `indices`."""

    def bounds(self, box: TileBounds) -> tuple[bool, bool]:
        """(may any pair of the tile be allowed, are all of them)."""


def tiles(length: int, size: int) -> list[tuple[int, int]]:
    """Half-open ranges of at most `size` that cover ``0..length``."""
    return [(start, min(start + size, length)) for start in range(0, length, size)]


def tile_kind(mask: Rule, coordinates: Coordinates, rows: tuple[int, int], cols: tuple[int, int]) -> int:
    """What is known of a tile without evaluating pairs: EMPTY and FULL are certain, PARTIAL may be anything."""
    box = coordinates.bounds(rows, cols)
    some, every = (True, False) if box is None else mask.bounds(box)
    return FULL if every else PARTIAL if some else EMPTY


def block_layout(mask: Rule, coordinates: Coordinates, size: tuple[int, int], exact_bounds: bool) -> Tensor:
    """The exact layout, int8 ``(B, H, rows, columns)``; undecided blocks are evaluated one by one.

    `exact_bounds`: the mask's bounds tell partial blocks from others, where rows start at one number.
    """
    rows, cols = tiles(coordinates.q_len, size[0]), tiles(coordinates.k_len, size[1])
    by_definition = exact_bounds and coordinates.packing is None and not isinstance(coordinates.q_start, Tensor)
    grid: list[list[Tensor]] = []
    for r in rows:
        line: list[Tensor] = []
        for c in cols:
            kind = tile_kind(mask, coordinates, r, c)
            if kind == PARTIAL and not by_definition:
                allowed = mask.allows_at(coordinates.indices(r, c))
                while allowed.ndim < 4:
                    allowed = allowed.unsqueeze(0)
                line.append(allowed.any(-1).any(-1).to(torch.int8) + allowed.all(-1).all(-1).to(torch.int8))
            else:
                line.append(torch.full((1, 1), kind, dtype=torch.int8))
        grid.append(line)
    flat = [one for line in grid for one in line]
    if not flat:
        return torch.zeros(1, 1, len(rows), len(cols), dtype=torch.int8)
    batch, heads = max(one.shape[0] for one in flat), max(one.shape[1] for one in flat)
    layout = torch.stack([one.expand(batch, heads) for one in flat], -1)
    return layout.view(batch, heads, len(rows), len(cols))
