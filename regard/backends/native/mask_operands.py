"""What the kernels read of a mask: the fields of `Operands` that it fills, for one call's sizes."""

from __future__ import annotations

import functools
import math
import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.backends.call import AttentionCall
from regard.backends.terms import packed_shift
from regard.coordinates import Coordinates, can_read, is_recording
from regard.masks import Buckets, Dense, Mask, Segments
from regard.masks.base import tensors_of
from regard.masks.tiles import TILE, TileGrid, TileLists, tile_lists

__all__ = ["broadcast4", "lists_others", "mask_operands"]

LOWEST, HIGHEST = -(2**63), 2**63 - 1  # open ends of the interval

# the fields of `Operands` that a mask fills, in their order
NAMES = (
    *("q_start", "prefix", "k_length", "keep", "q_segment", "k_segment", "mask"),
    *("tile_lines", "tile_column", "tile_bits", "bits", "low", "high"),
)
Fields = tuple[Any, ...]


def mask_operands(call: AttentionCall) -> Fields:
    """The mask's fields; remembered for the sizes last seen, so that layers share one reading."""
    mask, coordinates = call.mask, call.coordinates
    watched = is_recording() or torch._C._len_torch_dispatch_stack()  # what is made then is not for other calls
    if watched or not can_read(call.q) or isinstance(coordinates.q_start, Tensor):
        return _fields(call)
    inference = torch.is_inference_mode_enabled()  # tensors made in it cannot be saved for a backward pass
    if coordinates.packing is None:
        if mask is None or call.pattern == "full":
            return _interval(coordinates.batch, coordinates.q_start, -math.inf, math.inf, inference)
        offsets = mask.offsets()
        if offsets is not None and len(offsets.ranges) == 1:
            return _interval(coordinates.batch, coordinates.q_start, *offsets.ranges[0], inference)
    assert mask is not None
    if not all(map(can_read, tensors_of(mask))):
        return _fields(call)
    key = (coordinates.batch, coordinates.heads, coordinates.q_len, coordinates.k_len, coordinates.q_start, inference)
    known = mask._memo.get("native")
    if known is None or known[0] != key:
        known = mask._memo["native"] = (key, _fields(call))
    fields: Fields = known[1]
    return fields


@functools.lru_cache(maxsize=256)
def _interval(batch: int, start: int, low: float, high: float, inference: bool) -> Fields:
    """The fields of a mask that is one interval of ``i - j``."""
    return _named(_numbers(start, torch.empty(batch, 0)), low, high)


def _named(q_start: Tensor, low: float, high: float, **others: Tensor | None) -> Fields:
    ends = {"low": LOWEST if low == -math.inf else int(low), "high": HIGHEST if high == math.inf else int(high)}
    given = {"q_start": q_start, **ends, **others}
    return tuple(given.get(name) for name in NAMES)


def _fields(call: AttentionCall) -> Fields:
    batch, _, _, _, k_len, _ = call.sizes
    terms, coordinates = call.mask_terms, call.coordinates
    start = coordinates.q_start if coordinates.packing is None else packed_shift(coordinates.packing) or 0
    keeps = [mask.keep[:, by : by + k_len] for mask, by in terms.keeps]
    q_segment, k_segment = _segments(terms.ids[0], coordinates) if terms.ids else (None, None)
    listed = lists_others(call)
    dense = _dense(coordinates, [*terms.dense, *(() if listed else terms.others)])
    lists = _lists(terms.others, coordinates) if listed else None if dense is None else _lists_of(dense)
    lines, columns, numbers, bits = (None,) * 4 if lists is None else lists
    return _named(
        _numbers(start, call.q),
        *(terms.offsets.ranges[0] if terms.offsets.ranges else (1.0, 0.0)),
        prefix=functools.reduce(torch.maximum, _counts(terms.prefix, call.q)) if terms.prefix else None,
        k_length=functools.reduce(torch.minimum, _counts(terms.lengths, call.q)) if terms.lengths else None,
        keep=functools.reduce(operator.and_, keeps).expand(batch, k_len).contiguous() if keeps else None,
        q_segment=q_segment,
        k_segment=k_segment,
        mask=dense,
        tile_lines=lines,
        tile_column=columns,
        tile_bits=numbers,
        bits=bits,
    )


def lists_others(call: AttentionCall) -> bool:
    """Whether the terms that kernels do not know by rule are given to them as lists of tiles, never densely."""
    others, coordinates = call.mask_terms.others, call.coordinates
    if not others or is_recording() or coordinates.packing is not None or isinstance(coordinates.q_start, Tensor):
        return False
    if 0 in (coordinates.q_len, coordinates.k_len) or _is_small(coordinates.q_len, coordinates.k_len):
        return False
    return all(by == 0 and term.lists_tiles and all(map(can_read, tensors_of(term))) for term, by in others)


