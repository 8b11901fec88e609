"""The kernels that carry a state as operators: their records (csrc/recurrent.h), arguments and results."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from regard.backends.native import library
from regard.backends.native.operator import Operator, Outputs, Tensors, address
from regard.backends.recurrent import reference
from regard.backends.recurrent.call import RecurrenceCall, ScanCall, SelectiveScanCall, ShortConvCall
from regard.backends.recurrent.matrices import chunked_recurrence
from regard.backends.recurrent.vectors import blocked_scan, blocked_selective_scan

__all__ = ["run_conv", "run_recurrence", "run_scan", "run_selective_scan"]

Numbers = tuple[float, ...]
SELECTIVE_EVERY, SELECTIVE_GROUP = 64, 256  # as csrc/scans.inc has them: tokens between states kept, channels a sum


def _wide(x: Tensor | None) -> Tensor | None:
    return x if x is None or x.dtype == torch.float32 else x.to(torch.float32)


def _unit(x: Tensor) -> Tensor:
    """The tensor with neighbouring channels, copied where they lie apart."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _blocks(count: int, size: int) -> int:
    return (count + size - 1) // size


# ---- recurrence ------------------------------------------------------------------------------------------------------


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
    state, starts = _wide(call.state), call.starts
    arguments = [q, k, v, beta, decay, None if state is None else state.contiguous(), starts]
    if call.into is not None and not torch.compiler.is_compiling():  # no gradients: nothing to record
        out, _, kept = _empty_recurrence(arguments, (), False)
        library.fresh(out)
        _recurrence_forward(arguments, (call.scale,), (out, call.into, kept))
        return out, call.into
    return _recurrence(arguments, [call.scale])


def _empty_recurrence(tensors: Tensors, numbers: Numbers, keep: bool) -> Outputs:
    q, k, v, *_ = tensors
    assert q is not None and k is not None and v is not None
    batch, heads, tokens, value_dim = v.shape
    key_dim = q.shape[3]
    every = 128 if key_dim * value_dim > 96 * 96 else 256
    out = v.new_empty(batch, heads, tokens, value_dim)
    last = v.new_empty(batch, heads, key_dim, value_dim, dtype=torch.float32)
    count = _blocks(tokens, every) if keep else 0  # as csrc/recurrence.inc has it
    kept = v.new_empty(batch * heads * count * key_dim * value_dim, dtype=torch.float32)
    return out, last, kept


def _recurrence_record(tensors: Tensors, numbers: Numbers, outputs: Outputs) -> bytes:
    q, k, v, beta, decay, state, starts = tensors
    out, last, kept = outputs
    assert q is not None and k is not None and v is not None
    batch, heads, tokens, value_dim = v.shape
    channel = decay is not None and decay.ndim == 4
    return library.RECURRENCE.pack(
        *(batch, q.shape[1], heads, tokens, q.shape[3], value_dim),
        *(q.dtype == torch.bfloat16, channel, numbers[0]),
        *(q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), out.dtype == torch.float32),
        *(*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *out.stride()[:3]),
        *(address(beta), *((0, 0, 0) if beta is None else beta.stride())),
        *(address(decay), *((0, 0, 0) if decay is None else decay.stride()[:3])),
        *(address(starts), address(state), last.data_ptr(), address(kept if kept.numel() else None)),
    )


def _recurrence_forward(tensors: Tensors, numbers: Numbers, outputs: Outputs) -> None:
    library.run("regard_recurrence_forward", _recurrence_record(tensors, numbers, outputs))


def _recurrence_backward(
    tensors: Tensors, numbers: Numbers, outputs: Outputs, d_out: Tensor, d_last: Tensor | None, grads: Sequence[Tensor]
) -> None:
    d_q, d_k, d_v, d_beta, d_decay, d_state = grads
    first = d_state if d_state.numel() else torch.empty_like(outputs[1])
    record = library.RECURRENCE_GRAD.pack(
        *(d_out.data_ptr(), address(d_last), d_q.data_ptr(), d_k.data_ptr(), d_v.data_ptr()),
        *(address(x if x.numel() else None) for x in (d_beta, d_decay)),
        first.data_ptr(),
    )
    library.run("regard_recurrence_backward", _recurrence_record(tensors, numbers, outputs), record)


