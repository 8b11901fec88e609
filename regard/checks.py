"""Checks of arguments for the whole library, and look-ups in broadcasting tensors that masks and biases share."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from regard.coordinates import TileIndices, can_read

__all__ = [
    "HUGE",
    "SMALLEST",
    "any_all",
    "describe",
    "fits",
    "fits_ids",
    "fits_tile",
    "is_bool",
    "is_dense",
    "is_factory",
    "is_ids",
    "is_number_type",
    "is_part",
    "is_torch_rule",
    "label",
    "lengths",
    "norm_eps",
    "pick",
    "positive",
    "real",
    "same_label",
    "scale_of",
    "whole",
]

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
SMALLEST, HUGE = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max
UNKNOWN = (True, False)  # bounds that promise nothing: some pair may be allowed, not all need be


def describe(value: Any) -> str:
    """How an error names what came."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} tensor of shape {tuple(value.shape)}"
    if isinstance(value, type):
        return f"the class itself; write {value.__name__}(...)"
    kind, text = type(value).__name__, repr(value)
    return text if text.startswith(f"{kind}(") else f"{kind} {text}"


def is_torch_rule(value: Any) -> bool:
    """Whether `value` is torch's `CausalBias`: a tensor by class alone, whose memory was never written."""
    return type(value).__name__ == "CausalBias" and type(value).__module__ == "torch.nn.attention.bias"


def is_dense(name: str, x: Tensor) -> None:
    """Raise TypeError for tensors that hold no plain numbers in strides, or none at all."""
    if type(x) is Tensor and x.layout is torch.strided and not x.is_nested and not x.is_quantized:
        return
    if is_torch_rule(x):
        raise TypeError(
            f"{name}: expected numbers, got torch's CausalBias, which holds none; pass mask=Causal(), with q_start=0"
            " for its upper-left form"
        )
    kind = type(x).__name__
    if x.is_nested or x.layout is not torch.strided or x.is_quantized or kind == "MaskedTensor":
        what = "nested" if x.is_nested else "quantized" if x.is_quantized else str(x.layout).removeprefix("torch.")
        what = "masked" if kind == "MaskedTensor" else what
        raise TypeError(f"{name}: expected a dense tensor in strides, got a {what} one")


def is_number_type(name: str, x: Tensor) -> None:
    """Raise TypeError unless a tensor is of a dtype in which there is arithmetic."""
    if x.dtype not in FLOATS:
        raise TypeError(f"{name}: expected float64, float32, bfloat16 or float16, got {describe(x)}")


def whole(name: str, value: Any, least: int | None) -> int:
    """`value` as an int of at least `least`, or an error that names the argument."""
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
        raise TypeError(f"{name}: expected an int, got {describe(value)}")
    if least is not None and value < least:
        raise ValueError(f"{name}: expected an int of at least {least}, got {value}")
    return value  # type: ignore[return-value]


def real(name: str, value: Any, accepted: str) -> float:
    """`value`, any kind of real number, as a float, or an error that names the argument."""
    if isinstance(value, bool) or not isinstance(value, (int, float, numbers.Real)):
        raise TypeError(f"{name}: expected {accepted}, got {describe(value)}")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{name}: expected {accepted} that a float can hold, got one beyond 1.8e308") from None


def scale_of(scale: float | None, width: int, dtype: torch.dtype) -> float:
    """The factor on ``q . k`` for tensors of `dtype`: ``width ** -0.5`` by default."""
    if scale is None:
        width = int(width) if isinstance(width, Tensor) else width  # torch.jit.trace gives sizes as tensors
        return 1.0 / math.sqrt(width) if width else 1.0
    scale = real("scale", scale, "a number or None")
    if not math.isfinite(scale):
        raise ValueError(f"scale: expected a finite number, got {scale}")
    if dtype != torch.float64 and abs(scale) > HUGE:
        raise ValueError(f"scale: expected a number within {HUGE:.3g}, where the scores are float32, got {scale}")
    return scale


def positive(name: str, value: float, largest: float = HUGE) -> float:
    """`value` as a finite number > 0 that float32 holds in full precision, or an error that names the argument.

    A smaller one would divide as 0 does: x / 0 is not finite, and 0 / 0 is no number.
    """
    value = real(name, value, "a number > 0")
    if not SMALLEST <= value <= largest:
        raise ValueError(f"{name}: expected a number > 0, from {SMALLEST:.3g} to {largest:.3g}, got {value}")
    return value


def norm_eps(eps: float, least: float = 0.0) -> float:
    """What a norm adds before it divides, as a finite number of at least `least`, or an error."""
    eps = real("eps", eps, f"a number >= {least:g}")
    if not least <= eps < HUGE:
        raise ValueError(f"eps: expected a finite number >= {least:g}, got {eps}")
    return eps


def is_part(name: str, value: Any, *kinds: type) -> None:
    """Raise unless a part of a layer is left out (None) or of one of these classes."""
    if value is not None and not isinstance(value, kinds):
        accepted = [f"{'an' if kind.__name__[0] in 'AEIOU' else 'a'} {kind.__name__}" for kind in kinds]
        raise TypeError(f"{name}: expected {', '.join(accepted)} or None, got {describe(value)}")


