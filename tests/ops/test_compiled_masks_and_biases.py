"""Masks and biases inside one compiled graph and in exported programs whose length stays open."""

import pytest
import torch

import regard
from regard.backends import without_kernels
from regard.masks import Band, Causal, Dilated, Full, Prefix, Segments, Window


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


POSITIONAL = {
    "not window": ~Window(3),
    "not window or causal": ~Window(3) | Causal(),
    "not causal": ~Causal() & Band(5, 5),
    "not two": ~(Window(3) | Dilated(4, 2)),
    "nothing": ~Full(),
    "dilated": Dilated(4, 2),
    "prefix": Prefix(3) | Causal(),
    "within documents": Segments(torch.arange(300) // 7) & ~Window(2),
}


class _Call(torch.nn.Module):
    def __init__(self, mask):
        super().__init__()
        self.mask = mask

    def forward(self, q):
        return regard.attention(q, q, q, mask=self.mask)


@pytest.mark.parametrize("mask", POSITIONAL.values(), ids=POSITIONAL)
def test_combined_masks_compile_whole(mask):
    q = torch.randn(1, 2, 300, 8)
    torch._dynamo.reset()
    call = _Call(mask)
    torch.testing.assert_close(torch.compile(call, fullgraph=True, backend="eager")(q), call(q), rtol=0, atol=0)


@pytest.mark.parametrize("mask", list(POSITIONAL.values())[:-1], ids=list(POSITIONAL)[:-1])
def test_exported_with_an_open_length(mask):
    call, length = _Call(mask), torch.export.Dim("length", min=2, max=4096)
    program = torch.export.export(call, (torch.randn(1, 2, 40, 8),), dynamic_shapes={"q": {2: length}}).module()
    for size in (2, 127, 300):
        q = torch.randn(1, 2, size, 8)
        torch.testing.assert_close(program(q), call(q), rtol=1e-5, atol=1e-6)
