"""From a call to what the kernels read: plain tensors and numbers, as csrc/regard.h names them.

Of the mask, terms of the outermost ``&`` that the kernels know by themselves stay what they are: one interval of
``i - j`` (with a prefix by ``|``), key lengths, key padding, segments, dense tensors. Any other term is evaluated into
one dense mask, whose empty tiles are skipped. Of the bias, what depends on ``j - i`` alone becomes one vector per head,
computed here in torch, so that autograd leads its gradient back to slopes and tables; the rest is dense.
"""

from __future__ import annotations

import functools
import math
import operator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from regard import biases, masks
from regard.backends.call import AttentionCall
from regard.biases import Bias, RelativeTable
from regard.biases.base import Shifted as ShiftedBias
from regard.biases.base import Sum
from regard.coordinates import Coordinates, Packing, TileIndices, can_read, is_recording
from regard.masks import And, Buckets, KeyLengths, KeyPadding, Mask, Or, Prefix, Segments
from regard.masks.base import Shifted, tensors_of
from regard.masks.block_layout import EMPTY, FULL, PARTIAL
from regard.masks.intervals import EVERYTHING, Intervals

__all__ = ["Operands", "definition", "operands_of", "unfit"]

LOWEST, HIGHEST = -(2**63), 2**63 - 1  # open ends of the interval
TILE = 64  # rows and columns of a dense mask's tiles
DENSE_LIMIT = 2**24  # entries of a mask or bias that is evaluated densely; a mask counts for one head


class Operands(NamedTuple):
    """The arguments of the kernels, and the schema of their torch operators. The first five may be trained."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None  # float32, 4-D, broadcasting
    relative: Tensor | None  # float32 (Hq, n): by j - i + relative_zero
    q_start: Tensor  # int64 (B,)
    prefix: Tensor | None  # int64 (B,)
    k_length: Tensor | None  # int64 (B,)
    keep: Tensor | None  # bool (B, Tk)
    q_segment: Tensor | None  # int64 (B, Tq)
    k_segment: Tensor | None  # int64 (B, Tk)
    mask: Tensor | None  # bool, 4-D, broadcasting
    layout: Tensor | None  # uint8, 4-D, broadcasting: tiles of `mask`
    seed: Tensor | None  # int64 ()
    scale: float
    softcap: float  # 0: none
    low: int
    high: int
    relative_zero: int
    dropout_p: float


class _Reading(NamedTuple):
    """What the kernels read of a mask: the middle of `Operands`, for one call's sizes."""

    q_start: Tensor
    prefix: Tensor | None
    k_length: Tensor | None
    keep: Tensor | None
    q_segment: Tensor | None
    k_segment: Tensor | None
    mask: Tensor | None
    layout: Tensor | None
    low: int
    high: int


def unfit(call: AttentionCall) -> str | None:
    """Why a call's mask or bias cannot be given to the kernels, in one sentence."""
    pairs = call.q.shape[2] * call.k.shape[2]
    if call.bias is None and (pairs <= DENSE_LIMIT or call.pattern != "other"):
        return None
    if _sorted_terms(call).others and pairs > DENSE_LIMIT:
        return f"it would hold this mask densely, over {DENSE_LIMIT:,} entries"
    relative, _, others = _sorted_biases(call)
    if others and pairs * call.q.shape[1] > DENSE_LIMIT:
        return f"it would hold this bias densely, over {DENSE_LIMIT:,} entries"
    if relative and call.packing is None:
        span = call.coordinates.start_range
        if span is None:
            return "a bias by distance needs starts that are numbers, and these are traced"
        if span[1] - span[0] > DENSE_LIMIT:
            return f"the batch rows' starts lie over {DENSE_LIMIT:,} slots apart"
    return None


def operands_of(call: AttentionCall) -> Operands:
    """The kernels' arguments for a call that `unfit` lets pass."""
    reading = _read_mask(call)
    bias, vector, zero = _read_bias(call) if call.bias is not None else (None, None, 0)
    return Operands(
        call.q,
        call.k,
        call.v,
        bias,
        vector,
        *reading[:8],
        call.seed,
        call.scale,
        call.softcap or 0.0,
        reading.low,
        reading.high,
        zero,
        call.dropout_p,
    )


