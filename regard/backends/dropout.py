"""Dropout of attention weights: one counter-based rule, so that every backend and every tile draws the same bits."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from regard.coordinates import TileIndices

__all__ = ["draw_seed", "dropout_factor"]

_WORD = 0xFFFFFFFF


def _mix(x: Tensor) -> Tensor:
    """A 32-bit finalizer (xorshift-multiply, Wellons' lowbias32) on int64 tensors that hold 32-bit words."""
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & _WORD
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & _WORD
    return x ^ (x >> 16)


def draw_seed(device: torch.device) -> Tensor:
    """One seed, int64 (), from torch's generator for `device`."""
    return torch.randint(0, 2**62, (), dtype=torch.int64, device=device)


def dropout_factor(indices: TileIndices, seed: Tensor, p: float, dtype: torch.dtype) -> Tensor:
    """0 for a dropped weight, ``1 / (1 - p)`` for a kept one, on (B, H, rows, columns); ``p = 1`` drops all.

    A weight's bit depends on the seed and on its batch row, head, query row and key column, not on tiles or threads.
    `p` counts as the nearest float32, which is what kernels are given.
    """
    p = ctypes.c_float(p).value
    low, high = seed & _WORD, (seed >> 32) & _WORD
    line = _mix(_mix(_mix(low ^ indices.b) ^ indices.h) ^ indices.row)
    word = _mix(_mix(line ^ high) ^ indices.col)
    keep = word >= int(p * 2.0**32)
    return keep.to(dtype) * (1.0 / (1.0 - p) if p < 1.0 else 0.0)
