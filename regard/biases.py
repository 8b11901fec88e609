"""Biases: numbers added to the scores, after scale and softcap and before the mask; they combine with ``+``.

A bias gives its values on a tile of positions (`Bias.scores`) and sums a tile of score gradients into the gradients of
its tensors (`Bias.accumulate`), so no backend ever holds a whole ``(Tq, Tk)`` bias that was not given as one.

>>> from regard.biases import Alibi
>>> Alibi(2).dense(2)[0, 0]  # slope of head 0 is 1/16
tensor([[ 0.0000,  0.0625],
        [-0.0625,  0.0000]], dtype=torch.float64)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from regard.masks.base import tensors_of, to_device
from regard.masks.checks import describe, fits, pick, whole
from regard.sites import Frame, Site

__all__ = [
    "Alibi",
    "Bias",
    "Dense",
    "RelativeBuckets",
    "RelativeTable",
    "Sum",
    "alibi_slopes",
    "as_bias",
    "relative_bucket",
]

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

    def scores(self, site: Site, dtype: torch.dtype) -> Tensor:
        """The values on `site`, in `dtype`, broadcasting against (B, H, rows, columns)."""
        raise NotImplementedError

    def accumulate(self, site: Site, grad: Tensor, into: Sequence[Tensor]) -> None:
        """Add a tile's gradient (B, H, rows, columns) to `into`, tensors shaped like `tensors`; `site` is its place."""
        raise NotImplementedError

    def check(self, batch: int, heads: int, q_len: int, k_len: int) -> None:
        """Raise ValueError where the bias does not fit a call of these sizes."""

    def moved(self, by: int) -> Bias:
        """The same bias for keys whose first column is slot `by` (a window cache holds only the latest columns)."""
        return self if by == 0 or self.relative else Moved(self, by)

    def among(self, keep: Tensor | None) -> Bias:
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
        frame = Frame(
            batch,
            heads,
            q_len,
            k_len,
            k_len - q_len if q_start is None else q_start,
            device=tensors[0].device if tensors else None,
        )
        values = self.scores(frame.site(), torch.float64)
        while values.ndim < 4:
            values = values.unsqueeze(0)
        return values.expand(*values.shape[:2], q_len, k_len)

    def head_count(self) -> int | None:
        """The number of heads that the bias's tensors are made for, or None for any."""
        return None

    def to(self: B, device: torch.device | str) -> B:
        """The same bias with its tensors on `device`."""
        return to_device(self, device)  # type: ignore[no-any-return]

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

    def scores(self, site: Site, dtype: torch.dtype) -> Tensor:
        total = self.parts[0].scores(site, dtype)
        for part in self.parts[1:]:
            total = total + part.scores(site, dtype)
        return total

    def accumulate(self, site: Site, grad: Tensor, into: Sequence[Tensor]) -> None:
        for part, share in zip(self.parts, self._shares(into), strict=True):
            part.accumulate(site, grad, share)

    def check(self, batch: int, heads: int, q_len: int, k_len: int) -> None:
        for part in self.parts:
            part.check(batch, heads, q_len, k_len)

    def moved(self, by: int) -> Sum:
        return Sum(tuple(part.moved(by) for part in self.parts))

    def head_count(self) -> int | None:
        return next((n for part in self.parts if (n := part.head_count()) is not None), None)


@dataclass(frozen=True, eq=False)
class Moved(Bias):
    """`part` for keys whose first column is slot `by`."""

    part: Bias
    by: int

    def with_tensors(self, tensors: Sequence[Tensor]) -> Moved:
        return Moved(self.part.with_tensors(tensors), self.by)

    def scores(self, site: Site, dtype: torch.dtype) -> Tensor:
        return self.part.scores(site.moved(self.by), dtype)

    def accumulate(self, site: Site, grad: Tensor, into: Sequence[Tensor]) -> None:
        self.part.accumulate(site.moved(self.by), grad, into)

    def check(self, batch: int, heads: int, q_len: int, k_len: int) -> None:
        self.part.check(batch, heads, q_len, k_len + self.by)

    def head_count(self) -> int | None:
        return self.part.head_count()


def alibi_slopes(heads: int, order: str = "bloom", max_bias: float = 8.0) -> Tensor:
    """The published ALiBi slopes, float64 ``(heads,)``.

    For a power of two ``H`` they are ``2^(-max_bias * h / H)``, h = 1..H. Otherwise ``order="bloom"`` takes the slopes
    of the power of two below, then every other slope of the one above; ``order="mpt"`` takes the power of two above,
    its odd places (h = 2, 4, …) first, then its even ones, cut to `heads`: other heads get other slopes, so a
    checkpoint needs its own order.

    Press, Smith, Lewis 2021, arXiv:2108.12409, and the two families' code.

    >>> alibi_slopes(3).tolist()
    [0.0625, 0.00390625, 0.25]
    """
    whole("heads", heads, 1)

    def series(count: int) -> list[float]:
        return [2.0 ** (-max_bias * h / count) for h in range(1, count + 1)]

    below = 2 ** math.floor(math.log2(heads))
    if order not in ("bloom", "mpt"):
        raise ValueError(f"order: expected 'bloom' or 'mpt', got {order!r}")
    if below == heads:
        slopes = series(heads)
    elif order == "bloom":
        slopes = series(below) + series(2 * below)[0::2][: heads - below]
    else:
        slopes = (series(2 * below)[1::2] + series(2 * below)[0::2])[:heads]
    return torch.tensor(slopes, dtype=torch.float64)