def _is_small(q_len: int, k_len: int) -> bool:
    """Whether there is too little to skip."""
    return q_len == 1 or k_len == 1 or q_len * k_len < 4 * TILE * TILE


def _lists(terms: list[tuple[Mask, int]], coordinates: Coordinates) -> TileLists:
    start = coordinates.q_start
    assert not isinstance(start, Tensor)
    grid = TileGrid(coordinates.batch, coordinates.heads, coordinates.q_len, coordinates.k_len, start)
    tiles = functools.reduce(operator.and_, (term.tiles(grid) for term, _ in terms))
    return tile_lists(tiles, [term.allows_at for term, _ in terms])


def _numbers(n: int | Tensor, like: Tensor) -> Tensor:
    batch = like.shape[0]
    if not isinstance(n, Tensor):
        return like.new_full((batch,), n, dtype=torch.int64)  # of q's class, where that is a fake tensor, say
    return n.to(torch.int64).expand(batch).contiguous()


def _counts(terms: list[tuple[Mask, int]], like: Tensor) -> list[Tensor]:
    return [_numbers(term.n, like) - by for term, by in terms]  # type: ignore[attr-defined]


def _segments(term: tuple[Segments | Buckets, int], coordinates: Coordinates) -> tuple[Tensor, Tensor]:
    """The id of every query row (B, Tq) and key column (B, Tk)."""
    mask, by = term
    q_ids, k_ids = mask.q_ids.to(torch.int64), mask.k_ids
    if k_ids is None:  # per key slot: a query has the id of its own slot, and has none outside of them
        slots = coordinates.indices().i.flatten(1) + by  # (B | 1, Tq)
        last = q_ids.shape[-1] - 1
        ids = q_ids.expand(slots.shape[0], -1) if q_ids.ndim == 1 else q_ids
        slots = slots.expand(ids.shape[0], -1)
        k_ids = q_ids
        inside = (slots >= 0) & (slots <= last)
        q_ids = torch.where(inside, ids.gather(1, slots.clamp(0, max(last, 0))), LOWEST) if last >= 0 else slots
    k_ids = k_ids.to(torch.int64)[..., by : by + coordinates.k_len]
    shapes = (q_ids, coordinates.q_len), (k_ids, coordinates.k_len)
    q, k = (ids.expand(coordinates.batch, length).contiguous() for ids, length in shapes)
    return q, k


def _dense(coordinates: Coordinates, chosen: list[tuple[Mask, int]]) -> Tensor | None:
    """Terms that are tensors or evaluated as one bool tensor (B | 1, H | 1, Tq | 1, Tk | 1)."""
    if not chosen:
        return None
    parts = []
    for term, by in chosen:
        if isinstance(term, Dense):
            whole = term.tensor if term.tensor.ndim == 4 else term.tensor[None, None]
            parts.append(whole[..., by : by + coordinates.k_len] if whole.shape[3] > 1 else whole)
        else:
            indices = coordinates.indices()
            parts.append(broadcast4(term.allows_at(indices.shifted(by) if by else indices)))
    return functools.reduce(operator.and_, parts)


def broadcast4(x: Tensor) -> Tensor:
    """With axes of one entry before, as 4-D."""
    return x[(None,) * (4 - x.ndim)]


def _lists_of(mask: Tensor) -> TileLists | None:
    """The tiles of a dense mask that are not empty, or None where there is too little to skip.

    Of sizes that do not depend on what the mask holds, so that a compiler can follow; the mask itself hides the pairs.
    """
    rows, columns = mask.shape[2], mask.shape[3]
    if isinstance(rows, torch.SymInt) or isinstance(columns, torch.SymInt):
        return None  # how many tiles there are would become a condition on sizes that are meant to stay open
    if _is_small(rows, columns):
        return None
    padded = F.pad(mask, (0, -columns % TILE, 0, -rows % TILE))
    high, wide = padded.shape[2] // TILE, padded.shape[3] // TILE
    alive = padded.view(*mask.shape[:2], high, TILE, wide, TILE).any(5).any(3)
    listed = (~alive).to(torch.uint8).argsort(dim=-1, stable=True).to(torch.int32).contiguous()
    begin = torch.arange(alive[..., 0].numel(), device=mask.device).view(alive.shape[:3]) * wide
    lines = torch.stack([begin, begin + alive.sum(-1)], -1)
    return TileLists(lines, listed, torch.full_like(listed, -1), None)
