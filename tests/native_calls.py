"""What the tests of the native kernels share: a call's results, and their comparison with the definition."""

import pytest
import torch
from attention_calls import made

import regard
from regard.backends.native import library

needs_native = pytest.mark.skipif(library.REASON is not None, reason=f"native not built: {library.REASON}")
LOW = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}  # of a result's own size


def near(got: torch.Tensor, want: torch.Tensor, tolerance: float) -> None:
    """Within `tolerance` of the largest entry (at least 1), with infinities in the same places."""
    finite = want.isfinite()
    assert torch.equal(got.isfinite(), finite)
    size = max(float(want[finite].abs().max()), 1.0) if finite.any() else 1.0
    torch.testing.assert_close(got.double(), want, rtol=0, atol=tolerance * size)


def results(backend, q, k, v, *, bias=None, sink=None, lse=True, **options):
    """[out, lse, gradients of q, k, v, of the bias's tensors, of the sink] for fixed cotangents of out and lse."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    if bias is not None:
        tensors = [t.detach().requires_grad_() for t in bias.tensors()]
        bias, leaves = bias.with_tensors(tensors), leaves + tensors
    if sink is not None:
        sink = sink.detach().requires_grad_()
        leaves.append(sink)
    torch.manual_seed(5)
    out, log_sum = regard.attention(*leaves[:3], bias=bias, sink=sink, backend=backend, return_lse=True, **options)
    finite = torch.where(log_sum == -torch.inf, 0.0, log_sum)
    loss = (out * made(*out.shape)).sum() + (finite * made(*log_sum.shape)).sum() * lse
    grads = torch.autograd.grad(loss, leaves, allow_unused=True)
    return [out, log_sum, *(torch.zeros_like(x) if g is None else g for g, x in zip(grads, leaves, strict=True))]


def agrees(q, k, v, dtype=torch.float32, tolerance=None, **options):
    """Native results on `dtype` equal the definition on the same rounded numbers in float64."""
    low = [x.to(dtype) for x in (q, k, v)]
    want = results("reference", *(x.double() for x in low), **options)
    got = results("native", *low, **options)
    assert got[0].dtype == dtype and got[1].dtype == torch.float32
    for one, other in zip(got, want, strict=True):
        near(one.detach(), other.detach(), tolerance or LOW[dtype])
    return got
