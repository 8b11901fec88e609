"""Checks of numbers: gradients, precision, strides, uninitialised memory, backends, empty and single inputs."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from regard.backends import count_backends, names, use_backend
from regard.errors import BackendUnsupported
from regard.testing.slopes import own_slopes, plain_name
from regard.testing.subject import Subject
from regard.testing.violation import ContractViolation

__all__ = [
    "backends_agree",
    "empty_inputs",
    "gradients",
    "low_precision",
    "mixing",
    "native_runs",
    "second_gradients",
    "strides",
    "unwritten_memory",
]


def _wide(layer: nn.Module) -> nn.Module:
    """The same layer, its rounded parameters included, in float64."""
    return copy.deepcopy(layer).double()


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
            subject.close(f"backend {name}, {'output' if number == 0 else f'gradient {number}'}", a, b)


def native_runs(subject: Subject) -> None:
    """The CPU kernels run the whole layer: forward, backward and with a cache, by count."""
    layer: Any = subject.layer()

    def count(what: str, run: Any) -> None:
        with count_backends() as counts:
            run()
        if set(counts) != {"native"}:
            raise ContractViolation(f"{what}: these backends ran, by number of calls: {dict(counts)}")

    x = subject.tokens(2, 9).requires_grad_()
    count("with gradients", lambda: subject.run(layer, x).sum().backward())
    with torch.no_grad():
        x = subject.tokens(2, 9)
        count("without gradients", lambda: subject.run(layer, x))
        if subject.cached:
            cache, context = layer.init_cache(2, 10), subject.context_for(layer, x)
            count("filling a cache", lambda: layer(x, cache=cache, **context))
            count("a step", lambda: layer(x[:, :1], cache=cache))


def gradients(subject: Subject) -> None:
    """Gradients reach every parameter and are right: against finite differences, in lower dtypes against float64."""
    layer = subject.layer()
    if subject.call is None:  # anybody's may drop out in training
        layer.train()
    x = subject.tokens(2, 5)
    x.requires_grad_(x.is_floating_point())
    subject.run(layer, x).square().sum().backward()
    for name, parameter in layer.named_parameters():
        if parameter.requires_grad and (parameter.grad is None or not torch.isfinite(parameter.grad).all()):
            raise ContractViolation(f"{plain_name(name)} has no finite gradient after one backward pass")
    if subject.call is not None:
        own_slopes(subject)
        return
    if subject.dtype != torch.float64:
        _against_float64(subject, _loss, parameters=True, passes=1)
        return
    if not torch.autograd.gradcheck(lambda a: subject.run(layer, a), (x,), raise_exception=False):
        raise ContractViolation("the input's gradient differs from finite differences")
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None
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


Named = dict[str, Tensor]
Scalar = Callable[[Named], Tensor]


def _loss(subject: Subject, layer: nn.Module) -> Scalar:
    """A number that depends on the tokens and on every parameter, as a function of these by name."""

    def run(given: Named) -> Tensor:
        x = given["the input"]
        context = {name: value.to(x.dtype) for name, value in subject.context_for(layer, x).items()}
        parameters = {name: value for name, value in given.items() if name != "the input"}
        out: Tensor = torch.func.functional_call(layer, parameters, (x,), context)
        return out.square().sum()

    return run


def _second_loss(subject: Subject, layer: nn.Module) -> Scalar:
    """A number that depends on a gradient."""

    def run(given: Named) -> Tensor:
        x = given["the input"]
        x = x if x.requires_grad else x.detach().requires_grad_()
        context = {name: value.to(x.dtype) for name, value in subject.context_for(layer, x).items()}
        with torch.enable_grad():
            (first,) = torch.autograd.grad(layer(x, **context).sin().sum(), x, create_graph=True)
        return first.sin().sum()

    return run


def _found(loss: Scalar, given: Named) -> Named:
    leaves = {name: value.detach().requires_grad_() for name, value in given.items()}
    return dict(zip(leaves, torch.autograd.grad(loss(leaves), list(leaves.values())), strict=True))


def _against_float64(
    subject: Subject, make: Callable[[Subject, nn.Module], Scalar], parameters: bool, passes: int
) -> None:
    """Compare gradients with those of the same layer in float64, and these with finite differences.

    Each pass backwards may add the tolerance. Where a layer of the library amplifies rounding beyond it, the plain
    formula in the same dtype is the measure: twice its error, and a third of the gradient's size at most.
    """
    layer, x = subject.layer(), subject.tokens(2, 5)
    given = {"the input": x} | (dict(layer.named_parameters()) if parameters else {})
    wide = {name: value.detach().double() for name, value in given.items()}
    truth = make(subject, _wide(layer))
    want, got = _found(truth, wide), _found(make(subject, layer), given)
    plain, own = got, type(layer).__module__.startswith("regard.")
    if own:
        with use_backend("reference"):
            plain = _found(make(subject, layer), given)
    for name, right in want.items():
        _against_differences(name, right, truth, wide)
        size = max(1.0, float(right.abs().max()))
        error, other = (float((one[name].double() - right).abs().max()) for one in (got, plain))
        limit = passes * subject.tolerance * size
        if own:
            limit = max(limit, min(2 * other, size / 3))
        if not error <= limit:
            raise ContractViolation(f"the gradient of {name}: {error:.3g} off float64, allowed {limit:.3g}")


def _against_differences(name: str, grad: Tensor, loss: Scalar, at: Named) -> None:
    """The slope along a float64 gradient is its length."""
    length = float(grad.norm())
    step = 1e-6 / max(length, 1e-6) * max(1.0, float(at[name].abs().max()))
    sides = [float(loss(at | {name: at[name] + sign * step * grad}).detach()) for sign in (1.0, -1.0)]
    slope = (sides[0] - sides[1]) / (2 * step * max(length, 1e-6))
    if abs(slope - length) > 1e-4 * max(1.0, length):
        raise ContractViolation(f"the gradient of {name}: its length {length:.8g}, by finite differences {slope:.8g}")


def second_gradients(subject: Subject) -> None:
    """Second derivatives are right: against finite differences, in lower dtypes against float64."""
    if subject.dtype != torch.float64:
        _against_float64(subject, _second_loss, parameters=False, passes=2)
        return
    layer = subject.layer()
    x = subject.tokens(1, 3).requires_grad_()
    if not torch.autograd.gradgradcheck(lambda a: subject.run(layer, a), (x,), raise_exception=False):
        raise ContractViolation("second derivatives differ from finite differences")


def low_precision(subject: Subject) -> None:
    """The dtype that comes goes out, no more than twice as far from float64 as the plain formula in that dtype."""
    layer = subject.layer()
    x = subject.tokens(2, 33)
    context = subject.context_for(layer, x)
    truth = _wide(layer)(x.double(), **{name: value.double() for name, value in context.items()})
    got = subject.run(layer, x)
    if got.dtype != subject.dtype:
        raise ContractViolation(f"{subject.dtype} in gave {got.dtype} out")
    with use_backend("reference"):
        plain = subject.run(layer, x)
    error, allowed = (float((a.double() - truth).detach().abs().max()) for a in (got, plain))
    if error > 2 * allowed:
        raise ContractViolation(f"{subject.dtype}: off by {error:.3g}, the plain formula by {allowed:.3g}")


def strides(subject: Subject) -> None:
    """Non-contiguous inputs give what their copies give, and no input is modified."""
    layer = subject.layer()
    x = subject.tokens(2, 7)
    want = subject.run(layer, x)
    wide = torch.zeros(*x.shape[:-1], 2 * x.shape[-1], dtype=x.dtype, device=x.device)
    wide[..., ::2] = x
    for what, view in (
        ("every second " + ("channel" if x.ndim == 3 else "place"), wide[..., ::2]),
        ("a transposed tensor", x.transpose(-1, -2).contiguous().transpose(-1, -2)),
        ("batch last in memory", x.movedim(0, -1).contiguous().movedim(-1, 0)),
    ):
        kept = view.clone()
        subject.close(what, subject.run(layer, view), want, same_order=True)
        if not torch.equal(view, kept):
            raise ContractViolation(f"{what}: the input was modified")


def unwritten_memory(subject: Subject) -> None:
    """Filling fresh memory with NaN changes nothing: no result reads what was never written."""
    layer = subject.layer()
    x = subject.tokens(2, 9)
    x.requires_grad_(x.is_floating_point())

    def results() -> list[Tensor]:
        out = subject.run(layer, x)
        return [out, *(torch.autograd.grad(out.sum(), [x]) if x.requires_grad else ())]

    want = results()
    settings = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    try:
        torch.use_deterministic_algorithms(True, warn_only=subject.call is not None)
        torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
        with warnings.catch_warnings():
            if subject.call is not None:  # anybody's module may use operations that have no deterministic form
                warnings.simplefilter("ignore")
            got = results()
    finally:
        torch.use_deterministic_algorithms(settings[0])
        torch.utils.deterministic.fill_uninitialized_memory = settings[1]  # type: ignore[attr-defined]
    for a, b in zip(got, want, strict=True):
        subject.close("with fresh memory full of NaN", a, b, same_order=True)


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
            if not x.numel() and bool((parameter.grad != 0).any()):
                raise ContractViolation(f"{name} has a gradient that is not 0 after a call on {tuple(x.shape)}")


def mixing(subject: Subject) -> None:
    """M V is what the layer mixes, plain, packed and padded; M is differentiable, and triangular if causal."""
    layer: Any = subject.layer()
    x = subject.tokens(2, 6).requires_grad_()
    context = subject.context_for(layer, x)
    ids = torch.tensor([[0, 0, 0, 1, 1, 1], [2, 3, 3, 3, 3, 3]], device=x.device)
    keep = torch.tensor([[True] * 6, [False, True, True, False, True, True]], device=x.device)
    cases: list[tuple[str, dict[str, Tensor]]] = [("", {})]
    if subject.context:
        cases.append((", a padded context", {"keep": torch.cat((keep, keep[:, :1]), 1)}))
    else:
        cases += [(", packed", {"segments": ids}), (", padded", {"keep": keep})]
    for what, given in cases:
        matrix, values = layer.mixing(x, **context, **given)
        mixed = matrix @ values.to(matrix.dtype)
        if mixed.shape[-2] != 6:
            raise ContractViolation(f"M {tuple(matrix.shape)} @ V {tuple(values.shape)} gave {tuple(mixed.shape)}")
        subject.close(f"M @ V{what}, against what the layer mixes", mixed, layer.mixed(x, **context, **given))
        if subject.causal and bool((matrix.triu(1) != 0).any()):
            raise ContractViolation(f"the mixing matrix of a causal layer{what} has entries above the diagonal")
        torch.autograd.grad(mixed.sum(), x)