def definition(operands: Operands) -> AttentionCall:
    """The same call for the reference backend: everything that is not q, k, v or a bias written out densely."""
    one, batch, q_heads = operands, operands.q.shape[0], operands.q.shape[1]
    q_len, k_len = one.q.shape[2], one.k.shape[2]
    coordinates = Coordinates(batch, q_heads, q_len, k_len, one.q_start)
    indices = coordinates.indices()
    distance = indices.i - indices.j
    allowed = (distance >= one.low) & (distance <= one.high)
    if one.prefix is not None:
        allowed = allowed | (indices.j < one.prefix.view(-1, 1, 1, 1))
    if one.k_length is not None:
        allowed = allowed & (indices.j < one.k_length.view(-1, 1, 1, 1))
    if one.keep is not None:
        allowed = allowed & one.keep[:, None, None, :]
    if one.q_segment is not None and one.k_segment is not None:
        allowed = allowed & (one.q_segment[:, None, :, None] == one.k_segment[:, None, None, :])
    if one.mask is not None:
        allowed = allowed & one.mask
    bias = one.bias
    if one.relative is not None:
        vector = one.relative[indices.h, one.relative_zero - distance]
        bias = vector if bias is None else bias + vector
    return AttentionCall(
        one.q,
        one.k,
        one.v,
        masks.Dense(allowed),
        None if bias is None else biases.Dense(bias),
        one.scale,
        one.softcap or None,
        None,
        one.dropout_p,
        coordinates,
        "other",
        True,
        one.seed,
    )


# ---- masks -----------------------------------------------------------------------------------------------------------


class _Terms:
    """The terms of a mask by kind, each with how far its keys are moved; what has no kind is in `others`."""

    def __init__(self) -> None:
        self.offsets = EVERYTHING
        self.prefix: list[tuple[Mask, int]] = []  # | with `offsets`
        self.lengths: list[tuple[Mask, int]] = []
        self.keeps: list[tuple[KeyPadding, int]] = []
        self.labels: list[tuple[Segments | Buckets, int]] = []
        self.dense: list[tuple[masks.Dense, int]] = []
        self.others: list[tuple[Mask, int]] = []


def _terms(mask: Mask, kind: type[And] | type[Or], by: int = 0) -> list[tuple[Mask, int]]:
    if isinstance(mask, kind):
        return [term for part in mask.parts for term in _terms(part, kind, by)]
    return _terms(mask.part, kind, by + mask.by) if isinstance(mask, Shifted) else [(mask, by)]


def _shift(packing: Packing) -> int | None:
    """``i - j`` less ``row - column`` in packed rows, where it is the same in every segment."""
    ends: set[int] = set()
    q_end = k_end = 0
    for q, k in zip(packing.q_lengths, packing.k_lengths, strict=True):
        q_end, k_end = q_end + q, k_end + k
        if q and k:
            ends.add(k_end - q_end)
    return None if len(ends) > 1 else ends.pop() if ends else 0


def _sorted_terms(call: AttentionCall) -> _Terms:
    found = _Terms()
    if call.mask is None or call.pattern == "full":
        return found
    packing = call.packing
    aligned = packing is None or _shift(packing) is not None  # distances are rows less columns, moved by a constant
    for term, by in _terms(call.mask, And):
        offsets = term.offsets()
        both = found.offsets & offsets if offsets is not None else None
        if both is not None and aligned and len(both.ranges) <= 1 and not found.prefix:
            found.offsets = both
        elif isinstance(term, (KeyLengths, Prefix)) and packing is None:
            found.lengths.append((term, by))
        elif isinstance(term, KeyPadding):
            found.keeps.append((term, by))
        elif isinstance(term, masks.Dense):
            found.dense.append((term, by))
        elif _is_label(term, packing) and not found.labels:
            found.labels.append((term, by))  # type: ignore[arg-type]
        elif isinstance(term, Or) and packing is None and found.offsets == EVERYTHING and _is_prefixed(term, by, found):
            pass
        else:
            found.others.append((term, by))
    return found


def _is_label(term: Mask, packing: Packing | None) -> bool:
    if isinstance(term, Segments):
        return term.packing is packing  # a packed call's own, or none
    return isinstance(term, Buckets) and packing is None and term.q_ids.ndim < 3 and term.k_ids.ndim < 3


