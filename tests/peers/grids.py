"""What the peers' tests share: a spread over a grid, every backend that takes a call, and measures of an error."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from regard import backends, use_backend
from regard.backends.native import library
from regard.errors import BackendUnsupported

BUILT = library.REASON is None
LOW = (torch.bfloat16, torch.float16)
DTYPES = (torch.float32, *LOW)
COMPILED = ("flex",)  # every kind of call is compiled for many seconds


def spread(count: int, seed: int = 0, **axes: Sequence[Any]) -> list[Any]:
    """`count` points of a grid, named; each axis takes all its values equally often, each paired at random."""
    draw = random.Random(seed)
    columns = []
    for values in axes.values():
        column = [values[n % len(values)] for n in range(count)]
        draw.shuffle(column)
        columns.append(column)
    return named(list(zip(*columns, strict=True)))


def named(points: Sequence[tuple[Any, ...]]) -> list[Any]:
    """The points as parameters of a test, with their values as names."""
    return [pytest.param(*point, id="-".join(str(part).replace("torch.", "") for part in point)) for point in points]


def made(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    """Normal numbers, rounded to `dtype`."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=torch.float64).to(dtype)


def uniform(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    """Numbers from 0 to 1, rounded to `dtype`."""
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=torch.float64).to(dtype)


def leaves(tensors: Sequence[Tensor], dtype: torch.dtype | None = None) -> list[Tensor]:
    """Copies that gather gradients."""
    return [x.detach().to(x.dtype if dtype is None else dtype, copy=True).requires_grad_() for x in tensors]


def with_gradients(
    run: Callable[..., Sequence[Tensor]], tensors: Sequence[Tensor], cotangents: Sequence[Tensor]
) -> list[Tensor]:
    """The results of `run` and the gradients of all tensors, for fixed cotangents of the results that have any."""
    inputs = leaves(tensors)
    outs = run(*inputs)
    loss = sum((out.double() * weight.double()).sum() for out, weight in zip(outs, cotangents, strict=False))
    assert isinstance(loss, Tensor)
    grads = torch.autograd.grad(loss, inputs, allow_unused=True)
    return [
        *(out.detach() for out in outs),
        *(torch.zeros_like(x) if g is None else g for g, x in zip(grads, inputs, strict=True)),
    ]


def on_each_backend(
    run: Callable[[], Any], *, names: Sequence[str] | None = None, expected: Sequence[str] = ()
) -> Iterator[tuple[str, Any]]:
    """(backend, result) of every backend that takes the call; those expected must."""
    ran = []
    for name in names or [name for name in backends.names() if name not in COMPILED]:
        try:
            with use_backend(name):
                result = run()
        except BackendUnsupported:
            continue
        ran.append(name)
        yield name, result
    wanted = {*expected, "chunked", "reference"} if names is None else set(expected)
    assert wanted - ({"native"} if not BUILT else set()) <= set(ran), ran


def ratio(got: Tensor, want: Tensor) -> float:
    """The error's root mean square over that of the value; 0 where the error is nothing beside 1."""
    assert got.shape == want.shape
    error = got.double() - want.double()
    if not error.numel() or float(error.abs().max()) <= 1e-12:
        return 0.0
    return float(error.square().mean().sqrt() / (want.double().square().mean().sqrt() + 1e-8))