def _plain_recurrence(tensors: Tensors, numbers: Numbers) -> tuple[Tensor, Tensor]:
    q, k, v, beta, decay, state, starts = tensors
    assert q is not None and k is not None and v is not None
    return chunked_recurrence(RecurrenceCall(q, k, v, beta, decay, state, starts, numbers[0], None))


_recurrence = Operator(
    "recurrence",
    "Tensor q, Tensor k, Tensor v, Tensor? beta, Tensor? log_decay, Tensor? state, Tensor? starts",
    6,
    empty=_empty_recurrence,
    forward=_recurrence_forward,
    backward=_recurrence_backward,
    plain=_plain_recurrence,
)


# ---- scan ------------------------------------------------------------------------------------------------------------


def run_scan(call: ScanCall) -> tuple[Tensor, Tensor]:
    """`regard.scan` by the kernels."""
    if not call.x.numel():
        return reference.run(call)
    x = call.x.float()
    log_a, state = call.log_a.float().expand_as(x), _wide(call.state)
    flat = [log_a.contiguous(), x.contiguous(), None if state is None else state.contiguous(), call.starts]
    return _scan(flat)


def _empty_scan(tensors: Tensors, numbers: Numbers, keep: bool) -> Outputs:
    x = tensors[1]
    assert x is not None
    return torch.empty_like(x), x.new_empty(x.shape[0], *x.shape[2:]), x.new_empty(0)


