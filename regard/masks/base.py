"""What every mask can do, and the combinations: and, or, not, moved."""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from regard.checks import UNKNOWN
from regard.coordinates import Coordinates, Packing, TileBounds, TileIndices, can_read, is_recording
from regard.masks.block_layout import block_layout
from regard.masks.intervals import Intervals
from regard.masks.tiles import TileGrid, Tiles

__all__ = ["And", "Mask", "Shifted", "Not", "Or", "reach", "split_packing", "tensors_of", "to_device"]

M = TypeVar("M", bound="Mask")


@dataclass(frozen=True, eq=False)
class Mask:
    """A predicate on (batch, head, query slot, key slot); subclasses give `allows_at`, and `bounds` of blocks."""

    exact_bounds: ClassVar[bool] = False  # bounds() tells empty, partial and full apart without looking at single pairs
    traceable: ClassVar[bool] = True  # allows_at works on 0-d index tensors inside a compiled kernel

    def allows_at(self, indices: TileIndices) -> Tensor:
        """The truth on the pairs of `indices`: a bool tensor that broadcasts against (B, H, rows, columns)."""
        raise NotImplementedError

    def bounds(self, box: TileBounds) -> tuple[bool, bool]:
        """(may any pair of the tile be allowed, are all of them): sound, so a tile of ``(False, _)`` can be skipped."""
        return UNKNOWN

    def offsets(self) -> Intervals | None:
        """The allowed values of ``i - j``, when the mask depends on nothing else."""
        return None

    @property
    def lists_tiles(self) -> bool:
        """Whether `tiles` can say which tiles hold allowed pairs, in time and memory of their number."""
        return False

    def tiles(self, grid: TileGrid) -> Tiles:
        """Every tile of a call that may hold an allowed pair, and which are allowed whole; for masks that list them."""
        raise NotImplementedError

    def check(self, batch: int, heads: int, q_len: int, k_len: int) -> None:
        """Raise ValueError where the mask's tensors do not fit a call of these sizes."""
        for child in self.children():
            child.check(batch, heads, q_len, k_len)

    def children(self) -> tuple[Mask, ...]:
        """The masks this one is made of."""
        return ()

    def refresh(self) -> None:
        """Forget what was derived from tensors that have changed in place: lengths that grow while decoding, say.

        Values are compared: not every change of a tensor counts up its version.
        """
        memo = self.__dict__.get("_memo_")
        if memo is not None and not is_recording() and not all(torch.equal(*pair) for pair in memo["seen"]):
            del self.__dict__["_memo_"]
        for child in self.children():
            child.refresh()

    def shifted(self, by: int) -> Mask:
        """The same mask for keys whose first column is slot `by` (a window cache holds only the latest columns)."""
        return self if by == 0 or self.offsets() is not None else Shifted(self, by)

    # ---- what users call -------------------------------------------------------------------------------------------

    def allows(self, b: Any, h: Any, i: Any, j: Any) -> Tensor:
        """Whether query slot `i` may see key slot `j` in batch row `b`, head `h`: ints or tensors that broadcast."""
        self.refresh()
        b, h, i, j = (torch.as_tensor(x) for x in (b, h, i, j))
        return self.allows_at(TileIndices(b, h, i, j, i, j))

    def dense(
        self,
        q_len: int,
        k_len: int | None = None,
        *,
        batch: int = 1,
        heads: int = 1,
        q_start: int | Tensor | None = None,
    ) -> Tensor:
        """The whole mask as bool ``(B, H, Tq, Tk)``; B and H are 1 where the mask is the same for all rows or heads."""
        coordinates = self._coordinates(q_len, k_len, batch, heads, q_start)
        allowed = self.allows_at(coordinates.indices())
        while allowed.ndim < 4:
            allowed = allowed.unsqueeze(0)
        return allowed.expand(*allowed.shape[:2], coordinates.q_len, coordinates.k_len)

    def block_layout(
        self,
        q_len: int,
        k_len: int | None = None,
        size: int | tuple[int, int] = 128,
        *,
        batch: int = 1,
        heads: int = 1,
        q_start: int | Tensor | None = None,
    ) -> Tensor:
        """Blocks of `size` (queries, keys) as int8 ``(B, H, rows, columns)``: 0 empty, 1 partial, 2 full.

        Memoised. Masks that read no tensor are answered from their definition; of the others only undecided blocks are
        evaluated, so the dense form is never held.
        """
        self.refresh()
        sizes = (size, size) if isinstance(size, int) else size
        key = (q_len, k_len, sizes, batch, heads, q_start if isinstance(q_start, int) else None)
        if isinstance(q_start, Tensor) or key not in self._memo:
            exact = self.offsets() is not None or (self.exact_bounds and not tensors_of(self))
            layout = block_layout(self, self._coordinates(q_len, k_len, batch, heads, q_start), sizes, exact)
            if isinstance(q_start, Tensor):
                return layout
            self._memo[key] = layout
        known: Tensor = self._memo[key]
        return known.clone()

    def mask_mod(self, q_start: int | Tensor = 0) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
        """FlexAttention's predicate ``(b, h, q_idx, kv_idx) -> bool`` for queries that start at slot `q_start`."""

        def predicate(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            start = q_start[b] if isinstance(q_start, Tensor) else q_start
            allowed: Tensor = self.allows_at(TileIndices(b, h, q_idx + start, kv_idx, q_idx, kv_idx))
            return allowed

        return predicate

    def draw(
        self, q_len: int, k_len: int | None = None, *, batch: int = 0, head: int = 0, q_start: int | None = None
    ) -> str:
        """A picture in text, one line per query: ``#`` may attend, ``.`` may not."""
        dense = self.dense(q_len, k_len, batch=batch + 1, heads=head + 1, q_start=q_start)
        rows = dense[min(batch, dense.shape[0] - 1), min(head, dense.shape[1] - 1)].tolist()
        return "\n".join("".join("#" if allowed else "." for allowed in row) for row in rows)

    def to(self: M, device: torch.device | str) -> M:
        """The same mask with its tensors on `device`."""
        return to_device(self, device)  # type: ignore[no-any-return]

    def __and__(self, other: Mask) -> Mask:
        return And((self, other)) if isinstance(other, Mask) else NotImplemented

    def __or__(self, other: Mask) -> Mask:
        return Or((self, other)) if isinstance(other, Mask) else NotImplemented

    def __invert__(self) -> Mask:
        return Not(self)

    def __bool__(self) -> bool:
        raise TypeError(f"{type(self).__name__} is neither true nor false: combine masks with &, | and ~")

    @property
    def _memo(self) -> dict[Any, Any]:
        # frozen dataclass: the memo lives beside the fields; it is derived data and never part of the value
        memo: dict[Any, Any] | None = self.__dict__.get("_memo_")
        if memo is None:
            seen = [(tensor, tensor.clone()) for tensor in tensors_of(self) if can_read(tensor)]
            memo = self.__dict__["_memo_"] = {"seen": seen}
        return memo

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key not in ("_memo_", "_offsets_")}

    def _coordinates(
        self, q_len: int, k_len: int | None, batch: int, heads: int, q_start: int | Tensor | None
    ) -> Coordinates:
        self.refresh()
        k_len = q_len if k_len is None else k_len
        packing = split_packing(self)
        self.check(batch, heads, q_len, k_len)
        device = next((t.device for t in tensors_of(self)), None)
        return Coordinates(batch, heads, q_len, k_len, k_len - q_len if q_start is None else q_start, packing, device)


