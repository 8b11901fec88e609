"""Checks that the recurrent operations share."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from regard.checks import describe, is_dense, is_number_type, scale_of

__all__ = [
    "autocasting",
    "check_float",
    "check_shape",
    "check_state",
    "lowered",
    "scale_of",
    "tied",
    "widened",
    "without_autocast",
]


def autocasting(x: Tensor) -> bool:
    """Whether autocast is on for the device of `x`."""
    kind = x.device.type
    return (kind == "cpu" or torch.amp.is_autocast_available(kind)) and torch.is_autocast_enabled(kind)


def lowered(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Inside autocast, the tensors in its dtype (float64 stays)."""
    if not autocasting(tensors[0]):
        return tensors
    low = torch.get_autocast_dtype(tensors[0].device.type)
    return tuple(x.to(low) if x.is_floating_point() and x.dtype != torch.float64 else x for x in tensors)


def without_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """A block that autocast doesn't lower: sums stay in the compute dtype."""
    return torch.autocast(x.device.type, enabled=False) if autocasting(x) else contextlib.nullcontext()


def widened(like: Tensor, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """The tensors in the compute dtype of `like`: the gradients of one that is read several times add up in it."""
    dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
    return tuple(x if x is None else x.to(dtype) for x in tensors)


def check_float(name: str, x: Any, ndim: int, shape: object, like: Tensor | None = None) -> None:
    """Raise unless `x` is a floating tensor of `ndim` dimensions, on the device of `like`."""
    if not isinstance(x, Tensor) or not x.is_floating_point():
        raise TypeError(f"{name}: expected a float tensor {shape}, got {describe(x)}")
    is_dense(name, x)
    is_number_type(name, x)
    if x.ndim != ndim:
        raise ValueError(f"{name}: expected {ndim} dimensions {shape}, got shape {tuple(x.shape)}")
    if like is not None and x.device != like.device:
        raise ValueError(f"{name}: expected device {like.device}, got {x.device}")


def check_shape(name: str, x: Tensor, shape: Sequence[int]) -> None:
    """Raise unless `x` has this shape."""
    if tuple(x.shape) != tuple(shape):
        raise ValueError(f"{name}: expected shape {tuple(shape)}, got {tuple(x.shape)}")


def check_state(state: Any, shape: Sequence[int], like: Tensor) -> None:
    """Raise unless `state` is None or a floating tensor of this shape."""
    if state is not None:
        check_float("state", state, len(shape), tuple(shape), like)
        check_shape("state", state, shape)


def tied(out: Tensor, tensors: Iterable[Tensor]) -> Tensor:
    """An empty `out` with the gradient 0 towards each tensor, so that nothing is left without one."""
    for x in tensors:
        if x.is_floating_point():
            out = out + x.flatten()[:0].sum().to(out.dtype)
    return out
