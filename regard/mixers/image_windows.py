"""Attention inside windows of an image (Swin v1 and v2), and over a whole grid with relative places (CoAtNet).

    v1:  softmax(q . k / sqrt(D) + table[y_q - y_k, x_q - x_k])            in windows of M x M tokens
    v2:  softmax(cos(q, k) exp(min(scale, ln 100)) + 16 sigmoid(MLP(log-spaced offsets)))

Shifted layers roll the image by s first and mask what was not beside each other: so neighbouring windows meet.
Liu et al. 2021, arXiv:2103.14030 and arXiv:2111.09883; Dai et al. 2021, arXiv:2106.04803.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.biases import Bias, RelativeTable
from regard.checks import describe, is_dense, is_factory, whole
from regard.masks import Mask, Segments
from regard.mixers.base import check_dtype
from regard.mixers.parts import split_heads
from regard.ops.attention import attention, attention_weights

__all__ = ["GridAttention", "LogPlaces", "PlaceTable", "ShiftedWindowAttention"]


def offsets(size: tuple[int, int], device: torch.device | None = None) -> Tensor:
    """(y, x) of query minus key for every entry of a relative table, (2 H - 1, 2 W - 1, 2)."""
    rows, columns = (torch.arange(1 - n, n, device=device) for n in size)
    return torch.stack(torch.meshgrid(rows, columns, indexing="ij"), -1)


def resized(table: Tensor, old: tuple[int, int], new: tuple[int, int]) -> Tensor:
    """The rows (offsets, H) of a relative table of a grid, bilinearly for the offsets of another grid."""
    if old == new:
        return table
    rows, columns = (2 * n - 1 for n in old)
    grid = table.T.reshape(1, -1, rows, columns)
    resized = F.interpolate(grid, (2 * new[0] - 1, 2 * new[1] - 1), mode="bilinear")
    return resized.flatten(2)[0].T.contiguous()


class PlaceTable(nn.Module):
    """One learned number per offset and head: ``forward(size)`` is the `RelativeTable` of a grid.

    A larger or smaller grid than `size` resizes the table bilinearly, as CoAtNet does for other image sizes.

    >>> PlaceTable(2, (4, 4))((4, 4)).table.shape
    torch.Size([49, 2])
    """

    def __init__(self, heads: int, size: tuple[int, int]) -> None:
        super().__init__()
        self.size = (whole("size", size[0], 1), whole("size", size[1], 1))
        self.table = nn.Parameter(torch.empty((2 * self.size[0] - 1) * (2 * self.size[1] - 1), heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Starts the table anew, from N(0, 0.02^2) as published."""
        nn.init.normal_(self.table, std=0.02)

    def forward(self, size: tuple[int, int]) -> Bias:
        return RelativeTable(resized(self.table, self.size, size), size)


class LogPlaces(nn.Module):
    """Swin v2's continuous bias: ``16 sigmoid(W2 relu(W1 c + b))``, ``c = sign(d) log2(1 + 8 |d| / (M - 1)) / log2 8``.

    Args:
        heads: heads H.
        pretrained: the window that distances are measured by; None for the window itself.
        hidden: width of the two maps.

    >>> LogPlaces(2)((4, 4)).table.shape
    torch.Size([49, 2])
    """

    def __init__(self, heads: int, *, pretrained: int | None = None, hidden: int = 512) -> None:
        super().__init__()
        self.pretrained = None if pretrained is None else whole("pretrained", pretrained, 2)
        self.first, self.second = nn.Linear(2, hidden), nn.Linear(hidden, heads, bias=False)

    def forward(self, size: tuple[int, int]) -> Bias:
        device, dtype = self.first.weight.device, self.first.weight.dtype
        by = torch.tensor([max((self.pretrained or n) - 1, 1) for n in size], device=device)
        share = offsets(size, device).to(dtype) / by * 8
        coordinates = share.sign() * torch.log2(share.abs() + 1) / math.log2(8)
        table = 16 * torch.sigmoid(self.second(torch.relu(self.first(coordinates.flatten(0, 1)))))
        return RelativeTable(table, size)


