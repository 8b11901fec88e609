"""HGRN: a gated linear recurrence per channel whose forget gate has a lower bound, higher in deeper layers.

    f_t = low + (1 - low) sigmoid(W_f x_t),   h_t = f_t h_{t-1} + (1 - f_t) silu(W_i x_t)
    out_t = W_o (rmsnorm(h_t) * silu(W_g x_t))

Qin et al. 2023, arXiv:2311.04823, in real numbers.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.checks import describe, whole
from regard.decays import lower_bounded_decay, lower_bounded_input
from regard.mixers.base import Record
from regard.mixers.parts import GatedRMSNorm, merge_heads
from regard.mixers.recurrent import States
from regard.mixers.sequence import TokenSequence, compute_dtype, widened
from regard.mixers.vector_state import VectorInputs, VectorStateLayer

__all__ = ["HGRN", "ForgetBounds", "records"]


class ForgetBounds(nn.Module):
    """The table that the layers of a stack take their lower bounds from; ``bound(i)`` is layer i's part of it.

    ``low_i = sum of softmax over layers (weight)`` of layers 1 to i: 0 in the first, rising with depth, below 1.

    >>> ForgetBounds(4, 1).bound(2)().tolist()
    [0.5]
    """

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(whole("layers", layers, 1), whole("width", width, 1)))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)

    def bound(self, layer: int) -> ForgetBound:
        """The lower bound of one layer, as a module that shares this table."""
        if not 0 <= whole("layer", layer, 0) < self.weight.shape[0]:
            raise ValueError(f"layer: expected a layer from 0 to {self.weight.shape[0] - 1}, got {layer}")
        return ForgetBound(self, layer)


class ForgetBound(nn.Module):
    """One layer's lower bound (width,) from a shared table."""

    def __init__(self, table: ForgetBounds, layer: int) -> None:
        super().__init__()
        self.table, self.layer = table, layer

    def forward(self) -> Tensor:
        weight = self.table.weight
        return torch.softmax(weight.to(compute_dtype(weight)), 0)[1 : self.layer + 1].sum(0)


class HGRN(VectorStateLayer):
    """HGRN; ``(B, T, dim)`` in and out, causal.

    Args:
        dim: width of the tokens.
        width: channels of the recurrence; `dim` by default.
        low: the forget gate's lower bound: a number in [0, 1), or a module whose ``forward()`` gives such numbers
            (width,), as `ForgetBounds` does for the layers of a stack.

    Parameters: ``i_proj f_proj g_proj o_proj``, ``norm``, and those of `low`. The state is one number per channel.
    ``M @ V`` is per channel, ``V = (1 - f) silu(W_i x)``. Raises ValueError for a bound outside [0, 1).

    Cost: 8 T dim width FLOPs of projections, O(T width) of the recurrence.

    >>> import torch
    >>> HGRN(32, low=0.5)(torch.randn(2, 10, 32)).shape
    torch.Size([2, 10, 32])
    """

    def __init__(self, dim: int, *, width: int | None = None, low: float | nn.Module = 0.0) -> None:
        super().__init__()
        self.dim = whole("dim", dim, 1)
        self.width = dim if width is None else whole("width", width, 1)
        if not isinstance(low, nn.Module) and (isinstance(low, bool) or not isinstance(low, (int, float))):
            raise TypeError(f"low: expected a number in [0, 1) or a module that gives such, got {describe(low)}")
        if not isinstance(low, nn.Module) and not 0.0 <= low < 1.0:
            raise ValueError(f"low: expected a number in [0, 1), got {low}")
        self.low = low
        self.i_proj = nn.Linear(dim, self.width, bias=False)
        self.f_proj = nn.Linear(dim, self.width, bias=False)
        self.g_proj = nn.Linear(dim, self.width, bias=False)
        self.norm = GatedRMSNorm(self.width)
        self.o_proj = nn.Linear(self.width, dim, bias=False)

    def inputs(self, seq: TokenSequence, states: States) -> VectorInputs:
        raw, low = self.f_proj(seq.x), self.low() if isinstance(self.low, nn.Module) else self.low
        entered = lower_bounded_input(raw, low) * F.silu(widened(self.i_proj(seq.x)))
        return VectorInputs(entered, lower_bounded_decay(raw, low))

    def project_output(self, x: Tensor, mixed: Tensor, gate_input: Tensor | None) -> Tensor:
        out: Tensor = self.o_proj(self.norm(merge_heads(mixed), self.g_proj(x)))
        return out


records = (
    Record(
        name="hgrn",
        summary="HGRN: a forget gate per channel with a lower bound",
        source="Qin et al. 2023, arXiv:2311.04823",
        build=lambda dim, heads: HGRN(dim, low=ForgetBounds(2, dim).bound(1)),
    ),
)
