"""Gradients of anybody's module, which may round inside, drop out, or not run in float64 at all."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from regard.testing.subject import Subject
from regard.testing.violation import ContractViolation

__all__ = ["own_slopes", "plain_name"]


def plain_name(name: str) -> str:
    """A parameter's name as its owner knows it."""
    return name.removeprefix("module.")


def own_slopes(subject: Subject) -> None:
    """The slope of a loss along its gradient is the gradient's length, one parameter at a time.

    In float64 where the module runs in it, and then its own dtype gives about the same gradients. Tolerances are
    hundredths and one of three steps may fit, for many a module rounds to float32 inside, whatever it is given.
    """
    layer, x = subject.layer(), subject.tokens(2, 5)
    first, wide, wide_x = (
        copy.deepcopy(layer),
        copy.deepcopy(layer).double(),
        x.double() if x.is_floating_point() else x,
    )
    own = _leaves(subject, first, x.clone())
    try:
        given = _leaves(subject, wide, wide_x.clone())
        layer, x = wide, given.get("the input", x)
    except RuntimeError:  # some of its operations have no form in float64
        given = _leaves(subject, layer, x)
    exact = torch.finfo(_loss_of(subject, layer, x).dtype).eps < 1e-6

    def compare(name: str, length: float, other: str, off: float) -> None:
        allowed = 1e-2 * length + 2e-3
        subject.trace.saw(off, allowed)
        if not off <= allowed:
            raise ContractViolation(
                f"the gradient of {name}: of length {length:.6g}, {other} by {off:.3g}", effect=off, allowed=allowed
            )

    for name, one in given.items():
        grad, base = _grad(one), one.detach().clone()
        length = float(grad.norm())
        if subject.dtype in (torch.float32, torch.float64):
            compare(name, length, "off that in its own dtype", float((_grad(own[name]).double() - grad).norm()))
        if not exact:
            continue  # differences of numbers rounded so coarsely say nothing
        slopes = []
        for step in (1e-3, 1e-4, 1e-5):
            sides = []
            with torch.no_grad():
                for sign in (1.0, -1.0):
                    one.copy_(base + sign * step * grad / max(length, 1e-12))
                    sides.append(float(_loss_of(subject, layer, x)))
                one.copy_(base)
            slopes.append((sides[0] - sides[1]) / (2 * step))
        compare(name, length, "off finite differences", min(abs(slope - length) for slope in slopes))


def _loss_of(subject: Subject, layer: nn.Module, x: Tensor) -> Tensor:
    return subject.run(layer, x).sin().sum()


def _leaves(subject: Subject, layer: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """What has a gradient after one backward pass: trained parameters by name, and tokens that are vectors."""
    x.requires_grad_(x.is_floating_point())
    _loss_of(subject, layer, x).backward()
    given: dict[str, Tensor] = {plain_name(name): one for name, one in layer.named_parameters() if one.requires_grad}
    return given | ({"the input": x} if x.requires_grad else {})


def _grad(leaf: Tensor) -> Tensor:
    assert leaf.grad is not None, "the check has seen that gradients reach everything"
    return leaf.grad
