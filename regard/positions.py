"""Positions: rotary (half-split and interleaved, partial, with context extension), sinusoidal, learned.

Rotary position embedding turns each pair of channels of a query or key by an angle that grows with its position, so
that their product depends on the distance alone:

    pair m of a token at position p:   (a, b) -> (a cos t - b sin t, b cos t + a sin t),   t = p * f_m,
    f_m = base ** (-2 m / dim),   m = 0 .. dim/2 - 1

Angles are formed in float64 and rounded once, to float32 or (for float64 inputs) not at all, whatever the dtype of the
module or of the input: nothing here is a buffer, so nothing follows `.to(dtype)`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from regard.coordinates import plain_eager
from regard.position_scaling import (
    LinearScaling,
    Llama3Scaling,
    NTKScaling,
    Scaling,
    YarnScaling,
    plain_frequencies,
    wide,
)
from regard.position_tables import AxialPositions, LearnedPositions

__all__ = [
    "image_positions",
    "Rotary",
    "LinearScaling",
    "NTKScaling",
    "Llama3Scaling",
    "YarnScaling",
    "interleaved_to_half",
    "sinusoidal",
    "LearnedPositions",
    "AxialPositions",
]


@dataclass(frozen=True)
class _Angles:
    """The last angles formed, and for which positions."""

    positions: Tensor
    version: int | None
    values: Tensor | None
    dtype: torch.dtype
    cos: Tensor
    sin: Tensor

    def answer(self, positions: Tensor, dtype: torch.dtype) -> bool:
        if dtype is not self.dtype:
            return False
        if self.values is None:  # comparing would wait for the device
            return positions is self.positions and self.version is not None and positions._version == self.version
        # Cheaper than forming the angles, and not every change in place counts up a tensor's version.
        same_kind = positions.device == self.values.device and positions.dtype == self.values.dtype
        return same_kind and torch.equal(positions, self.values)


class _Memo:
    """One place for the last angles, shared by the thirty layers that hold the same Rotary; never copied or saved."""

    def __init__(self) -> None:
        self.last: _Angles | None = None
        self.frequencies: Tensor | None = None

    def __deepcopy__(self, memo: object) -> _Memo:
        return _Memo()

    def __reduce__(self) -> tuple[type[_Memo], tuple[()]]:
        return _Memo, ()


@dataclass(frozen=True)
class Rotary:
    """Rotary position embedding of the first `dim` channels of queries and keys.

        style "half":         pair m is channels (m, m + dim/2)       Llama, Mistral, NeoX, Falcon, Qwen, gpt-oss
        style "interleaved":  pair m is channels (2m, 2m + 1)         GPT-J, Cohere, DeepSeek-V2

    x (B, H, T, D), D >= dim; positions (T,), (1, T) or (B, T), integers or float32/float64 numbers, may be negative.
    The result has x's shape and dtype; channels from `dim` on pass through; the turn is computed in at least float32.
    Frequencies are in radians per position. A partial rotary (D > dim) derives them from `dim`, not from D.
    For weights made for interleaved pairs, and results laid out half-split, compose with `interleaved_to_half`.

    Raises `ValueError` for an odd or non-positive `dim`, an unknown style or wrong shapes, `TypeError` for dtypes.
    Cost: 6 operations a rotated pair and token; cos and sin are formed once for equal positions in a row of calls, so
    layers that share one Rotary share them. Source: Su et al. 2021, arXiv:2104.09864.

    >>> import torch
    >>> rotary = Rotary(4)
    >>> q = torch.tensor([1.0, 2.0, 0.0, 0.0]).view(1, 1, 1, 4)
    >>> rotary(q, torch.tensor([0])).flatten()
    tensor([1., 2., 0., 0.])
    >>> rotary(q, torch.tensor([1])).flatten()
    tensor([0.5403, 1.9999, 0.8415, 0.0200])
    """

    dim: int
    base: float = 10000.0
    style: Literal["half", "interleaved"] = "half"
    scaling: Scaling | None = None
    _memo: _Memo = field(default_factory=_Memo, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.dim <= 0 or self.dim % 2:
            raise ValueError(f"dim: expected an even number above 0, got {self.dim}")
        if self.style not in ("half", "interleaved"):
            raise ValueError(f"style: expected 'half' or 'interleaved', got {self.style!r}")
        if not (math.isfinite(self.base) and self.base > 1):
            raise ValueError(f"base: expected a finite number above 1, got {self.base!r}")

    @property
    def attention_factor(self) -> float:
        """What cos and sin are multiplied by (1 but for YaRN); queries and keys both, so scores get its square."""
        return 1.0 if self.scaling is None else self.scaling.amplitude

    def frequencies(self, dtype: torch.dtype = torch.float64, device: torch.device | str | None = None) -> Tensor:
        """Radians per position of each pair, (dim/2,)."""
        place = None if device is None else torch.device(device)
        if self.scaling is None:
            return plain_frequencies(self.dim, self.base, place).to(dtype)
        return self.scaling.frequencies(self.dim, self.base, place).to(dtype)

    def angles(self, positions: Tensor, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        """(cos, sin) of positions (..., T), times the attention factor: each (..., T, dim/2).

        float64 where `dtype` is float64, else float32: a lower dtype would not tell positions 257 and 258 apart.
        """
        _check_positions(positions)
        dtype = torch.float64 if dtype is torch.float64 else torch.float32
        cos, sin = (table[..., self.dim // 2 :] for table in self._both(positions, dtype))
        return (cos.squeeze(1), sin.squeeze(1)) if positions.dim() == 2 else (cos, sin)

    def _both(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """(cos, sin) of both channels of each half-split pair, (T, dim) or (B, 1, T, dim); the first sin is negated."""
        plain = plain_eager(positions)
        last = self._memo.last
        if plain and last is not None and last.answer(positions, dtype):
            return last.cos, last.sin
        if not plain:
            return self._form(positions, dtype)
        with torch.inference_mode(False):  # what is kept must also serve a later call that records gradients
            known, exact = self._memo.frequencies, wide(positions.device)
            if known is None or known.device != positions.device:
                known = self._memo.frequencies = self.frequencies(exact, positions.device)
            cos, sin = self._form(positions, dtype, known)
            object.__setattr__(self._memo, "last", self._entry(positions, dtype, cos, sin))
        return cos, sin

    def _form(self, positions: Tensor, dtype: torch.dtype, frequencies: Tensor | None = None) -> tuple[Tensor, Tensor]:
        exact = wide(positions.device)
        frequencies = self.frequencies(exact, positions.device) if frequencies is None else frequencies
        angle = positions.to(exact).unsqueeze(-1) * frequencies
        cos, sin = (angle.cos() * self.attention_factor).to(dtype), (angle.sin() * self.attention_factor).to(dtype)
        both = torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)
        return (both[0].unsqueeze(1), both[1].unsqueeze(1)) if positions.dim() == 2 else both

    @staticmethod
    def _entry(positions: Tensor, dtype: torch.dtype, cos: Tensor, sin: Tensor) -> _Angles:
        version = None if positions.is_inference() else positions._version
        values = positions.clone() if positions.device.type == "cpu" else None
        return _Angles(positions, version, values, dtype, cos, sin)

    def __call__(self, x: Tensor, positions: Tensor) -> Tensor:
        """Turn x (B, H, T, D) by its tokens' positions (T,) or (B, T)."""
        _check_turned(x, positions, self.dim)
        dtype = torch.float64 if x.dtype is torch.float64 else torch.float32
        cos, sin = self._both(positions, dtype)
        half = self.dim // 2
        turned = x if x.shape[-1] == self.dim else x[..., : self.dim]
        if x.dtype is not dtype:
            turned = turned.to(dtype)
        if self.style == "half":
            turned = torch.addcmul(turned * cos, turned.roll(half, -1), sin)
        else:
            cos, sin = cos[..., half:], sin[..., half:]
            a, b = turned[..., 0::2], turned[..., 1::2]
            turned = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
        if x.dtype is not dtype:
            turned = turned.to(x.dtype)
        return turned if x.shape[-1] == self.dim else torch.cat((turned, x[..., self.dim :]), dim=-1)


