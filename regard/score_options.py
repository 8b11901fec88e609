"""What becomes of a product of a query and a key before bias, mask and softmax. Every step stands here once.

The backends in plain torch call `ScoreOptions.apply` and `ScoreOptions.slope`; a backend with kernels of its own says
which of the steps it knows (`ScoreOptions.steps`). docs/score_steps.md tells how to add one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from regard.checks import SMALLEST, real, scale_of

__all__ = ["ScoreOptions"]

LOOSEST = 1e30  # a softcap from here on counts as none: scores over it in float32 would be below the smallest number


@dataclass(frozen=True)
class ScoreOptions:
    """Scores from products: ``S = softcap * tanh(scale * q . k / softcap)``.

    Args:
        scale: the factor on ``q . k``; None for ``Dk ** -0.5``.
        softcap: bound on the scores, > 0; None, inf and anything from 1e30 on for none.

    >>> ScoreOptions(softcap=2.0).apply(torch.tensor([0.0, 100.0])).tolist()
    [0.0, 2.0]
    """

    scale: float | None = None
    softcap: float | None = None

    def check(self) -> None:
        """Raise ValueError or TypeError for numbers that float32 scores do not take."""
        ScoreOptions.of(1, torch.float32, **self.arguments())

    @classmethod
    def of(
        cls, width: int, dtype: torch.dtype, *, scale: float | None = None, softcap: float | None = None
    ) -> ScoreOptions:
        """The options, checked, of queries of `width` channels and of `dtype`; the scale is a number then.

        Raises ValueError or TypeError for numbers out of range.
        """
        return cls(scale_of(scale, width, dtype), _softcap(softcap, dtype))

    def arguments(self) -> dict[str, Any]:
        """The same as arguments of `regard.attention`."""
        return {name: getattr(self, name) for name in NAMES}

    @property
    def steps(self) -> tuple[str, ...]:
        """The names of the steps in use beside the scale."""
        return () if self.softcap is None else ("softcap",)

    def apply(self, products: Tensor) -> Tensor:
        """The scores of products that the scale has already multiplied (`products` itself where there is no step)."""
        if self.softcap is None:
            return products
        return self.softcap * torch.tanh(products / self.softcap)

    def slope(self, scores: Tensor) -> Tensor | None:
        """The derivative of `apply` where it gave `scores`; None where it is 1 everywhere."""
        return None if self.softcap is None else 1 - (scores / self.softcap) ** 2


NAMES = tuple(ScoreOptions.__dataclass_fields__)


def _softcap(softcap: float | None, dtype: torch.dtype) -> float | None:
    if softcap is None or softcap == math.inf:
        return None
    softcap = real("softcap", softcap, "a number or None")
    if not softcap > 0:
        raise ValueError(f"softcap: expected a number > 0 (None or inf for none), got {softcap}")
    least = torch.finfo(torch.float64).tiny if dtype == torch.float64 else SMALLEST
    if softcap < least:  # scores are divided by it
        raise ValueError(f"softcap: expected a number of at least {least:.3g}, got {softcap}")
    return softcap if softcap < LOOSEST else None
