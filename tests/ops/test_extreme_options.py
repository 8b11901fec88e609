"""Numbers that the library divides by or multiplies with: what is accepted works in the compute dtype."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import regard
from regard.backends.native import library
from regard.biases import Alibi
from regard.feature_maps import Quadratic, Rebased, Taylor
from regard.masks import Causal
from regard.mixers.parts import l2_normalized
from regard.nn import (
    GatedLinearAttention,
    GatedRMSNorm,
    GLADecay,
    KDAGates,
    LinearAttention,
    MambaConfig,
    RMSNorm,
    Scores,
)

TINY = torch.finfo(torch.float32).tiny
BACKENDS = ["reference", "chunked"] + ([] if library.REASON else ["native"])
ON = pytest.mark.parametrize("backend", BACKENDS)


def operands(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    drawn = torch.Generator().manual_seed(0)
    return [torch.randn(1, 2, 5, 8, generator=drawn).to(dtype) for _ in range(3)]


@ON
@pytest.mark.parametrize("cap", [TINY, 1e-30, 1e-3, 1e10, 1e29, 1e30, 1e300])
def test_softcaps_that_are_accepted(cap, backend):
    wide = [x.double().requires_grad_() for x in operands()]
    scores = cap * torch.tanh(wide[0] @ wide[1].mT * 8**-0.5 / cap)
    right = scores.softmax(-1) @ wide[2]
    given = [x.requires_grad_() for x in operands()]
    found = regard.attention(*given, softcap=cap, backend=backend)
    torch.testing.assert_close(found.double(), right, rtol=0, atol=1e-6)
    grads = [torch.autograd.grad(y.sin().sum(), xs) for y, xs in ((found, given), (right, wide))]
    for one, other in zip(*grads, strict=True):  # float32's tanh is 1 where float64's is 1 less 1e-9
        torch.testing.assert_close(one.double(), other, rtol=0, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("cap", [1e-300, 1e-40, 5e-324, 0.0, -1.0, -math.inf, math.nan])
def test_softcaps_that_float32_cannot_divide_by(cap, dtype):
    with pytest.raises(ValueError, match="softcap"):
        regard.attention(*operands(dtype), softcap=cap)
    with pytest.raises(ValueError, match="softcap"):
        Scores(softcap=cap)


@pytest.mark.parametrize("option", ["scale", "softcap", "dropout_p"])
def test_whole_numbers_beyond_any_float_name_the_argument(option):
    with pytest.raises(ValueError, match=f"{option}: expected a number"):
        regard.attention(*operands(), **{option: 10**400})


def test_float64_scores_take_smaller_softcaps():
    q, k, v = operands(torch.float64)
    out = regard.attention(q, k, v, softcap=1e-300)
    torch.testing.assert_close(out, v.mean(2, keepdim=True).expand_as(out))
    with pytest.raises(ValueError, match="softcap"):
        regard.attention(q, k, v, softcap=5e-324)


@ON
@pytest.mark.parametrize("scale", [0.0, 5e-324, 1e-300, -1e-45, 1e-40, TINY])
def test_scales_that_vanish(scale, backend):
    q, k, v = (x.requires_grad_() for x in operands())
    out = regard.attention(q, k, v, scale=scale, backend=backend)
    torch.testing.assert_close(out, v.mean(2, keepdim=True).expand_as(out))
    assert all(x.abs().max() < 1e-30 for x in torch.autograd.grad(out.sum(), (q, k)))


@pytest.mark.parametrize("backend", ["reference", "chunked"])
def test_scales_up_to_the_largest(backend):
    q, k, v = operands()
    small = [x * 1e-18 for x in (q, k)]
    right = regard.attention(q.double(), k.double(), v.double(), scale=3.0, backend="reference")
    torch.testing.assert_close(
        regard.attention(*small, v, scale=3e36, backend=backend).double(), right, rtol=0, atol=2e-6
    )
    for scale in (3.5e38, -1e300, math.inf, math.nan):
        with pytest.raises(ValueError, match="scale"):
            regard.attention(q, k, v, scale=scale)
    assert regard.attention(*(x.double() * 1e-150 for x in (q, k)), v.double(), scale=1e300).isfinite().all()


@ON
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sinks_of_any_size(backend, dtype):
    q, k, v = (x.requires_grad_() for x in operands())
    sink = torch.tensor([3e38, -3e38], dtype=dtype, requires_grad=True)
    if dtype == torch.float64:
        sink = torch.tensor([1e300, -1e300], dtype=dtype, requires_grad=True)
    out = regard.attention(q, k, v, sink=sink, backend=backend)
    plain = regard.attention(q, k, v, backend=backend)
    torch.testing.assert_close(out, torch.stack((torch.zeros_like(plain[:, 0]), plain[:, 1]), 1))
    grads = torch.autograd.grad(out.sum(), (q, k, v, sink))
    assert all(x.isfinite().all() for x in grads) and torch.equal(grads[3], torch.zeros_like(sink))


@ON
def test_slopes_whose_penalties_stay_finite(backend):
    q, k, v = operands()
    out = regard.attention(q, k, v, mask=Causal(), bias=Alibi(torch.tensor([1e30, 1e-40])), backend=backend)
    torch.testing.assert_close(out[:, 0], v[:, 0])  # every token reads itself
    torch.testing.assert_close(out[:, 1], regard.attention(q, k, v, mask=Causal(), backend=backend)[:, 1])
    for steep in (1e31, math.inf):
        with pytest.raises(ValueError, match="slopes"):
            Alibi(torch.tensor([1.0, -steep], dtype=torch.float64))


@pytest.mark.parametrize("eps", [0.0, 5e-324, 1e-300, 1e-40, 1e-6])
def test_norms_of_rows_of_zeros(eps):
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        x = torch.zeros(2, 3, 4, dtype=dtype, requires_grad=True)
        for norm in (
            RMSNorm(4, eps),
            RMSNorm(4, eps, unit_offset=True),
            *(GatedRMSNorm(4, n, eps=eps) for n in (1, 2)),
        ):
            norm = norm.to(dtype)
            out = norm(x, torch.ones_like(x)) if isinstance(norm, GatedRMSNorm) else norm(x)
            assert torch.equal(out, torch.zeros_like(out))
            out.sum().backward()
            assert x.grad.isfinite().all() and norm.weight.grad.isfinite().all()
        if dtype != torch.bfloat16:
            unit = l2_normalized(x, eps)
            assert torch.equal(unit, x)
            (grad,) = torch.autograd.grad(unit.sum(), x)
            assert grad.isfinite().all()
    normed = RMSNorm(4, eps)(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    torch.testing.assert_close(normed, torch.tensor([1.0, 2.0, 3.0, 4.0]) / 7.5**0.5, rtol=1e-6, atol=0)


def test_a_norm_without_eps_is_that_of_the_direction():
    x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    torch.autograd.gradcheck(RMSNorm(5, 0.0).double(), x)
    torch.autograd.gradcheck(lambda x: l2_normalized(x, 0.0), x)
    for size in (1e-15, 1.0, 1e15):
        torch.testing.assert_close(RMSNorm(5, 0.0)(x.detach().float() * size), RMSNorm(5, 0.0)(x.detach().float()))


@pytest.mark.parametrize("eps", [-1e-6, math.nan, math.inf])
def test_norms_refuse_what_is_no_eps(eps):
    makers = [RMSNorm, GatedRMSNorm, lambda n, eps: MambaConfig(eps=eps), lambda n, eps: KDAGates(eps=eps)]
    for make in (*makers, lambda n, eps: Rebased(1, n, eps=eps)):
        with pytest.raises(ValueError, match="eps"):
            make(4, eps=eps)
    with pytest.raises(ValueError, match="eps"):
        Rebased(1, 4, eps=1e-30)


@pytest.mark.parametrize("tau", [1e-300, 1e-40, 0.0, math.inf])
def test_normalisers_of_decays_that_float32_cannot_divide_by(tau):
    with pytest.raises(ValueError, match="tau"):
        GLADecay(tau=tau)


def test_the_smallest_normaliser_and_bound():
    layer = GatedLinearAttention(8, 2, decay=GLADecay(tau=1.2e-38))
    x = torch.randn(1, 40, 8, requires_grad=True)
    layer(x).sum().backward()
    assert x.grad.isfinite().all() and all(p.grad.isfinite().all() for p in layer.parameters())


@pytest.mark.parametrize("scale", [1e-300, 1e-40, 1e12])
@pytest.mark.parametrize("kind", [Quadratic, Taylor, Rebased])
def test_scales_of_feature_maps(kind, scale):
    layer = LinearAttention(8, 2, feature_map=lambda heads, dim: kind(heads, dim, scale=scale))
    assert layer(torch.randn(1, 9, 8)).isfinite().all()
    for beyond in (1e13, 1e300, math.inf, 0.0, math.nan):
        with pytest.raises(ValueError, match="scale"):
            kind(2, 4, scale=beyond)
