"""Layers whose gates are far into saturation: outputs and gradients are those of float64, and no number is missing."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import regard
from regard import catalog

RECORDS = {r.name: r for r in catalog.RECORDS}
# (the layer, the parameter that saturates, what is added to it)
CASES = [
    *[("ema", "logit", at) for at in (-200.0, -17.0, 16.0, 17.0, 40.0, 200.0)],
    *[("mega_ema", name, at) for name in ("delta", "alpha") for at in (-200.0, -30.0, 30.0, 200.0)],
    *[("rglru", "p", at) for at in (-200.0, -60.0, 30.0, 200.0)],
    *[("rglru", "recurrence_gate.bias", at) for at in (-200.0, -60.0, 17.0, 200.0)],
    *[(name, "decay_proj.1.bias", at) for name in ("gla", "gla_bidirectional") for at in (-1e4, -200.0, 17.0, 200.0)],
    *[
        (name, "A_log", at)
        for name in ("gated_deltanet", "kda", "kda_bounded", "mamba2")
        for at in (-200.0, 100.0, 1e4)
    ],
    *[(name, "dt_bias", at) for name in ("gated_deltanet", "kda", "kda_bounded", "mamba2") for at in (-200.0, 100.0)],
    *[("mamba", name, at) for name in ("A_log", "dt_proj.bias") for at in (-200.0, 87.0)],
    *[("hgrn", "f_proj.weight", at) for at in (-20.0, 20.0)],
]


def outcome(layer: nn.Module, x: Tensor, up: Tensor) -> list[Tensor]:
    x = x.to(next(layer.parameters()).dtype).requires_grad_()
    out = layer(x)
    grads = torch.autograd.grad(out, (x, *layer.parameters()), up.to(out.dtype), allow_unused=True)
    return [out.detach(), *(torch.zeros(()) if g is None else g for g in grads)]


@pytest.mark.parametrize(("name", "parameter", "by"), CASES)
def test_outputs_and_gradients(name, parameter, by):
    torch.manual_seed(0)
    layer = RECORDS[name].build(16, 2)
    with torch.no_grad():
        layer.get_parameter(parameter).add_(by)
    x, up = torch.randn(2, 1, 40, 16).unbind(0)
    with regard.use_backend("chunked"):
        right = outcome(copy.deepcopy(layer).double(), x, up)
    found = outcome(layer, x, up)
    for number, (one, other) in enumerate(zip(found, right, strict=True)):
        size = max(other.abs().max().item(), 1e-30)
        assert one.isfinite().all(), number
        assert (one.double() - other).abs().max().item() <= 3e-5 * size + 1e-12, number


def test_a_small_step_in_front_of_a_large_rate():
    """softplus(-200) is 0 in float32 and exp(100) infinite; their product is 0."""
    torch.manual_seed(0)
    for name in ("gated_deltanet", "kda", "mamba2"):
        layer = RECORDS[name].build(16, 2)
        with torch.no_grad():
            layer.A_log.fill_(100.0)
            layer.dt_bias.fill_(-200.0)
        mask_padding = copy.deepcopy(layer).double()
        x, up = torch.randn(2, 1, 9, 16).unbind(0)
        for one, other in zip(outcome(layer, x, up), outcome(mask_padding, x, up), strict=True):
            torch.testing.assert_close(one.double(), other.double(), rtol=1e-4, atol=1e-5)
