"""Images as tokens: patches, places on a grid, and learned tokens before them.

    x = [t_1 ... t_P;  W p_1 + b ... W p_N + b] + places          patches p_n row by row, N = (Y // rows) (X // columns)

A convolution whose stride is its size is one linear map of every patch. Dosovitskiy et al. 2020, arXiv:2010.11929.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.checks import describe, is_dense, whole
from regard.mixers.base import floating
from regard.positions import sinusoidal

__all__ = ["GridPlaces", "PatchTokens", "SinusoidalPlaces", "TokenPlaces", "check_images"]


def check_images(images: object, channels: int, conv: nn.Module, model: nn.Module) -> Tensor:
    """The images, if they are a dense tensor (B, channels, height, width) in the dtype of `conv`, that `model` calls.

    Raises:
        ValueError, TypeError: where they are not.
    """
    if not isinstance(images, Tensor) or images.ndim != 4 or images.shape[1] != channels or 0 in images.shape[2:]:
        raise ValueError(f"images: expected (B, {channels}, height, width), got {describe(images)}")
    is_dense("images", images)
    dtype = floating(conv, model).dtype
    if images.dtype != dtype and not torch.is_autocast_enabled(images.device.type):
        raise TypeError(f"images: expected {dtype}, as the model's parameters, got {images.dtype}")
    return images


class GridPlaces(nn.Module):
    """A learned vector for every place of a grid, ``weight (height, width, dim)``; bicubic for other sizes.

    >>> GridPlaces((4, 4), 8)((6, 3)).shape
    torch.Size([6, 3, 8])
    """

    def __init__(self, size: tuple[int, int], dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(*size, dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, size: tuple[int, int]) -> Tensor:
        if size == tuple(self.weight.shape[:2]):
            return self.weight
        resized = F.interpolate(self.weight.permute(2, 0, 1)[None], size, mode="bicubic", align_corners=False)
        return resized[0].permute(1, 2, 0)


class TokenPlaces(nn.Module):
    """A learned vector for each of the first tokens, and for every place of the grid behind them: ``(P + N, dim)``.

    Other grids than `size` resize the places bicubically, as the published models do; the first tokens keep theirs.

    >>> TokenPlaces((4, 4), 8, tokens=1)((6, 3)).shape
    torch.Size([19, 8])
    """

    def __init__(self, size: tuple[int, int], dim: int, *, tokens: int = 0) -> None:
        super().__init__()
        self.grid = GridPlaces(size, dim)
        self.tokens = nn.Parameter(torch.empty(whole("tokens", tokens, 0), dim)) if tokens else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.tokens is not None:
            nn.init.normal_(self.tokens, std=0.02)

    def forward(self, size: tuple[int, int]) -> Tensor:
        grid: Tensor = self.grid(size).flatten(0, 1)
        return grid if self.tokens is None else torch.cat((self.tokens, grid))


class SinusoidalPlaces(nn.Module):
    """Fixed places of a grid of any size: sines and cosines of the row, then those of the column, ``(P + N, dim)``.

        [sin(y f), cos(y f), sin(x f), cos(x f)],   f_m = base ** (-4 m / dim);   0 for the first P tokens

    Vaswani et al. 2017, arXiv:1706.03762, for two axes as He et al. 2021, arXiv:2111.06377.
    Raises ValueError for a `dim` that 4 does not divide.

    >>> SinusoidalPlaces(8, tokens=1)((2, 3)).shape
    torch.Size([7, 8])
    """

    def __init__(self, dim: int, *, tokens: int = 0, base: float = 10000.0) -> None:
        super().__init__()
        if whole("dim", dim, 4) % 4:
            raise ValueError(f"dim: expected a multiple of 4, got {dim}")
        self.dim, self.tokens, self.base = dim, whole("tokens", tokens, 0), base

    def forward(self, size: tuple[int, int]) -> Tensor:
        exact = torch.float64  # a model in float64 stays exact; the sum is in the dtype of the patches
        rows, columns = (sinusoidal(n, self.dim // 2, base=self.base, style="half", dtype=exact) for n in size)
        shape = (*size, self.dim // 2)
        grid = torch.cat((rows[:, None].expand(shape), columns.expand(shape)), -1).flatten(0, 1)
        return F.pad(grid, (0, 0, self.tokens, 0))


class PatchTokens(nn.Module):
    """Images ``(B, channels, height, width)`` to tokens ``(B, P + N, dim)``: learned ones, then patches row by row.

    Args:
        channels: of the images.
        dim: width of the tokens.
        patch: (rows, columns) of a patch; what is left over on the right and below is not read, as published.
        image: (height, width) that the model was made for; others are refused unless a call says ``interpolate=True``.
            None: any size.
        tokens: P, learned tokens before the patches: 1 for a class token, 2 with a distillation token.
        places: from the grid's (rows, columns) to ``(P + N, dim)``: `TokenPlaces`, `SinusoidalPlaces`, or None.
        dropout: of the sum, in training.

    Parameters: ``proj`` (a convolution), ``tokens`` (P, dim), ``places.*``.

    >>> PatchTokens(3, 8, (4, 4), image=(12, 8), tokens=1, places=TokenPlaces((3, 2), 8, tokens=1))(
    ...     torch.ones(1, 3, 12, 8)
    ... ).shape
    torch.Size([1, 7, 8])
    """

    def __init__(
        self,
        channels: int,
        dim: int,
        patch: tuple[int, int],
        *,
        image: tuple[int, int] | None = None,
        tokens: int = 0,
        places: nn.Module | None = None,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.channels, self.patch, self.image = whole("channels", channels, 1), patch, image
        self.proj = nn.Conv2d(channels, dim, patch, stride=patch)
        if image is not None:
            self._fits("image", image)
        self.tokens = nn.Parameter(torch.empty(whole("tokens", tokens, 0), dim)) if tokens else None
        self.places = places
        self.dropout = dropout
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.tokens is not None:
            nn.init.normal_(self.tokens, std=0.02)

    def grid(self, images: Tensor) -> tuple[int, int]:
        """(rows, columns) of patches that images of this size are cut into."""
        return self._fits("images", (images.shape[2], images.shape[3]))

    def _fits(self, name: str, size: tuple[int, int]) -> tuple[int, int]:
        rows, columns = size[0] // self.patch[0], size[1] // self.patch[1]
        if rows < 1 or columns < 1:
            raise ValueError(f"{name}: expected at least one patch, {_pixels(self.patch)}, got {_pixels(size)}")
        return rows, columns

    def forward(self, images: Tensor, *, interpolate: bool = False) -> Tensor:
        """The tokens of images.

        Args:
            interpolate: take images of any size, and resize the places.

        Raises:
            ValueError, TypeError: for a tensor of another shape, size or dtype than the model was made for.
        """
        images = check_images(images, self.channels, self.proj, self)
        size = (images.shape[2], images.shape[3])
        if self.image is not None and size != self.image and not interpolate:
            raise ValueError(
                f"images: expected {_pixels(self.image)}, for which the model was made (interpolate=True takes other"
                f" sizes), got {_pixels(size)}"
            )
        grid = self.grid(images)
        x: Tensor = self.proj(images).flatten(2).transpose(1, 2)
        if self.tokens is not None:
            x = torch.cat((self.tokens.to(x.dtype).expand(len(x), -1, -1), x), 1)
        if self.places is not None:
            x = x + self.places(grid).to(x)
        return F.dropout(x, self.dropout, self.training) if self.dropout and self.training else x


def _pixels(size: tuple[int, int]) -> str:
    return f"{size[0]} × {size[1]} pixels"
