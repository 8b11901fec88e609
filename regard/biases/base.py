"""What every bias can do; sums, moved biases, and biases given as tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from regard.checks import describe, fits, is_dense, is_number_type, pick
from regard.coordinates import Coordinates, TileIndices
from regard.masks.base import tensors_of, to_device

__all__ = ["Bias", "Dense", "Shifted", "Sum", "as_bias", "needs_heads"]

B = TypeVar("B", bound="Bias")


@dataclass(frozen=True, eq=False)
class Bias:
    """A function of (batch, head, query slot, key slot) and of its own tensors, which may be trained."""

    relative: ClassVar[bool] = False  # it depends on the slots only through ``i - j``

    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors that gradients may be wanted for."""
        return tuple(t for t in tensors_of(self) if t.is_floating_point())

    def with_tensors(self: B, tensors: Sequence[Tensor]) -> B:
        """The same bias reading other tensors, in the order of `tensors`."""
        raise NotImplementedError

    def scores(self, indices: TileIndices, dtype: torch.dtype) -> Tensor:
        """The values on `indices`, in `dtype`, broadcasting against (B, H, rows, columns)."""
        raise NotImplementedError

    def accumulate(self, indices: TileIndices, grad: Tensor, out: Sequence[Tensor]) -> None:
        """Add a tile's gradient (B, H, rows, columns) to `out`, which is shaped like `tensors`."""
        raise NotImplementedError

    def check(self, batch: int, heads: int, q_len: int, k_len: int) -> None:
        """Raise ValueError where the bias does not fit a call of these sizes."""

    def shifted(self, by: int) -> Bias:
        """The same bias for keys whose first column is slot `by` (a window cache holds only the latest columns)."""
        return self if by == 0 or self.relative else Shifted(self, by)

    def with_padding(self, keep: Tensor | None) -> Bias:
        """The same bias for keys of which only `keep` (B, Tk) are real: itself, unless it counts tokens, not slots."""
        return self

    def dense(
        self,
        q_len: int,
        k_len: int | None = None,
        *,
        batch: int = 1,
        heads: int | None = None,
        q_start: int | None = None,
    ) -> Tensor:
        """The whole bias as float64 ``(B, H, Tq, Tk)`` (B and H as far as it depends on them)."""
        k_len = q_len if k_len is None else k_len
        heads = self.head_count() or 1 if heads is None else heads
        self.check(batch, heads, q_len, k_len)
        tensors = self.tensors()
        coordinates = Coordinates(
            batch,
            heads,
            q_len,
            k_len,
            k_len - q_len if q_start is None else q_start,
            device=tensors[0].device if tensors else None,
        )
        values = self.scores(coordinates.indices(), torch.float64)
        while values.ndim < 4:
            values = values.unsqueeze(0)
        return values.expand(*values.shape[:2], q_len, k_len)

    def head_count(self) -> int | None:
        """The number of heads that the bias's tensors are made for, or None for any."""
        return None

    def to(self: B, device: torch.device | str) -> B:
        """The same bias with its tensors on `device`."""
        return to_device(self, device)  # type: ignore[no-any-return]

    def __bool__(self) -> bool:
        raise TypeError(f"{type(self).__name__} is neither true nor false: add biases with +")

    def __add__(self, other: Any) -> Sum:
        other = as_bias(other)
        return NotImplemented if other is None else Sum((self, other))


@dataclass(frozen=True, eq=False)
class Sum(Bias):
    """Biases added together."""

    parts: tuple[Bias, ...]

    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(t for part in self.parts for t in part.tensors())

    def _shares(self, tensors: Sequence[Tensor]) -> list[Sequence[Tensor]]:
        shares, start = [], 0
        for part in self.parts:
            count = len(part.tensors())
            shares.append(tensors[start : start + count])
            start += count
        return shares

    def with_tensors(self, tensors: Sequence[Tensor]) -> Sum:
        return Sum(
            tuple(part.with_tensors(share) for part, share in zip(self.parts, self._shares(tensors), strict=True))
        )

    def scores(self, indices: TileIndices, dtype: torch.dtype) -> Tensor:
        total = self.parts[0].scores(indices, dtype)
        for part in self.parts[1:]:
            total = total + part.scores(indices, dtype)
        return total

    def accumulate(self, indices: TileIndices, grad: Tensor, out: Sequence[Tensor]) -> None:
        for part, share in zip(self.parts, self._shares(out), strict=True):
            part.accumulate(indices, grad, share)

    def check(self, batch: int, heads: int, q_len: int, k_len: int) -> None:
        for part in self.parts:
            part.check(batch, heads, q_len, k_len)

    def shifted(self, by: int) -> Sum:
        return Sum(tuple(part.shifted(by) for part in self.parts))

    def head_count(self) -> int | None:
        return next((n for part in self.parts if (n := part.head_count()) is not None), None)