class _Combined(Mask):
    parts: tuple[Mask, ...]

    def children(self) -> tuple[Mask, ...]:
        return self.parts

    def _joined_offsets(self, join: Callable[[Intervals, Intervals], Intervals]) -> Intervals | None:
        if is_recording():
            return self._join_offsets(join)
        if "_offsets_" not in self.__dict__:  # asked for at every tile; the parts never change
            self.__dict__["_offsets_"] = self._join_offsets(join)
        known: Intervals | None = self.__dict__["_offsets_"]
        return known

    def _join_offsets(self, join: Callable[[Intervals, Intervals], Intervals]) -> Intervals | None:
        joined: Intervals | None = None
        for part in self.parts:
            own = part.offsets()
            if own is None:
                return None
            joined = own if joined is None else join(joined, own)
        return joined


@dataclass(frozen=True, eq=False)
class And(_Combined):
    """Every part allows the pair."""

    parts: tuple[Mask, ...]

    def offsets(self) -> Intervals | None:
        return self._joined_offsets(Intervals.intersection)

    def allows_at(self, indices: TileIndices) -> Tensor:
        return functools.reduce(operator.and_, (part.allows_at(indices) for part in self.parts))

    def bounds(self, box: TileBounds) -> tuple[bool, bool]:
        if (offsets := self.offsets()) is not None:
            return offsets.meet(*box.distance)
        some, every = zip(*(part.bounds(box) for part in self.parts), strict=True)
        return all(some), all(every)

    @property
    def lists_tiles(self) -> bool:
        return any(part.lists_tiles for part in self.parts)

    def tiles(self, grid: TileGrid) -> Tiles:
        known = [part.tiles(grid) for part in self.parts if part.lists_tiles]
        found = functools.reduce(operator.and_, known)
        return found if len(known) == len(self.parts) else found.undecided()