def _check_positions(positions: Tensor) -> None:
    if positions.dtype is torch.int64:
        return
    if positions.dtype in (torch.float16, torch.bfloat16, torch.bool) or positions.is_complex():
        raise TypeError(f"positions: expected integers, float32 or float64 (exact counts), got {positions.dtype}")


def _check_turned(x: Tensor, positions: Tensor, dim: int) -> None:
    if x.dim() != 4:
        raise ValueError(f"x: expected (B, H, T, D), got shape {tuple(x.shape)}")
    if not x.is_floating_point():
        raise TypeError(f"x: expected a floating dtype, got {x.dtype}")
    if x.shape[-1] < dim:
        raise ValueError(f"x: expected at least the {dim} channels that this Rotary turns, got {x.shape[-1]}")
    _check_positions(positions)
    shape, batch, tokens = positions.shape, x.shape[0], x.shape[2]
    if shape[-1:] != (tokens,) or len(shape) > 2 or (len(shape) == 2 and shape[0] not in (1, batch)):
        expected = f"({tokens},) or ({batch}, {tokens})"
        raise ValueError(f"positions: expected {expected} for x {tuple(x.shape)}, got {tuple(shape)}")


def interleaved_to_half(x: Tensor) -> Tensor:
    """Reorder channels from interleaved pairs to the half-split layout: y = x[..., [0, 2, 4, .., 1, 3, 5, ..]].

    Turning interleaved pairs and then reordering equals reordering and then turning half-split pairs; DeepSeek-V3 does
    the latter to its queries and keys (their scores do not notice, cached keys differ in order only).
    Raises `ValueError` for an odd number of channels.

    >>> interleaved_to_half(torch.arange(6))
    tensor([0, 2, 4, 1, 3, 5])
    """
    if x.dim() == 0 or x.shape[-1] % 2:
        raise ValueError(f"x must have an even number of channels in its last axis, got shape {tuple(x.shape)}")
    return torch.cat((x[..., 0::2], x[..., 1::2]), dim=-1)


