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
from regard.backends.terms import MaskTerms, packed_shift
from regard.coordinates import Coordinates, can_read, is_recording
from regard.masks import Buckets, Mask, Segments
from regard.masks.base import tensors_of
from regard.masks.block_layout import EMPTY, FULL, PARTIAL

__all__ = ["TILE", "broadcast4", "mask_operands"]

LOWEST, HIGHEST = -(2**63), 2**63 - 1  # open ends of the interval
TILE = 64  # rows and columns of a dense mask's tiles

# the fields of `Operands` that a mask fills, in their order
NAMES = ("q_start", "prefix", "k_length", "keep", "q_segment", "k_segment", "mask", "layout", "low", "high")
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
    dense = _dense(terms, coordinates)
    return _named(
        _numbers(start, call.q),
        *(terms.offsets.ranges[0] if terms.offsets.ranges else (1.0, 0.0)),
        prefix=functools.reduce(torch.maximum, _counts(terms.prefix, call.q)) if terms.prefix else None,
        k_length=functools.reduce(torch.minimum, _counts(terms.lengths, call.q)) if terms.lengths else None,
        keep=functools.reduce(operator.and_, keeps).expand(batch, k_len).contiguous() if keeps else None,
        q_segment=q_segment,
        k_segment=k_segment,
        mask=dense,
        layout=_tiles(dense) if dense is not None else None,
    )


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


def _dense(terms: MaskTerms, coordinates: Coordinates) -> Tensor | None:
    """The terms that are tensors or have no other form, as one bool tensor (B | 1, H | 1, Tq | 1, Tk | 1)."""
    if not (terms.dense or terms.others):
        return None
    parts = []
    for given, by in terms.dense:
        whole = given.tensor if given.tensor.ndim == 4 else given.tensor[None, None]
        parts.append(whole[..., by : by + coordinates.k_len] if whole.shape[3] > 1 else whole)
    if terms.others:
        indices = coordinates.indices()
        parts += [broadcast4(other.allows_at(indices.shifted(by) if by else indices)) for other, by in terms.others]
    return functools.reduce(operator.and_, parts)


def broadcast4(x: Tensor) -> Tensor:
    """With axes of one entry before, as 4-D."""
    return x[(None,) * (4 - x.ndim)]


def _tiles(mask: Tensor) -> Tensor | None:
    """The kind of every tile of a dense mask, or None where there is too little to skip."""
    rows, cols = mask.shape[2], mask.shape[3]
    if isinstance(rows, torch.SymInt) or isinstance(cols, torch.SymInt):
        return None  # how many tiles there are would become a condition on sizes that are meant to stay open
    if rows == 1 or cols == 1 or rows * cols < 4 * TILE * TILE:
        return None
    edge = (0, -cols % TILE, 0, -rows % TILE)

    def tiles(beyond: int) -> Tensor:
        whole = F.pad(mask.to(torch.uint8), edge, value=beyond).contiguous()
        return whole.view(*whole.shape[:2], -(-rows // TILE), TILE, -(-cols // TILE), TILE)

    kinds = torch.where(tiles(1).amin((3, 5)) > 0, FULL, PARTIAL)
    return torch.where(tiles(0).amax((3, 5)) > 0, kinds, EMPTY).to(torch.uint8)