@dataclass(frozen=True, eq=False)
class Or(_Combined):
    """Some part allows the pair."""

    parts: tuple[Mask, ...]

    def offsets(self) -> Intervals | None:
        return self._joined_offsets(Intervals.union)

    def allows_at(self, indices: TileIndices) -> Tensor:
        return functools.reduce(operator.or_, (part.allows_at(indices) for part in self.parts))

    def bounds(self, box: TileBounds) -> tuple[bool, bool]:
        if (offsets := self.offsets()) is not None:
            return offsets.meet(*box.distance)
        some, every = zip(*(part.bounds(box) for part in self.parts), strict=True)
        return any(some), any(every)

    @property
    def lists_tiles(self) -> bool:
        return all(part.lists_tiles for part in self.parts)

    def tiles(self, grid: TileGrid) -> Tiles:
        return functools.reduce(operator.or_, (part.tiles(grid) for part in self.parts))


@dataclass(frozen=True, eq=False)
class Not(Mask):
    """The part does not allow the pair."""

    part: Mask

    def children(self) -> tuple[Mask, ...]:
        return (self.part,)

    def offsets(self) -> Intervals | None:
        found = self.part.offsets()
        return None if found is None else found.complement()

    def allows_at(self, indices: TileIndices) -> Tensor:
        return ~self.part.allows_at(indices)

    def bounds(self, box: TileBounds) -> tuple[bool, bool]:
        some, every = self.part.bounds(box)
        return not every, not some


@dataclass(frozen=True, eq=False)
class Shifted(Mask):
    """`part` for keys whose first column is slot `by`."""

    part: Mask
    by: int

    def children(self) -> tuple[Mask, ...]:
        return (self.part,)

    def check(self, batch: int, heads: int, q_len: int, k_len: int) -> None:
        self.part.check(batch, heads, q_len, k_len + self.by)

    def allows_at(self, indices: TileIndices) -> Tensor:
        return self.part.allows_at(indices.shifted(self.by))

    def bounds(self, box: TileBounds) -> tuple[bool, bool]:
        return self.part.bounds(box.shifted(self.by))


def split_packing(mask: Mask | None) -> Packing | None:
    """The packing of a `Segments.from_lengths` term, which may only stand in the outermost ``&``."""
    terms = _and_terms(mask) if mask is not None else []
    found: list[Packing] = [term.packing for term in terms if getattr(term, "packing", None) is not None]  # type: ignore[attr-defined]
    if len(found) > 1:
        raise ValueError(f"mask: Segments.from_lengths may stand once in a mask, got it {len(found)} times")
    if any(_holds_packing(child) for term in terms for child in term.children()):
        raise ValueError("mask: Segments.from_lengths renumbers slots, so it may only be a term of the outermost &")
    return found[0] if found else None


def reach(mask: Mask) -> int | None:
    """The largest distance ``i - j`` that the mask's own terms ever allow; None where there is no such bound."""
    bounds = []
    for term in _and_terms(mask):
        offsets = term.offsets()
        if offsets is not None and (not offsets.ranges or offsets.ranges[-1][1] < math.inf):
            bounds.append(int(offsets.ranges[-1][1]) if offsets.ranges else 0)
    return min(bounds, default=None)


def _and_terms(mask: Mask) -> list[Mask]:
    return [term for part in mask.parts for term in _and_terms(part)] if isinstance(mask, And) else [mask]


def _holds_packing(mask: Mask) -> bool:
    return getattr(mask, "packing", None) is not None or any(map(_holds_packing, mask.children()))


def to_device(value: Any, device: torch.device | str) -> Any:
    """A frozen dataclass (a mask or a bias) with every tensor in it on `device`; itself when nothing moves."""
    changes = {}
    for part in dataclasses.fields(value):
        old = getattr(value, part.name)
        if isinstance(old, Tensor):
            new: Any = old.to(device)
        elif isinstance(old, tuple) and old and dataclasses.is_dataclass(old[0]):
            new = tuple(to_device(one, device) for one in old)
            new = old if all(a is b for a, b in zip(old, new, strict=True)) else new
        elif dataclasses.is_dataclass(old) and not isinstance(old, (type, Packing)):
            new = to_device(old, device)
        else:
            continue
        if new is not old:
            changes[part.name] = new
    if not changes:
        return value
    shifted = object.__new__(type(value))  # not the constructor: it may take other arguments (RandomBlocks draws)
    for key, old in value.__dict__.items():
        if key != "_memo_":
            object.__setattr__(shifted, key, changes.get(key, old))
    return shifted


def tensors_of(value: Any) -> list[Tensor]:
    """Every tensor in a mask or bias."""
    found: list[Tensor] = []
    for part in dataclasses.fields(value):
        one = getattr(value, part.name)
        members = one if isinstance(one, tuple) else (one,)
        for member in members:
            if isinstance(member, Tensor):
                found.append(member)
            elif dataclasses.is_dataclass(member) and not isinstance(member, (type, Packing)):
                found.extend(tensors_of(member))
    return found