@dataclass(frozen=True, eq=False)
class Alibi(Bias):
    """ALiBi, ``slope_h * (j - i)``: the further the key, the lower its score; if `symmetric`, ``-slope_h * |i - j|``.

    `slopes` is a tensor (H,), or a number of heads for the published slopes in Bloom's order (see `alibi_slopes`).
    Distances count slots, so they equal Bloom's distances between real tokens wherever the padding is before or after
    them.

    Press, Smith, Lewis 2021, arXiv:2108.12409. The symmetric form is an extension for encoders.
    """

    slopes: Tensor | int
    symmetric: bool = False
    relative: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not isinstance(self.slopes, Tensor):
            object.__setattr__(self, "slopes", alibi_slopes(self.slopes))
        elif self.slopes.ndim != 1 or not self.slopes.is_floating_point():
            raise ValueError(f"slopes: expected a float tensor (H,) or a number of heads, got {describe(self.slopes)}")

    @property
    def _slopes(self) -> Tensor:
        assert isinstance(self.slopes, Tensor)
        return self.slopes

    def with_tensors(self, tensors: Sequence[Tensor]) -> Alibi:
        return Alibi(tensors[0], self.symmetric)

    def _distance(self, site: Site) -> Tensor:
        return -(site.i - site.j).abs() if self.symmetric else site.j - site.i

    def scores(self, site: Site, dtype: torch.dtype) -> Tensor:
        return self._slopes.to(dtype)[site.h] * self._distance(site).to(dtype)

    def accumulate(self, site: Site, grad: Tensor, into: Sequence[Tensor]) -> None:
        into[0].add_((grad * self._distance(site).to(grad.dtype)).sum((0, 2, 3)).to(into[0].dtype))

    def check(self, batch: int, heads: int, q_len: int, k_len: int) -> None:
        _needs_heads("Alibi.slopes", self._slopes.shape[0], heads)

    def head_count(self) -> int:
        return self._slopes.shape[0]


class _Table(Bias):
    """``table[index(i, j), h]``."""

    table: Tensor

    def index(self, site: Site) -> Tensor:
        raise NotImplementedError

    def scores(self, site: Site, dtype: torch.dtype) -> Tensor:
        return self.table.to(dtype)[self.index(site), site.h]

    def accumulate(self, site: Site, grad: Tensor, into: Sequence[Tensor]) -> None:
        index = self.index(site).expand(grad.shape[0], 1, *grad.shape[2:])[:, 0]
        into[0].index_add_(0, index.flatten(), grad.permute(0, 2, 3, 1).flatten(0, 2).to(into[0].dtype))

    def check(self, batch: int, heads: int, q_len: int, k_len: int) -> None:
        _needs_heads(f"{type(self).__name__}.table", self.table.shape[1], heads)

    def head_count(self) -> int:
        return self.table.shape[1]


def relative_bucket(offset: Tensor, buckets: int, *, bidirectional: bool = True, max_distance: int = 128) -> Tensor:
    """T5's bucket of every relative position ``offset = j - i``: exact near, logarithmic far.

    Bidirectional: the upper half of the buckets is for keys after the query. Otherwise later keys share bucket 0. With
        ``n`` buckets on a side and ``m = n // 2``, a distance ``a`` below ``m`` is its own bucket, else ``min(n - 1, m
        + floor(ln(a / m) / ln(max_distance / m) * (n - m)))``, computed in float32 as the published models do.

    Raffel et al. 2020, arXiv:1910.10683, and the authors' code.

    >>> relative_bucket(torch.tensor([0, -1, 1, -8, 8, 128]), 32).tolist()
    [0, 1, 17, 8, 24, 31]
    """
    first = torch.zeros_like(offset)
    if bidirectional:
        buckets //= 2
        first = (offset > 0).long() * buckets
        distance = offset.abs()
    else:
        distance = (-offset).clamp(min=0)
    exact = buckets // 2
    # float32, in this order: at the borders (16, 32, 64 …) float64 floors to another bucket than the models use
    far = torch.log(distance.clamp(min=1).float() / exact) / math.log(max_distance / exact) * (buckets - exact)
    far = (exact + far.long()).clamp(max=buckets - 1)
    return first + torch.where(distance < exact, distance, far)