def _is_prefixed(term: Or, by: int, found: _Terms) -> bool:
    """Whether ``|`` joins one interval of distances with prefixes; if so they are put into `found`."""
    offsets = Intervals(())
    prefix: list[tuple[Mask, int]] = []
    for part, shifted in _terms(term, Or, by):
        own = part.offsets()
        if own is not None:
            offsets = offsets | own
        elif isinstance(part, (KeyLengths, Prefix)):
            prefix.append((part, shifted))
        else:
            return False
    if len(offsets.ranges) > 1 or not prefix:
        return False
    found.offsets, found.prefix = offsets, prefix
    return True


def _read_mask(call: AttentionCall) -> _Reading:
    """What the kernels read of the mask; remembered for the sizes last seen, so that layers share one reading."""
    mask, coordinates = call.mask, call.coordinates
    watched = is_recording() or torch._C._len_torch_dispatch_stack()  # what is made then is not for other calls
    if watched or not can_read(call.q) or isinstance(coordinates.q_start, Tensor):
        return _new_reading(call)
    inference = torch.is_inference_mode_enabled()  # tensors made in it cannot be saved for a backward pass
    if coordinates.packing is None:
        if mask is None or call.pattern == "full":
            return _interval(coordinates.batch, coordinates.q_start, -math.inf, math.inf, inference)
        offsets = mask.offsets()
        if offsets is not None and len(offsets.ranges) == 1:
            return _interval(coordinates.batch, coordinates.q_start, *offsets.ranges[0], inference)
    assert mask is not None
    if not all(map(can_read, tensors_of(mask))):
        return _new_reading(call)
    key = (coordinates.batch, coordinates.heads, coordinates.q_len, coordinates.k_len, coordinates.q_start, inference)
    known = mask._memo.get("native")
    if known is None or known[0] != key:
        known = mask._memo["native"] = (key, _new_reading(call))
    reading: _Reading = known[1]
    return reading


def _new_reading(call: AttentionCall) -> _Reading:
    batch, _, _, _, k_len, _ = call.sizes
    terms, coordinates = _sorted_terms(call), call.coordinates
    start = coordinates.q_start if coordinates.packing is None else _shift(coordinates.packing) or 0
    q_segment, k_segment = _segments(terms.labels[0], coordinates) if terms.labels else (None, None)
    keeps = [mask.keep[:, by : by + k_len] for mask, by in terms.keeps]
    dense = _dense(terms, coordinates)
    low, high = _ends(*(terms.offsets.ranges[0] if terms.offsets.ranges else (1.0, 0.0)))
    return _Reading(
        _numbers(start, call.q),
        functools.reduce(torch.maximum, _counts(terms.prefix, call.q)) if terms.prefix else None,
        functools.reduce(torch.minimum, _counts(terms.lengths, call.q)) if terms.lengths else None,
        functools.reduce(operator.and_, keeps).expand(batch, k_len).contiguous() if keeps else None,
        q_segment,
        k_segment,
        dense,
        _tiles(dense) if dense is not None else None,
        low,
        high,
    )


@functools.lru_cache(maxsize=256)
def _interval(batch: int, start: int, low: float, high: float, inference: bool) -> _Reading:
    """The reading of a mask that is one interval of ``i - j``."""
    return _Reading(_numbers(start, torch.empty(batch, 0)), None, None, None, None, None, None, None, *_ends(low, high))


def _ends(low: float, high: float) -> tuple[int, int]:
    return LOWEST if low == -math.inf else int(low), HIGHEST if high == math.inf else int(high)


def _numbers(n: int | Tensor, like: Tensor) -> Tensor:
    batch = like.shape[0]
    if not isinstance(n, Tensor):
        return like.new_full((batch,), n, dtype=torch.int64)  # of q's class, where that is a fake tensor, say
    return n.to(torch.int64).expand(batch).contiguous()


def _counts(terms: list[tuple[Mask, int]], like: Tensor) -> list[Tensor]:
    return [_numbers(term.n, like) - by for term, by in terms]  # type: ignore[attr-defined]


def _segments(term: tuple[Segments | Buckets, int], coordinates: Coordinates) -> tuple[Tensor, Tensor]:
    """Labels of every query row (B, Tq) and key column (B, Tk)."""
    mask, by = term
    q_ids, k_ids = mask.q_ids.to(torch.int64), mask.k_ids
    if k_ids is None:  # per key slot: a query reads the label of its own slot, and has none outside of them
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


