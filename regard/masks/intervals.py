"""Sets of whole numbers as sorted disjoint intervals: what a mask of ``i - j`` allows."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["EVERYTHING", "PAST", "Intervals"]


@dataclass(frozen=True)
class Intervals:
    """Inclusive ranges ``(low, high)`` in rising order with gaps between them; ±inf for open ends."""

    ranges: tuple[tuple[float, float], ...]

    @classmethod
    def of(cls, *ranges: tuple[int | None, int | None]) -> Intervals:
        """From (low, high) pairs in any order; None is an open end, an empty range is dropped."""
        return cls._merged(
            (-math.inf if low is None else low, math.inf if high is None else high) for low, high in ranges
        )

    @classmethod
    def _merged(cls, ranges: Iterable[tuple[float, float]]) -> Intervals:
        merged: list[tuple[float, float]] = []
        for low, high in sorted(r for r in ranges if r[0] <= r[1]):
            if merged and low <= merged[-1][1] + 1:
                merged[-1] = (merged[-1][0], max(merged[-1][1], high))
            else:
                merged.append((low, high))
        return cls(tuple(merged))

    # named, not operators: torch.compile does not trace ``~`` of an object

    def union(self, other: Intervals) -> Intervals:
        return self._merged(self.ranges + other.ranges)

    def intersection(self, other: Intervals) -> Intervals:
        return self._merged((max(a, c), min(b, d)) for a, b in self.ranges for c, d in other.ranges)

    def complement(self) -> Intervals:
        gaps: list[tuple[float, float]] = []
        start = -math.inf
        for low, high in self.ranges:
            if low > start:
                gaps.append((start, low - 1))
            start = high + 1
        return Intervals(tuple(gaps if start == math.inf else [*gaps, (start, math.inf)]))

    def meet(self, low: int, high: int) -> tuple[bool, bool]:
        """(is any number of ``low..high`` in the set, are all of them). Plain Python: torch.compile traces it."""
        some = any(a <= high and low <= b for a, b in self.ranges)
        return some, any(a <= low and high <= b for a, b in self.ranges)

    def contains(self, number: Tensor) -> Tensor:
        """Membership of every entry of an integer tensor."""
        inside = torch.zeros_like(number, dtype=torch.bool)
        for low, high in self.ranges:
            if low == -math.inf and high == math.inf:
                return torch.ones_like(number, dtype=torch.bool)
            if low == -math.inf:
                part = number <= int(high)
            elif high == math.inf:
                part = number >= int(low)
            else:
                part = (number >= int(low)) & (number <= int(high))
            inside = inside | part
        return inside


EVERYTHING = Intervals.of((None, None))
PAST = Intervals.of((0, None))
