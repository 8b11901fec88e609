"""Blocks of image models: branches that training leaves out now and then, and that are scaled channel by channel."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from regard.models.blocks import PreNorm

__all__ = ["ChannelScale", "ImageBlock"]


class ChannelScale(nn.Module):
    """``weight * x``, a learned factor per channel that starts at `start` (Touvron et al. 2021, arXiv:2103.17239).

    >>> ChannelScale(2, 0.5)(torch.ones(1, 2)).tolist()
    [[0.5, 0.5]]
    """

    def __init__(self, dim: int, start: float) -> None:
        super().__init__()
        self.start = start
        self.weight = nn.Parameter(torch.empty(dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.weight, self.start)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class ImageBlock(PreNorm):
    """``x + a mixer(norm(x))``, then ``x + b ff(norm(x))``, over ``(B, ..., dim)``.

    Args:
        skipped: the probability that an image of a training batch leaves a branch out (Huang et al. 2016,
            arXiv:1603.09382).
        scales: the modules that scale the two branches (a and b), such as `ChannelScale`; None for neither.
    """

    def __init__(
        self,
        mixer: nn.Module,
        ff: nn.Module,
        mixer_norm: nn.Module,
        ff_norm: nn.Module,
        *,
        skipped: float = 0.0,
        scales: tuple[nn.Module, nn.Module] | None = None,
        **dropout: float,
    ) -> None:
        super().__init__(mixer, ff, mixer_norm, ff_norm, **dropout)
        if not 0 <= skipped < 1:
            raise ValueError(f"skipped: expected a probability below 1, got {skipped}")
        self.skipped = skipped
        self.mixer_scale = None if scales is None else scales[0]
        self.ff_scale = None if scales is None else scales[1]

    def forward(self, x: Tensor, **call: Any) -> Tensor:
        x = x + self._branch(self._drop(self.mixer(self.mixer_norm(x), **call), self.mixer_dropout), self.mixer_scale)
        return x + self._branch(self._drop(self.ff(self.ff_norm(x)), self.ff_dropout), self.ff_scale)

    def _branch(self, y: Tensor, scale: nn.Module | None = None) -> Tensor:
        """A branch as it is added: scaled, and in training left out for some images."""
        y = y if scale is None else scale(y)
        if not self.training or not self.skipped:
            return y
        kept = torch.rand(len(y), *[1] * (y.ndim - 1), device=y.device) >= self.skipped
        return y * kept / (1 - self.skipped)