def _dense(terms: _Terms, coordinates: Coordinates) -> Tensor | None:
    """The terms that are tensors or have no other form, as one bool tensor (B | 1, H | 1, Tq | 1, Tk | 1)."""
    if not (terms.dense or terms.others):
        return None
    parts = []
    for given, by in terms.dense:
        whole = given.tensor if given.tensor.ndim == 4 else given.tensor[None, None]
        parts.append(whole[..., by : by + coordinates.k_len] if whole.shape[3] > 1 else whole)
    if terms.others:
        indices = coordinates.indices()
        parts += [_four(other.allows_at(indices.shifted(by) if by else indices)) for other, by in terms.others]
    return functools.reduce(operator.and_, parts)


def _four(x: Tensor) -> Tensor:
    return x[(None,) * (4 - x.ndim)]


def _tiles(mask: Tensor) -> Tensor | None:
    """The kind of every tile of a dense mask, or None where there is too little to skip."""
    rows, cols = mask.shape[2], mask.shape[3]
    if rows == 1 or cols == 1 or rows * cols < 4 * TILE * TILE:
        return None
    edge = (0, -cols % TILE, 0, -rows % TILE)

    def tiles(beyond: int) -> Tensor:
        whole = F.pad(mask.to(torch.uint8), edge, value=beyond).contiguous()
        return whole.view(*whole.shape[:2], -(-rows // TILE), TILE, -(-cols // TILE), TILE)

    kinds = torch.where(tiles(1).amin((3, 5)) > 0, FULL, PARTIAL)
    return torch.where(tiles(0).amax((3, 5)) > 0, kinds, EMPTY).to(torch.uint8)


# ---- biases ----------------------------------------------------------------------------------------------------------


def _read_bias(call: AttentionCall) -> tuple[Tensor | None, Tensor | None, int]:
    """The dense bias, the bias by distance, and the place of distance 0 in that."""
    relative, dense, others = _sorted_biases(call)
    parts = [bias.tensor.to(torch.float32) for bias in dense]
    parts += [bias.scores(call.coordinates.indices(), torch.float32) for bias in others]
    written = functools.reduce(operator.add, map(_four, parts)) if parts else None
    return written, *(_by_distance(call, relative) if relative else (None, 0))


def _sorted_biases(call: AttentionCall) -> tuple[list[Bias], list[biases.Dense], list[Bias]]:
    """The parts of the bias: those by distance, those given densely, the others."""
    relative: list[Bias] = []
    dense: list[biases.Dense] = []
    others: list[Bias] = []
    aligned = call.packing is None or _shift(call.packing) is not None
    for part in _summands(call.bias) if call.bias is not None else ():
        if isinstance(part, biases.Dense):
            dense.append(part)
        elif aligned and (inner := _distance_only(part)) is not None:
            relative.append(inner)
        else:
            others.append(part)
    return relative, dense, others


def _summands(bias: Bias) -> list[Bias]:
    return [one for part in bias.parts for one in _summands(part)] if isinstance(bias, Sum) else [bias]


def _distance_only(bias: Bias) -> Bias | None:
    """The bias, or what it moves, if it depends on ``i - j`` alone."""
    if isinstance(bias, ShiftedBias):
        return _distance_only(bias.part)
    return bias if bias.relative or (isinstance(bias, RelativeTable) and len(bias.size) == 1) else None


def _by_distance(call: AttentionCall, parts: list[Bias]) -> tuple[Tensor, int]:
    """The values (Hq, n) by distance from the smallest ``j - i`` of the call on, and the place of distance 0."""
    q_len, k_len, device = call.q.shape[2], call.k.shape[2], call.q.device
    if call.packing is not None:
        span = (_shift(call.packing) or 0,) * 2
    else:
        assert call.coordinates.start_range is not None
        span = call.coordinates.start_range
    zero = span[1] + q_len - 1
    j = torch.arange(-zero, max(k_len - span[0], -zero), device=device).view(1, 1, 1, -1)  # none without pairs
    i = torch.zeros(1, 1, 1, 1, dtype=torch.int64, device=device)
    h = torch.arange(call.q.shape[1], device=device).view(1, -1, 1, 1)
    indices = TileIndices(i, h, i, j, i, j)
    values = functools.reduce(operator.add, (part.scores(indices, torch.float32) for part in parts))
    return values.expand(1, call.q.shape[1], 1, j.shape[3])[0, :, 0].contiguous(), zero
