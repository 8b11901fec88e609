"""Every log-decay formula over the whole range of its dtype: the value, its gradients and the second one."""

from __future__ import annotations

import itertools
import math
from functools import partial

import mpmath as mp
import pytest
import torch
from mpmath import exp, log, log1p

from regard import decays

LARGEST = {torch.float32: 3.4028234663852886e38, torch.float64: 1.7976931348623157e308}
SMALLEST = {torch.float32: 1.2e-38, torch.float64: 2.3e-308}
SIZES = (1e-30, 1.5, 16.0, 17.0, 40.0, 88.0, 104.0, 200.0, 1e30)
POINTS = (*(-x for x in reversed(SIZES)), 0.0, *SIZES)
RATES = (-200.0, -3.0, 0.0, 2.5, 87.0, 100.0, 200.0)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
mp.mp.dps = 50


def sp(x):
    return log1p(exp(x)) if x < 0 else x + log1p(exp(-x))


def sg(x):
    return 1 / (1 + exp(-x))


# Each gives (value, gradients, second derivative in the first argument) in 50 digits.


def softplus_decay(x, rate, bias):
    s, a = x + bias, exp(rate)
    return -a * sp(s), (-a * sg(s), -a * sp(s), -a * sg(s)), -a * sg(s) * sg(-s)


def step_decay(step, rate):
    a = exp(rate)
    return -a * step, (-a, -a * step), mp.mpf(0)


def softplus_step(x, bias):
    s = x + bias
    return sp(s), (sg(s), sg(s)), sg(s) * sg(-s)


def bounded_decay(x, rate, bias):
    a, p = exp(rate), exp(rate) * (x + bias)
    bend = -5 * sg(p) * sg(-p)
    return -5 * sg(p), (bend * a, bend * p, bend * a), bend * a * a * (sg(-p) - sg(p))


def logsigmoid_decay(x, tau=1.0):
    return -sp(-x) / mp.mpf(tau), (sg(-x) / mp.mpf(tau),), -sg(x) * sg(-x) / mp.mpf(tau)


def lower_bounded_decay(x, low):
    f = low + (1 - low) * sg(x)
    value = log1p(-(1 - low) * sg(-x)) if x > 0 else log(f)
    first = (1 - low) * sg(x) * sg(-x) / f
    return value, (first, sg(-x) / f), first * (sg(-x) - sg(x)) - first * first


def lower_bounded_input(x, low):
    slope = -(1 - low) * sg(x) * sg(-x)
    return (1 - low) * sg(-x), (slope, -sg(-x)), slope * (sg(-x) - sg(x))


def complement(x):
    return -sp(x), (-sg(x),), -sg(x) * sg(-x)


def damped_decay(delta, alpha):
    p, a = sg(delta), sg(alpha)
    kept = sg(-delta) + p * sg(-alpha)
    down, across = -a * p * sg(-delta) / kept, -p * a * sg(-alpha) / kept
    value = log1p(-p * a) if p * a < 0.5 else log(kept)
    return value, (down, across), down * (sg(-delta) - p) - down * down


def rglru(x, p):
    value = -8 * sg(x) * sp(p)
    return value, (value * sg(-x), -8 * sg(x) * sg(p)), value * sg(-x) * (sg(-x) - sg(x))


def sigmoid(x):
    return sg(x), (sg(x) * sg(-x),), sg(x) * sg(-x) * (sg(-x) - sg(x))


CASES = {
    "softplus_decay": (decays.softplus_decay, softplus_decay, (POINTS, RATES, (0.25,))),
    "step_decay": (decays.step_decay, step_decay, ((0.0, 1e-38, 1e-3, 1.0, 50.0, 1e30), RATES)),
    "softplus_step": (decays.softplus_step, softplus_step, (POINTS, (0.25,))),
    "bounded_decay": (decays.bounded_decay, bounded_decay, (POINTS, RATES, (0.0,))),
    "logsigmoid_decay": (partial(decays.logsigmoid_decay, tau=1.0), logsigmoid_decay, (POINTS,)),
    "with a tiny tau": (partial(decays.logsigmoid_decay, tau=1e-30), partial(logsigmoid_decay, tau=1e-30), (POINTS,)),
    "lower_bounded_decay": (decays.lower_bounded_decay, lower_bounded_decay, (POINTS, (1e-6, 0.3, 0.999))),
    "without a bound": (decays.lower_bounded_decay, lower_bounded_decay, (POINTS[1:-1], (0.0,))),
    "lower_bounded_input": (decays.lower_bounded_input, lower_bounded_input, (POINTS, (0.0, 0.3, 0.999))),
    "complement_decay_from_logit": (decays.complement_decay_from_logit, complement, (POINTS,)),
    "damped_decay": (decays.damped_decay, damped_decay, (POINTS, POINTS)),
    "rglru_decay_from_logit": (decays.rglru_decay_from_logit, rglru, (POINTS, POINTS)),
    "sigmoid": (decays.sigmoid, sigmoid, (POINTS,)),
}


def same(found: float, right, dtype: torch.dtype, scale=0.0) -> None:
    """Equal to a few units in the last place, of `scale` if larger, where the dtype holds it; at its border beyond."""
    assert not math.isnan(found)
    if abs(right) > LARGEST[dtype]:
        assert abs(found) > 0.99 * LARGEST[dtype] and (found > 0) == (right > 0)
        return
    rtol = 2e-7 if dtype == torch.float32 else 2e-12
    assert abs(found - right) <= rtol * max(abs(right), scale) + SMALLEST[dtype], (found, mp.nstr(right, 12))


