"""Exponential moving averages along time, per channel: the plain one, and Mega's damped multi-dimensional one.

plain:   z_t = alpha x_t + (1 - alpha) z_{t-1}
damped:  `regard.mixers.damped_ema`
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from regard.checks import whole
from regard.decays import complement_decay_from_logit, sigmoid
from regard.mixers.base import Record
from regard.mixers.damped_ema import DampedEMA
from regard.mixers.parts import merge_heads
from regard.mixers.recurrent import States
from regard.mixers.sequence import TokenSequence
from regard.mixers.vector_state import VectorInputs, VectorStateLayer

__all__ = ["DampedEMA", "ExponentialMovingAverage", "records"]


class ExponentialMovingAverage(VectorStateLayer):
    """The exponential moving average of each channel, starting at 0; ``(B, T, dim)`` in and out, causal.

    Args:
        dim: width of the tokens.
        alpha: the weight of the newest token to begin with, in (0, 1); it is learned per channel.

    Parameters: ``logit`` (dim), ``alpha = sigmoid(logit)``. The state is z, one number per channel. ``M @ V`` is per
    channel, ``V = x``. Raises ValueError for an alpha outside (0, 1). Cost: O(T dim).

    >>> import torch
    >>> ExponentialMovingAverage(1, alpha=0.5)(torch.ones(1, 3, 1)).flatten().tolist()
    [0.5, 0.75, 0.875]
    """

    def __init__(self, dim: int, alpha: float = 0.5) -> None:
        super().__init__()
        self.dim = self.width = whole("dim", dim, 1)
        if not 0.0 < alpha < 1.0:
            raise ValueError(f"alpha: expected a number in (0, 1), got {alpha}")
        self.alpha = alpha
        self.logit = nn.Parameter(torch.empty(dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Starts every channel's weight at `alpha` again."""
        nn.init.constant_(self.logit, math.log(self.alpha) - math.log1p(-self.alpha))

    def inputs(self, seq: TokenSequence, states: States) -> VectorInputs:
        log_a = complement_decay_from_logit(self.logit)
        return VectorInputs(seq.x, log_a[None, None], weight=sigmoid(self.logit))

    def project_output(self, x: Tensor, mixed: Tensor, gate_input: Tensor | None) -> Tensor:
        return merge_heads(mixed).to(x.dtype)


records = (
    Record(
        name="ema",
        summary="exponential moving average, one learned weight per channel",
        source="Brown 1956, Exponential Smoothing for Predicting Demand",
        build=lambda dim, heads: ExponentialMovingAverage(dim),
    ),
    Record(
        name="mega_ema",
        summary="Mega's damped multi-dimensional moving average",
        source="Ma et al. 2022, arXiv:2209.10655",
        build=lambda dim, heads: DampedEMA(dim),
    ),
    Record(
        name="mega_ema_bidirectional",
        summary="Mega's moving average in both directions, each with its own parameters",
        source="Ma et al. 2022, arXiv:2209.10655",
        build=lambda dim, heads: DampedEMA(dim, bidirectional=True),
    ),
    Record(
        name="mega_ema_truncated",
        summary="Mega's moving average over the latest tokens alone",
        source="Ma et al. 2022, arXiv:2209.10655",
        build=lambda dim, heads: DampedEMA(dim, 4, truncation=3),
    ),
)
