"""Layers with a state in half precision: sums stay in float32 until they have been normalised, and round once."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from regard import catalog
from regard.feature_maps import Quadratic, positive_features
from regard.nn import DeltaNet, LightningAttention, LinearAttention, LinearCrossAttention

DTYPES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
RECORDS = {r.name: r for r in catalog.RECORDS if r.kind in ("recurrent", "kernel")}
DIM = 64


def pair(layer: nn.Module, dtype: torch.dtype) -> tuple[nn.Module, nn.Module]:
    """(the layer in half precision, the same numbers in float64)."""
    half = layer.to(dtype)
    return half, copy.deepcopy(half).double()


def built(name: str, heads: int = 1) -> nn.Module:
    torch.manual_seed(0)
    return RECORDS[name].build(DIM, heads)


def large(dtype: torch.dtype, tokens: int, width: int = DIM, size: float = 6.0) -> Tensor:
    return (size * torch.randn(1, tokens, width, generator=torch.Generator().manual_seed(1))).to(dtype)


def off(found: Tensor, right: Tensor, dtype: torch.dtype) -> float:
    """The error's root mean square, in half units of the last place of the outputs' own; one rounding gives 0.4."""
    assert found.isfinite().all()
    error = (found.double() - right).square().mean().sqrt() / right.square().mean().sqrt()
    return float(error) / (torch.finfo(dtype).eps / 2)


def context_of(name: str, dtype: torch.dtype) -> dict[str, Tensor]:
    return {"context": large(dtype, 40, DIM + 4)} if RECORDS[name].context else {}


class Rounded(torch.autograd.Function):
    """Numbers that half precision holds, and gradients too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.dtype = dtype
        return x.to(dtype).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, up: Tensor) -> tuple[Tensor, None]:
        return up.to(ctx.dtype).to(up.dtype), None


def with_rounded_maps(wide: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The float64 layer, but for what enters its linear maps and leaves them: this much half precision cannot avoid."""
    layer = copy.deepcopy(wide)
    for module in layer.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(lambda _, given: (Rounded.apply(given[0], dtype),))
            module.register_forward_hook(lambda _, given, out: Rounded.apply(out, dtype))
    return layer


@DTYPES
@pytest.mark.parametrize("name", RECORDS)
def test_large_tokens(name, dtype):
    """What goes into linear maps and out of them is rounded, and nothing between."""
    half, wide = pair(built(name), dtype)
    x, given = large(dtype, 150), context_of(name, dtype)
    exact = {key: value.double() for key, value in given.items()}
    with torch.no_grad():
        right = wide(x.double(), **exact)
        allowed = 1.15 * off(with_rounded_maps(wide, dtype)(x.double(), **exact).to(dtype), right, dtype)
        found = half(x, **given)
        assert found.dtype == dtype and off(found, right, dtype) < allowed
        with torch.autocast("cpu", dtype=dtype):
            lowered = copy.deepcopy(half).float()(x.float(), **{key: value.float() for key, value in given.items()})
        assert off(lowered, right, dtype) < allowed


@pytest.mark.parametrize("name", [r.name for r in RECORDS.values() if r.cached and r.causal])
def test_single_steps_of_large_tokens(name):
    half, wide = pair(built(name, 2), torch.float16)
    x = large(torch.float16, 12)
    cache = half.init_cache(1, 12)
    with torch.no_grad():
        steps = torch.cat([half(part, cache=cache) for part in x.split([1, 1, 7, 1, 1, 1], 1)], 1)
        right, rounded = wide(x.double()), with_rounded_maps(wide, torch.float16)(x.double())
        assert off(steps, right, torch.float16) < 1.15 * off(rounded.half(), right, torch.float16)


@pytest.mark.parametrize("name", [r.name for r in RECORDS.values() if not r.context])
def test_gradients_of_large_tokens(name):
    half, wide = pair(built(name), torch.float16)
    x = large(torch.float16, 60)
    up = torch.randn(x.shape, generator=torch.Generator().manual_seed(2)).half() / 64
    found, right, rounded = x.clone().requires_grad_(), x.double().requires_grad_(), x.double().requires_grad_()
    half(found).backward(up)
    wide(right).backward(up.double())
    with_rounded_maps(wide, torch.float16)(rounded).backward(up.double())
    allowed = 1.25 * off(rounded.grad.half(), right.grad, torch.float16)
    assert off(found.grad, right.grad, torch.float16) < allowed
    for name_, parameter in half.named_parameters():
        assert parameter.grad is None or parameter.grad.isfinite().all(), name_


def test_sums_beyond_float16_before_a_norm():
    """Two thousand tokens of one head: the sums reach a million, the outputs 1.3."""
    torch.manual_seed(0)
    x = large(torch.float16, 2048)
    for layer in (LightningAttention(DIM, 1), LinearAttention(DIM, 1, eps=None), LinearAttention(DIM, 1)):
        half, wide = pair(layer, torch.float16)
        with torch.no_grad():
            assert off(half(x), wide(x.double()), torch.float16) < 1.5
            mixed = half.mixed(x)
            assert mixed.dtype == torch.float32
    keys = LinearCrossAttention(DIM, 1, eps=None, feature_map=Quadratic)
    half, wide = pair(keys, torch.float16)
    with torch.no_grad():
        assert off(half(x[:, :9], x), wide(x[:, :9].double(), x.double()), torch.float16) < 1.5


@DTYPES
def test_convolutions_beyond_float16_before_a_norm_of_keys(dtype):
    """Four conv_size of 9 over inputs of 9,000: 300,000 before queries and keys are brought to length 1."""
    torch.manual_seed(0)
    layer = DeltaNet(DIM, 2)
    with torch.no_grad():
        layer.conv.weight.fill_(9.0)
        layer.v_proj.weight.mul_(1e-3)
    half, wide = pair(layer, dtype)
    x = large(dtype, 30, size=9000.0)
    with torch.no_grad():
        assert off(half(x), wide(x.double()), dtype) < 4.0


@DTYPES
def test_random_features_are_rounded_once(dtype):
    x, projection = large(dtype, 9, size=1.0)[0] * 3, torch.randn(16, DIM).to(dtype)
    for hyperbolic in (False, True):
        found = positive_features(x, projection, hyperbolic=hyperbolic)
        right = positive_features(x.double(), projection.double(), hyperbolic=hyperbolic)
        kept = right > 1e-4
        torch.testing.assert_close(found.double()[kept], right[kept], rtol=torch.finfo(dtype).eps, atol=0)
