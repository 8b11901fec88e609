"""Decays, rates, taps and states that every token reads: their gradients are summed in the compute dtype."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import regard
from regard.backends.native import library

T = 300
BACKENDS = ["reference", "chunked"] + ([] if library.REASON else ["native"])
ON = pytest.mark.parametrize("backend", BACKENDS)
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])


def drawn(*shape: int, seed: int = 1) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)).bfloat16().float()


def check(operation, shared: dict[str, Tensor], dtype: torch.dtype, backend: str) -> None:
    """Gradients of `shared` in half precision, the rest in float32, are one rounding from those of float64."""
    found = []
    for kind, wide, name in ((dtype, torch.float32, backend), (torch.float64, torch.float64, "reference")):
        given = {key: x.to(dtype).to(kind).requires_grad_() for key, x in shared.items()}
        out, state = operation(wide, name, **given)
        found.append(torch.autograd.grad(out.sum() + state.sum(), list(given.values())))
    for one, other in zip(*found, strict=True):
        assert one.dtype == dtype
        torch.testing.assert_close(one.double(), other, rtol=0.52 * torch.finfo(dtype).eps, atol=1e-4)


@DTYPES
@ON
@pytest.mark.parametrize("segments", [False, True])
def test_a_constant_decay(backend, dtype, segments):
    ids = torch.arange(T)[None] // 97 if segments else None

    def run(wide, backend, decay):
        q, k, v = (drawn(1, 2, T, 3, seed=n).to(wide) for n in range(3))
        return regard.recurrence(q, k, v, regard.Decay(decay), scale=0.1, segments=ids, backend=backend)

    check(run, {"decay": -drawn(2)}, dtype, backend)


@DTYPES
@ON
def test_decays_that_broadcast_in_a_scan(backend, dtype):
    for shape in ((1, 1, 4), (1, 1, 1), (2, 1, 4), (1, T, 1)):
        check(
            lambda wide, backend, log_a: regard.scan(log_a, drawn(2, T, 4).to(wide) / 8, backend=backend),
            {"log_a": -drawn(*shape) - 0.1},
            dtype,
            backend,
        )


@DTYPES
@ON
def test_rates_and_skips_of_a_selective_scan(backend, dtype):
    def run(wide, backend, A, D):
        x, dt, B, C = (drawn(2, T, n, seed=n).to(wide) / 4 for n in (4, 4, 3, 3))
        return regard.selective_scan(x, dt, A, B, C, D, backend=backend)

    check(run, {"A": -drawn(4, 3), "D": drawn(4)}, dtype, backend)


@DTYPES
@ON
def test_taps_of_a_convolution(backend, dtype):
    def run(wide, backend, weight, bias):
        with regard.use_backend(backend):
            return regard.short_conv(drawn(2, T, 4).to(wide) / 8, weight, bias)

    check(run, {"weight": drawn(4, 3), "bias": drawn(4)}, dtype, backend)
