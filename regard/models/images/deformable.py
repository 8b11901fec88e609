"""Deformable attention as a layer: each query reads a few samples of a map, near a place of its own.

    y_q = W_o concat_h(sum over levels l and points p of softmax(W_a z_q)_hlp V_hl(r_q + (W_s z_q)_hlp / size_l)),
    z = x + places,  V = W_v context

r_q is where the query stands in the map, or, for queries that stand nowhere, sigmoid of a linear map of their places.
Zhu et al. 2020, arXiv:2010.04159.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from regard.checks import describe, whole
from regard.ops.deformable import deformable_attention

__all__ = ["DeformableAttention"]


class OffsetMap(nn.Linear):
    """The map to offsets: at first each head looks in a direction of its own, its n-th point n pixels away."""

    def __init__(self, dim: int, heads: int, levels: int, points: int) -> None:
        self.counts = (heads, levels, points)
        super().__init__(dim, heads * levels * points * 2)

    def reset_parameters(self) -> None:
        heads, levels, points = self.counts
        nn.init.zeros_(self.weight)
        angle = torch.arange(heads, dtype=torch.float64) * (2 * math.pi / heads)
        way = torch.stack([angle.cos(), angle.sin()], -1)
        way = way / way.abs().amax(-1, keepdim=True)
        far = torch.arange(1, points + 1, dtype=torch.float64)
        start = way[:, None, None] * far[:, None] * torch.ones(levels, 1, 1, dtype=torch.float64)
        with torch.no_grad():
            self.bias.copy_(start.flatten())


class EvenMap(nn.Linear):
    """The map to weights: at first all samples count alike."""

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)


class DeformableAttention(nn.Module):
    """Samples of maps at places of each query's own; ``(B, Q, dim)`` in and out, in the place of a `PlacedAttention`.

    Args:
        dim: width of the tokens.
        heads: heads H, a divisor of `dim`.
        levels: maps of different sizes, one after another in the context.
        points: samples of a map, for each head.
        guided: whether queries stand nowhere, and a linear map ``reference`` tells from their places where they look.

    Parameters: ``offset_proj weight_proj v_proj o_proj``, ``reference`` where guided. Cost O(Q levels points dim),
    whatever the maps' sizes, beside the projections.

    >>> layer = DeformableAttention(16, 4)
    >>> layer(torch.randn(2, 12, 16), grid=(3, 4)).shape
    torch.Size([2, 12, 16])
    """

    def __init__(self, dim: int, heads: int, *, levels: int = 1, points: int = 4, guided: bool = False) -> None:
        super().__init__()
        self.dim, self.heads = whole("dim", dim, 1), whole("heads", heads, 1)
        self.levels, self.points = whole("levels", levels, 1), whole("points", points, 1)
        if dim % heads:
            raise ValueError(f"heads: expected a divisor of dim={dim}, got {heads}")
        self.offset_proj = OffsetMap(dim, heads, levels, points)
        self.weight_proj = EvenMap(dim, heads * levels * points)
        self.v_proj, self.o_proj = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.reference = nn.Linear(dim, 2) if guided else None

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        places: Tensor | None = None,
        context_places: Tensor | None = None,
        keep: Tensor | None = None,
        grid: tuple[int, int] | Sequence[tuple[int, int]] | None = None,
        around: Tensor | None = None,
    ) -> Tensor:
        """The mixed tokens.

        Args:
            context: ``(B, S, dim)``, the maps that are read, each row by row; x itself by default.
            places: of x.
            context_places: taken as other layers take them, and not read: there are no keys.
            keep: bool ``(B, S)``; values of padding are 0.
            grid: (height, width) of the map, or a list of them, one a level.
            around: ``(B, Q, levels, 2)`` places (x, y) in shares of the maps' sides; by default those of the map's own
                tokens, or of the queries where the layer is guided.

        Raises:
            ValueError: for tensors that do not fit.
        """
        sizes = self._sizes(grid)
        read = x if context is None else context
        area = sum(height * width for height, width in sizes)
        if x.ndim != 3 or x.shape[2] != self.dim or read.shape != (x.shape[0], area, self.dim):
            raise ValueError(
                f"context: expected (B, {area}, {self.dim}) for maps of {sizes}, got {describe(read)} for {describe(x)}"
            )
        asks = x if places is None else x + places
        values = self.v_proj(read)
        if keep is not None:
            values = torch.where(keep[..., None], values, 0.0)
        counts = (self.heads, self.levels, self.points)
        offsets = self.offset_proj(asks).unflatten(-1, (*counts, 2))
        weights = self.weight_proj(asks).unflatten(-1, (self.heads, -1)).softmax(-1).unflatten(-1, counts[1:])
        if around is None:
            around = self._around(x, context, places, keep, sizes)
        sides = torch.tensor([[wide, high] for high, wide in sizes], dtype=x.dtype, device=x.device)
        where = around[:, :, None, :, None] + offsets / sides[:, None]
        mixed = deformable_attention(values.unflatten(-1, (self.heads, -1)), sizes, where, weights)
        out: Tensor = self.o_proj(mixed.flatten(2))
        return out

    def _sizes(self, grid: Any) -> list[tuple[int, int]]:
        sizes: list[Any] = [] if grid is None else [grid] if isinstance(grid[0], int) else list(grid)
        if len(sizes) != self.levels:
            raise ValueError(f"grid: expected (height, width) of {self.levels} maps, got {grid!r}")
        return [(int(high), int(wide)) for high, wide in sizes]

    def _around(
        self,
        x: Tensor,
        context: Tensor | None,
        places: Tensor | None,
        keep: Tensor | None,
        sizes: list[tuple[int, int]],
    ) -> Tensor:
        """(B, Q, levels, 2), by the real part of every map."""
        real = _real_shares(x, keep, sizes)  # (B, levels, 2)
        if self.reference is not None:
            guess = torch.sigmoid(self.reference(x if places is None else places))
            return guess.expand(x.shape[0], -1, -1)[:, :, None] * real[:, None]
        if context is not None:
            raise ValueError("around: expected places of the queries, for this layer is not guided, got None")
        own = []
        for level, (high, wide) in enumerate(sizes):
            rows = (torch.arange(high, device=x.device) + 0.5).to(x.dtype) / high
            columns = (torch.arange(wide, device=x.device) + 0.5).to(x.dtype) / wide
            pair = torch.stack([columns.expand(high, -1), rows[:, None].expand(-1, wide)], -1).flatten(0, 1)
            own.append(pair / real[:, None, level].clamp(min=1e-6))  # in shares of what is real
        return torch.cat(own, 1)[:, :, None] * real[:, None]


def _real_shares(x: Tensor, keep: Tensor | None, sizes: list[tuple[int, int]]) -> Tensor:
    """How much of each map's width and height is image, (B, levels, 2), by its first row and column."""
    if keep is None:
        return x.new_ones(x.shape[0], len(sizes), 2)
    shares = []
    for (high, wide), part in zip(sizes, keep.split([high * wide for high, wide in sizes], 1), strict=True):
        real = part.view(-1, high, wide).to(x.dtype)
        shares.append(torch.stack([real[:, 0].mean(1), real[:, :, 0].mean(1)], -1))
    return torch.stack(shares, 1)
