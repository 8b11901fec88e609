"""Masks that tensors spell out: padding, blocks, global tokens, edges of a graph, dense masks, any predicate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from regard.checks import UNKNOWN, any_all, describe, fits, is_bool, is_dense, pick, whole
from regard.coordinates import TileBounds, TileIndices, can_read
from regard.masks.base import Mask

__all__ = ["as_mask", "Blocks", "Dense", "Edges", "Global", "KeyPadding", "Predicate", "RandomBlocks"]


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
class Blocks(Mask):
    """``layout[…, i // size, j // size]``, bool (rows, columns) or (B, H, rows, columns); the last may be ragged."""

    layout: Tensor
    size: int
    exact_bounds: ClassVar[bool] = True

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


class RandomBlocks(Blocks):
    """`per_row` random key blocks for each query block of a sequence; drawn from `seed`, kept in ``layout``.

    Drawn separately for each of `heads` heads, without replacement, from a generator of its own.
    """

    def __init__(self, per_row: int, size: int, length: int, *, heads: int = 1, seed: int = 0) -> None:
        whole("size", size, 1)
        whole("heads", heads, 1)
        blocks = -(-whole("length", length, 0) // size)
        if not 0 <= whole("per_row", per_row, 0) <= blocks:
            raise ValueError(f"per_row: expected 0 to {blocks}, the number of key blocks, got {per_row}")
        generator = torch.Generator().manual_seed(seed)
        order = torch.rand(1, heads, blocks, blocks, generator=generator, dtype=torch.float64).argsort(-1).argsort(-1)
        super().__init__(order < per_row, size)


@dataclass(frozen=True, eq=False)
class Global(Mask):
    """i or j is global. `which`: the global slots as a sequence of ints, or bool (T,) or (B, T) over slots."""

    which: Tensor | Sequence[int]

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


@dataclass(frozen=True, eq=False)
class Edges(Mask):
    """Edges of a graph, an integer tensor (2, E): row 0 the source j, row 1 the target i. Repeated edges count once."""

    index: Tensor
    traceable: ClassVar[bool] = False

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
        return allowed


def as_mask(mask: Any) -> Mask | None:
    """A mask from what the `mask` argument accepts: a Mask, a bool tensor (2-D or 4-D), or None."""
    if mask is None or isinstance(mask, Mask):
        return mask
    if not isinstance(mask, Tensor):
        raise TypeError(f"mask: expected a Mask, a bool tensor or None, got {describe(mask)}")
    return Dense(mask)
