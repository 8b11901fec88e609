"""The kernels that carry a state as operators: their operands, structs (csrc/recurrent.h) and results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from regard.backends.macs import delta_macs, matrix_step_macs, state_macs
from regard.backends.native import library
from regard.backends.native.operator import Operator, Outputs, address, is_watched, room
from regard.backends.native.structs import (
    CONV,
    CONV_GRAD,
    RECURRENCE,
    RECURRENCE_GRAD,
    SCAN,
    SCAN_GRAD,
    SELECTIVE,
    SELECTIVE_GRAD,
)
from regard.backends.recurrent import reference
from regard.backends.recurrent.call import RecurrenceCall, ScanCall, SelectiveScanCall, ShortConvCall
from regard.backends.recurrent.matrices import chunked_recurrence
from regard.backends.recurrent.vectors import blocked_scan, blocked_selective_scan

__all__ = ["run_conv", "run_recurrence", "run_scan", "run_selective_scan"]

Grads = Sequence[Tensor | None]


def _wide(x: Tensor | None) -> Tensor | None:
    return x if x is None or x.dtype == torch.float32 else x.to(torch.float32)


def _unit(x: Tensor) -> Tensor:
    """The tensor with neighbouring channels, copied where they lie apart."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _blocks(count: int, size: int) -> int:
    return (count + size - 1) // size


# ---- recurrence ------------------------------------------------------------------------------------------------------


class _Recurrence(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor | None
    log_decay: Tensor | None
    state: Tensor | None
    segment_starts: Tensor | None
    scale: float


def run_recurrence(call: RecurrenceCall) -> tuple[Tensor, Tensor]:
    """`regard.recurrence` by the kernels."""
    batch, _, heads, tokens, key_dim, value_dim = call.sizes
    if not (batch and heads and tokens and key_dim and value_dim):
        return reference.run(call)
    q, k, v = (_unit(x.float() if x.dtype == torch.float16 else x) for x in (call.q, call.k, call.v))
    decay, beta = _wide(call.log_decay), _wide(call.beta)
    if decay is not None and decay.ndim == 1:
        decay = decay[None, :, None].expand(batch, -1, tokens)
    if decay is not None and decay.ndim == 4:
        decay = _unit(decay)
    state = _wide(call.state)
    operands = _Recurrence(
        q, k, v, beta, decay, None if state is None else state.contiguous(), call.segment_starts, call.scale
    )
    if call.state_out is not None and not is_watched(
        (*operands[:-1], call.state_out)
    ):  # no gradients: nothing to record
        out, _, kept = _empty_recurrence(operands, False)
        library.fresh(out)
        _recurrence_forward(operands, (out, call.state_out, kept))
        return out, call.state_out
    return _recurrence(operands)[:2]


def _empty_recurrence(one: _Recurrence, keep: bool) -> Outputs:
    batch, heads, tokens, value_dim = one.v.shape
    key_dim = one.q.shape[3]
    every = library.number("regard_recurrence_every", int(key_dim), int(value_dim))
    out = one.v.new_empty(batch, heads, tokens, value_dim)
    last = one.v.new_empty(batch, heads, key_dim, value_dim, dtype=torch.float32)
    count = _blocks(tokens, every) if keep else 0
    kept = one.v.new_empty(batch * heads * count * key_dim * value_dim, dtype=torch.float32)
    return out, last, kept


def _recurrence_record(one: _Recurrence, outputs: Outputs) -> bytes:
    q, k, v, beta, decay, state, segment_starts, scale = one
    out, last, kept = outputs
    batch, heads, tokens, value_dim = v.shape
    channel = decay is not None and decay.ndim == 4
    return RECURRENCE.pack(
        *(batch, q.shape[1], heads, tokens, q.shape[3], value_dim),
        *(q.dtype == torch.bfloat16, channel, scale),
        *(q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), out.dtype == torch.float32),
        *(*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *out.stride()[:3]),
        *(address(beta), *((0, 0, 0) if beta is None else beta.stride())),
        *(address(decay), *((0, 0, 0) if decay is None else decay.stride()[:3])),
        *(address(segment_starts), address(state), last.data_ptr(), address(kept), kept.numel()),
    )


def _recurrence_forward(one: _Recurrence, outputs: Outputs) -> None:
    library.run("regard_recurrence_forward", _recurrence_record(one, outputs))


def _recurrence_backward(
    one: _Recurrence, outputs: Outputs, d_out: Tensor, d_last: Tensor | None, grads: Grads
) -> None:
    rooms = [None if x is None else room(grad, x) for grad, x in zip(grads[:5], one[:5], strict=True)]
    rooms.append(room(grads[5], outputs[1]))
    record = RECURRENCE_GRAD.pack(*map(address, (d_out, d_last, *rooms)))
    library.run("regard_recurrence_backward", _recurrence_record(one, outputs), record)


