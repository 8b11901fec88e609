"""Deformable attention: each query samples a few places of feature maps, with weights of its own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.checks import describe, is_dense, is_number_type

__all__ = ["deformable_attention"]


def deformable_attention(values: Tensor, sizes: Sequence[tuple[int, int]], places: Tensor, weights: Tensor) -> Tensor:
    """``y_q = sum over levels l and points p of w_qlp V_l(place_qlp)``, with bilinear samples, 0 outside.

    Args:
        values: (B, S, H, D): the feature maps of all levels one after another, each row by row.
        sizes: (height, width) of each level.
        places: (B, Q, H, L, P, 2), (x, y) in shares of a level's width and height; pixel n is at (n + 1/2) / length.
        weights: (B, Q, H, L, P).

    Returns:
        (B, Q, H, D).

    Raises TypeError and ValueError for tensors that do not fit. Cost O(B Q H L P D), whatever the maps' sizes. (Zhu et
    al. 2020, arXiv:2010.04159, equation 3.)

    >>> middle, weights = torch.full((1, 5, 1, 1, 2, 2), 0.5), torch.ones(1, 5, 1, 1, 2)
    >>> y = deformable_attention(torch.ones(1, 4, 1, 3), [(2, 2)], middle, weights)
    >>> y.shape, float(y[0, 0, 0, 0])
    (torch.Size([1, 5, 1, 3]), 2.0)
    """
    for name, one in (("values", values), ("places", places), ("weights", weights)):
        is_dense(name, one)
        is_number_type(name, one)
    if values.ndim != 4 or values.shape[1] != sum(height * width for height, width in sizes):
        raise ValueError(f"values: expected (B, S, H, D) with S pixels of levels {list(sizes)}, got {describe(values)}")
    batch, _, heads, dim = values.shape
    if places.ndim != 6 or places.shape[:4] != (batch, places.shape[1], heads, len(sizes)) or places.shape[5] != 2:
        raise ValueError(f"places: expected ({batch}, Q, {heads}, {len(sizes)}, P, 2), got {describe(places)}")
    if weights.shape != places.shape[:5]:
        raise ValueError(f"weights: expected {tuple(places.shape[:5])}, got {describe(weights)}")
    queries, points = places.shape[1], places.shape[4]
    sampled = []
    for level, part in enumerate(values.split([height * width for height, width in sizes], 1)):
        maps = part.permute(0, 2, 3, 1).reshape(batch * heads, dim, *sizes[level])
        grid = 2 * places[:, :, :, level].transpose(1, 2).reshape(batch * heads, queries, points, 2) - 1
        sampled.append(F.grid_sample(maps, grid.to(maps.dtype), mode="bilinear", align_corners=False))
    together = torch.stack(sampled, 3)  # (B H, D, Q, L, P)
    shares = weights.transpose(1, 2).reshape(batch * heads, 1, queries, len(sizes), points)
    mixed = (together * shares).sum((3, 4))
    return mixed.view(batch, heads, dim, queries).permute(0, 3, 1, 2)
