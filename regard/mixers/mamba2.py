"""Mamba-2: a state space with one decay per head, as linear attention with a decay (state space duality).

    [z | x B C | dt] = W_in u,   x, B, C = silu(conv(x B C)),   dt = clamp(softplus(dt + b))
    S_t = exp(-exp(A_log) dt_t) S_{t-1} + B_t (dt_t x_t)^T,   y_t = S_t^T C_t + D x_t
    out_t = W_out rmsnorm_group(y_t * silu(z_t))

In `regard.recurrence`'s words q = C, k = B, v = dt x, without a scale; head h reads the B and C of group
``h // (H / G)``. Dao and Gu 2024, arXiv:2405.21060.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from regard.checks import is_part, whole
from regard.decays import fill_step_bias, softplus_decay, softplus_step
from regard.mixers.base import Record
from regard.mixers.matrix_state import MatrixInputs, MatrixStateLayer
from regard.mixers.parts import GatedRMSNorm, MambaConfig, ShortConv, fill_rates, merge_heads, split_heads
from regard.mixers.recurrent import States
from regard.mixers.sequence import TokenSequence, widened
from regard.transitions import Decay

__all__ = ["Mamba2", "records"]


class Mamba2(MatrixStateLayer):
    """Mamba-2; ``(B, T, dim)`` in and out, causal, or in both directions.

    Args:
        dim: width of the tokens.
        heads: H.
        head_dim: P, channels of a head; ``2 * dim // heads`` by default.
        state_dim: N, numbers of state per channel.
        groups: G, a divisor of `heads`: heads of a group share B and C, and are normalised together.
        limits: steps are clamped to them after the softplus, in any call and at any length of it.
        shell: `MambaConfig`: conv_size of the convolution, biases, the norm's eps.
        bidirectional: every token also reads those after it, by a second pass over the reversed tokens with the same
            parameters (a token reads itself once, and D x is added once); the convolution stays causal. Then the layer
            has no cache.

    Parameters: ``in_proj`` (rows z, x, B, C, dt), ``conv``, ``dt_bias A_log D`` (H), ``norm``, ``out_proj``. The state
    is (N, P) per head, and the last ``conv_size - 1`` inputs of the convolution. ``M @ V`` has ``V = x`` after the
    convolution; steps and D are in M. Raises ValueError for sizes that do not divide.

    Cost: 6 T dim H P FLOPs of projections, and about 2 T H (C (N + P) + 2 N P) with chunks of C tokens.

    >>> import torch
    >>> Mamba2(64, 4, state_dim=16)(torch.randn(2, 10, 64)).shape
    torch.Size([2, 10, 64])
    """

    title = "Mamba-2"
    scale = 1.0
    norm: nn.Module

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        head_dim: int | None = None,
        state_dim: int = 128,
        groups: int = 1,
        limits: tuple[float, float] = (0.0, float("inf")),
        shell: MambaConfig | None = None,
        bidirectional: bool = False,
    ) -> None:
        super().__init__()
        self.dim, self.heads = whole("dim", dim, 1), whole("heads", heads, 1)
        if head_dim is None and 2 * dim % heads:
            raise ValueError(f"heads: expected a divisor of 2 * dim={2 * dim}, got {heads} (or give head_dim)")
        self.head_dim = 2 * dim // heads if head_dim is None else whole("head_dim", head_dim, 1)
        self.state_dim, self.groups = whole("state_dim", state_dim, 1), whole("groups", groups, 1)
        if heads % groups:
            raise ValueError(f"groups: expected a divisor of heads={heads}, got {groups}")
        softplus_step(torch.zeros(0), limits=limits)  # refuses limits that it could not use
        self.limits, self.bidirectional = limits, bidirectional
        self.key_heads = groups
        is_part("shell", shell, MambaConfig)
        p = shell or MambaConfig()
        self.width = heads * self.head_dim
        channels = self.width + 2 * groups * state_dim
        self.in_proj = nn.Linear(dim, self.width + channels + heads, bias=p.bias)
        self.conv = ShortConv(channels, p.conv_size, bias=p.conv_bias)
        self.dt_bias = nn.Parameter(torch.empty(heads))
        self.A_log = nn.Parameter(torch.empty(heads))
        self.D = nn.Parameter(torch.empty(heads))
        self.norm = GatedRMSNorm(self.width, groups, eps=p.eps, gate_first=True)
        self.out_proj = nn.Linear(self.width, dim, bias=p.bias)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Starts the layer's own parameters anew: steps from 0.001 to 0.1, rates from 1 to 16, D = 1."""
        fill_step_bias(self.dt_bias)
        fill_rates(self.A_log, 1.0, 16.0)
        nn.init.ones_(self.D)

    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        return {"state": (self.heads, self.state_dim, self.head_dim), "conv": self.conv.state_shape}

    def inputs(self, seq: TokenSequence, states: States) -> MatrixInputs:
        shared = self.groups * self.state_dim
        z, mixed, steps = self.in_proj(seq.x).split([self.width, self.width + 2 * shared, self.heads], -1)
        mixed, conv_state = self.conv(seq, widened(mixed), states.get("conv"))
        x, B, C = mixed.split([self.width, shared, shared], -1)
        dt = softplus_step(steps, self.dt_bias, self.limits).transpose(1, 2)
        log_decay = softplus_decay(steps, self.A_log, self.dt_bias, self.limits).transpose(1, 2)
        return MatrixInputs(
            q=split_heads(C, self.groups),
            k=split_heads(B, self.groups),
            v=split_heads(x, self.heads),
            transition=Decay(log_decay),
            weight=dt,
            gate_input=z,
            states={"conv": conv_state},
        )

    def recur(
        self, seq: TokenSequence, given: MatrixInputs, v: Tensor, state: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        y, state = super().recur(seq, given, v, state)
        return y + self.D.to(y.dtype)[:, None, None] * v.to(y.dtype), state

    def project_output(self, x: Tensor, mixed: Tensor, gate_input: Tensor | None) -> Tensor:
        assert gate_input is not None
        out: Tensor = self.out_proj(self.norm(merge_heads(mixed), gate_input))
        return out


records = (
    Record(
        name="mamba2",
        summary="Mamba-2 (SSD): one decay per head and token, B and C shared by groups of heads",
        source="Dao and Gu 2024, arXiv:2405.21060",
        build=lambda dim, heads: Mamba2(dim, heads),
    ),
    Record(
        name="mamba2_bidirectional",
        summary="Mamba-2 in both directions, by two passes",
        source="Dao and Gu 2024, arXiv:2405.21060",
        build=lambda dim, heads: Mamba2(dim, heads, bidirectional=True),
    ),
)
