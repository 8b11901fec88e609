"""The vector-state recurrence, `scan`, and Mamba's `selective_scan`."""

from __future__ import annotations

from torch import Tensor

from regard import backends
from regard.backends import ScanCall, SelectiveScanCall
from regard.checks import describe
from regard.coordinates import can_read
from regard.ops.checks import check_float, check_shape, check_state, tied, widened, without_autocast
from regard.ops.packing import Ids, by_sequence, packed_lengths, segment_starts_of
from regard.ops.states import run_state_call
from regard.transitions import check_log_decay

__all__ = ["scan", "selective_scan"]


def scan(
    log_a: Tensor,
    x: Tensor,
    *,
    state: Tensor | None = None,
    segments: Ids | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """A state of independent numbers: ``y_t = exp(log_a_t) * y_{t-1} + x_t``.

    Args:
        log_a: log-decays <= 0 in nats per token, any floating dtype, as many dimensions as x and broadcasting against
            it; -inf forgets everything before the token, exactly.
        x: ``(B, T, ...)``, any floating dtype.
        state: like ``x[:, 0]``, before the first token; zeros by default. Differentiable.
        segments: ids ``(B, T)`` or ``Segments.from_lengths``, as in `regard.recurrence`.
        backend: a backend by name instead of the first that can.

    Returns:
        y like x, in its dtype, and the state after the last token in the compute dtype (float32, or float64).

    Raises:
        ValueError, TypeError: an argument of the wrong shape, type or range; the text names it.
        BackendUnsupported: `backend` (or `use_backend`) names one that cannot run the call.

    Cost: O(T) per number in time and memory. Martin and Cundy 2018, arXiv:1709.04057, eq. 1.

    >>> import torch, regard
    >>> y, last = regard.scan(torch.full((1, 4, 1), 0.5).log(), torch.ones(1, 4, 1))
    >>> y[0, :, 0].tolist()
    [1.0, 1.5, 1.75, 1.875]
    """
    if not isinstance(x, Tensor) or not x.is_floating_point():
        raise TypeError(f"x: expected a float tensor (B, T, ...), got {describe(x)}")
    if x.ndim < 2:
        raise ValueError(f"x: expected (B, T, ...), got shape {tuple(x.shape)}")
    check_log_decay("log_a", log_a)
    if log_a.ndim != x.ndim or any(a not in (1, b) for a, b in zip(log_a.shape, x.shape, strict=True)):
        raise ValueError(f"log_a: expected a shape that broadcasts to x's {tuple(x.shape)}, got {tuple(log_a.shape)}")
    if log_a.device != x.device:
        raise ValueError(f"log_a: expected device {x.device}, got {log_a.device}")
    batch, tokens = x.shape[:2]
    lengths = packed_lengths(segments, batch, tokens)
    check_state(state, (batch if lengths is None else len(lengths), *x.shape[2:]), x)
    if not lengths:
        segment_starts = None if lengths is not None else segment_starts_of(segments, batch, tokens)
        y, last = run_state_call(ScanCall(x, log_a, state, segment_starts), backend)
        return y, last if lengths is None else last[:0]
    with without_autocast(x):
        (wide,) = widened(x, log_a)
        assert wide is not None
        timed = wide.expand(1, tokens, *log_a.shape[2:])

        def body(parts: list[Tensor], state: Tensor | None, _: Tensor) -> tuple[Tensor, Tensor]:
            return backends.dispatch(ScanCall(parts[0], parts[1], state, None), backend)

        y, last = by_sequence(lengths, [(x, 1), (timed, 1)], state, body, axis=1)
        y = y if y.numel() else tied(y, ScanCall(x, log_a, state, None).tensors)
        return y.to(x.dtype), last


def selective_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    *,
    state: Tensor | None = None,
    segments: Ids | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Mamba's scan: a diagonal state of N numbers per channel; steps, inputs and read-outs depend on the token.

    ``h_t = exp(dt_t A) * h_{t-1} + dt_t x_t B_t``, ``y_t = h_t C_t + D x_t``.

    Args:
        x: ``(B, T, d)``, any floating dtype.
        dt: ``(B, T, d)``, steps >= 0, after their softplus.
        A: ``(d, N)``, <= 0 (the numbers themselves, not their logarithm).
        B, C: ``(B, T, N)``; D: ``(d,)`` or None.
        state: ``(B, d, N)`` before the first token; zeros by default. Differentiable.
        segments: ids ``(B, T)`` or ``Segments.from_lengths``, as in `regard.recurrence`.
        backend: a backend by name instead of the first that can.

    Returns:
        y ``(B, T, d)`` in x's dtype, and the state after the last token in the compute dtype.

    Raises:
        ValueError, TypeError: an argument of the wrong shape, type or range; the text names it.
        BackendUnsupported: `backend` (or `use_backend`) names one that cannot run the call.

    Cost: about 6 T d N FLOPs; memory O(T d + d N): no state but the last is kept, backward computes them again.

    Gu and Dao 2023, arXiv:2312.00752, algorithm 2.

    >>> import torch, regard
    >>> x = torch.ones(1, 3, 2)
    >>> y, h = regard.selective_scan(x, x, -torch.ones(2, 4), torch.ones(1, 3, 4), torch.ones(1, 3, 4))
    >>> y.shape, h.shape
    (torch.Size([1, 3, 2]), torch.Size([1, 2, 4]))
    """
    check_float("x", x, 3, "(B, T, d)")
    batch, tokens, width = x.shape
    check_float("A", A, 2, "(d, N)", x)
    states = A.shape[1]
    check_shape("A", A, (width, states))
    for name, given, size in (("dt", dt, width), ("B", B, states), ("C", C, states)):
        check_float(name, given, 3, (batch, tokens, size), x)
        check_shape(name, given, (batch, tokens, size))
    if D is not None:
        check_float("D", D, 1, f"({width},)", x)
        check_shape("D", D, (width,))
    if can_read(A) and A.numel() and float(A.detach().max()) > 0:
        raise ValueError(f"A: expected numbers <= 0, got {float(A.detach().max()):.6g}")
    if can_read(dt) and dt.numel() and float(dt.detach().min()) < 0:
        raise ValueError(f"dt: expected steps >= 0, after their softplus, got {float(dt.detach().min()):.6g}")
    lengths = packed_lengths(segments, batch, tokens)
    check_state(state, (batch if lengths is None else len(lengths), width, states), x)
    if not lengths:
        segment_starts = None if lengths is not None else segment_starts_of(segments, batch, tokens)
        y, last = run_state_call(SelectiveScanCall(x, dt, A, B, C, D, state, segment_starts), backend)
        return y, last if lengths is None else last[:0]
    with without_autocast(x):
        everywhere, skip = widened(x, A, D)

        def body(parts: list[Tensor], state: Tensor | None, _: Tensor) -> tuple[Tensor, Tensor]:
            x, dt, B, C = parts
            assert everywhere is not None
            return backends.dispatch(SelectiveScanCall(x, dt, everywhere, B, C, skip, state, None), backend)

        y, last = by_sequence(lengths, [(each, 1) for each in (x, dt, B, C)], state, body, axis=1)
        y = y if y.numel() else tied(y, SelectiveScanCall(x, dt, A, B, C, D, state, None).tensors)
        return y.to(x.dtype), last
