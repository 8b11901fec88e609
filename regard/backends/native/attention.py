"""The kernels of softmax attention as torch operators."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from regard.backends import reference
from regard.backends.macs import attention_macs
from regard.backends.native import library
from regard.backends.native.operands import Operands, definition, strided, struct_of
from regard.backends.native.operator import Operator, Outputs, address
from regard.backends.native.structs import ATTENTION_GRAD

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
    record, alive = struct_of(operands, outputs)
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
    record, alive = struct_of(operands, (out, lse, kept))
    addresses = (address(x) for x in (d_out, d_lse, out, d_q, d_k, d_v))
    wanted = ATTENTION_GRAD.pack(*addresses, *strided(d_bias), address(d_relative))
    library.run("regard_attention_backward", record, wanted)
    del alive


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
