"""Causal convolutions as long as the sequence, in time T log^2 T, without a rounding that later tokens could touch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.checks import describe, is_dense, is_number_type

__all__ = ["long_conv", "toeplitz"]

DIRECT = 64  # tokens up to which sums are taken one by one


def long_conv(x: Tensor, kernel: Tensor, *, state: Tensor | None = None) -> Tensor:
    """``y_t = sum_{s <= t} kernel_{t - s} x_s`` per channel.

    Args:
        x: (B, T, C).
        kernel: (C, K): lag 0 first; lags from K on count 0. K may be smaller or larger than T.
        state: (B, P, C), the inputs before the first token; none by default.

    Returns:
        (B, T, C) in x's dtype, computed in float32 at least.

    Halves are combined by FFT: what the first half gives to the second is one circular convolution of earlier tokens
    alone, so that a later token cannot even change a rounding of an earlier result, as one FFT of everything would.
    Differentiable in all three. Raises TypeError and ValueError for tensors that do not fit. Cost O(C T log^2 T) time,
    O(C T) memory. (The convolution of Hyena and Mega: Poli et al. 2023, arXiv:2302.10866; Ma et al. 2022,
    arXiv:2209.10655.)

    >>> long_conv(torch.ones(1, 4, 1), torch.tensor([[1.0, 0.5, 0.25]])).flatten().tolist()
    [1.0, 1.5, 1.75, 1.75]
    """
    for name, one in (("x", x), ("kernel", kernel)):
        is_dense(name, one)
        is_number_type(name, one)
    if x.ndim != 3 or kernel.ndim != 2 or kernel.shape[0] != x.shape[2]:
        raise ValueError(f"kernel: expected (C, K) for x (B, T, C), got {describe(kernel)} and {describe(x)}")
    if state is not None and (state.ndim != 3 or state.shape[::2] != x.shape[::2]):
        raise ValueError(f"state: expected (B, P, C) as x (B, T, C), got {describe(state)} and {describe(x)}")
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    seen = x if state is None else torch.cat([state.to(x.dtype), x], 1)
    rows = _convolved(seen.to(wide).transpose(1, 2), kernel.to(wide))
    return rows.transpose(1, 2)[:, seen.shape[1] - x.shape[1] :].to(x.dtype)


def toeplitz(kernel: Tensor, tokens: int) -> Tensor:
    """The same as matrices (C, T, T): ``kernel[t - s]`` on and below the diagonal.

    >>> toeplitz(torch.tensor([[1.0, 2.0]]), 3)[0].tolist()
    [[1.0, 0.0, 0.0], [2.0, 1.0, 0.0], [0.0, 2.0, 1.0]]
    """
    lags = F.pad(kernel[:, :tokens], (0, max(tokens - kernel.shape[1], 0)))
    distance = torch.arange(tokens, device=kernel.device)[:, None] - torch.arange(tokens, device=kernel.device)
    return torch.where(distance >= 0, lags[:, distance.clamp(min=0)], 0.0)


def _convolved(x: Tensor, kernel: Tensor) -> Tensor:
    """(B, C, T) with (C, K)."""
    tokens = x.shape[2]
    if tokens <= DIRECT:
        taps = (
            kernel[:, :tokens].flip(1).unsqueeze(1)
        )  # each output reads earlier tokens alone, whatever later ones hold
        if not x.numel() or not taps.numel():
            return x * kernel.sum()
        return F.conv1d(F.pad(x, (taps.shape[2] - 1, 0)), taps, groups=x.shape[1])
    half = tokens // 2
    first, second = x[..., :half], x[..., half:]
    # the first half seen from the second: lags 1 ... tokens - 1, read at places half ... tokens - 1 of the convolution
    lags = kernel[:, :tokens]
    size = 1 << (half + lags.shape[1] - 2).bit_length()
    spectrum = torch.fft.rfft(first, size) * torch.fft.rfft(lags, size)
    carried = torch.fft.irfft(spectrum, size)[..., half : half + second.shape[2]]
    carried = F.pad(carried, (0, second.shape[2] - carried.shape[2]))
    return torch.cat([_convolved(first, kernel), _convolved(second, kernel) + carried], -1)
