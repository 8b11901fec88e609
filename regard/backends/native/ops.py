"""The torch operators ``regard::attention_forward`` and ``regard::attention_backward``, and their gradients.

Both take `Operands` one by one. In eager mode an `autograd.Function` calls them; in a compiled graph the registered
formula does, which is the same two functions. Where the backward pass is itself recorded, it goes through the
definition.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from regard.backends import reference
from regard.backends.native import library
from regard.backends.native.operands import TILE, Operands, definition

__all__ = ["attend"]

_SCHEMA = (
    "Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor? relative, Tensor q_start, Tensor? prefix, Tensor? k_length, "
    "Tensor? keep, Tensor? q_segment, Tensor? k_segment, Tensor? mask, Tensor? layout, Tensor? seed, "
    "float scale, float softcap, SymInt low, SymInt high, SymInt relative_zero, float dropout_p"
)
TRAINED, TENSORS = 5, 14  # how many of the operands may want gradients (the first), and are tensors

_library = torch.library.Library("regard", "FRAGMENT")
_library.define(f"attention_forward({_SCHEMA}, bool wide) -> (Tensor, Tensor, Tensor)")
_library.define(
    f"attention_backward(Tensor? d_out, Tensor? d_lse, Tensor out, Tensor lse, Tensor lse_low, "
    f"{_SCHEMA}, bool[] wanted)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)


def attend(operands: Operands, wide: bool) -> tuple[Tensor, Tensor]:
    """(out, lse) of the kernels, recorded by autograd where gradients are wanted; `wide`: out in float32, as then."""
    trained = wide and torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in operands.trained)
    if torch.compiler.is_compiling():
        out, lse, _ = torch.ops.regard.attention_forward(*operands, wide or trained)
    elif trained:
        out, lse, _ = _Attention.apply(*operands, True)  # type: ignore[no-untyped-call]
    else:
        out, lse = _forward_here(operands, wide)
    return out, lse


def _forward_here(operands: Operands, wide: bool) -> tuple[Tensor, Tensor]:
    """The forward operator, without torch's dispatcher (a third of a decode step's time) where nobody watches it."""
    if _is_watched(operands):
        out, lse, _ = torch.ops.regard.attention_forward(*operands, wide)
        return out, lse
    out, lse = _empty_out(operands.q, operands.v, wide), _empty_lse(operands.q)
    _run_forward(operands, out, lse, None)
    return out, lse


def _is_watched(one: Operands) -> bool:
    """Whether a mode or a tensor subclass wants to see the operators."""
    if torch._C._len_torch_dispatch_stack():
        return True
    return not (type(one.q) in _PLAIN and type(one.k) in _PLAIN and type(one.v) in _PLAIN)


_PLAIN = (Tensor, torch.nn.Parameter)


# ---- the kernels -----------------------------------------------------------------------------------------------------


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


def _empty_lse(q: Tensor) -> Tensor:
    batch, heads, length, _ = q.shape
    return q.new_empty(batch, heads, length, dtype=torch.float32)  # numbers: torch reads a tuple far more slowly


def _empty_results(q: Tensor, v: Tensor, wide: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Where the forward kernels put the output, the log-sum-exp, and what that lost by rounding."""
    return _empty_out(q, v, wide), _empty_lse(q), _empty_lse(q) if wide else q.new_empty(0, dtype=torch.float32)


def _forward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    operands, wide = Operands(*arguments[:-1]), arguments[-1]
    out, lse, low = _empty_results(operands.q, operands.v, wide)
    _run_forward(operands, out, lse, low if wide else None)
    return out, lse, low


def _run_forward(operands: Operands, out: Tensor, lse: Tensor, low: Tensor | None) -> None:
    if not lse.numel() or not operands.k.shape[2]:
        out.zero_(), lse.fill_(-torch.inf)
        if low is not None:
            low.zero_()
        return
    record, alive = _record(operands, out, lse, low)
    library.fresh(out)
    library.run("regard_attention_forward", record)
    del alive


def _backward(
    d_out: Tensor | None, d_lse: Tensor | None, out: Tensor, lse: Tensor, low: Tensor, *arguments: Any
) -> tuple[Tensor, ...]:
    operands, wanted = Operands(*arguments[:-1]), arguments[-1]
    grads = _empty_grads(operands, wanted)
    if not lse.numel() or not operands.k.shape[2]:
        return tuple(grad.zero_() for grad in grads)
    out = out.to(torch.float32).contiguous()
    d_out = torch.zeros_like(out) if d_out is None else d_out.to(torch.float32).contiguous()
    d_lse = None if d_lse is None else d_lse.to(torch.float32).contiguous()
    record, alive = _record(operands, out, lse, low)
    d_q, d_k, d_v, d_bias, d_relative = (g if want else None for g, want in zip(grads, wanted, strict=True))
    grad = library.GRAD.pack(
        *(_address(x) for x in (d_out, d_lse, out, d_q, d_k, d_v)), *_broadcast(d_bias), _address(d_relative)
    )
    library.fresh(*grads)
    library.run("regard_attention_backward", record, grad)
    del alive
    return grads