@DTYPES
@pytest.mark.parametrize("name", CASES)
def test_value_and_derivatives_over_the_range(name, dtype):
    formula, exact, axes = CASES[name]
    for points in itertools.product(*axes):
        given = [torch.tensor([p], dtype=dtype, requires_grad=True) for p in points]
        right, firsts, second = exact(*(mp.mpf(x.item()) for x in given))
        value = formula(*given)
        assert value.dtype == dtype
        same(value.item(), right, dtype)
        found = torch.autograd.grad(value, given, create_graph=True)
        for one, first in zip(found, firsts, strict=True):
            same(one.item(), first, dtype)
        if found[0].requires_grad and abs(firsts[0]) < LARGEST[dtype]:
            twice = torch.autograd.grad(found[0], given, allow_unused=True)
            assert all(x is None or not x.isnan().any() for x in twice), points
            if twice[0] is not None:
                same(twice[0].item(), second, dtype, abs(firsts[0]))


@DTYPES
@pytest.mark.parametrize("name", CASES)
def test_what_a_state_reads_has_a_gradient_everywhere(name, dtype):
    """exp of a log-decay beyond the range is 0, and its gradient 0, never 0 times inf."""
    formula, _, axes = CASES[name]
    ends = (-1e38, -1e30, -1e3, 0.0, 1e3, 1e30, 1e38)
    axes = [ends if axis in (POINTS, RATES) else axis for axis in axes]
    given = [x.to(dtype).requires_grad_() for x in torch.cartesian_prod(*map(torch.tensor, axes)).view(-1, len(axes)).T]
    kept = torch.exp(-formula(*given).abs())
    assert not kept.isnan().any()
    kept.sum().backward()
    assert not any(x.grad.isnan().any() for x in given)


def test_saturated_weights_of_a_moving_average():
    for at in (16.0, 17.0, 40.0, 200.0):
        z = torch.tensor([at], requires_grad=True)
        decays.complement_decay_from_logit(z).backward()
        torch.testing.assert_close(z.grad, torch.tensor([-1.0]), rtol=2e-7, atol=0)
    one = torch.ones(2, requires_grad=True)
    decays.complement_decay(one).exp().sum().backward()
    assert torch.equal(one.grad, torch.zeros(2))
    z = torch.tensor([17.0, 3.0], requires_grad=True)
    decays.complement_decay(torch.sigmoid(z)).sum().backward()
    assert z.grad.isfinite().all()


def test_steps_too_small_to_be_held():
    x, rate, bias = (torch.tensor([v], requires_grad=True) for v in (-200.0, 100.0, 0.0))
    decay = torch.exp(decays.softplus_decay(x, rate, bias))
    decay.backward()
    assert decay.item() == 1.0 and all(t.grad.abs().item() < 1e-37 for t in (x, rate, bias))


def test_limits_of_steps_are_limits_of_the_decay():
    x = torch.linspace(-30, 30, 61, dtype=torch.float64, requires_grad=True)
    rate, bias = torch.tensor(0.7, dtype=torch.float64), torch.tensor(0.1, dtype=torch.float64)
    for limits in ((0.0, math.inf), (0.0, 2.0), (1e-3, 0.1), (0.5, math.inf)):
        one = decays.softplus_decay(x, rate, bias, limits)
        other = decays.step_decay(decays.softplus_step(x, bias, limits), rate)
        torch.testing.assert_close(one, other, rtol=1e-13, atol=0)
        a, b = (torch.autograd.grad(y.sum(), x)[0] for y in (one, other))
        torch.testing.assert_close(a, b, rtol=1e-12, atol=0)
    with pytest.raises(ValueError, match="limits"):
        decays.softplus_decay(x, rate, bias, (2.0, 1.0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_widened_first(dtype):
    x, rate, bias = torch.randn(2, 5, 3, dtype=dtype), torch.randn(3, dtype=dtype), torch.randn(3, dtype=dtype)
    for formula, given in (
        (decays.softplus_decay, (x, rate, bias)),
        (decays.bounded_decay, (x, rate, bias)),
        (decays.logsigmoid_decay, (x,)),
        (decays.complement_decay_from_logit, (x,)),
        (decays.damped_decay, (x, rate)),
        (decays.rglru_decay_from_logit, (x, rate)),
    ):
        out = formula(*given)
        assert out.dtype == torch.float32 and out.shape == (2, 5, 3)
        torch.testing.assert_close(out, formula(*(t.double() for t in given)).float(), rtol=1e-6, atol=0)


def test_rates_of_states_stay_finite():
    for dtype in (torch.float32, torch.float64):
        log_rate = torch.tensor([-1e30, 0.0, 88.0, 1000.0, 1e30], dtype=dtype, requires_grad=True)
        rate = decays.state_rate(log_rate)
        rate.sum().backward()
        assert rate.isfinite().all() and log_rate.grad.isfinite().all() and rate[1] == -1


@pytest.mark.parametrize("tau", [0.0, -1.0, 1e-300, 1e-40, math.inf, math.nan])
def test_a_divisor_that_float32_cannot_divide_by_is_refused(tau):
    with pytest.raises(ValueError, match="tau"):
        decays.logsigmoid_decay(torch.zeros(1), tau)
