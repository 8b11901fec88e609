"""Convolutions along time: `short_conv`, causal and depthwise, with a carried state."""

from __future__ import annotations

import torch
from torch import Tensor

from regard import backends
from regard.backends import ShortConvCall
from regard.ops.checks import check_float, check_shape, check_state, tied, widened, without_autocast
from regard.ops.packing import Ids, by_sequence, packed_lengths, segment_starts_of

__all__ = ["convolve", "short_conv"]


def short_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    state: Tensor | None = None,
    segments: Ids | None = None,
) -> tuple[Tensor, Tensor]:
    """A causal depthwise convolution of a few taps: ``y_t = bias + sum_i weight[:, i] * x_{t - W + 1 + i}``.

    Args:
        x: ``(B, T, C)``, any floating dtype.
        weight: ``(C, W)``, the last tap is the current token's; bias: ``(C,)`` or None. No activation.
        state: ``(B, W - 1, C)``, the inputs before the first token; zeros by default. Differentiable.
        segments: ids ``(B, T)`` or ``Segments.from_lengths``, as in `regard.recurrence`: no tap reaches across.

    Returns:
        y ``(B, T, C)`` in x's dtype, and the last W - 1 inputs, zeros where they are of an earlier segment, in the
        compute dtype (float32, or float64).

    Raises:
        ValueError, TypeError: an argument of the wrong shape or type; the text names it.

    Cost: 2 T C W FLOPs.

    >>> import torch, regard
    >>> y, tail = regard.short_conv(torch.ones(1, 4, 1), torch.ones(1, 3))
    >>> y[0, :, 0].tolist(), tail.shape
    ([1.0, 2.0, 3.0, 3.0], torch.Size([1, 2, 1]))
    """
    check_float("x", x, 3, "(B, T, C)")
    batch, tokens, channels = x.shape
    check_float("weight", weight, 2, f"({channels}, W)", x)
    if weight.shape[0] != channels or not weight.shape[1]:
        raise ValueError(f"weight: expected ({channels}, W) with W >= 1, got {tuple(weight.shape)}")
    if bias is not None:
        check_float("bias", bias, 1, f"({channels},)", x)
        check_shape("bias", bias, (channels,))
    taps = weight.shape[1]
    lengths = packed_lengths(segments, batch, tokens)
    check_state(state, (batch if lengths is None else len(lengths), taps - 1, channels), x)
    with without_autocast(x):
        if not lengths:
            segment_starts = None if lengths is not None else segment_starts_of(segments, batch, tokens)
            y, conv_state = convolve(x, weight, bias, state, segment_starts)
            return y, conv_state if lengths is None else conv_state[:0]

        taken, added = widened(x, weight, bias)

        def body(parts: list[Tensor], state: Tensor | None, lengths: Tensor) -> tuple[Tensor, Tensor]:
            assert taken is not None
            return convolve(parts[0], taken, added, state, None, lengths)

        y, conv_state = by_sequence(lengths, [(x, 1)], state, body, axis=1)
        return y if y.numel() else tied(y, [t for t in (x, weight, bias, state) if t is not None]), conv_state


def convolve(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor | None,
    segment_starts: Tensor | None,
    lengths: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`short_conv` without checks; `segment_starts` (B, T) bool, `lengths` (B,): how many tokens are real."""
    call = ShortConvCall(x, weight, bias, state, segment_starts)
    y, _ = backends.dispatch(call)
    (_, tokens, channels), earlier = x.shape, weight.shape[1] - 1
    number = None if segment_starts is None else torch.nn.functional.pad(segment_starts.cumsum(1), (earlier, 0))
    if lengths is None:
        late = x[:, max(tokens - earlier, 0) :] if isinstance(tokens, int) else x  # an export may leave the length open
        conv_state = ShortConvCall(late, weight, None, state, None).line[:, late.shape[1] :]
        ids = None if number is None else number[:, tokens:]
    else:
        where = lengths[:, None] + torch.arange(earlier, device=x.device)
        conv_state = call.line.gather(1, where[..., None].expand(-1, -1, channels))
        ids = None if number is None else number.gather(1, where)
    if ids is not None and number is not None and earlier:
        latest = number[:, -1:] if lengths is None else number.gather(1, (lengths + earlier - 1)[:, None])
        conv_state = torch.where((ids == latest)[..., None], conv_state, 0.0)
    y = y if y.numel() else tied(y, call.tensors)
    return y.to(x.dtype), conv_state
