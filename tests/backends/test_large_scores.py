"""Scores and biases of any size: gradients and sinks on every backend that writes its own softmax."""

import pytest
import torch

import regard
from regard.backends import without_kernels
from regard.masks import Causal

BACKENDS = ["chunked", "reference", *([] if without_kernels() else ["native"])]
PAIRS = [(b, d) for b in BACKENDS for d in (torch.float32, torch.float64) if (b, d) != ("native", torch.float64)]


@pytest.mark.parametrize(("backend", "dtype"), PAIRS)
@pytest.mark.parametrize("size", [-1e5, -1e9, -1e18, 1e9, -3e38])
def test_gradients_of_equal_scores(size, backend, dtype):
    q, k, v = (torch.zeros(1, 1, n, 4, dtype=dtype).requires_grad_() for n in (3, 300, 300))
    bias = torch.full((3, 300), size, dtype=dtype).requires_grad_()
    out = regard.attention(q, k, v, bias=bias, backend=backend)
    dq, dk, dv, d_bias = torch.autograd.grad(out.sum(), (q, k, v, bias))
    torch.testing.assert_close(dv, torch.full_like(dv, 3 / 300))
    assert not dq.any() and not dk.any() and not d_bias.any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_row_of_padding_beside_causal_rows(backend):
    bias = torch.full((3, 3), -torch.inf).triu(1)
    bias[0] = torch.finfo(torch.float32).min
    v = torch.ones(1, 1, 3, 4).requires_grad_()
    q = torch.zeros(1, 1, 3, 4)
    (dv,) = torch.autograd.grad(regard.attention(q, q, v, bias=bias, backend=backend)[..., 0].sum(), v)
    torch.testing.assert_close(dv[0, 0, :, 0], torch.tensor([1 / 3 + 1 / 2 + 1 / 3, 1 / 3 + 1 / 2 + 1 / 3, 2 / 3]))


@pytest.mark.parametrize(("backend", "dtype"), PAIRS)
@pytest.mark.parametrize("queries", [1, 3, 40])
@pytest.mark.parametrize("size", [0.0, 1e6, 1e7, 1e8, 1e17, 1e20])
def test_sinks_beside_large_scores(size, dtype, queries, backend):
    """Seven keys and a sink of one score share the weight equally."""
    q = torch.full((1, 1, queries, 1), size, dtype=dtype)
    one = torch.ones(1, 1, 7, 1, dtype=dtype).requires_grad_()
    sink = torch.tensor([size], dtype=dtype).requires_grad_()
    out = regard.attention(q, one, one, scale=1.0, sink=sink, backend=backend)
    torch.testing.assert_close(out, torch.full_like(out, 7 / 8))
    d_sink = torch.autograd.grad(out.sum(), sink)[0]
    torch.testing.assert_close(d_sink, torch.full_like(d_sink, -queries * 7 / 64))
    with torch.no_grad():
        out = regard.attention(q, one, one, scale=1.0, sink=sink, mask=Causal(), q_start=6, backend=backend)
    torch.testing.assert_close(out, torch.full_like(out, 7 / 8))