def sinusoidal(
    positions: int | Tensor,
    dim: int,
    *,
    base: float = 10000.0,
    style: str = "interleaved",
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Fixed sine and cosine embeddings of positions.

        PE[p, 2m] = sin(p * f_m),   PE[p, 2m + 1] = cos(p * f_m),   f_m = base ** (-2 m / dim)

    positions: a count T, meaning 0 .. T-1, or a tensor (...); the result is (T, dim) or (..., dim) in `dtype`, rounded
    from float64. style "half" lays all sines before all cosines (Transformer-XL, DETR).
    Raises `ValueError` for an odd or non-positive dim, a negative count or an unknown style.
    Source: Vaswani et al. 2017, arXiv:1706.03762.

    >>> sinusoidal(2, 4)
    tensor([[0.0000, 1.0000, 0.0000, 1.0000],
            [0.8415, 0.5403, 0.0100, 0.9999]])
    """
    if dim <= 0 or dim % 2:
        raise ValueError(f"dim: expected an even number above 0, got {dim}")
    if style not in ("half", "interleaved"):
        raise ValueError(f"style: expected 'half' or 'interleaved', got {style!r}")
    if isinstance(positions, int):
        if positions < 0:
            raise ValueError(f"positions: expected a count of 0 or more, or a tensor, got {positions}")
        positions = torch.arange(positions)
    _check_positions(positions)
    exact = wide(positions.device)
    angle = positions.to(exact).unsqueeze(-1) * plain_frequencies(dim, base, positions.device)
    if style == "half":
        return torch.cat((angle.sin(), angle.cos()), dim=-1).to(dtype)
    return torch.stack((angle.sin(), angle.cos()), dim=-1).flatten(-2).to(dtype)


def image_positions(
    real: Tensor, features: int, *, base: float = 10000.0, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Sines and cosines of both places of a pixel, rows first: (B, height, width, 2 features), as DETR's.

    A place is the number of real pixels up to the pixel along its axis, as a share of all of the line's, times 2 pi;
    `real` is bool (B, height, width), True where there is image. Each axis has `features` numbers, sin and cos in turn.
    Raises TypeError and ValueError for other tensors and odd numbers. Source: Carion et al. 2020, arXiv:2005.12872.

    >>> image_positions(torch.ones(1, 2, 3, dtype=torch.bool), 4).shape
    torch.Size([1, 2, 3, 8])
    """
    if not isinstance(real, Tensor) or real.dtype != torch.bool or real.ndim != 3:
        got = f"{real.dtype} {tuple(real.shape)}" if isinstance(real, Tensor) else type(real).__name__
        raise TypeError(f"real: expected a bool tensor (B, height, width), got {got}")
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    parts = []
    for axis in (1, 2):
        count = real.to(exact).cumsum(axis)
        whole_line = count.narrow(axis, real.shape[axis] - 1, 1) if real.shape[axis] else count
        parts.append(sinusoidal(count / (whole_line + 1e-6) * (2 * math.pi), features, base=base, dtype=exact))
    return torch.cat(parts, -1).to(dtype)
