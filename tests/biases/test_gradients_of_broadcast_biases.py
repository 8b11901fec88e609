"""The gradient of what broadcasts is summed in the compute dtype and rounded once, on every backend."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

import regard
from regard.backends.native import library
from regard.biases import Alibi, Dense, RelativeBuckets, RelativeTable, Sum
from regard.errors import BackendUnsupported
from regard.masks import Causal, Window

B, H, TQ, TK, D = 2, 4, 48, 64, 8
BACKENDS = ["reference", "chunked", "sdpa"] + ([] if library.REASON else ["native"])
ON = pytest.mark.parametrize("backend", BACKENDS)
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])


def drawn(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def gradients(make, tensors: list[Tensor], dtype: torch.dtype, backend: str, **options) -> list[Tensor]:
    """Of the bias's tensors; q, k, v and what comes back are the same numbers for every dtype."""
    q, k, v, up = (drawn(B, H, t, D, seed=n).bfloat16() for n, t in enumerate((TQ, TK, TK, TQ)))
    tensors = [t.to(dtype, copy=True).requires_grad_() for t in tensors]
    out = regard.attention(*(x.to(dtype) for x in (q, k, v)), bias=make(*tensors), backend=backend, **options)
    return list(torch.autograd.grad(out, tensors, up.to(dtype)))


def check(make, tensors: list[Tensor], dtype: torch.dtype, backend: str, **options) -> None:
    if backend == "sdpa" and dtype == torch.float16:
        with pytest.raises(BackendUnsupported, match="float16"):
            gradients(make, tensors, dtype, backend, **options)
        return
    tensors = [t.to(dtype) for t in tensors]
    found = gradients(make, tensors, dtype, backend, **options)
    right = gradients(make, tensors, torch.float64, "reference", **options)
    for one, other in zip(found, right, strict=True):
        assert one.dtype == dtype
        torch.testing.assert_close(one.double(), other, rtol=0.51 * torch.finfo(dtype).eps, atol=2e-4)


@DTYPES
@ON
def test_dense_biases_of_every_shape(backend, dtype):
    """Where it is one number for a whole row the gradient is 0; half precision would sum its noise."""
    axes = ((1, B), (1, H), (1, TQ), (1, TK))
    for shape in [(), *itertools.product(*axes[2:]), *itertools.product(*axes)]:
        check(Dense, [drawn(*shape)], dtype, backend)
        check(Dense, [drawn(*shape)], dtype, backend, mask=Causal())


@DTYPES
@ON
def test_slopes_tables_and_sums(backend, dtype):
    mask = {"mask": Window(9)}  # distances that bfloat16 sums would round away
    check(Alibi, [drawn(H).abs()], dtype, backend)
    check(lambda s: Alibi(s, symmetric=True), [drawn(H).abs()], dtype, backend)
    check(RelativeBuckets, [drawn(32, H)], dtype, backend, **mask)
    check(lambda t: RelativeTable(t, (8, 8)), [drawn(225, H)], dtype, backend)
    parts = [drawn(H).abs(), drawn(1, TK), drawn(1, H, TQ, 1), drawn(B, 1, 1, TK, seed=2)]
    check(lambda s, *rest: Sum((Alibi(s), *map(Dense, rest))), parts, dtype, backend)
    check(lambda s, rows: (Dense(s) + Dense(rows)).shifted(3), [drawn(1, TK + 3), drawn(TQ, TK + 3)], dtype, backend)


@pytest.mark.parametrize("backend", [b for b in BACKENDS if b != "native"])
def test_a_bias_narrower_than_float64_scores(backend):
    """float32 tensors beside float64 queries: summed in float64, which the kernels do not compute in."""
    q, k, v = (drawn(B, H, t, D, seed=n).double() for n, t in enumerate((TQ, TK, TK)))
    found = []
    for dtype in (torch.float32, torch.float64):
        bias = drawn(1, TK).to(dtype).requires_grad_()
        found.append(torch.autograd.grad(regard.attention(q, k, v, bias=bias, backend=backend).sin().sum(), bias)[0])
    torch.testing.assert_close(found[0].double(), found[1], rtol=6e-8, atol=1e-12)


@DTYPES
@pytest.mark.parametrize("backend", [b for b in BACKENDS if b != "sdpa"])
def test_sinks(backend, dtype):
    def of(kind: torch.dtype, backend: str) -> Tensor:
        q, k, v, up = (drawn(B, H, t, D, seed=n).bfloat16().to(kind) for n, t in enumerate((TQ, TK, TK, TQ)))
        sink = drawn(H).to(dtype).to(kind).requires_grad_()
        return torch.autograd.grad(regard.attention(q, k, v, sink=sink, backend=backend), sink, up)[0]

    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(of(dtype, backend).double(), of(torch.float64, "reference"), rtol=eps, atol=20 * eps)
