"""State-space and vector-state layers against their papers' formulas, and what the catalogue's checks don't ask."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from oracles import state_spaces as oracle

import regard
from regard.catalog import find
from regard.decays import complement_decay, rglru_decay, softplus_step, step_decay
from regard.masks import Causal
from regard.mixers.griffin import _bounded_sqrt
from regard.nn import (
    HGRN,
    DampedEMA,
    ExponentialMovingAverage,
    ForgetBounds,
    GriffinRecurrent,
    Mamba,
    Mamba2,
    MambaConfig,
    RMSNorm,
    griffin_attention,
)
from regard.testing import Subject

NAMES = ["mamba2", "mamba", "jamba", "rglru", "hgrn", "ema", "mega_ema"]


def randomised(make, dim):
    return Subject("", make, dim).layer()


def numpy_weights(layer):
    return {name: tensor.numpy() for name, tensor in layer.state_dict().items()}


def check(layer, formula, *arguments, tokens=9, **options):
    """The layer against the oracle on one sequence, and ``M @ V`` against what the layer mixes."""
    x = Subject("", lambda: layer, layer.dim).tokens(1, tokens)
    want = formula(x[0].numpy(), numpy_weights(layer), *arguments, **options)
    torch.testing.assert_close(layer(x)[0].detach(), torch.from_numpy(want), rtol=0, atol=1e-12)
    matrix, values = regard.mixing_matrix(layer, x)
    torch.testing.assert_close(matrix @ values, layer.mixed(x), rtol=0, atol=1e-12)


MAMBA2 = {
    "plain": {},
    "groups": {"groups": 2, "head_dim": 3},
    "one_group_a_head": {"groups": 4},
    "limits": {"limits": (0.01, 0.05)},
    "biases": {"shell": MambaConfig(conv_size=3, bias=True, conv_bias=False)},
    "one_tap": {"shell": MambaConfig(conv_size=1)},
    "both_ways": {"groups": 2, "bidirectional": True},
}


@pytest.mark.parametrize("options", MAMBA2.values(), ids=MAMBA2)
def test_mamba2_equals_the_formula(options):
    layer = randomised(lambda: Mamba2(12, 4, state_dim=5, **options), 12)
    sizes = (4, layer.head_dim, 5, layer.groups)
    check(layer, oracle.mamba2, *sizes, limits=layer.limits, both_ways=layer.bidirectional)


@pytest.mark.parametrize("tokens", [1, 150])
def test_mamba2_across_chunks(tokens):
    layer = randomised(lambda: Mamba2(8, 2, state_dim=3), 8)
    check(layer, oracle.mamba2, 2, 8, 3, 1, tokens=tokens)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"norm": RMSNorm, "rank": 3, "state_dim": 2},
        {"width": 5, "shell": MambaConfig(conv_size=2, bias=True, conv_bias=False)},
    ],
    ids=["plain", "norms", "biases"],
)
def test_mamba_equals_the_formula(options):
    layer = randomised(lambda: Mamba(10, **options), 10)
    check(layer, oracle.mamba, layer.state_dim, layer.rank)


def test_griffin_equals_the_formula():
    check(randomised(lambda: GriffinRecurrent(8, 2), 8), oracle.griffin)
    check(randomised(lambda: GriffinRecurrent(8, 3, width=12, conv_size=2), 8), oracle.griffin)


def test_hgrn_equals_the_formula():
    for low in (0.0, 0.7):
        check(randomised(lambda low=low: HGRN(6, width=4, low=low), 6), oracle.hgrn, low)
    bounds = ForgetBounds(3, 4)
    layer = randomised(lambda: HGRN(6, width=4, low=bounds.bound(2)), 6)
    weight = layer.low.table.weight.detach().numpy()
    shares = np.exp(weight) / np.exp(weight).sum(0)
    check(layer, oracle.hgrn, shares[1] + shares[2])


def test_averages_equal_the_formula():
    check(randomised(lambda: ExponentialMovingAverage(5), 5), oracle.ema)
    check(randomised(lambda: DampedEMA(5, 3), 5), oracle.damped_ema)
    check(randomised(lambda: DampedEMA(5, 3, bidirectional=True), 5), oracle.damped_ema, both_ways=True)


# ---- values worked out elsewhere -------------------------------------------------------------------------------------


def wave(seed, *shape):
    """sin(1.7 seed + 0.37 n + 0.011 n^2), n the flat index."""
    n = torch.arange(math.prod(shape), dtype=torch.float64)
    return torch.sin(1.7 * seed + 0.37 * n + 0.011 * n * n).view(shape)


def near(got, want):
    torch.testing.assert_close(got, torch.tensor(want, dtype=torch.float64), rtol=0, atol=2e-6)


def test_stored_values_of_ssd():
    dt, x, b, c = F.softplus(wave(8, 8)), wave(9, 8, 3), wave(10, 8, 4), wave(11, 8, 4)
    decay = regard.Decay(step_decay(dt, torch.tensor(1.3, dtype=torch.float64).log())[None, None])
    q, k, v = (t[None, None] for t in (c, b, dt[:, None] * x))
    y, state = regard.recurrence(q, k, v, decay, scale=1.0)
    near((y[0, 0] + 0.5 * x)[-1], [0.718428, 0.379889, -0.161536])
    want = [[0.084996, 0.294037, 0.320471, 0.109584], [0.426434, 0.539742, 0.219571, -0.270212]]
    near(state[0, 0].T, [*want, [0.502626, 0.463427, -0.003393, -0.480721]])


def test_stored_values_of_the_rglru():
    x, r, i, p = wave(12, 8, 4), torch.sigmoid(wave(13, 8, 4)), torch.sigmoid(wave(14, 8, 4)), wave(15, 4)
    log_a = rglru_decay(r, p)
    log_a[0] = -torch.inf
    h, _ = regard.scan(log_a[None], (torch.sqrt(-torch.expm1(2 * log_a)) * i * x)[None])
    near(h[0, -1], [0.253414, 0.143694, -0.362727, -0.721884])
    near(h[0, 1], [0.002388, -0.321813, -0.612813, -0.724942])
    want = oracle.rglru(*(t.numpy() for t in (x, r, i, p)))
    torch.testing.assert_close(h[0], torch.from_numpy(want), rtol=0, atol=1e-13)


def test_stored_values_of_the_damped_average():
    layer = DampedEMA(4, 3).double()
    with torch.no_grad():
        for seed, name in enumerate(("delta", "alpha", "beta", "gamma"), 16):
            getattr(layer, name).copy_(wave(seed, 4, 3))
        layer.omega.copy_(wave(20, 4))
    near(layer(wave(12, 8, 4)[None])[0, -1].detach(), [0.154523, 0.05912, 0.126523, 0.27715])


# ---- steps, resets, limits -------------------------------------------------------------------------------------------


def test_limits_hold_in_prefill_and_in_steps():
    """The same numbers whether a token comes in a long call or alone, with limits that bite."""
    layer = randomised(lambda: Mamba2(8, 2, state_dim=3, limits=(0.5, 0.8)), 8)
    torch.nn.init.zeros_(layer.dt_bias)
    x = torch.randn(1, 9, 8, dtype=torch.float64)
    cache = layer.init_cache(1, 0)
    steps = torch.cat([layer(part, cache=cache) for part in x.split(1, 1)], 1)
    torch.testing.assert_close(steps, layer(x), rtol=0, atol=1e-12)
    raw = layer.in_proj(x)[..., -2:] + layer.dt_bias
    assert (F.softplus(raw) < 0.5).any() and (F.softplus(raw) > 0.8).any()


def test_positions_say_where_the_rglru_resets():
    layer = randomised(lambda: GriffinRecurrent(6, 2), 6)
    x = torch.randn(1, 8, 6, dtype=torch.float64)
    late = layer(x, positions=torch.arange(3, 11)[None])
    want = torch.from_numpy(oracle.griffin(x[0].numpy(), numpy_weights(layer), first=3))
    torch.testing.assert_close(late[0].detach(), want, rtol=0, atol=1e-12)
    assert not torch.allclose(late, layer(x))
    restart = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]])
    mixed, again = layer.mixed(x, positions=restart), layer.mixed(x, positions=torch.tensor([[5, 6, 7, 8, 0, 1, 2, 3]]))
    assert torch.equal(mixed[:, :, 4:], again[:, :, 4:])  # what came before is forgotten
    segments = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1]])
    packed = layer(x, segments=segments)
    torch.testing.assert_close(packed[:, 4:], layer(x[:, 4:]), rtol=0, atol=1e-12)
    offset = layer(x, segments=segments, positions=restart + 2)
    torch.testing.assert_close(offset[:, 4:], layer(x[:, 4:], positions=restart[:, 4:] + 2), rtol=0, atol=1e-12)


def test_padding_at_position_0_does_not_reset():
    layer = randomised(lambda: GriffinRecurrent(6, 2), 6)
    x = torch.randn(1, 6, 6, dtype=torch.float64)
    keep = torch.tensor([[True, True, False, True, False, True]])
    got = layer(x, keep=keep, positions=torch.tensor([[0, 1, 0, 2, 0, 3]]))
    torch.testing.assert_close(got[keep], layer(x[keep][None])[0], rtol=0, atol=1e-12)


def test_the_bounded_root():
    x = torch.tensor([0.0, 1e-9, 2.4e-7, 1e-4, 0.25], dtype=torch.float64, requires_grad=True)
    root = _bounded_sqrt(x)
    assert torch.equal(root, torch.sqrt(x))
    (slope,) = torch.autograd.grad(root.sum(), x)
    torch.testing.assert_close(slope, torch.tensor([1000.0, 1000.0, 1000.0, 50.0, 1.0], dtype=torch.float64))


def test_a_forget_gate_that_rounds_to_1_still_learns():
    """log a = 0 exactly: the square root stands at 0, where its own derivative is infinite."""
    layer = GriffinRecurrent(4, 1)
    with torch.no_grad():
        layer.recurrence_gate.bias.fill_(-200.0)
    layer(torch.randn(1, 5, 4)).sum().backward()
    assert all(torch.isfinite(parameter.grad).all() for parameter in layer.parameters())


@pytest.mark.parametrize("name", NAMES)
def test_a_projection_bias_does_not_leak_through_padding(name):
    """A padded token, projected, is not 0: it must not reach the convolution of the first real tokens."""
    layer = randomised(lambda: find(name).build(16, 4), 16)
    for module in layer.modules():
        if isinstance(module, torch.nn.Linear) and module.bias is not None:
            torch.nn.init.constant_(module.bias, 3.0)
    x = torch.randn(1, 9, 16, dtype=torch.float64)
    keep = torch.tensor([[False, False, True, True, False, True, True, True, False]])
    got = layer(x.masked_fill(~keep[..., None], 7.0), keep=keep)
    torch.testing.assert_close(got[keep], layer(x[keep][None])[0], rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_padding_has_no_gradient_and_leaves_the_states_alone(name):
    layer = randomised(lambda: find(name).build(16, 4), 16)
    x = torch.randn(2, 10, 16, dtype=torch.float64, requires_grad=True)
    keep = torch.tensor([[False] * 3 + [True] * 4 + [False, True, True], [True, False] + [True] * 5 + [False] * 3])
    layer(x, keep=keep)[keep].square().sum().backward()
    assert (x.grad[~keep] == 0).all() and (x.grad[keep] != 0).any()
    with torch.no_grad():
        padded = layer.init_cache(2, 0)
        for part in (slice(0, 5), slice(5, 10)):
            layer(x[:, part], keep=keep[:, part], cache=padded)
        for row in range(2):
            alone = layer.init_cache(1, 0)
            layer(x[row][keep[row]][None], cache=alone)
            for state, want in zip(padded.states.values(), alone.states.values(), strict=True):
                torch.testing.assert_close(state[row : row + 1], want, rtol=0, atol=1e-12)


@pytest.mark.filterwarnings("ignore:`torch.jit.script")  # torch's own, on the first jvp
@pytest.mark.parametrize("name", [*NAMES, "mamba2_bidirectional", "mega_ema_bidirectional"])
def test_forward_derivatives_and_vmap(name):
    layer = randomised(lambda: find(name).build(16, 4), 16)
    x, direction = torch.randn(2, 2, 5, 16, dtype=torch.float64)
    _, slope = torch.func.jvp(layer, (x,), (direction,))
    step = 1e-6
    want = (layer(x + step * direction) - layer(x - step * direction)) / (2 * step)
    torch.testing.assert_close(slope, want, rtol=0, atol=1e-7)
    each = torch.func.vmap(layer)(torch.stack([x, direction]))
    torch.testing.assert_close(each, torch.stack([layer(x), layer(direction)]), rtol=0, atol=1e-12)


def test_biases_of_mambas_projections_do_not_leak():
    shell = MambaConfig(bias=True)
    for make in (lambda: Mamba2(8, 2, state_dim=3, shell=shell), lambda: Mamba(8, shell=shell)):
        layer = randomised(make, 8)
        x = torch.randn(1, 7, 8, dtype=torch.float64)
        keep = torch.tensor([[False, False, False, True, True, True, True]])
        torch.testing.assert_close(layer(x, keep=keep)[keep], layer(x[:, 3:])[0], rtol=0, atol=1e-12)


def test_extreme_steps_stay_finite():
    for make in (lambda: Mamba2(8, 2, state_dim=3), lambda: Mamba(8), lambda: GriffinRecurrent(8, 2)):
        layer = make()
        with torch.no_grad():
            for name in ("dt_bias", "p"):
                if hasattr(layer, name):
                    getattr(layer, name).fill_(200.0)
            if hasattr(layer, "dt_proj"):
                layer.dt_proj.bias.fill_(200.0)
        x = torch.randn(2, 70, 8, requires_grad=True)
        out = layer(x)
        out.sum().backward()
        assert torch.isfinite(out).all() and torch.isfinite(x.grad).all()
        assert all(torch.isfinite(parameter.grad).all() for parameter in layer.parameters())


def test_sizes_of_states():
    def elements(layer):
        return layer.init_cache(1, 0).nbytes // 4

    assert elements(Mamba2(2560, 80, head_dim=64).to("meta")) == 655_360 + 3 * (2 * 2560 + 2 * 128)
    assert elements(Mamba(32)) == 64 * 16 + 3 * 64
    assert elements(GriffinRecurrent(32, 4, width=48)) == 48 + 3 * 48
    assert elements(HGRN(32)) == elements(ExponentialMovingAverage(32)) == 32
    assert elements(DampedEMA(32, 4)) == 128


def test_griffins_local_attention():
    layer = griffin_attention(24, 4, 5, head_dim=8)
    assert layer.kv_heads == 1 and layer.rotary.dim == 4 and layer.o_proj.bias is not None and layer.q_proj.bias is None
    assert type(layer.init_cache(1, 100)).__name__ == "WindowCache"


def test_bounds_of_the_forget_gates_rise_with_depth():
    bounds = ForgetBounds(4, 3)
    torch.nn.init.normal_(bounds.weight)
    lows = torch.stack([bounds.bound(i)() for i in range(4)])
    assert (lows[0] == 0).all() and (lows.diff(dim=0) > 0).all() and (lows < 1).all()
    layers = [HGRN(3, low=bounds.bound(i)) for i in (1, 3)]
    assert layers[0].low.table is layers[1].low.table
    sum(layer(torch.randn(1, 4, 3)).sum() for layer in layers).backward()
    assert torch.isfinite(bounds.weight.grad).all()


def test_an_average_that_forgets_everything():
    """alpha = 1 in float32: the log-decay is -inf, the average is its input."""
    layer = ExponentialMovingAverage(3)
    torch.nn.init.constant_(layer.logit, 200.0)
    x = torch.randn(1, 4, 3)
    assert complement_decay(torch.sigmoid(layer.logit)).isneginf().all()
    assert torch.equal(layer(x), x)


# ---- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: Mamba2(8, 3), "heads: expected a divisor of 2"),
        (lambda: Mamba2(8, 4, groups=3), "groups: expected a divisor of heads=4"),
        (lambda: Mamba2(8, 4, limits=(0.5, 0.1)), "limits: expected"),
        (lambda: Mamba2(8, 4, limits=(-1.0, 0.1)), "limits: expected"),
        (lambda: MambaConfig(conv_size=0), "conv_size"),
        (lambda: MambaConfig(eps=-1.0), "eps: expected"),
        (lambda: Mamba(8, state_dim=0), "state_dim"),
        (lambda: GriffinRecurrent(8, 3), "heads: expected a divisor of width=8"),
        (lambda: HGRN(8, low=1.0), "low: expected"),
        (lambda: HGRN(8, low=-0.1), "low: expected"),
        (lambda: ForgetBounds(3, 8).bound(3), "layer: expected"),
        (lambda: ExponentialMovingAverage(8, alpha=1.0), "alpha: expected"),
        (lambda: DampedEMA(8, 0), "states"),
        (lambda: softplus_step(torch.zeros(1), limits=(math.nan, 1.0)), "limits: expected"),
        (lambda: Mamba2(8, 2, bidirectional=True).init_cache(1, 4), "bidirectional: "),
        (lambda: DampedEMA(8, bidirectional=True)(torch.zeros(1, 2, 8), mask=Causal()), "mask: expected None"),
        (
            lambda: DampedEMA(8, bidirectional=True)(torch.zeros(1, 2, 8), cache=DampedEMA(8).init_cache(1, 4)),
            "cache: expected None",
        ),
        (lambda: Mamba2(8, 2)(torch.zeros(1, 2, 8), cache=Mamba(8).init_cache(1, 4)), "cache: it was made for states"),
    ],
)
def test_errors_name_the_argument(call, words):
    with pytest.raises(ValueError, match=f"^{words}"):
        call()


def test_a_bound_of_a_wrong_kind():
    with pytest.raises(TypeError, match=r"^low: expected"):
        HGRN(8, low="high")
