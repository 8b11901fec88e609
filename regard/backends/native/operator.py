"""A pair of kernels as torch operators: forward and backward, recorded by compilers, tracers and autograd.

In eager mode the kernels are called without torch's dispatcher, which takes a third of a decode step. Where anybody
watches the operators (a compiler, a tracer, a dispatch mode, a subclass of tensors), they go through it, and what was
registered here is recorded. Where a backward pass is itself recorded, it goes through a plain-torch form.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, TypeVar, get_type_hints

import torch
from torch import Tensor

from regard.backends.call import recorded_gradients
from regard.backends.native import flops
from regard.backends.native.library import fresh
from regard.coordinates import is_recording

__all__ = ["Operator", "Outputs", "address", "is_watched", "room"]

Outputs = tuple[Tensor, Tensor, Tensor]
O = TypeVar("O", bound=tuple[Any, ...])

_library = torch.library.Library("regard", "FRAGMENT")
_SCHEMA = {Tensor: "Tensor", Tensor | None: "Tensor?", float: "float", int: "SymInt"}
_PLAIN = (Tensor, torch.nn.Parameter)


def address(x: Tensor | None) -> int:
    """The pointer that a kernel gets; 0 for what is absent."""
    return 0 if x is None else x.data_ptr()


def room(grad: Tensor | None, like: Tensor) -> Tensor:
    """Where a kernel writes a gradient: a tensor that is thrown away, of the size of `like`, where nobody wants it."""
    return like.new_empty(like.shape, dtype=torch.float32) if grad is None else grad


def is_watched(tensors: Iterable[Any]) -> bool:
    """Whether a compiler, a tracer, a mode or a subclass of tensors must see operators rather than their results."""
    if is_recording() or torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack():
        return True
    return any(x is not None and type(x) not in _PLAIN for x in tensors)


class Operator(Generic[O]):
    """``regard::<name>_forward`` and ``regard::<name>_backward``.

    Args:
        name: of the operators.
        operands: a named tuple whose fields are their arguments: tensors (those that may want gradients first), then
            numbers. The operators' schema is its annotations.
        trained: how many of the fields may want gradients.
        empty: ``(operands, keep) -> (output, second result, what the backward pass needs)``, allocated only; `keep`
            says whether there will be one. The first two are the results; the third is the operator's own.
        forward: ``(operands, outputs)`` fills them.
        backward: ``(operands, outputs, d_out, d_second, grads)`` fills those of `grads` that are not None: shaped as
            the operands, float32, contiguous. ``d_out`` is float32 and contiguous, ``d_second`` too or None.
        plain: ``operands -> (output, second result)`` in plain torch.
        macs: ``operands -> (forward, backward)``: the multiply-accumulates of all that may be asked for, for counters.
    """

    def __init__(
        self,
        name: str,
        operands: Callable[..., O],
        trained: int,
        *,
        empty: Callable[[O, bool], Outputs],
        forward: Callable[[O, Outputs], None],
        backward: Callable[[O, Outputs, Tensor, Tensor | None, Sequence[Tensor | None]], None],
        plain: Callable[[O], tuple[Tensor, Tensor]],
        macs: Callable[[O], tuple[int, int]],
    ) -> None:
        hints = get_type_hints(operands)
        self.name, self.operands, self.trained, self.count = name, operands, trained, len(hints)
        self.tensors = sum(hint in (Tensor, Tensor | None) for hint in hints.values())
        self._empty, self._fill, self._fill_grads, self._plain = empty, forward, backward, plain
        schema = ", ".join(f"{_SCHEMA[hint]} {field}" for field, hint in hints.items())
        results = ", ".join(["Tensor"] * trained)
        _library.define(f"{name}_forward({schema}, bool train) -> (Tensor, Tensor, Tensor)")
        _library.define(
            f"{name}_backward(Tensor? d_out, Tensor? d_second, Tensor out, Tensor second, Tensor kept, {schema}, "
            f"bool[] wanted) -> ({results})"
        )
        _library.impl(f"{name}_forward", self._forward, "CPU")
        _library.impl(f"{name}_backward", self._backward, "CPU")
        forward_name, backward_name = f"regard::{name}_forward", f"regard::{name}_backward"
        torch.library.register_fake(forward_name, self._fake_forward, lib=_library)
        torch.library.register_fake(backward_name, self._fake_backward, lib=_library)
        torch.library.register_autograd(forward_name, self._gradients, setup_context=self._setup, lib=_library)
        torch.library.register_autograd(backward_name, self._once, lib=_library)
        torch.library.register_vmap(backward_name, self._mapped, lib=_library)
        flops.add(f"{name}_forward", lambda *arguments: 2 * macs(operands(*arguments[:-1]))[0])
        flops.add(f"{name}_backward", lambda *arguments: 2 * macs(operands(*arguments[5:-1]))[1])
        methods: dict[str, Any] = {"forward": self._forward, "setup_context": self._setup, "backward": self._gradients}
        methods = {key: staticmethod(method) for key, method in methods.items()}
        self._function: Any = type(f"_{name}", (torch.autograd.Function,), methods)

    def __call__(self, operands: O, keep: bool = False) -> Outputs:
        """(output, second result, what is kept), recorded by autograd where gradients are wanted.

        `keep`: as if they were.
        """
        trained = operands[: self.trained]
        recorded = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in trained)
        # a trace runs twice, once without gradients, and has to be the same graph
        keep = keep or (recorded and torch._C._get_tracing_state() is None)
        if is_watched(operands[: self.tensors]):
            flops.tell()
            found: Outputs = getattr(torch.ops.regard, f"{self.name}_forward")(*operands, keep)
        elif recorded:
            found = self._function.apply(*operands, keep)
        else:
            found = self._forward(*operands, keep)
        return found

    # ---- the two operators ---------------------------------------------------------------------------------------

    def _forward(self, *arguments: Any) -> Outputs:
        operands: O = self.operands(*arguments[:-1])
        outputs = self._empty(operands, arguments[-1])
        fresh(*outputs)
        self._fill(operands, outputs)
        return outputs

    def _fake_forward(self, *arguments: Any) -> Outputs:
        return self._empty(self.operands(*arguments[:-1]), arguments[-1])

    def _backward(
        self, d_out: Tensor | None, d_second: Tensor | None, out: Tensor, second: Tensor, kept: Tensor, *arguments: Any
    ) -> tuple[Tensor, ...]:
        operands, wanted = self.operands(*arguments[:-1]), arguments[-1]
        grads = self._empty_grads(operands, wanted)
        fresh(*grads)
        d_out = torch.zeros_like(out, dtype=torch.float32) if d_out is None else d_out.float()
        d_second = None if d_second is None else d_second.float().contiguous()
        chosen = [grad if want else None for grad, want in zip(grads, wanted, strict=True)]
        self._fill_grads(operands, (out, second, kept), d_out.contiguous(), d_second, chosen)
        return grads

    def _fake_backward(self, d_out: Any, d_second: Any, out: Any, second: Any, kept: Any, *arguments: Any) -> Any:
        return self._empty_grads(self.operands(*arguments[:-1]), arguments[-1])

    def _mapped(self, info: Any, dims: tuple[Any, ...], *arguments: Any) -> tuple[Any, Any]:
        """Many backward passes, of gradients that vmap gives at once: one after the other."""
        backward = getattr(torch.ops.regard, f"{self.name}_backward")
        rows = (
            backward(*(x.select(dim, n) if isinstance(dim, int) else x for x, dim in zip(arguments, dims, strict=True)))
            for n in range(info.batch_size)
        )
        grads = tuple(map(torch.stack, zip(*rows, strict=True)))
        return grads, (0,) * len(grads)

    def _empty_grads(self, operands: O, wanted: Sequence[bool]) -> tuple[Tensor, ...]:
        """Where the kernels put gradients: float32, contiguous; empty for what nobody wants."""
        pairs = zip(operands[: self.trained], wanted, strict=True)
        return tuple(operands[0].new_empty(x.shape if want else 0, dtype=torch.float32) for x, want in pairs)

    # ---- autograd ------------------------------------------------------------------------------------------------

    def _setup(self, ctx: Any, inputs: tuple[Any, ...], output: Outputs) -> None:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs[: self.tensors], *output)
        ctx.numbers, ctx.kept = inputs[self.tensors : -1], inputs[-1]

    def _gradients(self, ctx: Any, d_out: Tensor | None, d_second: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
        if torch._C._len_torch_dispatch_stack():
            flops.tell()
        *tensors, out, second, kept = ctx.saved_tensors
        operands: O = self.operands(*tensors, *ctx.numbers)
        wanted = list(ctx.needs_input_grad[: self.trained])
        if not ctx.kept:  # recorded without gradients, and trained now
            out, second, kept = getattr(torch.ops.regard, f"{self.name}_forward")(*operands, True)
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            rest: tuple[Any, ...] = operands[self.trained :]
            found = recorded_gradients(
                lambda own: self._plain(self.operands(*own, *rest)), operands[: self.trained], (d_out, d_second), wanted
            )
        else:
            backward = getattr(torch.ops.regard, f"{self.name}_backward")
            grads = backward(d_out, d_second, out, second, kept, *operands, wanted)
            triples = zip(grads, operands[: self.trained], wanted, strict=True)
            found = tuple(g.to(x.dtype) if want else None for g, x, want in triples)
        return *found, *(None,) * (self.count - self.trained + 1)

    def _once(self, *_: Any) -> Any:
        raise NotImplementedError(
            f"regard::{self.name}_backward has no derivative: differentiate twice in eager mode, or with"
            " backend='reference'"
        )
