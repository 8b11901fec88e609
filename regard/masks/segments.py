"""Masks of equal labels: packed segments and hash buckets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from regard.checks import fits_ids, is_ids, label, lengths, same_label
from regard.coordinates import Packing, TileBounds, TileIndices
from regard.masks.base import Mask

__all__ = ["Buckets", "Segments"]


@dataclass(frozen=True, eq=False)
class Buckets(Mask):
    """Equal ids: ``q_ids[…, row] == k_ids[…, column]``; integer tensors (T,), (B, T) or (B, H, T)."""

    q_ids: Tensor
    k_ids: Tensor

    def __post_init__(self) -> None:
        for name in ("q_ids", "k_ids"):
            is_ids(name, getattr(self, name), (1, 2, 3))

    def check(self, batch: int, heads: int, q_len: int, k_len: int) -> None:
        fits_ids(f"{type(self).__name__}.q_ids", self.q_ids, batch, heads, q_len)
        fits_ids(f"{type(self).__name__}.k_ids", self.k_ids, batch, heads, k_len)

    def allows_at(self, indices: TileIndices) -> Tensor:
        return label(self.q_ids, indices, indices.row) == label(self.k_ids, indices, indices.col)

    def bounds(self, box: TileBounds) -> tuple[bool, bool]:
        return same_label(self, (self.q_ids, box.rows), (self.k_ids, box.cols))


@dataclass(frozen=True, eq=False)
class Segments(Mask):
    """Equal segment ids, integers (T,) or (B, T).

    With ``k_ids=None`` the ids are per key slot, and query row r has the id of slot ``q_start + r``; else `q_ids` is
    per row and `k_ids` per column. `Segments.from_lengths` packs sequences instead: then every other mask and the bias
    of the call count ``i`` and ``j`` inside the segment.
    """

    q_ids: Tensor
    k_ids: Tensor | None = None
    packing: Packing | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        is_ids("q_ids", self.q_ids, (1, 2))
        if self.k_ids is not None:
            is_ids("k_ids", self.k_ids, (1, 2))

    @classmethod
    def from_lengths(
        cls, q_lengths: Sequence[int] | Tensor, k_lengths: Sequence[int] | Tensor | None = None
    ) -> Segments:
        """Packed rows (B = 1): sequence n has ``q_lengths[n]`` queries and ``k_lengths[n]`` keys (the same by default).

        Only as a term of the outermost ``&`` and without `q_start`. A segment's queries are the last of its slots.

        >>> from regard.masks import Causal
        >>> print((Causal() & Segments.from_lengths([2, 1], [3, 2])).dense(3, 5)[0, 0].int())
        tensor([[1, 1, 0, 0, 0],
                [1, 1, 1, 0, 0],
                [0, 0, 0, 1, 1]], dtype=torch.int32)
        """
        q = lengths("q_lengths", q_lengths)
        k = q if k_lengths is None else lengths("k_lengths", k_lengths)
        if len(q) != len(k):
            raise ValueError(f"k_lengths: expected {len(q)} lengths, as many as q_lengths, got {len(k)}")
        packing = Packing(q, k)
        device = q_lengths.device if isinstance(q_lengths, Tensor) else None
        ids = [torch.tensor(part, dtype=torch.long, device=device) for part in (packing.q_ids, packing.k_ids)]
        return cls(ids[0], ids[1], packing)

    def check(self, batch: int, heads: int, q_len: int, k_len: int) -> None:
        if self.packing is not None:
            if batch != 1:
                raise ValueError(f"Segments.from_lengths: packed rows need batch size 1, got {batch}")
            for name, lengths, have in (("q", self.packing.q_lengths, q_len), ("k", self.packing.k_lengths, k_len)):
                if sum(lengths) != have:
                    raise ValueError(
                        f"{name}_lengths: they sum to {sum(lengths)}, but the call has {have} {name} tokens"
                    )
            return
        if self.k_ids is None:
            fits_ids("Segments.q_ids (per key slot)", self.q_ids, batch, heads, k_len)
        else:
            fits_ids("Segments.q_ids", self.q_ids, batch, heads, q_len)
            fits_ids("Segments.k_ids", self.k_ids, batch, heads, k_len)

    def allows_at(self, indices: TileIndices) -> Tensor:
        if self.k_ids is not None:
            return label(self.q_ids, indices, indices.row) == label(self.k_ids, indices, indices.col)
        last = self.q_ids.shape[-1] - 1  # a query may stand outside the keys' slots: it belongs to no segment
        inside = (indices.i >= 0) & (indices.i <= last)
        return (
            label(self.q_ids, indices, indices.i.clamp(0, max(last, 0))) == label(self.q_ids, indices, indices.j)
        ) & inside

    def bounds(self, box: TileBounds) -> tuple[bool, bool]:
        if self.k_ids is not None:
            return same_label(self, (self.q_ids, box.rows), (self.k_ids, box.cols))
        low, high, length = box.i_low, box.i_high + 1, self.q_ids.shape[-1]
        if high <= 0 or low >= length:
            return False, False
        inside = (max(low, 0), min(high, length))
        some, every = same_label(self, (self.q_ids, inside), (self.q_ids, (box.j_low, box.j_high + 1)))
        return some, every and inside == (low, high)