@dataclass(frozen=True, eq=False)
class Shifted(Bias):
    """`part` for keys whose first column is slot `by`."""

    part: Bias
    by: int

    def with_tensors(self, tensors: Sequence[Tensor]) -> Shifted:
        return Shifted(self.part.with_tensors(tensors), self.by)

    def scores(self, indices: TileIndices, dtype: torch.dtype) -> Tensor:
        return self.part.scores(indices.shifted(self.by), dtype)

    def accumulate(self, indices: TileIndices, grad: Tensor, out: Sequence[Tensor]) -> None:
        self.part.accumulate(indices.shifted(self.by), grad, out)

    def check(self, batch: int, heads: int, q_len: int, k_len: int) -> None:
        self.part.check(batch, heads, q_len, k_len + self.by)

    def head_count(self) -> int | None:
        return self.part.head_count()


@dataclass(frozen=True, eq=False)
class Dense(Bias):
    """A float tensor over the call's rows and columns: 0-D, (Tq, Tk) or (B, H, Tq, Tk), broadcasting; -inf masks."""

    tensor: Tensor

    def __post_init__(self) -> None:
        t = self.tensor
        if isinstance(t, Tensor) and not torch.compiler.is_compiling():  # it cannot read layouts in a backward pass
            is_dense("bias", t)
        if not isinstance(t, Tensor) or not t.is_floating_point():
            raise TypeError(
                f"bias: expected a float tensor, got {describe(t)}; a bool tensor is a mask: pass it as mask="
            )
        is_number_type("bias", t)
        if t.ndim == 3:
            raise ValueError(
                f"bias: a 3-D bias is ambiguous, got {describe(t)}; add the missing axis:"
                " bias[:, None] for one per batch row, bias[None] for one per head"
            )
        if t.ndim not in (0, 2, 4):
            raise ValueError(f"bias: expected a number, (Tq, Tk) or (B, H, Tq, Tk), got {describe(t)}")

    def with_tensors(self, tensors: Sequence[Tensor]) -> Dense:
        return Dense(tensors[0])

    def check(self, batch: int, heads: int, q_len: int, k_len: int) -> None:
        fits("bias", self.tensor, (batch, heads, q_len, k_len)[4 - self.tensor.ndim :])

    def _index(self, indices: TileIndices) -> tuple[Tensor, ...]:
        return () if self.tensor.ndim == 0 else (indices.b, indices.h, indices.row, indices.col)[4 - self.tensor.ndim :]

    def scores(self, indices: TileIndices, dtype: torch.dtype) -> Tensor:
        tensor, index = self.tensor, self._index(indices)
        if torch.is_grad_enabled() and tensor.requires_grad:  # first: gradients of what broadcasts add up in it
            tensor = tensor.to(torch.promote_types(tensor.dtype, dtype))
        return (pick(tensor, *index) if index else tensor).to(dtype)

    def accumulate(self, indices: TileIndices, grad: Tensor, out: Sequence[Tensor]) -> None:
        (total,) = out
        if total.ndim == 0:
            total.add_(grad.sum().to(total.dtype))
            return
        grad = grad.sum_to_size(
            [1] * (4 - total.ndim)
            + [1 if n == 1 else m for n, m in zip(total.shape, grad.shape[4 - total.ndim :], strict=True)]
        )
        part = total
        for axis, start, extent in zip((-2, -1), indices.origin, grad.shape[-2:], strict=True):
            if total.shape[axis] != 1:
                part = part.narrow(axis, start, extent)
        part.add_(grad.reshape(part.shape).to(total.dtype))


def as_bias(bias: Any) -> Bias | None:
    """A bias from what the `bias` argument accepts: a Bias, a float tensor (0-D, 2-D or 4-D), or None."""
    return bias if bias is None or isinstance(bias, Bias) else Dense(bias)


def needs_heads(name: str, have: int, heads: int) -> None:
    """Raise unless tensors made for `have` heads meet a call with as many."""
    if have != heads:
        raise ValueError(f"{name}: expected {heads} heads, as q has, got {have}")
