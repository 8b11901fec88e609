"""Frequencies of rotary positions, and the ways to scale them past the context a model was trained on.

Numbers have the names and meanings of published configurations: `factor` is how many times longer the context becomes,
`original_max_positions` the trained one in tokens.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor


def wide(device: torch.device | None) -> torch.dtype:
    """The widest floating dtype of a device (Apple's GPUs have no float64)."""
    return torch.float32 if device is not None and device.type == "mps" else torch.float64


def plain_frequencies(dim: int, base: float, device: torch.device | None = None) -> Tensor:
    """base ** (-2 m / dim) for m = 0 .. dim/2 - 1, in radians per position."""
    exponents = torch.arange(0, dim, 2, dtype=wide(device), device=device) / dim
    return 1.0 / base**exponents


class Scaling(ABC):
    """A way to read positions past the trained context: changed frequencies, and a factor on cos and sin."""

    @property
    def amplitude(self) -> float:
        """What cos and sin are multiplied by."""
        return 1.0

    @abstractmethod
    def frequencies(self, dim: int, base: float, device: torch.device | None = None) -> Tensor:
        """Radians per position of each pair, (dim/2,), in `wide(device)`."""


def _positive(owner: object, **values: float) -> None:
    for name, value in values.items():
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"{name}: expected a finite number above 0, got {value!r}")


@dataclass(frozen=True)
class LinearScaling(Scaling):
    """Position interpolation: every frequency divided by `factor`.

        f'_m = f_m / factor

    Raises `ValueError` for a factor that is not a finite number above 0.
    Source: Chen et al. 2023, arXiv:2306.15595.

    >>> LinearScaling(2.0).frequencies(4, 10000.0)
    tensor([0.5000, 0.0050], dtype=torch.float64)
    """

    factor: float

    def __post_init__(self) -> None:
        _positive(self, factor=self.factor)

    def frequencies(self, dim: int, base: float, device: torch.device | None = None) -> Tensor:
        return plain_frequencies(dim, base, device) / self.factor


@dataclass(frozen=True)
class NTKScaling(Scaling):
    """NTK-aware scaling: a larger base, so that the slowest pair slows down by `factor` and the fastest stays.

        base' = base * factor ** (dim / (dim - 2))

    Its "dynamic" relative, whose base grows with the current length, is left out on purpose: keys already in a cache
    stay turned by the old base, so a sequence read in two calls differs from the same sequence read in one.

    Raises `ValueError` for a factor that is not a finite number above 0, and for a rotary width of 2.
    Source: bloc97 2023 (public note), as given in Peng et al. 2023, arXiv:2309.00071, section 3.1.

    >>> NTKScaling(10.0).frequencies(4, 10000.0)
    tensor([1.0000, 0.0010], dtype=torch.float64)
    """

    factor: float

    def __post_init__(self) -> None:
        _positive(self, factor=self.factor)

    def frequencies(self, dim: int, base: float, device: torch.device | None = None) -> Tensor:
        if dim == 2:
            raise ValueError("NTKScaling needs a rotary width (dim) above 2, got 2: its one pair has frequency 1")
        return plain_frequencies(dim, base * self.factor ** (dim / (dim - 2)), device)


