"""Causal convolutions as long as the sequence, in time T log^2 T, without a rounding that later tokens could touch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.checks import describe, is_dense, is_number_type
from regard.ops.checks import without_autocast

__all__ = ["long_conv", "toeplitz"]

DIRECT = 128  # tokens up to which sums are taken one by one
AT_ONCE = 1 << 17  # numbers whose transforms are formed together
PARTS = 8  # of a longer sequence, each of which is convolved by itself


def long_conv(x: Tensor, kernel: Tensor, *, state: Tensor | None = None) -> Tensor:
    """``y_t = sum_{s <= t} kernel_{t - s} x_s`` per channel.

    Args:
        x: (B, T, C).
        kernel: (C, K): lag 0 first; lags from K on count 0. K may be smaller or larger than T.
        state: (B, P, C), the inputs before the first token; none by default.

    Returns:
        (B, T, C) in x's dtype, computed in float32 at least.

    Parts of the sequence are combined by FFT: what earlier parts give to a later one are circular convolutions of
    earlier tokens alone, and each part is convolved in the same way; so a later token cannot even change a rounding of
    an earlier result, as one FFT of everything would.
    Differentiable in all three. Raises TypeError and ValueError for tensors that do not fit. Cost O(C T log^2 T) time,
    O(C T) memory. (The convolution of Hyena and Mega: Poli et al. 2023, arXiv:2302.10866; Ma et al. 2022,
    arXiv:2209.10655.)

    >>> long_conv(torch.ones(1, 4, 1), torch.tensor([[1.0, 0.5, 0.25]])).flatten().tolist()
    [1.0, 1.5, 1.75, 1.75]
    """
    for name, one in (("x", x), ("kernel", kernel), ("state", state)):
        if name == "state" and one is None:
            continue
        if not isinstance(one, Tensor):
            raise TypeError(f"{name}: expected a tensor, got {describe(one)}")
        is_dense(name, one)
        is_number_type(name, one)
    if x.ndim != 3 or kernel.ndim != 2 or kernel.shape[0] != x.shape[2]:
        raise ValueError(f"kernel: expected (C, K) for x (B, T, C), got {describe(kernel)} and {describe(x)}")
    if state is not None and (state.ndim != 3 or state.shape[::2] != x.shape[::2]):
        raise ValueError(f"state: expected (B, P, C) as x (B, T, C), got {describe(state)} and {describe(x)}")
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    seen = x if state is None else torch.cat([state.to(x.dtype), x], 1)
    with without_autocast(x):
        rows = _by_channels(seen.to(wide).transpose(1, 2), kernel.to(wide))
    return rows.transpose(1, 2)[:, seen.shape[1] - x.shape[1] :].to(x.dtype)


def toeplitz(kernel: Tensor, tokens: int) -> Tensor:
    """The same as matrices (C, T, T): ``kernel[t - s]`` on and below the diagonal.

    >>> toeplitz(torch.tensor([[1.0, 2.0]]), 3)[0].tolist()
    [[1.0, 0.0, 0.0], [2.0, 1.0, 0.0], [0.0, 2.0, 1.0]]
    """
    lags = F.pad(kernel[:, :tokens], (0, max(tokens - kernel.shape[1], 0)))
    distance = torch.arange(tokens, device=kernel.device)[:, None] - torch.arange(tokens, device=kernel.device)
    return torch.where(distance >= 0, lags[:, distance.clamp(min=0)], 0.0)


def _by_channels(x: Tensor, kernel: Tensor) -> Tensor:
    """`_convolved` of a few channels at a time, whose spectra stay in a core's cache."""
    batch, channels, tokens = x.shape
    if torch.compiler.is_compiling() or x.device.type != "cpu" or tokens <= DIRECT:
        return _convolved(x, kernel)
    together = max(AT_ONCE // (batch * tokens) // 16 * 16, 16) if x.numel() else channels
    if channels <= together:
        return _convolved(x, kernel)
    parts = zip(x.split(together, 1), kernel.split(together), strict=True)
    return torch.cat([_convolved(*part) for part in parts], 1)


def _convolved(x: Tensor, kernel: Tensor) -> Tensor:
    """(B, C, T) with (C, K)."""
    tokens = x.shape[2]
    if not x.numel() or not kernel.numel():
        return x * kernel.sum()
    if tokens <= DIRECT:
        # each output reads earlier tokens alone, whatever later ones hold
        taps = kernel[:, :tokens].flip(1).unsqueeze(1)
        return F.conv1d(F.pad(x, (taps.shape[2] - 1, 0)), taps, groups=x.shape[1])
    batch, channels, _ = x.shape
    size = max(1 << (-(-tokens // PARTS) - 1).bit_length(), DIRECT)  # of a part, a power of two
    parts = -(-tokens // size)
    blocks = F.pad(x, (0, parts * size - tokens)).view(batch, channels, parts, size)
    # what a part gives to the d-th after it: lags (d - 1) size + 1 ... (d + 1) size - 1, a circular product of 2 size
    reach = min(parts - 1, -(-kernel.shape[1] // size))
    lags = F.pad(kernel[:, : (reach + 1) * size], (0, max((reach + 1) * size - kernel.shape[1], 0)))
    filters = torch.fft.rfft(lags.unfold(1, 2 * size, size))  # (C, reach, frequencies)
    given = torch.fft.rfft(blocks[:, :, : parts - 1], 2 * size)
    spectra = filters[:, :1] * given
    for d in range(1, reach):
        spectra[:, :, d:].addcmul_(filters[:, d : d + 1], given[:, :, : parts - 1 - d])
    carried = torch.fft.irfft(spectra, 2 * size)[..., size:]
    inner = _convolved(blocks.transpose(1, 2).flatten(0, 1), kernel[:, :size]).unflatten(0, (batch, parts))
    whole: Tensor = inner.transpose(1, 2) + F.pad(carried, (0, 0, 1, 0))
    return whole.flatten(2)[..., :tokens]