class ShiftedWindowAttention(nn.Module):
    """Attention inside windows of an image; ``(B, height, width, dim)`` in and out, any size.

    Args:
        dim: width of the tokens.
        heads: heads H.
        window: side M of the windows.
        shift: by how many tokens the windows are shifted; 0 for none.
        places: makes the bias: ``places(heads)``; `PlaceTable` of the window by default.
        cosine: Swin v2's scores, with a learned scale per head and no bias of the keys' projection.
        bias: biases of q, k and v.
        shrinks: an image with a side that is not longer than the window is cut into windows of its shorter side,
            without a shift, as Swin's released code does; otherwise it is padded to whole windows like any other.

    Parameters: ``q_proj k_proj v_proj o_proj``, ``places.*``, ``logit_scale`` (H). An image that windows do not divide
    is padded with zeros on the right and below; as in the released code the padding is read like other tokens (it
    gives what the projections' biases are). Raises ValueError and TypeError for tensors that do not fit. Cost
    4 M^2 height width dim FLOPs beside the projections; all windows are one call of `regard.attention`.

    >>> layer = ShiftedWindowAttention(16, 4, window=4, shift=2)
    >>> layer(torch.randn(2, 9, 12, 16)).shape
    torch.Size([2, 9, 12, 16])
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        window: int,
        *,
        shift: int = 0,
        places: Any = None,
        cosine: bool = False,
        bias: bool = True,
        shrinks: bool = True,
    ) -> None:
        super().__init__()
        self.dim, self.heads, self.window = whole("dim", dim, 1), whole("heads", heads, 1), whole("window", window, 1)
        if dim % heads:
            raise ValueError(f"heads: expected a divisor of dim={dim}, got {heads}")
        if not 0 <= whole("shift", shift, 0) < window:
            raise ValueError(f"shift: expected 0 to {window - 1}, got {shift}")
        self.shift, self.cosine, self.shrinks = shift, cosine, shrinks
        if places is None:
            self.places: nn.Module = PlaceTable(heads, (window, window))
        else:
            is_factory("places", places)
            self.places = places(heads)
        self.q_proj, self.k_proj = nn.Linear(dim, dim, bias=bias), nn.Linear(dim, dim, bias=bias and not cosine)
        self.v_proj, self.o_proj = nn.Linear(dim, dim, bias=bias), nn.Linear(dim, dim)
        self.logit_scale = nn.Parameter(torch.empty(heads)) if cosine else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Starts the scales anew, at ln 10."""
        if self.logit_scale is not None:
            nn.init.constant_(self.logit_scale, math.log(10))

    def forward(self, x: Tensor) -> Tensor:
        """The mixed image (B, height, width, dim)."""
        q, k, v, options, back = self._read(x)
        mixed = attention(q, k, v, **options).transpose(1, 2).flatten(2)
        y: Tensor = self.o_proj(self._image(mixed, x, back))
        return y

    def mixing(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(M (B windows, H, M^2, M^2), V (B windows, H, M^2, D)): windows of an image one after the other."""
        q, k, v, options, _ = self._read(x)
        return attention_weights(q, k, v, **options)[1], v

    def _sides(self, x: Tensor) -> tuple[tuple[int, int], tuple[int, int]]:
        """(sides of a window, shifts), smaller for images that are."""
        if not isinstance(x, Tensor) or x.ndim != 4 or x.shape[3] != self.dim:
            raise ValueError(f"x: expected (B, height, width, {self.dim}), got {describe(x)}")
        is_dense("x", x)
        check_dtype(self, "x", x)
        least = min(x.shape[1:3])
        if self.shrinks and least <= self.window:  # as published: both sides, by the shorter one
            return (max(least, 1), max(least, 1)), (0, 0)
        return (self.window, self.window), (self.shift, self.shift)

    def _read(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, dict[str, Any], tuple[int, ...]]:
        (high, wide), shifts = self._sides(x)
        batch, height, width, _ = x.shape
        x = F.pad(x, (0, 0, 0, -width % wide, 0, -height % high))
        if any(shifts):
            x = x.roll((-shifts[0], -shifts[1]), (1, 2))
        rows, columns = x.shape[1] // high, x.shape[2] // wide
        windows = x.view(batch, rows, high, columns, wide, self.dim).transpose(2, 3)
        windows = windows.reshape(batch * rows * columns, high * wide, self.dim)
        q, k, v = (split_heads(proj(windows), self.heads) for proj in (self.q_proj, self.k_proj, self.v_proj))
        options: dict[str, Any] = {"bias": self.places((high, wide)), "mask": self._regions(x, (high, wide), shifts)}
        if self.logit_scale is not None:
            scale = self.logit_scale.clamp(max=math.log(100)).exp()[:, None, None]
            q, k = F.normalize(q, dim=-1, eps=1e-12) * scale.to(q.dtype), F.normalize(k, dim=-1, eps=1e-12)
            options["scale"] = 1.0
        return q, k, v, options, (rows, columns, high, wide, *shifts)

    @staticmethod
    def _regions(x: Tensor, sides: tuple[int, int], shifts: tuple[int, int]) -> Mask | None:
        """Which tokens of a window were beside each other before the image was rolled."""
        if not any(shifts):
            return None
        labels = []
        for length, side, shift in zip(x.shape[1:3], sides, shifts, strict=True):
            place = torch.arange(length, device=x.device)
            labels.append((place >= length - side).long() + (place >= length - shift).long())
        ids = labels[0][:, None] * 3 + labels[1]
        (high, wide), (height, width) = sides, ids.shape
        windows = ids.view(height // high, high, width // wide, wide).transpose(1, 2).reshape(-1, high * wide)
        ids = windows.repeat(x.shape[0], 1)
        return Segments(ids, ids)

    def _image(self, mixed: Tensor, x: Tensor, back: tuple[int, ...]) -> Tensor:
        rows, columns, high, wide, down, right = back
        image = mixed.view(x.shape[0], rows, columns, high, wide, self.dim).transpose(2, 3)
        image = image.reshape(x.shape[0], rows * high, columns * wide, self.dim)
        if down or right:
            image = image.roll((down, right), (1, 2))
        return image[:, : x.shape[1], : x.shape[2]]

    def extra_repr(self) -> str:
        return f"{self.dim}, {self.heads} heads, window={self.window}, shift={self.shift}, cosine={self.cosine}"


class GridAttention(nn.Module):
    """CoAtNet's relative attention over all tokens of a grid; ``(B, height, width, dim)`` in and out.

    Args:
        dim: width of the tokens.
        heads: heads H.
        size: (height, width) that the table of places is made for; other sizes resize it.
        places: makes the bias from `heads`; a `PlaceTable` of `size` by default.
        in_dim: width of the tokens that come in, where it is another; those that go out are `dim` wide.

    Parameters: ``q_proj k_proj v_proj o_proj``, ``places.*``. Raises ValueError and TypeError for tensors that do not
    fit. Cost 4 (height width)^2 dim FLOPs. (Dai et al. 2021, arXiv:2106.04803, equation 3.)

    >>> GridAttention(16, 4, (7, 7))(torch.randn(2, 7, 7, 16)).shape
    torch.Size([2, 7, 7, 16])
    """

    def __init__(
        self, dim: int, heads: int, size: tuple[int, int], *, places: Any = None, in_dim: int | None = None
    ) -> None:
        super().__init__()
        self.dim, self.heads = whole("dim", dim, 1), whole("heads", heads, 1)
        self.in_dim = dim if in_dim is None else whole("in_dim", in_dim, 1)
        if dim % heads:
            raise ValueError(f"heads: expected a divisor of dim={dim}, got {heads}")
        if places is not None:
            is_factory("places", places)
        self.places: nn.Module = PlaceTable(heads, size) if places is None else places(heads)
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(self.in_dim, dim) for _ in range(3))
        self.o_proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        """The mixed grid (B, height, width, dim)."""
        q, k, v, bias = self._read(x)
        mixed = attention(q, k, v, bias=bias).transpose(1, 2).flatten(2)
        y: Tensor = self.o_proj(mixed.view(*x.shape[:3], self.dim))
        return y

    def mixing(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(M (B, H, N, N), V (B, H, N, D)), N = height width tokens, row by row."""
        q, k, v, bias = self._read(x)
        return attention_weights(q, k, v, bias=bias)[1], v

    def _read(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Bias]:
        if not isinstance(x, Tensor) or x.ndim != 4 or x.shape[3] != self.in_dim:
            raise ValueError(f"x: expected (B, height, width, {self.in_dim}), got {describe(x)}")
        is_dense("x", x)
        check_dtype(self, "x", x)
        flat = x.flatten(1, 2)
        q, k, v = (split_heads(proj(flat), self.heads) for proj in (self.q_proj, self.k_proj, self.v_proj))
        bias: Bias = self.places((x.shape[1], x.shape[2]))
        return q, k, v, bias