def _plain_recurrence(one: _Recurrence) -> tuple[Tensor, Tensor]:
    return chunked_recurrence(RecurrenceCall(*one[:7], one.scale, None))


def _recurrence_macs(one: _Recurrence) -> tuple[int, int]:
    """Backward: the products again, and two for each."""
    batch, heads, tokens, value_dim = one.v.shape
    key_heads, key_dim, delta = one.q.shape[1], one.q.shape[3], one.beta is not None
    if tokens == 1:
        macs = matrix_step_macs(heads, key_dim, value_dim, decays=one.log_decay is not None, delta=delta)
    elif delta:
        macs = delta_macs(heads, key_dim, value_dim, tokens)
    else:
        macs = state_macs(key_heads, heads, key_dim, value_dim, tokens)
    return batch * macs, 3 * batch * macs


_recurrence = Operator(
    "recurrence",
    _Recurrence,
    6,
    empty=_empty_recurrence,
    forward=_recurrence_forward,
    backward=_recurrence_backward,
    plain=_plain_recurrence,
    macs=_recurrence_macs,
)


# ---- scan ------------------------------------------------------------------------------------------------------------


class _Scan(NamedTuple):
    log_a: Tensor
    x: Tensor
    state: Tensor | None
    segment_starts: Tensor | None


def run_scan(call: ScanCall) -> tuple[Tensor, Tensor]:
    """`regard.scan` by the kernels."""
    if not call.x.numel():
        return reference.run(call)
    x = call.x.float()
    log_a, state = call.log_a.float().expand_as(x), _wide(call.state)
    state = None if state is None else state.contiguous()
    return _scan(_Scan(log_a.contiguous(), x.contiguous(), state, call.segment_starts))[:2]


def _empty_scan(one: _Scan, keep: bool) -> Outputs:
    x = one.x
    return torch.empty_like(x), x.new_empty(x.shape[0], *x.shape[2:]), x.new_empty(0)


