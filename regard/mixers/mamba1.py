"""Mamba: a diagonal state space whose steps, inputs and read-outs are computed from the token.

    [x | z] = W_in u,   x = silu(conv(x)),   [dt | B | C] = W_x x,   dt = softplus(W_dt norm(dt) + b)
    h_t[d, n] = exp(-exp(A_log[d, n]) dt_t[d]) h_{t-1}[d, n] + dt_t[d] norm(B)_t[n] x_t[d]
    out_t = W_out ((sum_n norm(C)_t[n] h_t[d, n] + D[d] x_t[d]) * silu(z_t[d]))

Gu and Dao 2023, arXiv:2312.00752 (no norms); Lieber et al. 2024, arXiv:2403.19887 (Jamba: RMS norms on dt, B and C).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.checks import is_factory, is_part, whole
from regard.decays import fill_step_bias, softplus_step, state_rate
from regard.mixers.base import Record, is_plain
from regard.mixers.parts import MambaConfig, RMSNorm, ShortConv, linear_with_start, merge_heads, split_heads
from regard.mixers.recurrent import RecurrentLayer, States
from regard.mixers.sequence import TokenSequence, compute_dtype, widened
from regard.ops.checks import lowered

__all__ = ["Mamba", "records"]


def start_steps(linear: nn.Linear) -> None:
    """Starts the map from low-rank steps to those of every channel, with steps from 0.001 to 0.1."""
    bound = linear.in_features**-0.5
    nn.init.uniform_(linear.weight, -bound, bound)
    fill_step_bias(linear.bias)


class Mamba(RecurrentLayer):
    """Mamba (the first); ``(B, T, dim)`` in and out, causal.

    Args:
        dim: width of the tokens.
        width: d, channels of the state space; ``2 * dim`` by default.
        state_dim: N, numbers of state per channel.
        rank: inner width of the steps' projection; ``ceil(dim / 16)`` by default.
        norm: a module factory; ``norm(size)`` normalises dt, B and C, each its own, before they are used: Jamba's.
        shell: `MambaConfig`: conv_size of the convolution, biases (its eps is not read: there is no norm at the end).

    Parameters: ``in_proj`` (rows x, z), ``conv``, ``x_proj`` (rows dt, B, C), ``dt_proj``, ``A_log`` (d, N), ``D`` (d),
    ``dt_norm B_norm C_norm``, ``out_proj``. The state is (N) per channel, and the last ``conv_size - 1`` inputs of the
    convolution. ``M @ V`` is per channel, ``V = x`` after the convolution; steps and D are in M.

    Cost: 6 T dim d FLOPs of projections, about 6 T d N of the scan; memory O(T d + d N).

    >>> import torch
    >>> Mamba(32)(torch.randn(2, 10, 32)).shape
    torch.Size([2, 10, 32])
    """

    title = "Mamba"

    def __init__(
        self,
        dim: int,
        *,
        width: int | None = None,
        state_dim: int = 16,
        rank: int | None = None,
        norm: Callable[[int], nn.Module] | None = None,
        shell: MambaConfig | None = None,
    ) -> None:
        super().__init__()
        self.dim, self.state_dim = whole("dim", dim, 1), whole("state_dim", state_dim, 1)
        self.width = 2 * dim if width is None else whole("width", width, 1)
        self.rank = -(-dim // 16) if rank is None else whole("rank", rank, 1)
        is_part("shell", shell, MambaConfig)
        if norm is not None:
            is_factory("norm", norm)
        p = shell or MambaConfig()
        self.in_proj = nn.Linear(dim, 2 * self.width, bias=p.bias)
        self.conv = ShortConv(self.width, p.conv_size, bias=p.conv_bias)
        self.x_proj = nn.Linear(self.width, self.rank + 2 * state_dim, bias=False)
        self.dt_proj = linear_with_start(self.rank, self.width, start_steps)
        self.A_log = nn.Parameter(torch.empty(self.width, state_dim))
        self.D = nn.Parameter(torch.empty(self.width))
        self.dt_norm = None if norm is None else norm(self.rank)
        self.B_norm = None if norm is None else norm(state_dim)
        self.C_norm = None if norm is None else norm(state_dim)
        self.out_proj = nn.Linear(self.width, dim, bias=p.bias)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Starts the layer's own parameters anew: rates 1, 2, … N in every channel, and D = 1."""
        with torch.no_grad():
            self.A_log.copy_(torch.arange(1.0, self.state_dim + 1, device=self.A_log.device).log())
        nn.init.ones_(self.D)

    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        return {"state": (self.width, self.state_dim), "conv": self.conv.state_shape}

    def mix_tokens(self, seq: TokenSequence, states: States) -> tuple[Tensor, Tensor | None, dict[str, Tensor]]:
        x, z = self.in_proj(seq.x).chunk(2, -1)
        x, conv_state = self.conv(seq, widened(x), states.get("conv"))
        A, D = self._constants(x)
        y, state = seq.selective_scan(x, *self._selection(x.to(z.dtype), A), D, states.get("state"))
        return split_heads(y, self.width), z, {"state": state, "conv": conv_state}

    def project_output(self, x: Tensor, mixed: Tensor, gate_input: Tensor | None) -> Tensor:
        assert gate_input is not None
        gated = merge_heads(mixed) * F.silu(gate_input.to(mixed.dtype))
        out: Tensor = self.out_proj(gated.to(gate_input.dtype))
        return out

    def matrix(self, seq: TokenSequence) -> tuple[Tensor, Tensor]:
        """Each channel is copied once for every token, and copy s is fed a 1 at token s."""
        x, z = self.in_proj(seq.x).chunk(2, -1)
        x, _ = self.conv(seq, widened(x), None)
        A, D = self._constants(x)
        tokens = x.shape[1]
        dt, A, B, C = self._selection(x.to(z.dtype), A)
        eye = torch.eye(tokens, dtype=A.dtype, device=x.device).repeat(1, self.width).expand(x.shape[0], -1, -1)
        copies = (dt.repeat_interleave(tokens, 2), A.repeat_interleave(tokens, 0), B, C, D.repeat_interleave(tokens))
        y, _ = seq.selective_scan(eye, *copies)
        return y.unflatten(2, (self.width, tokens)).movedim(1, 2), split_heads(x, self.width)

    def _constants(self, x: Tensor) -> tuple[Tensor, Tensor]:
        wide = compute_dtype(x)
        return state_rate(self.A_log).to(wide), self.D.to(wide)

    def _selection(self, x: Tensor, A: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(steps (B, T, d), A, B and C (B, T, N))."""
        dt, B, C = self.x_proj(x).split([self.rank, self.state_dim, self.state_dim], -1)
        if self.dt_norm is not None and self.B_norm is not None and self.C_norm is not None:
            dt, B, C = self.dt_norm(dt), self.B_norm(B), self.C_norm(C)
        if is_plain(self.dt_proj, nn.Linear):  # its bias is added in the compute dtype
            return softplus_step(F.linear(*lowered(dt, self.dt_proj.weight)), self.dt_proj.bias), A, B, C
        return softplus_step(self.dt_proj(dt)), A, B, C


records = (
    Record(
        name="mamba",
        summary="Mamba: a selective scan, 16 numbers of state per channel",
        source="Gu and Dao 2023, arXiv:2312.00752",
        build=lambda dim, heads: Mamba(dim),
    ),
    Record(
        name="jamba",
        summary="Mamba with RMS norms on steps, B and C",
        source="Lieber et al. 2024, arXiv:2403.19887",
        build=lambda dim, heads: Mamba(dim, norm=RMSNorm),
    ),
)
