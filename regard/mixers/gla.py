"""Gated linear attention: a decay per key channel, or per head, computed from the token.

    g_t = log sigmoid(W_2 W_1 x_t + b) / tau,   S_t = diag(exp(g_t)) S_{t-1} + k_t v_t^T,   o_t = S_t^T q_t / sqrt(Dk)
    y_t = W_o (rmsnorm_head(o_t) * silu(W_g x_t))

Yang et al. 2023, arXiv:2312.06635.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from regard.checks import is_part, positive
from regard.decays import logsigmoid_decay
from regard.mixers.base import Record
from regard.mixers.matrix_state import MatrixInputs, MatrixStateLayer
from regard.mixers.parts import GatedRMSNorm, low_rank, split_heads
from regard.mixers.recurrent import States
from regard.mixers.sequence import TokenSequence
from regard.transitions import Decay

__all__ = ["GLADecay", "GatedLinearAttention", "records"]


@dataclass(frozen=True)
class GLADecay:
    """How `GatedLinearAttention` makes its log-decay, ``log sigmoid(W x + b) / tau``.

    Args:
        rank: inner width of the projection; None for one whole matrix.
        tau: divides the log-decay: larger remembers longer.
        low: the log-decay is clamped from below at this number <= 0 (nats per token), if given.
        per_head: one decay for all key channels of a head ("simple GLA").
    """

    rank: int | None = 16
    tau: float = 16.0
    low: float | None = None
    per_head: bool = False

    def __post_init__(self) -> None:
        positive("tau", self.tau)
        if self.low is not None and not self.low <= 0:
            raise ValueError(f"low: expected None or a number <= 0 (nats per token), got {self.low}")


class GatedLinearAttention(MatrixStateLayer):
    """GLA; ``(B, T, dim)`` in and out, causal, or in both directions.

    Args:
        dim: width of the tokens.
        heads: H.
        key_dim: Dk of a head; ``dim // (2 * heads)`` by default.
        value_dim: Dv of a head; ``dim // heads`` by default.
        decay: how the decay is made.
        bidirectional: every token also reads those after it, by a second pass over the reversed tokens with the same
            parameters (a token reads itself once); then the layer takes neither a cache nor a mask.

    Parameters: ``q_proj k_proj v_proj g_proj o_proj`` (heads contiguous), ``decay_proj`` (``0`` and ``1`` where
    low-rank), ``norm``. The state is (Dk, Dv) per head. Raises ValueError for sizes below 1 and numbers out of
    range.

    >>> import torch
    >>> GatedLinearAttention(64, 4)(torch.randn(2, 10, 64)).shape
    torch.Size([2, 10, 64])
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        key_dim: int | None = None,
        value_dim: int | None = None,
        decay: GLADecay | None = None,
        bidirectional: bool = False,
    ) -> None:
        super().__init__()
        self.make_projections(dim, heads, key_dim=key_dim, value_dim=value_dim)
        is_part("decay", decay, GLADecay)
        self.decay, self.bidirectional = GLADecay() if decay is None else decay, bidirectional
        keys, values = heads * self.key_dim, heads * self.value_dim
        self.g_proj = nn.Linear(dim, values, bias=False)
        self.decay_proj = low_rank(dim, self.decay.rank, heads if self.decay.per_head else keys, bias=True)
        self.norm = GatedRMSNorm(self.value_dim)
        self.o_proj = nn.Linear(values, dim, bias=False)

    def default_key_dim(self) -> int:
        return self.dim // (2 * self.heads)

    def inputs(self, seq: TokenSequence, states: States) -> MatrixInputs:
        raw = split_heads(self.decay_proj(seq.x), self.heads)
        log_decay = logsigmoid_decay(raw.squeeze(-1) if self.decay.per_head else raw, self.decay.tau, self.decay.low)
        return MatrixInputs(*self.head_inputs(seq.x), Decay(log_decay))


records = (
    Record(
        name="gla",
        summary="gated linear attention: a decay per key channel",
        source="Yang et al. 2023, arXiv:2312.06635",
        build=lambda dim, heads: GatedLinearAttention(dim, heads),
    ),
    Record(
        name="gla_bidirectional",
        summary="gated linear attention over the tokens before and after",
        source="Yang et al. 2023, arXiv:2312.06635, in two passes",
        build=lambda dim, heads: GatedLinearAttention(dim, heads, bidirectional=True),
    ),
    Record(
        name="simple_gla",
        summary="gated linear attention with one decay per head",
        source="Yang et al. 2023, arXiv:2312.06635; Peng et al. 2021, arXiv:2103.02143",
        build=lambda dim, heads: GatedLinearAttention(dim, heads, decay=GLADecay(rank=None, per_head=True)),
    ),
)