def _scan_record(one: _Scan, outputs: Outputs) -> bytes:
    batch, tokens = one.x.shape[:2]
    pointers = (address(t) for t in (one.log_a, one.x, one.segment_starts, one.state, outputs[0], outputs[1]))
    return SCAN.pack(batch, tokens, one.x.numel() // (batch * tokens), *pointers)


def _scan_forward(one: _Scan, outputs: Outputs) -> None:
    library.run("regard_scan_forward", _scan_record(one, outputs))


def _scan_backward(one: _Scan, outputs: Outputs, d_y: Tensor, d_last: Tensor | None, grads: Grads) -> None:
    d_log_a, d_x, d_state = map(room, grads, (one.log_a, one.x, outputs[1]))
    record = SCAN_GRAD.pack(*map(address, (outputs[0], d_y, d_last, d_log_a, d_x, d_state)))
    library.run("regard_scan_backward", _scan_record(one, outputs), record)


def _plain_scan(one: _Scan) -> tuple[Tensor, Tensor]:
    return blocked_scan(ScanCall(one.x, one.log_a, one.state, one.segment_starts))


def _scan_macs(one: _Scan) -> tuple[int, int]:
    return one.x.numel(), 2 * one.x.numel()


_scan = Operator(
    "scan",
    _Scan,
    3,
    empty=_empty_scan,
    forward=_scan_forward,
    backward=_scan_backward,
    plain=_plain_scan,
    macs=_scan_macs,
)


# ---- selective scan --------------------------------------------------------------------------------------------------


class _Selective(NamedTuple):
    x: Tensor
    dt: Tensor
    A: Tensor
    B: Tensor
    C: Tensor
    D: Tensor | None
    state: Tensor | None
    segment_starts: Tensor | None


def run_selective_scan(call: SelectiveScanCall) -> tuple[Tensor, Tensor]:
    """`regard.selective_scan` by the kernels."""
    if not call.x.numel() or not call.A.numel():
        return reference.run(call)
    x, dt, A, B, C = (t.float().contiguous() for t in (call.x, call.dt, call.A, call.B, call.C))
    D, state = (None if t is None else t.float().contiguous() for t in (call.D, call.state))
    return _selective(_Selective(x, dt, A, B, C, D, state, call.segment_starts))[:2]


def _empty_selective(one: _Selective, keep: bool) -> Outputs:
    batch, tokens, width = one.x.shape
    states = one.A.shape[1]
    count = _blocks(tokens, library.number("regard_selective_every")) if keep else 0
    kept = one.x.new_empty(batch * count * width * states)
    return torch.empty_like(one.x), one.x.new_empty(batch, width, states), kept


def _selective_record(one: _Selective, outputs: Outputs) -> bytes:
    y, last, kept = outputs
    pointers = (address(t) for t in (*one[:6], one.segment_starts, one.state, y, last, kept))
    return SELECTIVE.pack(*one.x.shape, one.A.shape[1], *pointers, kept.numel())


def _selective_forward(one: _Selective, outputs: Outputs) -> None:
    library.run("regard_selective_forward", _selective_record(one, outputs))


def _selective_backward(one: _Selective, outputs: Outputs, d_y: Tensor, d_last: Tensor | None, grads: Grads) -> None:
    d_x, d_dt, d_A, d_B, d_C = map(room, grads[:5], one[:5])
    d_D, d_state = None if one.D is None else room(grads[5], one.D), room(grads[6], outputs[1])
    groups = _blocks(d_x.shape[2], library.number("regard_selective_group"))
    partial_b, partial_c = (d_B.new_empty(groups, *d_B.shape) for _ in range(2))
    first = (address(t) for t in (d_y, d_last, d_x, d_dt, d_A, partial_b, partial_c))
    record = SELECTIVE_GRAD.pack(*first, groups, address(d_D), address(d_state))
    library.run("regard_selective_backward", _selective_record(one, outputs), record)
    torch.sum(partial_b, 0, out=d_B)
    torch.sum(partial_c, 0, out=d_C)


def _plain_selective(one: _Selective) -> tuple[Tensor, Tensor]:
    return blocked_selective_scan(SelectiveScanCall(*one))


def _selective_macs(one: _Selective) -> tuple[int, int]:
    """For each number of the state a decay, a write and a read; backward, these again, and two for each."""
    macs = 3 * one.x.numel() * one.A.shape[1]
    return macs, 3 * macs


_selective = Operator(
    "selective_scan",
    _Selective,
    7,
    empty=_empty_selective,
    forward=_selective_forward,
    backward=_selective_backward,
    plain=_plain_selective,
    macs=_selective_macs,
)


# ---- short convolution -----------------------------------------------------------------------------------------------


class _Conv(NamedTuple):
    x: Tensor
    taps: Tensor
    bias: Tensor | None
    state: Tensor | None
    segment_starts: Tensor | None


def run_conv(call: ShortConvCall) -> tuple[Tensor, Tensor]:
    """`regard.short_conv` by the kernels; the second result is empty."""
    if not call.x.numel():
        return reference.run(call)
    x, taps = _unit(call.x.float()), call.weight.float().t().contiguous()
    bias, state = (None if t is None else t.float().contiguous() for t in (call.bias, call.state))
    return _conv(_Conv(x, taps, bias, state, call.segment_starts))[:2]


def _empty_conv(one: _Conv, keep: bool) -> Outputs:
    x = one.x
    return x.new_empty(x.shape), x.new_empty(0), x.new_empty(0)


def _conv_record(one: _Conv, outputs: Outputs) -> bytes:
    pointers = (address(t) for t in (one.taps, one.bias, one.segment_starts, one.state, outputs[0]))
    return CONV.pack(*one.x.shape, one.taps.shape[0], one.x.data_ptr(), *one.x.stride()[:2], *pointers)


def _conv_forward(one: _Conv, outputs: Outputs) -> None:
    library.run("regard_conv_forward", _conv_record(one, outputs))


def _conv_backward(one: _Conv, outputs: Outputs, d_y: Tensor, d_last: Tensor | None, grads: Grads) -> None:
    d_x, d_taps = map(room, grads[:2], one[:2])
    d_bias = None if one.bias is None else room(grads[2], one.bias)
    d_state = grads[3]
    if d_state is None:
        d_state = d_x.new_empty(d_x.shape[0], one.taps.shape[0] - 1, d_x.shape[2])
    record = CONV_GRAD.pack(*map(address, (d_y, d_x, d_taps, d_bias, d_state)))
    library.run("regard_conv_backward", _conv_record(one, outputs), record)


def _plain_conv(one: _Conv) -> tuple[Tensor, Tensor]:
    return reference.convolution(ShortConvCall(one.x, one.taps.t(), one.bias, one.state, one.segment_starts))


def _conv_macs(one: _Conv) -> tuple[int, int]:
    macs = one.x.numel() * one.taps.shape[0]
    return macs, 2 * macs


_conv = Operator(
    "short_conv",
    _Conv,
    4,
    empty=_empty_conv,
    forward=_conv_forward,
    backward=_conv_backward,
    plain=_plain_conv,
    macs=_conv_macs,
)
