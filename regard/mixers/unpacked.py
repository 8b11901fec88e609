"""The sequences of a call apart from each other and from padding: each in a row of its own, from slot 0 on.

For mechanisms in which neighbours meet by their slots (blocks, convolutions of scores), so that padding and packing
change nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from regard.coordinates import has_values

__all__ = ["Unpacked"]


@dataclass(frozen=True)
class Unpacked:
    """Where the tokens of (B, T) go.

    Args:
        row: the sequence of each token (B, T).
        at: its place there (B, T).
        real: whether it is a token at all (B, T).
        lengths: of the sequences (n,).
        longest: of the rows made, at least every length.
    """

    row: Tensor
    at: Tensor
    real: Tensor
    lengths: Tensor
    longest: int

    @classmethod
    def of(cls, keep: Tensor | None, segments: Tensor | None, batch: int, tokens: int) -> Unpacked | None:
        """None where each row is one sequence without padding.

        Raises ValueError in a compiled graph with segments: how many sequences there are depends on what they hold.
        """
        if keep is None and segments is None:
            return None
        like = keep if keep is not None else segments
        assert like is not None
        device = like.device
        real = torch.ones(batch, tokens, dtype=torch.bool, device=device) if keep is None else keep
        count = real.long().cumsum(1) - 1
        if segments is None:
            row = torch.arange(batch, device=device)[:, None].expand(-1, tokens)
            return cls(row, count.clamp(min=0), real, real.sum(1), tokens)
        if torch.compiler.is_compiling():
            raise ValueError(
                "segments: expected None in a compiled graph: how many there are depends on what they hold"
            )
        starts = torch.ones(batch, tokens, dtype=torch.bool, device=device)
        starts[:, 1:] = segments[:, 1:] != segments[:, :-1]
        row = starts.flatten().cumsum(0).view(batch, tokens) - 1
        before = torch.where(starts, count - real.long() + 1, 0)  # real tokens of the row before the segment
        offset = before.cummax(1).values
        known = has_values(segments)  # without values there is room for as many as there could be
        sequences = batch * tokens if not known else int(row[-1, -1]) + 1 if row.numel() else 0
        lengths = torch.zeros(sequences, dtype=torch.long, device=device)
        lengths = lengths.scatter_add(0, row.flatten(), real.flatten().long())
        longest = tokens if not known else int(lengths.max()) if sequences else 0
        return cls(row, (count - offset).clamp(min=0), real, lengths, longest)

    @property
    def keep(self) -> Tensor:
        """Which places of the rows hold tokens (n, longest)."""
        return torch.arange(self.longest, device=self.lengths.device) < self.lengths[:, None]

    def apart(self, x: Tensor) -> Tensor:
        """(B, H, T, D) as (n, H, longest, D), 0 behind each sequence."""
        rows = x.new_zeros(len(self.lengths), self.longest + 1, x.shape[1], x.shape[3])
        place = torch.where(self.real, self.at, self.longest)  # padding goes behind everything
        rows = rows.index_put((self.row, place), x.transpose(1, 2))
        return rows[:, : self.longest].transpose(1, 2)

    def together(self, y: Tensor) -> Tensor:
        """(n, H, longest, D) as (B, H, T, D), 0 at padding."""
        if not self.longest:
            return y.new_zeros(self.real.shape[0], y.shape[1], self.real.shape[1], y.shape[3])
        found = y.transpose(1, 2)[self.row, self.at.clamp(max=self.longest - 1)].transpose(1, 2)
        return torch.where(self.real[:, None, :, None], found, 0.0)

    def columns(self, weights: Tensor) -> Tensor:
        """(B, H, T, longest), of places, as (B, H, T, T), of tokens: 0 for tokens of other sequences and padding."""
        tokens = self.real.shape[1]
        if not self.longest:
            return weights.new_zeros(*weights.shape[:3], tokens)
        same = (self.row[:, :, None] == self.row[:, None]) & self.real[:, None] & self.real[:, :, None]
        index = self.at.clamp(max=self.longest - 1)[:, None, None].expand(*weights.shape[:3], -1)
        return torch.where(same[:, None], weights.gather(3, index), 0.0)
