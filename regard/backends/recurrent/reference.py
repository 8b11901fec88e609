"""The definition of the recurrent operations: one loop over tokens each, in plain torch, for every dtype.

    recurrence:      S' = a_t * S;  S = S' + beta_t k_t (v_t - S'^T k_t)^T;  o_t = scale * S^T q_t
                     without beta: S = S' + k_t v_t^T, and + write_t (S_before^T read_t)^T with such keys
    scan:            y_t = a_t * y_{t-1} + x_t
    selective_scan:  h = exp(dt_t A) * h + dt_t x_t B_t;  y_t = h C_t + D x_t
    short_conv:      y_t = bias + sum_i weight_i * x_{t - W + 1 + i}  (of its own segment)

A decay of -inf and the first token of a segment forget the old state exactly, gradients included. Every other backend
is compared with this one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from regard.backends.recurrent.call import RecurrenceCall, ScanCall, SelectiveScanCall, ShortConvCall, StateCall

__all__ = ["convolution", "defer", "reject", "run"]


def reject(call: StateCall) -> str | None:
    """It runs every call."""
    return None


def defer(call: StateCall) -> str | None:
    """It never leaves a call to others by itself; it stands last in the order."""
    return None


def run(call: StateCall) -> tuple[Tensor, Tensor]:
    """(output, last state), both in the compute dtype."""
    if isinstance(call, RecurrenceCall):
        return call.result(_recurrence(call))
    if isinstance(call, ScanCall):
        return call.result(_scan(call))
    if isinstance(call, ShortConvCall):
        return call.result(convolution(call))
    assert isinstance(call, SelectiveScanCall)
    return call.result(_selective_scan(call))


def _reset_at(state: Tensor, segment_starts: Tensor | None, t: int) -> Tensor:
    """What token t reads of the state (decayed): 0 in rows where it opens a segment, whatever was before."""
    if segment_starts is None:
        return state
    return torch.where(segment_starts[:, t].view(-1, *[1] * (state.ndim - 1)), 0.0, state)


def _recurrence(call: RecurrenceCall) -> tuple[Tensor, Tensor]:
    batch, key_heads, heads, tokens, _, value_dim = call.sizes
    dtype, state, group = call.compute_dtype, call.first_state(), heads // key_heads if key_heads else 1
    q, k, v = (x.to(dtype) for x in (call.q, call.k, call.v))
    q, k = ((q * call.scale).repeat_interleave(group, 1), k.repeat_interleave(group, 1))
    decay = None if call.log_decay is None else call.log_decay.to(dtype)
    beta, read, write = (None if x is None else x.to(dtype) for x in (call.beta, call.read_key, call.write_key))
    outs = []
    for t in range(tokens):
        before = _reset_at(state, call.segment_starts, t)
        if decay is not None:
            now = decay if decay.ndim == 1 else decay[:, :, t]
            state = torch.exp(now[..., None] if decay.ndim == 4 else now[..., None, None]) * state
        state = _reset_at(state, call.segment_starts, t)
        key, value = k[:, :, t, :, None], v[:, :, t, None, :]
        if beta is not None:
            value = beta[:, :, t, None, None] * (value - (key * state).sum(-2, keepdim=True))
        if read is not None and write is not None:
            held = (read[:, :, t, :, None] * before).sum(-2, keepdim=True)
            state = state + write[:, :, t, :, None] * held
        state = state + key * value
        outs.append((q[:, :, t, :, None] * state).sum(-2))
    out = torch.stack(outs, 2) if outs else v.new_zeros(batch, heads, 0, value_dim)
    return out, state


def _scan(call: ScanCall) -> tuple[Tensor, Tensor]:
    dtype, state = call.compute_dtype, call.first_state()
    x, log_a = call.x.to(dtype), call.log_a.to(dtype)
    outs = []
    for t in range(x.shape[1]):
        a = torch.exp(log_a[:, t if log_a.shape[1] > 1 else 0])
        state = _reset_at(a * state, call.segment_starts, t) + x[:, t]
        outs.append(state)
    return torch.stack(outs, 1) if outs else x, state


def _selective_scan(call: SelectiveScanCall) -> tuple[Tensor, Tensor]:
    dtype, state = call.compute_dtype, call.first_state()
    x, dt, A, B, C = (each.to(dtype) for each in (call.x, call.dt, call.A, call.B, call.C))
    outs = []
    for t in range(x.shape[1]):
        step = dt[:, t, :, None]
        state = (
            _reset_at(torch.exp(step * A) * state, call.segment_starts, t) + step * x[:, t, :, None] * B[:, t, None, :]
        )
        outs.append((state * C[:, t, None, :]).sum(-1))
    out = torch.stack(outs, 1) if outs else x
    return out if call.D is None else out + call.D.to(dtype) * x, state


def convolution(call: ShortConvCall) -> tuple[Tensor, Tensor]:
    """(y, the inputs before and in the call): a fused multiply-add a tap, oldest first, as torch's own convolution."""
    (batch, tokens, channels), earlier, line = call.x.shape, call.weight.shape[1] - 1, call.line
    weight = call.weight.to(line.dtype)
    number = (
        None if call.segment_starts is None else torch.nn.functional.pad(call.segment_starts.cumsum(1), (earlier, 0))
    )
    y = (line.new_zeros(()) if call.bias is None else call.bias.to(line.dtype)).expand(batch, tokens, channels)
    for tap in range(earlier + 1):
        inputs = line[:, tap : tap + tokens]
        if number is not None and tap < earlier:
            inputs = torch.where((number[:, tap : tap + tokens] == number[:, earlier:])[..., None], inputs, 0.0)
        y = torch.addcmul(y, inputs, weight[:, tap])
    return y, line