@dataclass(frozen=True, eq=False)
class RelativeBuckets(_Table):
    """T5's relative position bias ``table[bucket(j - i), h]``; `table` is (buckets, H). See `relative_bucket`."""

    table: Tensor
    bidirectional: bool = True
    max_distance: int = 128
    relative: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _is_table(self.table, "(buckets, H)")
        exact = self.table.shape[0] // (4 if self.bidirectional else 2)
        if exact < 1 or self.max_distance <= exact:
            raise ValueError(
                f"RelativeBuckets: {self.table.shape[0]} buckets keep {exact} distances exact; it takes at least 1, and"
                f" a max_distance above that, got {self.max_distance}"
            )

    def with_tensors(self, tensors: Sequence[Tensor]) -> RelativeBuckets:
        return RelativeBuckets(tensors[0], self.bidirectional, self.max_distance)

    def index(self, site: Site) -> Tensor:
        return relative_bucket(
            site.j - site.i, self.table.shape[0], bidirectional=self.bidirectional, max_distance=self.max_distance
        )


@dataclass(frozen=True, eq=False)
class RelativeTable(_Table):
    """One learned number per offset and head on a grid (Swin, CoAtNet, and 1-D): ``table[index(i - j), h]``.

    Slots run row-major over a grid of `size` (``(T,)``, ``(height, width)``, …); `table` has ``prod(2 n - 1)`` rows,
    row-major over the offsets query minus key plus ``n - 1``: for two axes ``(dy + H - 1) * (2 W - 1) + dx + W - 1``.

    Liu et al. 2021, arXiv:2103.14030.
    """

    table: Tensor
    size: tuple[int, ...]

    def __post_init__(self) -> None:
        _is_table(self.table, "(offsets, H)")
        object.__setattr__(self, "size", tuple(whole("size", n, 1) for n in self.size))
        offsets = math.prod(2 * n - 1 for n in self.size)
        if self.table.shape[0] != offsets:
            raise ValueError(f"table: a grid of {self.size} has {offsets} offsets, got {self.table.shape[0]} rows")

    def with_tensors(self, tensors: Sequence[Tensor]) -> RelativeTable:
        return RelativeTable(tensors[0], self.size)

    def check(self, batch: int, heads: int, q_len: int, k_len: int) -> None:
        super().check(batch, heads, q_len, k_len)
        if max(q_len, k_len) > math.prod(self.size):
            raise ValueError(
                f"RelativeTable.size: a grid of {self.size} has {math.prod(self.size)} slots, got {max(q_len, k_len)}"
            )

    def index(self, site: Site) -> Tensor:
        index = torch.zeros_like(site.i - site.j)
        below = math.prod(self.size)
        i, j = site.i, site.j
        for n in self.size:
            below //= n
            index = index * (2 * n - 1) + (i // below - j // below) + (n - 1)
            i, j = i % below, j % below
        return index


@dataclass(frozen=True, eq=False)
class Dense(Bias):
    """A float tensor over the call's rows and columns: 0-D, (Tq, Tk) or (B, H, Tq, Tk), broadcasting; -inf masks."""

    tensor: Tensor

    def __post_init__(self) -> None:
        t = self.tensor
        if not isinstance(t, Tensor) or not t.is_floating_point():
            raise TypeError(
                f"bias: expected a float tensor, got {describe(t)}; a bool tensor is a mask: pass it as mask="
            )
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

    def _index(self, site: Site) -> tuple[Tensor, ...]:
        return () if self.tensor.ndim == 0 else (site.b, site.h, site.row, site.col)[4 - self.tensor.ndim :]

    def scores(self, site: Site, dtype: torch.dtype) -> Tensor:
        return (pick(self.tensor, *index) if (index := self._index(site)) else self.tensor).to(dtype)

    def accumulate(self, site: Site, grad: Tensor, into: Sequence[Tensor]) -> None:
        (total,) = into
        if total.ndim == 0:
            total.add_(grad.sum().to(total.dtype))
            return
        grad = grad.sum_to_size(
            [1] * (4 - total.ndim)
            + [1 if n == 1 else m for n, m in zip(total.shape, grad.shape[4 - total.ndim :], strict=True)]
        )
        part = total
        for axis, start, extent in zip((-2, -1), site.origin, grad.shape[-2:], strict=True):
            if total.shape[axis] != 1:
                part = part.narrow(axis, start, extent)
        part.add_(grad.reshape(part.shape).to(total.dtype))


def as_bias(bias: Any) -> Bias | None:
    """A bias from what the `bias` argument accepts: a Bias, a float tensor (0-D, 2-D or 4-D), or None."""
    return bias if bias is None or isinstance(bias, Bias) else Dense(bias)


def _is_table(table: Any, shape: str) -> None:
    if not isinstance(table, Tensor) or not table.is_floating_point() or table.ndim != 2:
        raise ValueError(f"table: expected a float tensor {shape}, got {describe(table)}")


def _needs_heads(name: str, have: int, heads: int) -> None:
    if have != heads:
        raise ValueError(f"{name}: expected {heads} heads, as q has, got {have}")