def is_factory(name: str, value: Any) -> None:
    """Raise unless what makes a part of a layer can be called."""
    if not callable(value):
        raise TypeError(f"{name}: expected a factory of modules, got {describe(value)}")


def lengths(name: str, values: Sequence[int] | Tensor) -> tuple[int, ...]:
    """Sequence lengths as a tuple of ints."""
    if isinstance(values, Tensor):
        if values.ndim != 1 or values.is_floating_point() or values.dtype == torch.bool:
            raise ValueError(f"{name}: expected integers, one per sequence, got {describe(values)}")
        values = values.tolist()
    return tuple(whole(name, value, 0) for value in values)


def is_bool(name: str, tensor: Any, ndims: tuple[int, ...], shape: str) -> None:
    """Raise unless `tensor` is a bool tensor of one of these numbers of dimensions."""
    if not isinstance(tensor, Tensor) or tensor.dtype != torch.bool:
        raise TypeError(f"{name}: expected a bool tensor {shape}, True = may attend, got {describe(tensor)}")
    is_dense(name, tensor)
    if tensor.ndim not in ndims:
        raise ValueError(f"{name}: expected a bool tensor {shape}, got {describe(tensor)}")


def is_ids(name: str, tensor: Any, ndims: tuple[int, ...]) -> None:
    """Raise unless `tensor` is an integer tensor of one of these numbers of dimensions."""
    if not isinstance(tensor, Tensor) or tensor.is_floating_point() or tensor.dtype == torch.bool:
        raise TypeError(f"{name}: expected an integer tensor, got {describe(tensor)}")
    is_dense(name, tensor)
    if tensor.ndim not in ndims:
        raise ValueError(
            f"{name}: expected {' or '.join(map(str, ndims))} dimensions, the last one tokens, got {describe(tensor)}"
        )


def fits(name: str, tensor: Tensor, sizes: Sequence[int]) -> None:
    """Raise unless `tensor` broadcasts to `sizes`."""
    if any(have not in (1, want) for have, want in zip(tensor.shape, sizes, strict=True)):
        raise ValueError(f"{name}: expected a shape that broadcasts to {tuple(sizes)}, got {tuple(tensor.shape)}")


def fits_tile(name: str, values: Tensor, indices: TileIndices) -> None:
    """Raise unless what a user's rule gave broadcasts to a tile."""
    sizes = torch.broadcast_shapes(indices.b.shape, indices.h.shape, indices.i.shape, indices.j.shape)
    pairs = zip(values.shape[::-1], sizes[::-1], strict=False)
    if values.ndim > len(sizes) or any(have not in (1, want) for have, want in pairs):
        raise ValueError(f"{name}: expected a result that broadcasts to {tuple(sizes)}, got {tuple(values.shape)}")


def fits_ids(name: str, ids: Tensor, batch: int, heads: int, length: int) -> None:
    """Raise unless `ids` has one label per token, shared or not by rows and heads."""
    if ids.shape[-1] != length:
        raise ValueError(f"{name}: expected one id for each of {length} tokens, got shape {tuple(ids.shape)}")
    fits(name, ids, {1: (length,), 2: (batch, length), 3: (batch, heads, length)}[ids.ndim])


def pick(tensor: Tensor, *index: Tensor) -> Tensor:
    """``tensor[index]`` where dimensions of size 1 broadcast."""
    return tensor[tuple(torch.zeros_like(i) if size == 1 else i for i, size in zip(index, tensor.shape, strict=True))]


def label(ids: Tensor, indices: TileIndices, token: Tensor) -> Tensor:
    """The label of every token of a tile; ids (T,), (B, T) or (B, H, T)."""
    return pick(ids, *((), (indices.b,), (indices.b, indices.h))[ids.ndim - 1], token)


def any_all(mask: Any, tensor: Tensor, index: tuple[Any, ...]) -> tuple[bool, bool]:
    """(any, all) of a block of a bool tensor, remembered on the mask."""
    if not can_read(tensor):
        return UNKNOWN
    key = tuple((part.start, part.stop) if isinstance(part, slice) else None for part in index)
    if key not in mask._memo:
        block = tensor[index]
        mask._memo[key] = (bool(block.any()), bool(block.all()))
    answer: tuple[bool, bool] = mask._memo[key]
    return answer


def same_label(mask: Any, q: tuple[Tensor, tuple[int, int]], k: tuple[Tensor, tuple[int, int]]) -> tuple[bool, bool]:
    """(may any, do all) labels of two ranges of tokens agree: by their smallest and largest, remembered on the mask."""
    ends = []
    for side, (ids, tokens) in enumerate((q, k)):
        if not can_read(ids):
            return UNKNOWN
        key = (side, ids is q[0], tokens)
        if key not in mask._memo:
            part = ids[..., slice(*tokens)]
            mask._memo[key] = (part.amin(-1), part.amax(-1))
        ends.append(mask._memo[key])
    (q_low, q_high), (k_low, k_high) = ends
    if {q_low.ndim, k_low.ndim} == {1, 2}:  # (B,) beside (B, H)
        q_low, q_high, k_low, k_high = (x[:, None] if x.ndim == 1 else x for x in (q_low, q_high, k_low, k_high))
    some = ((q_low <= k_high) & (k_low <= q_high)).any()
    every = ((q_low == q_high) & (k_low == k_high) & (q_low == k_low)).all()
    return bool(some), bool(every)
