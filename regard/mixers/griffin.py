"""Griffin's recurrent block: a gated linear recurrence (RG-LRU) behind a short convolution, times a GELU branch.

    u = conv(W_x x),   r = sigmoid(W_r u + b_r),   i = sigmoid(W_i u + b_i)      W_r, W_i block-diagonal
    log a_t = -8 r_t softplus(p),   h_t = a_t h_{t-1} + sqrt(1 - a_t^2) (i_t u_t)
    out_t = W_o (h_t * gelu(W_y x_t))

At position 0 a new text begins: the state is dropped (a = 0) and the factor sqrt(1 - a^2) is 1. De et al. 2024,
arXiv:2402.19427 (their Lambda is -p).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from regard.checks import is_part, whole
from regard.decays import rglru_decay_from_logit
from regard.mixers.base import Record
from regard.mixers.parts import ShortConv, merge_heads
from regard.mixers.recurrent import States
from regard.mixers.sequence import TokenSequence, widened
from regard.mixers.vector_state import VectorInputs, VectorStateLayer

__all__ = ["GriffinRecurrent", "records"]

STEEPEST = 1000.0  # the derivative of the square root is cut here


class BlockDiagonal(nn.Module):
    """``y = x W + b`` with W of `blocks` square blocks: ``weight`` (blocks, in, out), ``bias`` (blocks, out)."""

    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        size = width // blocks
        self.weight = nn.Parameter(torch.empty(blocks, size, size))
        self.bias = nn.Parameter(torch.empty(blocks, size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.weight.shape[1] ** -0.5)
        nn.init.zeros_(self.bias)

    def matrix_macs(self) -> int:
        """Multiply-accumulates of one token."""
        return self.weight.numel()

    def forward(self, x: Tensor) -> Tensor:
        parts = x.unflatten(-1, (self.weight.shape[0], -1))
        return (torch.einsum("bthi,hio->btho", parts, self.weight) + self.bias).flatten(-2)


class GriffinRecurrent(VectorStateLayer):
    """Griffin's recurrent block with the RG-LRU; ``(B, T, dim)`` in and out, causal.

    Args:
        dim: width of the tokens.
        heads: blocks of the gates' matrices, a divisor of `width`.
        width: channels of the recurrence; `dim` by default.
        conv_size: of the convolution, which has a bias and no activation.
        activation: of the other branch; GELU in its tanh form by default.

    Parameters: ``x_proj y_proj o_proj``, ``conv``, ``recurrence_gate input_gate`` (block-diagonal), ``p`` (width). The
    state is one number per channel, and the last ``conv_size - 1`` inputs of the convolution. It resets where
    ``positions`` are 0 (and at segments); a call whose positions begin elsewhere starts from an empty state without
    resetting. The convolution is cut at segments only. ``M @ V`` is per channel, ``V = sqrt(1 - a^2) i u``.

    Cost: 6 T dim width FLOPs of projections, 4 T width^2 / heads of gates, O(T width) of the recurrence.

    >>> import torch
    >>> GriffinRecurrent(64, 4)(torch.randn(2, 10, 64)).shape
    torch.Size([2, 10, 64])
    """

    title = "RG-LRU"

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        width: int | None = None,
        conv_size: int = 4,
        activation: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.dim, self.heads = whole("dim", dim, 1), whole("heads", heads, 1)
        self.width = dim if width is None else whole("width", width, 1)
        if self.width % heads:
            raise ValueError(f"heads: expected a divisor of width={self.width}, got {heads}")
        is_part("activation", activation, nn.Module)
        self.x_proj = nn.Linear(dim, self.width)
        self.y_proj = nn.Linear(dim, self.width)
        self.conv = ShortConv(self.width, conv_size, bias=True, silu=False)
        self.recurrence_gate = BlockDiagonal(self.width, heads)
        self.input_gate = BlockDiagonal(self.width, heads)
        self.p = nn.Parameter(torch.empty(self.width))
        self.activation = nn.GELU(approximate="tanh") if activation is None else activation
        self.o_proj = nn.Linear(self.width, dim)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Starts `p` anew, as the authors' code does: a step with r = 1/8 keeps between 0.9 and 0.999."""
        nn.init.uniform_(self.p, 0.9**2, 0.999**2)
        with torch.no_grad():
            self.p.sqrt_().log_().neg_().expm1_().log_()

    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        return {"state": (self.width,), "conv": self.conv.state_shape}

    def inputs(self, seq: TokenSequence, states: States) -> VectorInputs:
        x = self.x_proj(seq.x)
        u, conv_state = self.conv(seq, widened(x), states.get("conv"))
        narrow = u.to(x.dtype)
        log_a = rglru_decay_from_logit(self.recurrence_gate(narrow).double(), self.p)
        anew = (seq.positions == 0)[..., None]
        share = torch.where(anew, 1.0, _bounded_sqrt(-torch.expm1(2.0 * log_a))).to(u.dtype)
        entered = share * torch.sigmoid(widened(self.input_gate(narrow))) * u
        log_a = torch.where(anew, -torch.inf, log_a.to(u.dtype))
        return VectorInputs(entered, log_a, states={"conv": conv_state})

    def project_output(self, x: Tensor, mixed: Tensor, gate_input: Tensor | None) -> Tensor:
        y = self.activation(self.y_proj(x))
        out: Tensor = self.o_proj((merge_heads(mixed) * y).to(y.dtype))
        return out


def _bounded_sqrt(x: Tensor) -> Tensor:
    """The square root of numbers >= 0, with a derivative of at most `STEEPEST`: 0 has one too."""
    steep = 4.0 * STEEPEST**2 * x < 1.0
    root = torch.sqrt(torch.where(steep, 1.0, x))
    line = torch.sqrt(x.detach()) + STEEPEST * (x - x.detach())
    return torch.where(steep, line, root)


records = (
    Record(
        name="rglru",
        summary="Griffin's recurrent block: a gated decay per channel (RG-LRU)",
        source="De et al. 2024, arXiv:2402.19427",
        build=lambda dim, heads: GriffinRecurrent(dim, heads),
    ),
)
