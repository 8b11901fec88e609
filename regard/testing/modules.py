"""Checks of modules: state, copies, devices, compilation, error texts."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import torch

from regard.testing.subject import Subject
from regard.testing.violation import ContractViolation

__all__ = ["compiled", "copies", "error_texts", "inductor", "meta_device"]


def copies(subject: Subject) -> None:
    """deepcopy, a strict state_dict round trip and pickling of the state give the same layer."""
    layer = subject.layer()
    x = subject.tokens(2, 6)
    want = subject.run(layer, x)
    subject.close("deepcopy", subject.run(copy.deepcopy(layer), x), want, same_order=True)
    buffer = io.BytesIO()
    torch.save(layer.state_dict(), buffer)
    buffer.seek(0)
    other = subject.layer(seed=7)
    other.load_state_dict(torch.load(buffer, weights_only=True), strict=True)
    subject.close("a state_dict round trip", subject.run(other, x), want, same_order=True)


def meta_device(subject: Subject) -> None:
    """The layer runs on the meta device: shapes without memory."""
    layer: Any = subject.make().to("meta", subject.dtype)
    x = torch.empty(2, 6, subject.dim, device="meta", dtype=subject.dtype)
    given = {"context": x.new_empty(2, 7, layer.context_dim)} if subject.context else {}
    out = layer(x, **given)
    if out.shape != x.shape or out.device.type != "meta" or out.dtype != subject.dtype:
        raise ContractViolation(f"on meta: {tuple(out.shape)} in {out.dtype} on {out.device}")


def _compiled(subject: Subject, backend: str) -> None:
    layer = subject.layer()
    torch._dynamo.reset()
    fast = torch.compile(layer, fullgraph=True, backend=backend)
    for length in (6, 9):
        x = subject.tokens(2, length).requires_grad_()
        context = subject.context_for(layer, x)
        want, got = layer(x, **context), fast(x, **context)
        subject.close(f"compiled, {length} tokens", got, want)
        a, b = (torch.autograd.grad(out.square().sum(), x)[0] for out in (got, want))
        subject.close(f"compiled, gradient, {length} tokens", a, b)


def compiled(subject: Subject) -> None:
    """torch.compile(fullgraph=True) traces forward and backward and gives the same numbers."""
    _compiled(subject, "aot_eager")


def inductor(subject: Subject) -> None:
    """The same through Inductor's generated code; takes minutes."""
    _compiled(subject, "inductor")


def error_texts(subject: Subject) -> None:
    """Wrong arguments raise ValueError or TypeError whose text begins with the argument's name."""
    layer: Any = subject.layer()
    x = subject.tokens(2, 5)
    context = subject.context_for(layer, x)
    cases: list[tuple[str, Callable[[], Any]]] = [
        ("x", lambda: layer(x[0], **context)),
        ("x", lambda: layer(x[..., :-1], **context)),
        ("x", lambda: layer(x.long(), **context)),
        ("keep", lambda: layer(x, keep=torch.ones(2, 3, dtype=torch.bool), **context)),
        ("keep", lambda: layer(x, keep=torch.ones(2, 5), **context)),
        ("segments", lambda: layer(x, segments=torch.tensor([[0, 0, 1, 0, 0]] * 2), **context)),
    ]
    if subject.cached:
        cases.append(("cache", lambda: layer(x, cache=layer.init_cache(3, 8), **context)))
    for name, call in cases:
        try:
            call()
        except (ValueError, TypeError) as error:
            if not str(error).startswith(name):
                raise ContractViolation(f"an error about {name} does not begin with it: {error}") from error
        else:
            raise ContractViolation(f"a wrong {name} raised nothing")
