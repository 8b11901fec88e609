"""Checks of numbers: gradients, precision, strides, uninitialised memory, backends, empty and single inputs."""

from __future__ import annotations

import torch
from torch import Tensor

from regard.backends import names, use_backend
from regard.errors import BackendUnsupported
from regard.testing.subject import ContractViolation, Subject, close

__all__ = [
    "backends_agree",
    "empty_inputs",
    "gradients",
    "low_precision",
    "mixing",
    "second_gradients",
    "strides",
    "unwritten_memory",
]


def backends_agree(subject: Subject) -> None:
    """Every backend gives the same output and gradients, or a reason why it does not run."""
    layer = subject.layer()
    layer.train()
    x = subject.tokens(2, 9).requires_grad_()
    parameters = [x, *layer.parameters()]

    def results() -> list[Tensor]:
        out = subject.run(layer, x)
        return [out, *torch.autograd.grad(out.sin().sum(), parameters)]

    with use_backend("reference"):
        want = results()
    for name in names():
        try:
            with use_backend(name):
                got = results()
        except BackendUnsupported as error:
            if len(str(error)) < 20:
                raise ContractViolation(f"backend {name} gave no reason: {error}") from error
            continue
        for number, (a, b) in enumerate(zip(got, want, strict=True)):
            close(f"backend {name}, {'output' if number == 0 else f'gradient {number}'}", a, b)


def gradients(subject: Subject) -> None:
    """Gradients are right against finite differences and reach every parameter."""
    layer = subject.layer()
    layer.train()
    x = subject.tokens(2, 5).requires_grad_()
    if not torch.autograd.gradcheck(lambda a: subject.run(layer, a), (x,), raise_exception=False):
        raise ContractViolation("the input's gradient differs from finite differences")
    subject.run(layer, x).square().sum().backward()
    for name, parameter in layer.named_parameters():
        if parameter.grad is None or not torch.isfinite(parameter.grad).all():
            raise ContractViolation(f"{name} has no finite gradient after one backward pass")
        direction = torch.randn_like(parameter)
        step, base = 1e-6, parameter.detach().clone()
        with torch.no_grad():
            sides = []
            for sign in (1.0, -1.0):
                parameter.copy_(base + sign * step * direction)
                sides.append(float(subject.run(layer, x).square().sum()))
            parameter.copy_(base)
        slope, want = (sides[0] - sides[1]) / (2 * step), float((parameter.grad * direction).sum())
        if abs(slope - want) > 1e-5 * max(1.0, abs(want)):
            raise ContractViolation(f"{name}: directional derivative {want:.8g}, finite differences {slope:.8g}")


def second_gradients(subject: Subject) -> None:
    """Second derivatives are right against finite differences."""
    layer = subject.layer()
    x = subject.tokens(1, 3).requires_grad_()
    if not torch.autograd.gradgradcheck(lambda a: subject.run(layer, a), (x,), raise_exception=False):
        raise ContractViolation("second derivatives differ from finite differences")


def low_precision(subject: Subject) -> None:
    """bfloat16 in and out is no more than twice as far from float64 as the plain formula in bfloat16."""
    for dtype in (torch.bfloat16,):
        layer = subject.layer(dtype)
        x = subject.tokens(2, 33, dtype)
        truth = subject.run(subject.layer(dtype).double(), x.double())
        got = subject.run(layer, x)
        if got.dtype != dtype:
            raise ContractViolation(f"{dtype} in gave {got.dtype} out")
        with use_backend("reference"):
            plain = subject.run(layer, x)
        error, allowed = (float((a.double() - truth).detach().abs().max()) for a in (got, plain))
        if error > 2 * allowed:
            raise ContractViolation(f"{dtype}: off by {error:.3g}, the plain formula by {allowed:.3g}")


def strides(subject: Subject) -> None:
    """Non-contiguous inputs give what their copies give, and no input is modified."""
    layer = subject.layer()
    x = subject.tokens(2, 7)
    want = subject.run(layer, x)
    wide = torch.zeros(2, 7, 2 * subject.dim, dtype=x.dtype, device=x.device)
    wide[..., ::2] = x
    for what, view in (
        ("every second channel", wide[..., ::2]),
        ("a transposed tensor", x.transpose(1, 2).contiguous().transpose(1, 2)),
        ("batch last in memory", x.permute(1, 2, 0).contiguous().permute(2, 0, 1)),
    ):
        kept = view.clone()
        close(what, subject.run(layer, view), want, 1e-12)
        if not torch.equal(view, kept):
            raise ContractViolation(f"{what}: the input was modified")


def unwritten_memory(subject: Subject) -> None:
    """Filling fresh memory with NaN changes nothing: no result reads what was never written."""
    layer = subject.layer()
    x = subject.tokens(2, 9).requires_grad_()

    def results() -> list[Tensor]:
        out = subject.run(layer, x)
        return [out, *torch.autograd.grad(out.sum(), [x])]

    want = results()
    settings = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    try:
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
        got = results()
    finally:
        torch.use_deterministic_algorithms(settings[0])
        torch.utils.deterministic.fill_uninitialized_memory = settings[1]  # type: ignore[attr-defined]
    for a, b in zip(got, want, strict=True):
        close("with fresh memory full of NaN", a, b, 1e-12)


def empty_inputs(subject: Subject) -> None:
    """No rows, no tokens, one token: right shapes, zero-filled gradients, finite."""
    layer = subject.layer()
    for batch, length in ((0, 3), (2, 0), (0, 0), (1, 1)):
        x = subject.tokens(batch, length).requires_grad_()
        layer.zero_grad()
        out = subject.run(layer, x)
        if out.shape != x.shape:
            raise ContractViolation(f"{tuple(x.shape)} gave {tuple(out.shape)}")
        out.sum().backward()
        for name, parameter in layer.named_parameters():
            if parameter.grad is None or not torch.isfinite(parameter.grad).all():
                raise ContractViolation(f"{name} has no finite gradient after a call on {tuple(x.shape)}")


def mixing(subject: Subject) -> None:
    """The mixing matrix is finite and differentiable, and 0 above the diagonal if the layer is causal."""
    layer = subject.layer()
    x = subject.tokens(2, 6).requires_grad_()
    matrix, values = layer.mixing(x, **subject.context_for(layer, x))  # type: ignore[operator]
    mixed = matrix @ values
    if mixed.shape[-2] != 6 or not torch.isfinite(mixed).all():
        raise ContractViolation(f"M {tuple(matrix.shape)} @ V {tuple(values.shape)} gave {tuple(mixed.shape)}")
    if subject.causal and bool((matrix.triu(1) != 0).any()):
        raise ContractViolation("the mixing matrix of a causal layer has entries above the diagonal")
    if hasattr(layer, "mixed"):
        ids = torch.tensor([[0, 0, 0, 1, 1, 1], [2, 3, 3, 3, 3, 3]], device=x.device)
        keep = torch.tensor([[True] * 6, [False, True, True, False, True, True]], device=x.device)
        for what, given in (("", {}), (", packed", {"segments": ids}), (", padded", {"keep": keep})):
            matrix, values = layer.mixing(x, **given)  # type: ignore[operator]
            close(f"M @ V{what}, against what the layer mixes", matrix @ values, layer.mixed(x, **given))  # type: ignore[operator]
    torch.autograd.grad(mixed.sum(), x)
