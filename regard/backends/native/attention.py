"""The kernels of softmax attention as torch operators, and the struct that they read (csrc/regard.h)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from regard.backends import reference
from regard.backends.macs import attention_macs
from regard.backends.native import library
from regard.backends.native.mask_operands import TILE
from regard.backends.native.operands import Operands, definition
from regard.backends.native.operator import Operator, Outputs, address
from regard.backends.native.structs import ATTENTION, ATTENTION_GRAD

__all__ = ["attend"]


def _empty_out(q: Tensor, v: Tensor, wide: bool) -> Tensor:
    """(B, Hq, Tq, Dv), laid out in memory as q is: heads inside tokens or tokens inside heads."""
    batch, heads, length, dim = q.shape
    v_dim = v.shape[3]
    if wide:
        return q.new_empty(batch, heads, length, v_dim, dtype=torch.float32)
    if dim == v_dim and q.is_contiguous():
        return torch.empty_like(q)
    if q.stride(1) < q.stride(2):
        return q.new_empty(batch, length, heads, v_dim).transpose(1, 2)
    return q.new_empty(batch, heads, length, v_dim)


def _empty(operands: Operands, keep: bool) -> Outputs:
    """Where the forward kernels put the output, the log-sum-exp, and the three rows of `kept` (csrc/regard.h)."""
    q = operands.q
    batch, heads, length, _ = q.shape
    lse = q.new_empty(batch, heads, length, dtype=torch.float32)  # numbers: torch reads a tuple far more slowly
    size = (3, batch, heads, length) if keep else (0,)
    return _empty_out(q, operands.v, keep), lse, q.new_empty(size, dtype=torch.float32)


def _forward(operands: Operands, outputs: Outputs) -> None:
    out, lse, kept = outputs
    if not lse.numel() or not operands.k.shape[2]:
        out.zero_(), lse.fill_(-torch.inf), kept.zero_()
        return
    record, alive = _record(operands, outputs)
    library.run("regard_attention_forward", record)
    del alive


def _backward(
    operands: Operands, outputs: Outputs, d_out: Tensor, d_lse: Tensor | None, grads: Sequence[Tensor | None]
) -> None:
    out, lse, kept = outputs
    if not lse.numel() or not operands.k.shape[2]:
        for grad in grads:
            if grad is not None:
                grad.zero_()
        return
    out = out.to(torch.float32).contiguous()
    d_q, d_k, d_v, d_bias, d_relative = grads
    record, alive = _record(operands, (out, lse, kept))
    addresses = (address(x) for x in (d_out, d_lse, out, d_q, d_k, d_v))
    wanted = ATTENTION_GRAD.pack(*addresses, *_broadcast(d_bias), address(d_relative))
    library.run("regard_attention_backward", record, wanted)
    del alive


def _record(one: Operands, outputs: Outputs) -> tuple[bytes, tuple[Tensor, ...]]:
    """The struct of a call, and the tensors that its pointers need alive."""
    out, lse, kept = outputs
    (q, q_steps), (k, k_steps), (v, v_steps) = map(_with_unit_steps, (one.q, one.k, one.v))
    batch, q_heads, q_len, k_dim = q.shape
    _, kv_heads, k_len, v_dim = v.shape
    record = ATTENTION.pack(  # in the order of its fields
        *(batch, q_heads, kv_heads, q_len, k_len, k_dim, v_dim),
        *(q.dtype == torch.bfloat16, one.scale, one.softcap),
        *(q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), lse.data_ptr(), address(kept)),
        *(out.dtype == torch.float32, *q_steps[:3], *k_steps[:3], *v_steps[:3], *out.stride()[:3]),
        *(one.q_start.data_ptr(), one.low, one.high),
    )
    options = bytes(ATTENTION.parts[1].size) if _is_plain(one) else _options(one)
    return record + options, (q, k, v)


def _with_unit_steps(x: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """The tensor with neighbouring channels, copied where they lie apart, and its strides."""
    steps = x.stride()
    if steps[3] != 1 and x.shape[3] != 1:
        x = x.contiguous()
        steps = x.stride()
    return x, steps


def _is_plain(one: Operands) -> bool:
    """Whether a call has nothing that `_options` writes."""
    known = one.prefix is one.k_length is one.keep is one.q_segment is one.mask is one.bias is one.relative is None
    return known and one.dropout_p == 0.0


def _options(one: Operands) -> bytes:
    vector = one.relative
    return ATTENTION.parts[1].pack(
        *(address(one.prefix), address(one.k_length), address(one.keep)),
        *(address(one.q_segment), address(one.k_segment), *_broadcast(one.mask)),
        *(*_broadcast(one.layout), TILE, TILE, *_broadcast(one.bias)),
        *(address(vector), *((0, 0, 0) if vector is None else (vector.stride(0), one.relative_zero, vector.shape[1]))),
        *(one.dropout_p, 0 if one.seed is None else int(one.seed)),
    )


def _broadcast(x: Tensor | None) -> tuple[int, ...]:
    """The address of a 4-D tensor and its strides, 0 along axes of one entry, which broadcast."""
    if x is None:
        return 0, 0, 0, 0, 0
    return x.data_ptr(), *(0 if size == 1 else step for size, step in zip(x.shape, x.stride(), strict=True))


def _plain(operands: Operands) -> tuple[Tensor, Tensor]:
    return reference.run(definition(operands))[:2]


def _macs(operands: Operands) -> tuple[int, int]:
    """As torch counts `scaled_dot_product_attention`: every pair, whatever the mask; backward, scores once more."""
    q, k, v = operands[:3]
    batch, heads, q_len, k_dim = q.shape
    pairs, v_dim = batch * q_len * k.shape[2], v.shape[3]
    return attention_macs(heads, k_dim, v_dim, pairs), attention_macs(heads, 3 * k_dim, 2 * v_dim, pairs)


attend = Operator(
    "attention", Operands, 5, empty=_empty, forward=_forward, backward=_backward, plain=_plain, macs=_macs
)