def _scan_record(tensors: Tensors, outputs: Outputs) -> bytes:
    log_a, x, state, starts = tensors
    assert log_a is not None and x is not None
    batch, tokens = x.shape[:2]
    pointers = (address(t) for t in (log_a, x, starts, state, outputs[0], outputs[1]))
    return library.SCAN.pack(batch, tokens, x.numel() // (batch * tokens), *pointers)


def _scan_forward(tensors: Tensors, numbers: Numbers, outputs: Outputs) -> None:
    library.run("regard_scan_forward", _scan_record(tensors, outputs))


def _scan_backward(
    tensors: Tensors, numbers: Numbers, outputs: Outputs, d_y: Tensor, d_last: Tensor | None, grads: Sequence[Tensor]
) -> None:
    d_log_a, d_x, d_state = grads
    first = d_state if d_state.numel() else torch.empty_like(outputs[1])
    record = library.SCAN_GRAD.pack(*(address(t) for t in (outputs[0], d_y, d_last, d_log_a, d_x, first)))
    library.run("regard_scan_backward", _scan_record(tensors, outputs), record)


def _plain_scan(tensors: Tensors, numbers: Numbers) -> tuple[Tensor, Tensor]:
    log_a, x, state, starts = tensors
    assert log_a is not None and x is not None
    return blocked_scan(ScanCall(x, log_a, state, starts))


_scan = Operator(
    "scan",
    "Tensor log_a, Tensor x, Tensor? state, Tensor? starts",
    3,
    empty=_empty_scan,
    forward=_scan_forward,
    backward=_scan_backward,
    plain=_plain_scan,
)


# ---- selective scan --------------------------------------------------------------------------------------------------


def run_selective_scan(call: SelectiveScanCall) -> tuple[Tensor, Tensor]:
    """`regard.selective_scan` by the kernels."""
    if not call.x.numel() or not call.A.numel():
        return reference.run(call)
    given = (call.x, call.dt, call.A, call.B, call.C, call.D, call.state)
    wide = [None if t is None else t.float().contiguous() for t in given]
    return _selective([*wide, call.starts])


def _empty_selective(tensors: Tensors, numbers: Numbers, keep: bool) -> Outputs:
    x, _, A, *_ = tensors
    assert x is not None and A is not None
    batch, tokens, width = x.shape
    last = x.new_empty(batch, width, A.shape[1])
    kept = x.new_empty(batch * (_blocks(tokens, SELECTIVE_EVERY) if keep else 0) * width * A.shape[1])
    return torch.empty_like(x), last, kept


def _selective_record(tensors: Tensors, outputs: Outputs) -> bytes:
    x, dt, A, B, C, D, state, starts = tensors
    y, last, kept = outputs
    assert x is not None and A is not None
    pointers = (address(t) for t in (x, dt, A, B, C, D, starts, state, y, last, kept if kept.numel() else None))
    return library.SELECTIVE.pack(*x.shape, A.shape[1], *pointers)


def _selective_forward(tensors: Tensors, numbers: Numbers, outputs: Outputs) -> None:
    library.run("regard_selective_forward", _selective_record(tensors, outputs))


def _selective_backward(
    tensors: Tensors, numbers: Numbers, outputs: Outputs, d_y: Tensor, d_last: Tensor | None, grads: Sequence[Tensor]
) -> None:
    d_x, d_dt, d_A, d_B, d_C, d_D, d_state = grads
    first = d_state if d_state.numel() else torch.empty_like(outputs[1])
    groups = _blocks(d_x.shape[2], SELECTIVE_GROUP)
    partial_b, partial_c = (d_B.new_empty(groups, *d_B.shape) for _ in range(2))
    pointers = (d_y, d_last, d_x, d_dt, d_A, partial_b, partial_c, d_D if d_D.numel() else None, first)
    record = library.SELECTIVE_GRAD.pack(*(address(t) for t in pointers))
    library.run("regard_selective_backward", _selective_record(tensors, outputs), record)
    torch.sum(partial_b, 0, out=d_B)
    torch.sum(partial_c, 0, out=d_C)


def _plain_selective(tensors: Tensors, numbers: Numbers) -> tuple[Tensor, Tensor]:
    x, dt, A, B, C, D, state, starts = tensors
    assert x is not None and dt is not None and A is not None and B is not None and C is not None
    return blocked_selective_scan(SelectiveScanCall(x, dt, A, B, C, D, state, starts))


_selective = Operator(
    "selective_scan",
    "Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor? D, Tensor? state, Tensor? starts",
    7,
    empty=_empty_selective,
    forward=_selective_forward,
    backward=_selective_backward,
    plain=_plain_selective,
)


# ---- short convolution -----------------------------------------------------------------------------------------------


def run_conv(call: ShortConvCall) -> tuple[Tensor, Tensor]:
    """`regard.short_conv` by the kernels; the second result is empty."""
    if not call.x.numel():
        return reference.run(call)
    x, taps = _unit(call.x.float()), call.weight.float().t().contiguous()
    bias, state = (None if t is None else t.float().contiguous() for t in (call.bias, call.state))
    return _conv([x, taps, bias, state, call.starts])


def _empty_conv(tensors: Tensors, numbers: Numbers, keep: bool) -> Outputs:
    x = tensors[0]
    assert x is not None
    return x.new_empty(x.shape), x.new_empty(0), x.new_empty(0)


def _conv_record(tensors: Tensors, outputs: Outputs) -> bytes:
    x, taps, bias, state, starts = tensors
    assert x is not None and taps is not None
    pointers = (address(t) for t in (taps, bias, starts, state, outputs[0]))
    return library.CONV.pack(*x.shape, taps.shape[0], x.data_ptr(), *x.stride()[:2], *pointers)


def _conv_forward(tensors: Tensors, numbers: Numbers, outputs: Outputs) -> None:
    library.run("regard_conv_forward", _conv_record(tensors, outputs))


def _conv_backward(
    tensors: Tensors, numbers: Numbers, outputs: Outputs, d_y: Tensor, d_last: Tensor | None, grads: Sequence[Tensor]
) -> None:
    d_x, d_taps, d_bias, d_state = grads
    taps = tensors[1]
    assert taps is not None
    first = d_state if d_state.numel() else d_x.new_empty(d_x.shape[0], taps.shape[0] - 1, d_x.shape[2])
    record = library.CONV_GRAD.pack(
        *(address(t) for t in (d_y, d_x, d_taps, d_bias if d_bias.numel() else None, first))
    )
    library.run("regard_conv_backward", _conv_record(tensors, outputs), record)


def _plain_conv(tensors: Tensors, numbers: Numbers) -> tuple[Tensor, Tensor]:
    x, taps, bias, state, starts = tensors
    assert x is not None and taps is not None
    return reference.convolution(ShortConvCall(x, taps.t(), bias, state, starts))


_conv = Operator(
    "short_conv",
    "Tensor x, Tensor taps, Tensor? bias, Tensor? state, Tensor? starts",
    4,
    empty=_empty_conv,
    forward=_conv_forward,
    backward=_conv_backward,
    plain=_plain_conv,
)
