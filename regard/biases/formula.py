"""A user's own rule for scores."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from regard.biases.base import Bias
from regard.checks import describe, fits_tile
from regard.coordinates import TileIndices

__all__ = ["Formula"]


@dataclass(frozen=True, eq=False)
class Formula(Bias):
    """Any ``fn(b, h, i, j, *parameters) -> float tensor`` on broadcasting index tensors: what is added to the scores.

    As `regard.masks.Predicate` is for masks. `fn` is called tile by tile, so that no (Tq, Tk) tensor is held; it must
    be made of torch operations whose result broadcasts against (B, H, rows, columns), and read nothing that is trained
    but its parameters. `b`, `h` are the batch row and head, `i`, `j` the slots of query and key.

    Args:
        fn: the rule.
        parameters: float tensors that `fn` is given after the indices; gradients reach them. A layer trains those of
            a module that gives the bias (``bias=module``), not those of a bias it is handed.

    Values are formed in float64 or float32, as scores are. Raises TypeError where `fn` gives no float tensor, and for
    parameters that are none, ValueError for a result of another shape.

    >>> import torch, regard
    >>> rate = torch.tensor([0.5, 2.0], requires_grad=True)  # one for each head
    >>> bias = Formula(lambda b, h, i, j, rate: -rate[h] * (i - j).abs().sqrt(), (rate,))
    >>> q = k = v = torch.randn(1, 2, 5, 4)
    >>> regard.attention(q, k, v, bias=bias).sum().backward()
    >>> rate.grad.shape
    torch.Size([2])
    """

    fn: Callable[..., Tensor]
    parameters: tuple[Tensor, ...] = ()

    def __post_init__(self) -> None:
        if not callable(self.fn):
            raise TypeError(f"fn: expected a function of (b, h, i, j, *parameters), got {describe(self.fn)}")
        given = (self.parameters,) if isinstance(self.parameters, Tensor) else tuple(self.parameters)
        for one in given:
            if not isinstance(one, Tensor) or not one.is_floating_point():
                raise TypeError(f"parameters: expected float tensors, got {describe(one)}")
        object.__setattr__(self, "parameters", given)

    def tensors(self) -> tuple[Tensor, ...]:
        return self.parameters

    def with_tensors(self, tensors: Sequence[Tensor]) -> Formula:
        return Formula(self.fn, tuple(tensors))

    def to(self, device: torch.device | str) -> Formula:
        return Formula(self.fn, tuple(t.to(device) for t in self.parameters))

    def scores(self, indices: TileIndices, dtype: torch.dtype) -> Tensor:
        return self._values(indices, [t.to(dtype) for t in self.parameters]).to(dtype)

    def _values(self, indices: TileIndices, parameters: Sequence[Tensor]) -> Tensor:
        values = self.fn(indices.b, indices.h, indices.i, indices.j, *parameters)
        if not isinstance(values, Tensor) or not values.is_floating_point():
            raise TypeError(f"Formula.fn: expected a float tensor, got {describe(values)}")
        fits_tile("Formula.fn", values, indices)
        return values

    def accumulate(self, indices: TileIndices, grad: Tensor, out: Sequence[Tensor]) -> None:
        if not self.parameters:
            return
        leaves = [t.detach().to(grad.dtype) for t in self.parameters]

        def values(*own: Tensor) -> Tensor:
            return self._values(indices, own).to(grad.dtype).expand(grad.shape)

        pulled_back: Any = torch.func.vjp(values, *leaves)[1]
        for total, one in zip(out, pulled_back(grad), strict=True):
            total.add_(one.to(total.dtype))
