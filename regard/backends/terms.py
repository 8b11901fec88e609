"""The mask and the bias of a call, sorted once into kinds that kernels know by rule; `AttentionCall` remembers them.

A mask is the outermost ``&`` of terms. Those of `MaskTerms` can be given to a kernel as numbers, vectors and ids; what
has no such form is in `others`. A bias is a sum; what depends on ``j - i`` alone is apart from what is written densely.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from regard import biases, masks
from regard.biases import Bias, RelativeTable
from regard.biases.base import Shifted as ShiftedBias
from regard.biases.base import Sum
from regard.coordinates import Coordinates, Packing
from regard.masks import And, Buckets, KeyLengths, KeyPadding, Mask, Or, Prefix, Segments
from regard.masks.base import Shifted
from regard.masks.intervals import EVERYTHING, PAST, Intervals

__all__ = ["BiasTerms", "MaskTerms", "packed_shift", "pattern_of", "sorted_bias", "sorted_mask"]


@dataclass
class MaskTerms:
    """The terms of a mask by kind, each with how far its keys are shifted."""

    offsets: Intervals = field(default_factory=lambda: EVERYTHING)  # of i - j: one interval at most
    prefix: list[tuple[Mask, int]] = field(default_factory=list)  # | with `offsets`
    lengths: list[tuple[Mask, int]] = field(default_factory=list)
    keeps: list[tuple[KeyPadding, int]] = field(default_factory=list)
    ids: list[tuple[Segments | Buckets, int]] = field(default_factory=list)  # one at most
    dense: list[tuple[masks.Dense, int]] = field(default_factory=list)
    others: list[tuple[Mask, int]] = field(default_factory=list)


@dataclass
class BiasTerms:
    """The summands of a bias by kind."""

    by_distance: list[Bias] = field(default_factory=list)  # of j - i alone
    dense: list[biases.Dense] = field(default_factory=list)
    others: list[Bias] = field(default_factory=list)


def pattern_of(mask: Mask | None, coordinates: Coordinates) -> str:
    """ "full": every query may attend to every key; "causal": query r to keys 0..r of as many; else "other".

    By the mask's definition alone; packed rows and starts given per row are "other".
    """
    if mask is None:
        return "full"
    offsets = mask.offsets()
    if offsets is None or coordinates.packing is not None or isinstance(coordinates.q_start, Tensor):
        return "other"
    if offsets == PAST and coordinates.q_start == 0 and coordinates.q_len == coordinates.k_len:
        return "causal"
    lowest = coordinates.q_start - coordinates.k_len + 1
    highest = coordinates.q_start + coordinates.q_len - 1
    if isinstance(lowest, torch.SymInt) or isinstance(highest, torch.SymInt):
        return "full" if _sure(offsets, lowest, highest) else "other"
    return "full" if offsets.meet(lowest, highest)[1] else "other"


def _sure(offsets: Intervals, low: Any, high: Any) -> bool:
    """Whether all of ``low..high`` is in the set whatever the sizes will be: an open length gets no condition."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return any(
        (a == -math.inf or statically_known_true(int(a) <= low))
        and (b == math.inf or statically_known_true(high <= int(b)))
        for a, b in offsets.ranges
    )


def packed_shift(packing: Packing) -> int | None:
    """``i - j`` less ``row - column`` in packed rows, where it is the same in every segment."""
    ends: set[int] = set()
    q_end = k_end = 0
    for q, k in zip(packing.q_lengths, packing.k_lengths, strict=True):
        q_end, k_end = q_end + q, k_end + k
        if q and k:
            ends.add(k_end - q_end)
    return None if len(ends) > 1 else ends.pop() if ends else 0


def _aligned(packing: Packing | None) -> bool:
    """Whether distances are rows less columns, shifted by a constant."""
    return packing is None or packed_shift(packing) is not None


def sorted_mask(mask: Mask | None, packing: Packing | None) -> MaskTerms:
    """The terms of `mask` by kind."""
    found = MaskTerms()
    if mask is None:
        return found
    aligned = _aligned(packing)
    for term, by in _terms(mask, And):
        offsets = term.offsets()
        both = found.offsets.intersection(offsets) if offsets is not None else None
        if both is not None and aligned and len(both.ranges) <= 1 and not found.prefix:
            found.offsets = both
        elif isinstance(term, (KeyLengths, Prefix)) and packing is None:
            found.lengths.append((term, by))
        elif isinstance(term, KeyPadding):
            found.keeps.append((term, by))
        elif isinstance(term, masks.Dense):
            found.dense.append((term, by))
        elif _has_ids(term, packing) and not found.ids:
            found.ids.append((term, by))  # type: ignore[arg-type]
        elif isinstance(term, Or) and packing is None and found.offsets == EVERYTHING and _has_prefix(term, by, found):
            pass
        else:
            found.others.append((term, by))
    return found


def _terms(mask: Mask, kind: type[And] | type[Or], by: int = 0) -> list[tuple[Mask, int]]:
    if isinstance(mask, kind):
        return [term for part in mask.parts for term in _terms(part, kind, by)]
    return _terms(mask.part, kind, by + mask.by) if isinstance(mask, Shifted) else [(mask, by)]


def _has_ids(term: Mask, packing: Packing | None) -> bool:
    """Whether a term compares an id of the query with one of the key, the same for all heads."""
    if isinstance(term, Segments):
        return term.packing is packing  # a packed call's own, or none
    return isinstance(term, Buckets) and packing is None and term.q_ids.ndim < 3 and term.k_ids.ndim < 3


def _has_prefix(term: Or, by: int, found: MaskTerms) -> bool:
    """Whether ``|`` joins one interval of distances with prefixes; if so they are put into `found`."""
    offsets = Intervals(())
    prefix: list[tuple[Mask, int]] = []
    for part, shifted in _terms(term, Or, by):
        own = part.offsets()
        if own is not None:
            offsets = offsets.union(own)
        elif isinstance(part, (KeyLengths, Prefix)):
            prefix.append((part, shifted))
        else:
            return False
    if len(offsets.ranges) > 1 or not prefix:
        return False
    found.offsets, found.prefix = offsets, prefix
    return True


def sorted_bias(bias: Bias | None, packing: Packing | None) -> BiasTerms:
    """The summands of `bias` by kind."""
    found = BiasTerms()
    aligned = _aligned(packing)
    for part in _summands(bias) if bias is not None else ():
        if isinstance(part, biases.Dense):
            found.dense.append(part)
        elif aligned and (inner := _distance_only(part)) is not None:
            found.by_distance.append(inner)
        else:
            found.others.append(part)
    return found


def _summands(bias: Bias) -> list[Bias]:
    return [one for part in bias.parts for one in _summands(part)] if isinstance(bias, Sum) else [bias]


def _distance_only(bias: Bias) -> Bias | None:
    """The bias, or what it shifts, if it depends on ``i - j`` alone."""
    if isinstance(bias, ShiftedBias):
        return _distance_only(bias.part)
    return bias if bias.relative or (isinstance(bias, RelativeTable) and len(bias.size) == 1) else None
