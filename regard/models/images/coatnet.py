"""CoAtNet: two stages of convolutions, then two of attention with relative places, over ever smaller maps.

    convolution:  x = project(pool(x)) + shrink(excite(act(norm(depthwise(act(norm(expand(norm(x)))))))))
    attention:    x = project(pool(x)) + attention(pool(norm(x))),  x = x + mlp(norm(x))
    attention:    softmax_j(q_i . k_j / sqrt(D) + w[i - j])        over the whole map

The first block of a stage halves the map; in the others the shortcut is x itself. Dai et al. 2021, arXiv:2106.04803.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from regard.checks import describe, whole
from regard.mixers.base import check_dtype
from regard.mixers.image_windows import GridAttention
from regard.models.feedforward import MLP
from regard.models.model import Model

__all__ = ["COATNETS", "AttentionBlock", "CoAtNet", "CoAtNetShape", "ConvolutionBlock", "SqueezeExcite"]


class SqueezeExcite(nn.Module):
    """``x * sigmoid(W2 silu(W1 mean(x)))``: channels weighed by what the whole map holds (Hu et al. 2017,
    arXiv:1709.01507). ``(B, C, height, width)``.
    """

    def __init__(self, channels: int, hidden: int) -> None:
        super().__init__()
        self.squeeze, self.excite = nn.Linear(channels, hidden), nn.Linear(hidden, channels)

    def forward(self, x: Tensor) -> Tensor:
        weights = torch.sigmoid(self.excite(nn.functional.silu(self.squeeze(x.mean((2, 3))))))
        return x * weights[:, :, None, None]


def _halve() -> nn.Module:
    """Means of 2 × 2; at the edge of an odd side, of the pixels that are there."""
    return nn.AvgPool2d(2, ceil_mode=True)


class Shortcut(nn.Module):
    """``project(pool(x))``; without the projection where the width stays."""

    def __init__(self, before: int, width: int) -> None:
        super().__init__()
        self.pool = _halve()
        self.proj = nn.Conv2d(before, width, 1) if before != width else None

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(x)
        return x if self.proj is None else self.proj(x)


class ConvolutionBlock(nn.Module):
    """MBConv with norms in front: expand by 4 times the width, convolve every channel alone, weigh channels, shrink.

    ``(B, before, height, width)`` to ``(B, width, height, width)``, halved and rounded up with `halves`.

    >>> ConvolutionBlock(8, 16, halves=True)(torch.ones(1, 8, 7, 10)).shape
    torch.Size([1, 16, 4, 5])
    """

    def __init__(self, before: int, width: int, *, halves: bool = False) -> None:
        super().__init__()
        if not halves and before != width:
            raise ValueError(f"width: expected {before}, as before, in a block that does not halve, got {width}")
        hidden = 4 * width
        self.shortcut = Shortcut(before, width) if halves else None
        self.norm = nn.BatchNorm2d(before)
        self.expand, self.expand_norm = nn.Conv2d(before, hidden, 1, bias=False), nn.BatchNorm2d(hidden)
        self.depthwise = nn.Conv2d(hidden, hidden, 3, stride=1 + halves, padding=1, groups=hidden, bias=False)
        self.depthwise_norm = nn.BatchNorm2d(hidden)
        self.weigh = SqueezeExcite(hidden, max(width // 4, 1))
        self.shrink = nn.Conv2d(hidden, width, 1)
        self.act = nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(self.expand_norm(self.expand(self.norm(x))))
        y = self.shrink(self.weigh(self.act(self.depthwise_norm(self.depthwise(y)))))
        out: Tensor = y + (x if self.shortcut is None else self.shortcut(x))
        return out


class AttentionBlock(nn.Module):
    """Attention over the whole map and a feed-forward part, norms in front; shapes as `ConvolutionBlock`'s.

    Args:
        before: channels of the map that comes in.
        width: of the one that goes out.
        head_dim: channels of a head.
        size: (height, width) of the map that the table of places is made for; other maps resize it.

    >>> AttentionBlock(8, 16, 8, (4, 4), halves=True)(torch.ones(1, 8, 7, 10)).shape
    torch.Size([1, 16, 4, 5])
    """

    def __init__(self, before: int, width: int, head_dim: int, size: tuple[int, int], *, halves: bool = False) -> None:
        super().__init__()
        if width % head_dim:
            raise ValueError(f"head_dim: expected a divisor of width={width}, got {head_dim}")
        if not halves and before != width:
            raise ValueError(f"width: expected {before}, as before, in a block that does not halve, got {width}")
        self.shortcut = Shortcut(before, width) if halves else None
        self.pool = _halve() if halves else None
        self.mixer_norm, self.ff_norm = nn.LayerNorm(before, 1e-6), nn.LayerNorm(width, 1e-6)
        self.mixer = GridAttention(width, width // head_dim, size, in_dim=before)
        self.ff = MLP(width, 4 * width, nn.GELU())

    def forward(self, x: Tensor) -> Tensor:
        y = self.mixer_norm(x.permute(0, 2, 3, 1))
        if self.pool is not None:
            y = self.pool(y.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
        short = x if self.shortcut is None else self.shortcut(x)
        y = self.mixer(y) + short.permute(0, 2, 3, 1)
        y = y + self.ff(self.ff_norm(y))
        out: Tensor = y.permute(0, 3, 1, 2)
        return out


@dataclass(frozen=True)
class CoAtNetShape:
    """The sizes of a CoAtNet.

    Args:
        stem: channels of the first two convolutions.
        widths: channels of the stages' maps.
        depths: blocks of the stages.
        attention: how many of the last stages are of attention.
        head_dim: channels of a head.
        hidden: width of a map with tanh between the mean and the classes, as in the released code; None for none.
        image: (height, width) of the images that tables of places are made for.
        channels: of the images.
    """

    stem: int
    widths: tuple[int, ...]
    depths: tuple[int, ...]
    attention: int = 2
    head_dim: int = 32
    hidden: int | None = None
    image: tuple[int, int] = (224, 224)
    channels: int = 3

    def __post_init__(self) -> None:
        for name, sizes in (("widths", self.widths), ("depths", self.depths), ("image", self.image)):
            if not sizes or any(whole(name, n, 1) < 1 for n in sizes):
                raise ValueError(f"{name}: expected one number or more, got {sizes}")
        if len(self.widths) != len(self.depths):
            raise ValueError(f"depths: expected {len(self.widths)}, one a stage, got {self.depths}")
        if not 0 <= whole("attention", self.attention, 0) <= len(self.widths):
            raise ValueError(f"attention: expected 0 to {len(self.widths)} stages, got {self.attention}")

    def grid(self, stage: int) -> tuple[int, int]:
        """The map of a stage, for images of the stated size."""
        high, wide = (-(-n // 2 ** (stage + 2)) for n in self.image)
        return high, wide


_NARROW, _WIDE = (96, 192, 384, 768), (192, 384, 768, 1536)
COATNETS = {
    "coatnet-0": CoAtNetShape(64, _NARROW, (2, 3, 5, 2), hidden=768),
    "coatnet-1": CoAtNetShape(64, _NARROW, (2, 6, 14, 2), hidden=768),
    "coatnet-2": CoAtNetShape(128, (128, 256, 512, 1024), (2, 6, 14, 2), hidden=1024),
    "coatnet-3": CoAtNetShape(192, _WIDE, (2, 6, 14, 2), hidden=1536),
    "coatnet-4": CoAtNetShape(192, _WIDE, (2, 12, 28, 2), hidden=1536),
    "coatnet-5": CoAtNetShape(192, (256, 512, 1280, 2048), (2, 12, 28, 2), hidden=2048),
}
"""The published family, by name, for images of 224 × 224."""


class CoAtNet(Model):
    """Scores of classes ``(B, classes)`` of images ``(B, channels, Y, X)`` of any size.

    Args:
        shape: a `CoAtNetShape`; `COATNETS` has the published ones.
        classes: of the last map, or None for the mean ``(B, dim)``.

    Parameters start as torch's own layers do. There is no common file format, so such a model is kept by its
    ``state_dict``.

    >>> small = CoAtNetShape(8, (8, 16, 32), (1, 1, 2), attention=1, head_dim=8, image=(32, 32))
    >>> CoAtNet(small, 5)(torch.randn(2, 3, 32, 41)).shape
    torch.Size([2, 5])
    """

    def __init__(self, shape: CoAtNetShape, classes: int | None = None) -> None:
        super().__init__()
        self.shape = shape
        self.stem = nn.Sequential(
            nn.Conv2d(shape.channels, shape.stem, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(shape.stem),
            nn.GELU(),
            nn.Conv2d(shape.stem, shape.stem, 3, padding=1, bias=False),
        )
        before = (shape.stem, *shape.widths)
        self.stages = nn.ModuleList([self._stage(i, before[i], shape.widths[i]) for i in range(len(shape.widths))])
        last = shape.widths[-1]
        self.norm = nn.LayerNorm(last, 1e-6)
        self.hidden_map = None if shape.hidden is None else nn.Linear(last, shape.hidden)
        self.classifier = None if classes is None else nn.Linear(shape.hidden or last, whole("classes", classes, 1))

    def _stage(self, i: int, before: int, width: int) -> nn.Sequential:
        attends = i >= len(self.shape.widths) - self.shape.attention
        blocks: list[nn.Module] = []
        for n in range(self.shape.depths[i]):
            given = before if n == 0 else width
            if attends:
                blocks.append(AttentionBlock(given, width, self.shape.head_dim, self.shape.grid(i), halves=n == 0))
            else:
                blocks.append(ConvolutionBlock(given, width, halves=n == 0))
        return nn.Sequential(*blocks)

    def forward(self, images: Tensor) -> Tensor:
        """The classes' scores, or what they are made of.

        Raises ValueError and TypeError for images that do not fit."""
        pooled: Tensor = self.norm(self.maps(images)[-1].mean((2, 3)))
        if self.hidden_map is not None:
            pooled = torch.tanh(self.hidden_map(pooled))
        return pooled if self.classifier is None else self.classifier(pooled)

    def maps(self, images: Tensor) -> list[Tensor]:
        """The map ``(B, width, height, width)`` of every stage, as a detector or a segmenter reads them."""
        channels = self.shape.channels
        if not isinstance(images, Tensor) or images.ndim != 4 or images.shape[1] != channels or 0 in images.shape[2:]:
            raise ValueError(f"images: expected (B, {channels}, height, width), got {describe(images)}")
        check_dtype(self, "images", images)
        x, maps = self.stem(images), []
        for stage in self.stages:
            x = stage(x)
            maps.append(x)
        return maps
