"""A mask and a bias given as tensors, trained inside one compiled graph, on every backend that trains there."""

import pytest
import torch

import regard
from regard.backends import without_kernels


@pytest.mark.parametrize(("backend", "dtype"), [("chunked", torch.float64), ("native", torch.float32)])
def test_training_with_a_mask_and_a_bias_compiles_whole(backend, dtype):
    if backend == "native" and without_kernels():
        pytest.skip(f"native not built: {without_kernels()}")
    q, k, v = (torch.randn(2, 2, 5, 4, dtype=dtype, requires_grad=True) for _ in range(3))
    mask, bias = torch.rand(2, 1, 5, 5) > 0.3, torch.randn(2, 2, 5, 5, dtype=dtype, requires_grad=True)

    def call(q, k, v, bias):
        return regard.attention(q, k, v, mask=mask, bias=bias, backend=backend)

    torch._dynamo.reset()
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    want, found = (one(q, k, v, bias) for one in (call, compiled))
    torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-6)
    grads = (torch.autograd.grad(out.square().sum(), (q, k, v, bias)) for out in (want, found))
    for want, found in zip(*grads, strict=True):
        torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-5)
