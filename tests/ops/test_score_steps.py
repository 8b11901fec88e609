"""Every step between a scaled product and its score: the oracle's values on every backend, and the derivative."""

import dataclasses

import numpy as np
import pytest
import torch
from oracles.softmax_attention import softmax_attention

import regard
from regard import backends
from regard.errors import BackendUnsupported
from regard.score_options import ScoreOptions

STEPS = {"softcap": 1.5}  # a value that bends the scores of the test


def made(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)), dtype=torch.float64)


def test_every_step_is_tried_here():
    """Add a value above for a new field."""
    fields = {field.name for field in dataclasses.fields(ScoreOptions)} - {"scale"}
    assert fields == set(STEPS)


@pytest.mark.parametrize("step", STEPS)
def test_slope_is_the_derivative(step):
    options = ScoreOptions.of(8, torch.float64, **{step: STEPS[step]})
    products = (3 * made(50)).requires_grad_()
    scores = options.apply(products)
    (wanted,) = torch.autograd.grad(scores.sum(), products)
    torch.testing.assert_close(options.slope(scores.detach()), wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("backend", backends.names())
@pytest.mark.parametrize("step", STEPS)
def test_every_backend_has_a_step_or_says_that_it_has_not(step, backend):
    q, k, v = made(2, 4, 5, 8), 2 * made(2, 2, 7, 8), made(2, 2, 7, 6)
    options = {step: STEPS[step]}
    if backend == "flex":  # its compilation takes long; a slow test elsewhere runs it
        return
    wide = backend in ("reference", "chunked")
    dtype = torch.float64 if wide else torch.float32
    tensors = [x.to(dtype) for x in (q, k, v)]
    try:
        out = regard.attention(*tensors, backend=backend, **options)
    except BackendUnsupported as refusal:
        assert step in str(refusal) or "kernels were not built" in str(refusal)
        return
    wanted, _, _ = softmax_attention(q.numpy(), k.numpy(), v.numpy(), **options)
    close = 1e-12 if wide else 1e-5
    np.testing.assert_allclose(out.double().numpy(), wanted, rtol=close, atol=close)