@dataclass(frozen=True)
class Llama3Scaling(Scaling):
    """Llama 3.1's scaling: slow pairs divided by `factor`, fast pairs kept, a linear blend in their turns between.

        n_m = original_max_positions * f_m / (2 pi)                       turns of pair m over the trained context
        s_m = clamp((n_m - low_freq_factor) / (high_freq_factor - low_freq_factor), 0, 1)
        f'_m = (1 - s_m) * f_m / factor + s_m * f_m

    Raises `ValueError` where a number is not finite and above 0, or `high_freq_factor <= low_freq_factor`.
    Source: Grattafiori et al. 2024, arXiv:2407.21783, and the released model's configuration.

    >>> Llama3Scaling(8.0, 1.0, 4.0, original_max_positions=64).frequencies(4, 10000.0)
    tensor([1.0000, 0.0013], dtype=torch.float64)
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int

    def __post_init__(self) -> None:
        _positive(
            self,
            factor=self.factor,
            low_freq_factor=self.low_freq_factor,
            high_freq_factor=self.high_freq_factor,
            original_max_positions=self.original_max_positions,
        )
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"high_freq_factor: expected a number above low_freq_factor, "
                f"got {self.high_freq_factor} and {self.low_freq_factor}"
            )

    def frequencies(self, dim: int, base: float, device: torch.device | None = None) -> Tensor:
        plain = plain_frequencies(dim, base, device)
        turns = plain * (self.original_max_positions / (2 * math.pi))
        keep = ((turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)).clamp(0, 1)
        return (1 - keep) * plain / self.factor + keep * plain


@dataclass(frozen=True)
class YarnScaling(Scaling):
    """YaRN: pairs blended between plain and interpolated by their index, and sharper scores.

        i(n) = dim * ln(original_max_positions / (2 pi n)) / (2 ln base)      the pair that makes n turns
        low, high = i(beta_fast), i(beta_slow), to the integers outside when `truncate`, within [0, dim - 1]
        r_m = clamp((m - low) / (high - low), 0, 1)
        f'_m = (1 - r_m) * f_m + r_m * f_m / factor

    cos and sin are multiplied by `amplitude`: `attention_factor` where given, else g(mscale) / g(mscale_all_dim) where
    both are given and not 0, else g(1), with g(s) = 0.1 * s * ln(factor) + 1 (and 1 for a factor of 1 or less). The
    ramp is read as written, as the released models do, also where low > high: a trained context so short that high < 0
    (r = 0 everywhere), or so long that low > dim - 1 (r = 1 everywhere).

    Raises `ValueError` where a number is not finite and above 0 (mscale and mscale_all_dim may be 0 or None).
    Source: Peng et al. 2023, arXiv:2309.00071; mscale and mscale_all_dim: DeepSeek-V2, arXiv:2405.04434.

    >>> YarnScaling(40.0, 4096, mscale=1.0, mscale_all_dim=1.0).amplitude
    1.0
    >>> round(YarnScaling(4.0, 4096).amplitude, 4)
    1.1386
    """

    factor: float
    original_max_positions: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None

    def __post_init__(self) -> None:
        _positive(
            self,
            factor=self.factor,
            original_max_positions=self.original_max_positions,
            beta_fast=self.beta_fast,
            beta_slow=self.beta_slow,
        )
        if self.attention_factor is not None:
            _positive(self, attention_factor=self.attention_factor)

    @property
    def amplitude(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._sharpness(self.mscale) / self._sharpness(self.mscale_all_dim)
        return self._sharpness(1.0)

    @property
    def score_factor(self) -> float:
        """``g(mscale_all_dim)^2``: DeepSeek's latent attention multiplies its scores by it too; 1 where not given."""
        return self._sharpness(self.mscale_all_dim or 0.0) ** 2

    def _sharpness(self, scale: float) -> float:
        return 1.0 if self.factor <= 1 else 0.1 * scale * math.log(self.factor) + 1.0

    def _pair_turning(self, turns: float, dim: int, base: float) -> float:
        return dim * math.log(self.original_max_positions / (turns * 2 * math.pi)) / (2 * math.log(base))

    def frequencies(self, dim: int, base: float, device: torch.device | None = None) -> Tensor:
        low, high = self._pair_turning(self.beta_fast, dim, base), self._pair_turning(self.beta_slow, dim, base)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        if low == high:
            high += 0.001  # the ramp becomes a step instead of 0 / 0
        plain = plain_frequencies(dim, base, device)
        ramp = ((torch.arange(dim // 2, dtype=plain.dtype, device=device) - low) / (high - low)).clamp(0, 1)
        return (1 - ramp) * plain + ramp * plain / self.factor
