"""A large finite log-decay at one token forgets the past and leaves later decays as they are, on every backend."""

from __future__ import annotations

from functools import lru_cache

import pytest
import torch
from torch import Tensor

import regard
from regard.backends.native import library

F32, F64 = torch.float32, torch.float64
DTYPES = pytest.mark.parametrize("dtype", [F32, F64], ids=["float32", "float64"])
RUNS = [("chunked", F32), ("chunked", F64)] + ([] if library.REASON else [("native", F32)])  # float32 is all it has
RUN = pytest.mark.parametrize(("backend", "dtype"), RUNS, ids=lambda x: str(x).removeprefix("torch."))
LARGE = [-0.1 * torch.finfo(F32).max, -1e30, -1e20, -1e5, -700.0]
KINDS = ["scalar", "channel", "delta scalar", "delta channel", "scan", "selective_scan"]
TOKENS, AT = 40, (4, 21, 22, 39)


@lru_cache
def operands(kind: str) -> dict[str, Tensor]:
    """Positive numbers, so that nothing cancels; the decays' own size is about 1/2."""
    make = torch.Generator().manual_seed(1)

    def drawn(*shape: int) -> Tensor:
        return 0.1 + torch.rand(shape, generator=make)

    if kind == "scan":
        return {"log_a": -drawn(1, TOKENS, 3), "x": drawn(1, TOKENS, 3)}
    if kind == "selective_scan":
        return {"x": drawn(1, TOKENS, 2), "dt": drawn(1, TOKENS, 2), "A": -drawn(2, 3)} | {
            name: drawn(1, TOKENS, 3) for name in "BC"
        }
    sizes = (1, 2, TOKENS)
    given = {"q": drawn(*sizes, 3), "k": drawn(*sizes, 3) / 2, "v": drawn(*sizes, 2)}
    given["decay"] = -drawn(*sizes, 3) if "channel" in kind else -drawn(*sizes)
    return given | ({"beta": drawn(*sizes)} if "delta" in kind else {})


def apply(kind: str, given: dict[str, Tensor], backend: str) -> tuple[Tensor, Tensor]:
    if kind == "scan":
        return regard.scan(**given, backend=backend)
    if kind == "selective_scan":
        return regard.selective_scan(**given, backend=backend)
    q, k, v, decay = (given[name] for name in ("q", "k", "v", "decay"))
    transition = regard.Delta(given["beta"], decay) if "delta" in kind else regard.Decay(decay)
    return regard.recurrence(q, k, v, transition, backend=backend)


def results(kind: str, large: float, dtype: torch.dtype, backend: str) -> list[Tensor]:
    """Output, state and all gradients; `large` stands at the tokens of AT, alone or in its whole channel."""
    given = {name: x.to(dtype, copy=True) for name, x in operands(kind).items()}
    name = {"scan": "log_a", "selective_scan": "dt"}.get(kind, "decay")
    size = -large if kind == "selective_scan" else large
    given[name][(slice(None), AT) if kind in ("scan", "selective_scan") else (slice(None), slice(None), AT)] = size
    if kind == "selective_scan":  # what a huge step writes is huge, so nothing is written there
        given["x"][:, AT] = 0.0
    given = {name: x.requires_grad_() for name, x in given.items()}
    out, state = apply(kind, given, backend)
    grads = torch.autograd.grad(out.square().sum() + state.sum(), list(given.values()))
    return [out.detach(), state.detach(), *grads]


@RUN
@pytest.mark.parametrize("kind", KINDS)
def test_later_decays_count(kind, backend, dtype):
    for large in LARGE:
        found, right = results(kind, large, dtype, backend), results(kind, large, F64, "reference")
        for one, other in zip(found, right, strict=True):
            torch.testing.assert_close(one.to(F64), other, rtol=1e-4 if dtype == F32 else 1e-10, atol=1e-6)


@RUN
@pytest.mark.parametrize("chunk_size", [None, 4])
def test_sums_of_a_half_start_again(backend, dtype, chunk_size):
    one = torch.ones(1, 1, 8, 1, dtype=dtype)
    decay = torch.full((1, 1, 8), -0.5, dtype=dtype)
    decay[0, 0, 4] = -0.1 * torch.finfo(dtype).max
    kept = 0.6065306597126334
    right = [1.0, 1 + kept, 1 + kept + kept**2, 1 + kept + kept**2 + kept**3] * 2
    for each in (decay, decay[..., None]):
        out, _ = regard.recurrence(one, one, one, regard.Decay(each), scale=1.0, chunk_size=chunk_size, backend=backend)
        torch.testing.assert_close(out[0, 0, :, 0], torch.tensor(right, dtype=dtype), rtol=1e-6, atol=0)


@DTYPES
def test_a_constant_that_forgets_everything(dtype):
    """Without a token of its own: every token reads itself alone."""
    q, k, v = (torch.rand(1, 2, 9, 3, dtype=dtype) for _ in range(3))
    decay = torch.tensor([-1e30, -0.25], dtype=dtype)
    for backend in ("reference", "chunked"):
        out, _ = regard.recurrence(q, k, v, regard.Decay(decay), backend=backend)
        own = (q[:, 0] * k[:, 0]).sum(-1, keepdim=True) * 3**-0.5 * v[:, 0]
        torch.testing.assert_close(out[:, 0], own)
