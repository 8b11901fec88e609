"""Kimi Delta Attention: the delta rule on a state whose key channels decay each at their own rate.

    g_t = -exp(A) softplus(F x_t + b),   or   low * sigmoid(exp(A) (F x_t + b)),   a number per head and key channel
    S' = diag(exp(g_t)) S_{t-1},   S_t = S' + beta_t k_t (v_t - S'^T k_t)^T
    y_t = W_o (rmsnorm_head(S_t^T q_t / sqrt(Dk)) * sigmoid(G x_t))

F and G are products of two matrices with a head's size between them (Kimi Linear), or whole ones. Kimi team 2025,
arXiv:2510.26692.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from regard.checks import is_part, norm_eps
from regard.decays import bounded_decay, fill_step_bias, softplus_decay
from regard.mixers.base import Record
from regard.mixers.delta_rule import DeltaRuleLayer
from regard.mixers.parts import GatedRMSNorm, fill_rates, low_rank, split_heads

__all__ = ["KDAGates", "KimiDeltaAttention", "records"]


@dataclass(frozen=True)
class KDAGates:
    """The two gates of `KimiDeltaAttention`: how the decay and the output's gate are made.

    Args:
        low: None for the softplus decay, or the lower bound (< 0, nats per token) of the bounded one, which is another
            function, not a clamp.
        decay_rank: inner width of the decay's projection; None for one whole matrix.
        gate_rank: inner width of the output gate's projection; None for one whole matrix.
        gate_bias: the output gate's projection has a bias.
        eps: of the norm that the output gate multiplies.

    >>> KDAGates(low=-5.0, decay_rank=128).gate_rank is None  # Kimi K3
    True
    """

    low: float | None = None
    decay_rank: int | None = None
    gate_rank: int | None = None
    gate_bias: bool = False
    eps: float = 1e-5

    def __post_init__(self) -> None:
        if self.low is not None and not -float("inf") < self.low < 0:
            raise ValueError(f"low: expected None or a finite number < 0 (nats per token), got {self.low}")
        norm_eps(self.eps)


class KimiDeltaAttention(DeltaRuleLayer):
    """KDA; ``(B, T, dim)`` in and out, causal.

    Args:
        dim: width of the tokens.
        heads: H, of values, decays, strengths and gates.
        key_heads: Hk, of queries and keys, a divisor of H; H by default. Value head h reads key head
            ``h // (H // Hk)``.
        key_dim: Dk of a head; ``dim // heads`` by default.
        value_dim: Dv of a head; `key_dim` by default.
        conv_size: tokens that the convolution reads.
        beta_max: the largest writing strength beta, in (0, 2].
        gates: by default Kimi Linear's, ``KDAGates(decay_rank=Dv, gate_rank=Dv)``.

    Parameters: ``q_proj k_proj v_proj o_proj`` (heads contiguous), ``b_proj`` (H), ``conv`` over the channels [q,
    k, v], ``decay_proj`` and ``g_proj`` (``0`` and ``1`` where low-rank), ``A_log`` (H), ``dt_bias`` (H * Dk),
    ``norm``. The states are (H, Dk, Dv) and the convolution's last ``conv_size - 1`` inputs. Raises ValueError for
    sizes below 1, head counts that do not divide, and numbers out of range.

    >>> import torch
    >>> KimiDeltaAttention(64, 4, gates=KDAGates(low=-5.0))(torch.randn(2, 10, 64)).shape
    torch.Size([2, 10, 64])
    """

    title = "Kimi Delta Attention"

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        key_heads: int | None = None,
        key_dim: int | None = None,
        value_dim: int | None = None,
        conv_size: int = 4,
        beta_max: float = 1.0,
        gates: KDAGates | None = None,
    ) -> None:
        super().__init__(dim, heads, key_heads, key_dim, value_dim, conv_size, beta_max)
        is_part("gates", gates, KDAGates)
        gates = KDAGates(decay_rank=self.value_dim, gate_rank=self.value_dim) if gates is None else gates
        keys, values = heads * self.key_dim, heads * self.value_dim
        self.low = gates.low
        self.decay_proj = low_rank(dim, gates.decay_rank, keys)
        self.A_log = nn.Parameter(torch.empty(heads))
        self.dt_bias = nn.Parameter(torch.empty(keys))
        self.g_proj = low_rank(dim, gates.gate_rank, values, bias=gates.gate_bias)
        self.norm = GatedRMSNorm(self.value_dim, eps=gates.eps, gate="sigmoid")
        self.o_proj = nn.Linear(values, dim, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Starts the layer's own parameters anew: rates from 1 to 16 (1 where bounded), steps from 0.001 to 0.1."""
        if self.low is None:
            fill_rates(self.A_log, 1.0, 16.0)
        else:
            nn.init.zeros_(self.A_log)
        fill_step_bias(self.dt_bias)

    def log_decay(self, x: Tensor) -> Tensor:
        raw = split_heads(self.decay_proj(x), self.heads)
        rate, bias = self.A_log[:, None, None], self.dt_bias.view(self.heads, 1, self.key_dim)
        return softplus_decay(raw, rate, bias) if self.low is None else bounded_decay(raw, rate, bias, self.low)


records = (
    Record(
        name="kda",
        summary="Kimi Delta Attention: the delta rule with a decay per key channel",
        source="Kimi team 2025, arXiv:2510.26692",
        build=lambda dim, heads: KimiDeltaAttention(dim, heads),
    ),
    Record(
        name="kda_bounded",
        summary="Kimi Delta Attention with a decay bounded from below and a full-rank output gate",
        source="Kimi team 2025, arXiv:2510.26692; the bounded decay is Kimi K3's",
        build=lambda dim, heads: KimiDeltaAttention(dim, heads, gates=KDAGates(low=-5.0, decay_rank=dim // heads)),
    ),
)
