"""ALiBi: a penalty that grows with the distance, by a slope per head."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from regard.biases.base import Bias, needs_heads
from regard.checks import describe, whole
from regard.coordinates import TileIndices, can_read

__all__ = ["Alibi", "alibi_slopes"]


STEEPEST = 1.1e30  # times a distance it is a float32


def alibi_slopes(heads: int, order: str = "bloom", max_bias: float = 8.0) -> Tensor:
    """The published ALiBi slopes, float64 ``(heads,)``.

    For a power of two ``H`` they are ``2^(-max_bias * h / H)``, h = 1..H. Otherwise ``order="bloom"`` takes the slopes
    of the power of two below, then every other slope of the one above; ``order="mpt"`` takes the power of two above,
    its odd places (h = 2, 4, …) first, then its even ones, cut to `heads`: other heads get other slopes, so a
    checkpoint needs its own order.

    Press, Smith, Lewis 2021, arXiv:2108.12409, and the two families' code.

    >>> alibi_slopes(3).tolist()
    [0.0625, 0.00390625, 0.25]
    """
    whole("heads", heads, 1)

    def series(count: int) -> list[float]:
        return [2.0 ** (-max_bias * h / count) for h in range(1, count + 1)]

    below = 2 ** math.floor(math.log2(heads))
    if order not in ("bloom", "mpt"):
        raise ValueError(f"order: expected 'bloom' or 'mpt', got {order!r}")
    if below == heads:
        slopes = series(heads)
    elif order == "bloom":
        slopes = series(below) + series(2 * below)[0::2][: heads - below]
    else:
        slopes = (series(2 * below)[1::2] + series(2 * below)[0::2])[:heads]
    # constants, though layers be built on the meta device
    place = "cpu" if torch.get_default_device().type == "meta" else None
    return torch.tensor(slopes, dtype=torch.float64, device=place)


@dataclass(frozen=True, eq=False)
class Alibi(Bias):
    """ALiBi, ``slope_h * (j - i)``: the further the key, the lower its score; if `symmetric`, ``-slope_h * |i - j|``.

    `slopes` is a tensor (H,), or a number of heads for the published slopes in Bloom's order (see `alibi_slopes`).
    Distances count slots, so they equal Bloom's distances between real tokens wherever the padding is before or after
    them.

    Press, Smith, Lewis 2021, arXiv:2108.12409. The symmetric form is an extension for encoders.
    """

    slopes: Tensor | int
    symmetric: bool = False
    relative: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not isinstance(self.slopes, Tensor):
            object.__setattr__(self, "slopes", alibi_slopes(self.slopes))
        elif self.slopes.ndim != 1 or not self.slopes.is_floating_point():
            raise ValueError(f"slopes: expected a float tensor (H,) or a number of heads, got {describe(self.slopes)}")
        elif can_read(self.slopes) and self.slopes.numel():
            steepest = float(self.slopes.detach().abs().max())
            if steepest > STEEPEST:
                raise ValueError(f"slopes: expected numbers within 1e30, so that scores are finite, got {steepest:.6g}")

    @property
    def _slopes(self) -> Tensor:
        assert isinstance(self.slopes, Tensor)
        return self.slopes

    def with_tensors(self, tensors: Sequence[Tensor]) -> Alibi:
        return Alibi(tensors[0], self.symmetric)

    def _distance(self, indices: TileIndices) -> Tensor:
        return -(indices.i - indices.j).abs() if self.symmetric else indices.j - indices.i

    def scores(self, indices: TileIndices, dtype: torch.dtype) -> Tensor:
        return self._slopes.to(dtype)[indices.h] * self._distance(indices).to(dtype)

    def accumulate(self, indices: TileIndices, grad: Tensor, out: Sequence[Tensor]) -> None:
        out[0].add_((grad * self._distance(indices).to(grad.dtype)).sum((0, 2, 3)).to(out[0].dtype))

    def check(self, batch: int, heads: int, q_len: int, k_len: int) -> None:
        needs_heads("Alibi.slopes", self._slopes.shape[0], heads)

    def head_count(self) -> int:
        return self._slopes.shape[0]
