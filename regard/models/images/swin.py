"""Swin: attention in windows that shift from layer to layer, and maps that get smaller and wider from stage to stage.

    stage:  x = x + attention(norm(x)),  x = x + mlp(norm(x))          (v2: x + norm(attention(x)), x + norm(mlp(x)))
    merge:  four neighbours [(0,0), (1,0), (0,1), (1,1)] become one token of 4 C channels, and a map makes 2 C of them

Liu et al. 2021, arXiv:2103.14030 (v1) and arXiv:2111.09883 (v2).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.checks import whole
from regard.models.images.blocks import ImageBlock
from regard.models.images.patches import GridPlaces, check_images
from regard.models.model import Model

__all__ = ["PatchGrid", "PatchMerging", "SwinBlock", "SwinStage", "SwinTransformer", "SwinV2Block"]


class SwinBlock(ImageBlock):
    """``x + mixer(norm(x))``, then ``x + ff(norm(x))``, over ``(B, height, width, dim)``; see `ImageBlock`."""


class SwinV2Block(SwinBlock):
    """``x + norm(mixer(x))``, then ``x + norm(ff(x))``: norms behind the branches keep deep models steady."""

    def forward(self, x: Tensor, **call: Any) -> Tensor:
        x = x + self._branch(self.mixer_norm(self._drop(self.mixer(x, **call), self.mixer_dropout)))
        return x + self._branch(self.ff_norm(self._drop(self.ff(x), self.ff_dropout)))


class BranchNorm(nn.LayerNorm):
    """A layer norm that starts at 0, so that a block of v2 starts as the identity."""

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)


class PatchMerging(nn.Module):
    """``W norm([x(0,0), x(1,0), x(0,1), x(1,1)])`` of every 2 × 2 tokens, rows first; v2: ``norm(W [...])``.

    ``(B, height, width, dim)`` to ``(B, ceil(height / 2), ceil(width / 2), 2 dim)``; an odd side is padded with zeros.

    >>> PatchMerging(8)(torch.ones(1, 5, 4, 8)).shape
    torch.Size([1, 3, 2, 16])
    """

    def __init__(self, dim: int, *, norm_last: bool = False) -> None:
        super().__init__()
        self.norm_last = norm_last
        self.norm = nn.LayerNorm(2 * dim if norm_last else 4 * dim)
        self.reduction = nn.Linear(4 * dim, 2 * dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = F.pad(x, (0, 0, 0, x.shape[2] % 2, 0, x.shape[1] % 2))
        x = torch.cat([x[:, row::2, column::2] for column in (0, 1) for row in (0, 1)], -1)
        out: Tensor = self.norm(self.reduction(x)) if self.norm_last else self.reduction(self.norm(x))
        return out


class PatchGrid(nn.Module):
    """Patches as tokens: ``norm(conv(images)) + places``; ``(B, channels, Y, X)`` to ``(B, height, width, dim)``.

    Args:
        channels: of the images.
        patch: (rows, columns) of a patch; an image that patches do not divide is padded with zeros, right and below.
        places: a `GridPlaces`, or None.

    >>> PatchGrid(3, 8, (4, 4))(torch.ones(1, 3, 9, 8)).shape
    torch.Size([1, 3, 2, 8])
    """

    def __init__(
        self,
        channels: int,
        dim: int,
        patch: tuple[int, int],
        *,
        places: GridPlaces | None = None,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.proj = nn.Conv2d(channels, dim, patch, stride=patch)
        self.norm = nn.LayerNorm(dim)
        self.places = places
        self.dropout = dropout

    def forward(self, images: Tensor) -> Tensor:
        images = check_images(images, self.proj.in_channels, self.proj, self)
        rows, columns = self.proj.kernel_size
        images = F.pad(images, (0, -images.shape[3] % columns, 0, -images.shape[2] % rows))
        x: Tensor = self.norm(self.proj(images).permute(0, 2, 3, 1))
        if self.places is not None:
            x = x + self.places((x.shape[1], x.shape[2]))
        return F.dropout(x, self.dropout, self.training) if self.dropout and self.training else x


class SwinStage(nn.Module):
    """Blocks at one resolution, and the merging behind them, or None."""

    def __init__(self, blocks: Sequence[nn.Module], merge: nn.Module | None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(blocks)
        self.merge = merge

    def forward(self, x: Tensor) -> Tensor:
        """The map that the blocks make, before it is merged."""
        for layer in self.layers:
            x = layer(x)
        return x


class SwinTransformer(Model):
    """Patches, stages of blocks, a norm, the mean over all places, and a linear map to classes where there is one.

    Args:
        embedding: a `PatchGrid`, or any module from images to ``(B, height, width, dim)``.
        stages: one factory a stage, called with the stage's number, that gives a `SwinStage`.
        norm: of the last map.
        classifier: from the mean ``(B, dim)`` to scores ``(B, classes)``, or None.

    Images of any size are taken. What a stage does with a map that is smaller than a window is for its attention to say
    (`regard.nn.ShiftedWindowAttention`). Made by `regard.load` and `regard.models.from_config` for ``swin`` and
    ``swinv2``; by hand of any parts:

    >>> from regard.models import MLP, activation
    >>> from regard.nn import ShiftedWindowAttention
    >>> def block(dim, shift):
    ...     mixer = ShiftedWindowAttention(dim, 2, 4, shift=shift)
    ...     return SwinBlock(mixer, MLP(dim, 2 * dim, activation("gelu")), nn.LayerNorm(dim), nn.LayerNorm(dim))
    >>> def stage(i):
    ...     return SwinStage([block(8 << i, 0), block(8 << i, 2)], PatchMerging(8) if i == 0 else None)
    >>> model = SwinTransformer(PatchGrid(3, 8, (2, 2)), [stage, stage], nn.LayerNorm(16), nn.Linear(16, 5))
    >>> model(torch.randn(2, 3, 17, 24)).shape
    torch.Size([2, 5])
    """

    def __init__(
        self,
        embedding: nn.Module,
        stages: Sequence[Callable[[int], SwinStage]],
        norm: nn.Module,
        classifier: nn.Module | None = None,
    ) -> None:
        super().__init__()
        whole("stages", len(stages), 1)
        self.embedding = embedding
        self.stages = nn.ModuleList([make(i) for i, make in enumerate(stages)])
        self.norm = norm
        self.classifier = classifier

    def forward(self, images: Tensor) -> Tensor:
        """Scores ``(B, classes)`` of images ``(B, channels, Y, X)``; without a classifier the means ``(B, dim)``."""
        pooled = self.pool(self.hidden(images))
        return pooled if self.classifier is None else self.classifier(pooled)

    def hidden(self, images: Tensor) -> Tensor:
        """The last map, normed: ``(B, height, width, dim)``."""
        out: Tensor = self.norm(self.maps(images)[-1])
        return out

    def pool(self, hidden: Tensor) -> Tensor:
        """The mean over all places, ``(B, dim)``."""
        return hidden.mean((1, 2))

    def maps(self, images: Tensor) -> list[Tensor]:
        """The map of every stage before it is merged, as a detector or a segmenter reads them."""
        x, maps = self.embedding(images), []
        for stage in self.stages:
            assert isinstance(stage, SwinStage)
            x = stage(x)
            maps.append(x)
            if stage.merge is not None:
                x = stage.merge(x)
        return maps