def _empty_grads(operands: Operands, wanted: list[bool]) -> tuple[Tensor, ...]:
    """Where the kernels put gradients: float32, contiguous; empty where none is wanted."""
    return tuple(
        operands.q.new_empty(x.shape if want and x is not None else 0, dtype=torch.float32)
        for x, want in zip(operands.trained, wanted, strict=True)
    )


def _record(one: Operands, out: Tensor, lse: Tensor, low: Tensor | None) -> tuple[bytes, tuple[Tensor, ...]]:
    """The struct of a call, and the tensors that its pointers need alive."""
    (q, q_steps), (k, k_steps), (v, v_steps) = map(_with_unit_steps, (one.q, one.k, one.v))
    batch, q_heads, q_len, k_dim = q.shape
    _, kv_heads, k_len, v_dim = v.shape
    record = library.CALL.pack(  # in the order of its fields
        *(batch, q_heads, kv_heads, q_len, k_len, k_dim, v_dim),
        *(q.dtype == torch.bfloat16, one.scale, one.softcap),
        *(q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), lse.data_ptr(), _address(low)),
        *(out.dtype == torch.float32, *q_steps[:3], *k_steps[:3], *v_steps[:3], *out.stride()[:3]),
        *(one.q_start.data_ptr(), one.low, one.high),
    )
    return record + (_NO_OPTIONS if _is_plain(one) else _options(one)), (q, k, v)


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
    return library.OPTIONS.pack(
        *(_address(one.prefix), _address(one.k_length), _address(one.keep)),
        *(_address(one.q_segment), _address(one.k_segment), *_broadcast(one.mask)),
        *(*_broadcast(one.layout), TILE, TILE, *_broadcast(one.bias)),
        *(_address(vector), *((0, 0, 0) if vector is None else (vector.stride(0), one.relative_zero, vector.shape[1]))),
        *(one.dropout_p, 0 if one.seed is None else int(one.seed)),
    )


_NO_OPTIONS = bytes(library.OPTIONS.size)


def _address(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


def _broadcast(x: Tensor | None) -> tuple[int, ...]:
    """The address of a 4-D tensor and its strides, 0 along axes of one entry, which broadcast."""
    if x is None:
        return 0, 0, 0, 0, 0
    return x.data_ptr(), *(0 if size == 1 else step for size, step in zip(x.shape, x.stride(), strict=True))


# ---- their gradients -------------------------------------------------------------------------------------------------


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:TENSORS], *output)
    ctx.numbers = inputs[TENSORS:-1]


def _gradients(ctx: Any, d_out: Tensor | None, d_lse: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    *tensors, out, lse, low = ctx.saved_tensors
    operands = Operands(*tensors, *ctx.numbers)
    wanted = ctx.needs_input_grad[:TRAINED]
    found: tuple[Tensor | None, ...]
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        grads = (out.new_zeros(out.shape) if d_out is None else d_out, d_lse)
        found = reference.recorded_gradients(definition(operands), operands.trained, grads, wanted)
    else:
        found = torch.ops.regard.attention_backward(d_out, d_lse, out, lse, low, *operands, wanted)
        triples = zip(found, operands.trained, wanted, strict=True)
        found = tuple(g.to(x.dtype) if want and g is not None and x is not None else None for g, x, want in triples)
    return *found, *(None,) * (len(operands) - TRAINED + 1)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        if _is_watched(Operands(*arguments[:-1])):
            out, lse, low = torch.ops.regard.attention_forward(*arguments)
            return out, lse, low
        return _forward(*arguments)

    setup_context = staticmethod(_setup)
    backward = staticmethod(_gradients)


def _once(*_: Any) -> Any:
    raise NotImplementedError(
        "regard::attention_backward has no derivative: differentiate twice in eager mode, or with backend='reference'"
    )


def _fake_forward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    q, _, v = arguments[:3]
    return _empty_results(q, v, arguments[-1])


def _fake_backward(
    d_out: Tensor | None, d_lse: Tensor | None, out: Tensor, lse: Tensor, low: Tensor, *arguments: Any
) -> tuple[Tensor, ...]:
    return _empty_grads(Operands(*arguments[:-1]), arguments[-1])


_library.impl("attention_forward", _forward, "CPU")
_library.impl("attention_backward", _backward, "CPU")
torch.library.register_fake("regard::attention_forward", _fake_forward, lib=_library)
torch.library.register_fake("regard::attention_backward", _fake_backward, lib=_library)
torch.library.register_autograd("regard::attention_forward", _gradients, setup_context=_setup, lib=_library)
torch.library.register_autograd("regard::attention_backward", _once, lib=_library)
