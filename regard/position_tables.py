"""Learned vectors for positions: one each, or one for each row and column of a grid of them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from regard.coordinates import plain_eager

__all__ = ["AxialPositions", "LearnedPositions"]


def _check_places(positions: Tensor, places: int) -> None:
    """Raise unless they are integers in [0, places), as far as they can be read."""
    if positions.is_floating_point() or positions.is_complex() or positions.dtype is torch.bool:
        raise TypeError(f"positions: expected integers, got {positions.dtype}")
    if positions.numel() and positions.device.type == "cpu" and plain_eager(positions):
        low, high = int(positions.min()), int(positions.max())
        if low < 0 or high >= places:
            raise ValueError(f"positions: expected numbers in [0, {places}), got {low} to {high}")


class LearnedPositions(nn.Module):
    """A learned vector for each position: y = weight[positions + first].

    positions (B, T) or (T,) of integers in [0, max_length - first) -> (B, T, dim) or (T, dim), in the weight's dtype.
    `first` is the row of position 0; RoBERTa's family leaves the rows before it to padding.
    `weight` (max_length, dim) starts from a normal distribution of standard deviation 0.02.
    Raises `ValueError` for a position outside the table (read in eager mode on a CPU only; a GPU kernel asserts),
    `TypeError` for positions that are not integers. Source: Gehring et al. 2017, arXiv:1705.03122.

    >>> LearnedPositions(16, 8)(torch.arange(5)).shape
    torch.Size([5, 8])
    """

    def __init__(self, max_length: int, dim: int, *, first: int = 0) -> None:
        super().__init__()
        if max_length <= 0 or dim <= 0:
            raise ValueError(f"max_length, dim: expected numbers above 0, got {max_length} and {dim}")
        if not 0 <= first < max_length:
            raise ValueError(f"first: expected a row below max_length={max_length}, got {first}")
        self.first = first
        self.weight = nn.Parameter(torch.empty(max_length, dim))
        self.reset_parameters()

    def reset_parameters(self, std: float = 0.02) -> None:
        nn.init.normal_(self.weight, std=std)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, {self.weight.shape[1]}" + (f", first={self.first}" if self.first else "")

    def forward(self, positions: Tensor) -> Tensor:
        """Look positions (B, T) or (T,) up."""
        _check_places(positions, self.weight.shape[0] - self.first)
        return nn.functional.embedding(positions + self.first if self.first else positions, self.weight)


class AxialPositions(nn.Module):
    """Learned vectors of a position's row and column in a grid: y = [rows[p // width], columns[p % width]].

    positions (B, T) or (T,) of integers in [0, height * width) -> (B, T, row_dim + column_dim). The parameters are
    `rows` (height, 1, row_dim) and `columns` (1, width, column_dim), which start from a normal distribution of
    standard deviation `std`: height + width vectors for height * width positions.
    Raises `ValueError` for a position outside the grid (read in eager mode on a CPU only), `TypeError` for positions
    that are not integers. Source: Kitaev, Kaiser, Levskaya 2020, arXiv:2001.04451 (its released code).

    >>> AxialPositions(4, 8, 3, 5)(torch.arange(32)).shape
    torch.Size([32, 8])
    """

    def __init__(self, height: int, width: int, row_dim: int, column_dim: int, *, std: float = 1.0) -> None:
        super().__init__()
        if min(height, width, row_dim, column_dim) <= 0:
            raise ValueError(f"sizes: expected numbers above 0, got {(height, width, row_dim, column_dim)}")
        self.rows = nn.Parameter(torch.empty(height, 1, row_dim))
        self.columns = nn.Parameter(torch.empty(1, width, column_dim))
        self.start_std = std
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Starts both tables anew."""
        nn.init.normal_(self.rows, std=self.start_std)
        nn.init.normal_(self.columns, std=self.start_std)

    def forward(self, positions: Tensor) -> Tensor:
        """Look positions (B, T) or (T,) up."""
        width = self.columns.shape[1]
        _check_places(positions, self.rows.shape[0] * width)
        return torch.cat((self.rows[positions // width, 0], self.columns[0, positions % width]), -1)
