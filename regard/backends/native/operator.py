"""A kernel pair as torch operators: forward and backward, traced by compilers, recorded by autograd.

In eager mode an `autograd.Function` calls the kernels; in a compiled graph the registered formula does, which is the
same two functions. Where the backward pass is itself recorded, it goes through a plain-torch form.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from regard.backends.native.library import fresh

__all__ = ["Operator", "address"]

Tensors = Sequence[Tensor | None]
Outputs = tuple[Tensor, Tensor, Tensor]

_library = torch.library.Library("regard", "FRAGMENT")


def address(x: Tensor | None) -> int:
    """The pointer that a kernel gets; 0 for what is absent."""
    return 0 if x is None else x.data_ptr()


class Operator:
    """``regard::<name>_forward`` and ``regard::<name>_backward``.

    Args:
        name: of the operators.
        tensors: their tensor arguments as a schema, those that may want gradients first.
        trained: how many those are.
        empty: ``(tensors, numbers, keep) -> (output, last state, what the backward pass needs)``, allocated only;
            `keep` says whether there will be one.
        forward: ``(tensors, numbers, outputs)`` fills them.
        backward: ``(tensors, numbers, outputs, d_out, d_last, grads)`` fills ``grads``, as the tensors, float32.
        plain: ``(tensors, numbers) -> (output, last state)`` in plain torch.
    """

    def __init__(
        self,
        name: str,
        tensors: str,
        trained: int,
        *,
        empty: Callable[[Tensors, tuple[float, ...], bool], Outputs],
        forward: Callable[[Tensors, tuple[float, ...], Outputs], None],
        backward: Callable[..., None],
        plain: Callable[[Tensors, tuple[float, ...]], tuple[Tensor, Tensor]],
    ) -> None:
        self.name, self.count, self.trained = name, tensors.count("Tensor"), trained
        self._empty, self._forward_kernel, self._backward_kernel, self._plain = empty, forward, backward, plain
        results = ", ".join(["Tensor"] * trained)
        _library.define(f"{name}_forward({tensors}, float[] numbers, bool keep) -> (Tensor, Tensor, Tensor)")
        _library.define(
            f"{name}_backward(Tensor? d_out, Tensor? d_last, Tensor out, Tensor last, Tensor kept, {tensors}, "
            f"float[] numbers) -> ({results})"
        )
        _library.impl(f"{name}_forward", self._forward, "CPU")
        _library.impl(f"{name}_backward", self._backward, "CPU")
        torch.library.register_fake(f"regard::{name}_forward", self._fake_forward, lib=_library)
        torch.library.register_fake(f"regard::{name}_backward", self._fake_backward, lib=_library)
        torch.library.register_autograd(
            f"regard::{name}_forward", self._gradients, setup_context=self._setup, lib=_library
        )
        torch.library.register_autograd(f"regard::{name}_backward", self._once, lib=_library)
        self._function = type(
            f"_{name}",
            (torch.autograd.Function,),
            {
                "forward": staticmethod(self._apply),
                "setup_context": staticmethod(self._setup),
                "backward": staticmethod(self._gradients),
            },
        )

    def __call__(self, tensors: Tensors, numbers: Sequence[float] = ()) -> tuple[Tensor, Tensor]:
        """(output, last state), recorded by autograd where gradients are wanted."""
        numbers = list(numbers)
        wanted = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors[: self.trained])
        if torch.compiler.is_compiling():
            operator = getattr(torch.ops.regard, f"{self.name}_forward")
            out, last, _ = operator(*tensors, numbers, wanted)
        elif wanted:
            out, last, _ = self._function.apply(*tensors, numbers, True)  # type: ignore[attr-defined]
        else:
            out, last, _ = self._apply(*tensors, numbers, False)
        return out, last

    def _apply(self, *arguments: Any) -> Outputs:
        if torch._C._len_torch_dispatch_stack():  # somebody watches the operators
            outputs: Outputs = getattr(torch.ops.regard, f"{self.name}_forward")(*arguments)
            return outputs
        return self._forward(*arguments)

    def _forward(self, *arguments: Any) -> Outputs:
        *tensors, numbers, keep = arguments
        outputs = self._empty(tensors, tuple(numbers), keep)
        fresh(*outputs)
        self._forward_kernel(tensors, tuple(numbers), outputs)
        return outputs

    def _fake_forward(self, *arguments: Any) -> Outputs:
        *tensors, numbers, keep = arguments
        return self._empty(tensors, tuple(numbers), keep)

    def _backward(
        self, d_out: Tensor | None, d_last: Tensor | None, out: Tensor, last: Tensor, kept: Tensor, *arguments: Any
    ) -> tuple[Tensor, ...]:
        *tensors, numbers = arguments
        grads = self._empty_grads(tensors)
        fresh(*grads)
        d_out = torch.zeros_like(out, dtype=torch.float32) if d_out is None else d_out.float()
        d_last = None if d_last is None else d_last.float().contiguous()
        self._backward_kernel(tensors, tuple(numbers), (out, last, kept), d_out.contiguous(), d_last, grads)
        return grads

    def _fake_backward(self, d_out: Any, d_last: Any, out: Any, last: Any, kept: Any, *arguments: Any) -> Any:
        return self._empty_grads(arguments[:-1])

    def _empty_grads(self, tensors: Tensors) -> tuple[Tensor, ...]:
        """Where the kernels put gradients: float32, contiguous; empty for what is absent."""
        some = next(t for t in tensors if t is not None)
        return tuple(some.new_empty(0 if t is None else t.shape, dtype=torch.float32) for t in tensors[: self.trained])

    def _setup(self, ctx: Any, inputs: tuple[Any, ...], output: Outputs) -> None:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs[: self.count], *output)
        ctx.numbers = inputs[self.count]

    def _gradients(self, ctx: Any, d_out: Tensor | None, d_last: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
        *tensors, out, last, kept = ctx.saved_tensors
        trained, wanted = tensors[: self.trained], ctx.needs_input_grad[: self.trained]
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            found = self._recorded(tensors, tuple(ctx.numbers), d_out, d_last, wanted)
        else:
            operator = getattr(torch.ops.regard, f"{self.name}_backward")
            grads = operator(d_out, d_last, out, last, kept, *tensors, ctx.numbers)
            triples = zip(grads, trained, wanted, strict=True)
            found = tuple(g.to(t.dtype) if want and t is not None else None for g, t, want in triples)
        return *found, *(None,) * (self.count - self.trained + 2)

    def _recorded(
        self, tensors: Tensors, numbers: tuple[float, ...], d_out: Any, d_last: Any, wanted: Sequence[bool]
    ) -> tuple[Tensor | None, ...]:
        """The gradients through the plain form, differentiable again."""
        pairs = [(y, g) for y, g in zip(self._plain(tensors, numbers), (d_out, d_last), strict=True) if g is not None]
        outputs, given = zip(*pairs, strict=True)
        chosen = [t for t, want in zip(tensors, wanted, strict=False) if want and t is not None]
        given = tuple(g.to(y.dtype) for y, g in pairs)
        found = iter(torch.autograd.grad(outputs, chosen, given, create_graph=True, allow_unused=True))
        return tuple(next(found) if want else None for want in wanted)

    def _once(self, *_: Any) -> Any:
        raise NotImplementedError(
            f"regard::{self.name}_backward has no derivative: differentiate twice in eager mode, or with"
            " backend='chunked'"
        )
