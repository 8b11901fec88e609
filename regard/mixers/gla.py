"""Gated linear attention: a decay per key channel, or per head, computed from the token.

    g_t = log sigmoid(W_2 W_1 x_t + b) / tau,   S_t = diag(exp(g_t)) S_{t-1} + k_t v_t^T,   o_t = S_t^T q_t / sqrt(Dk)
    y_t = W_o (rmsnorm_head(o_t) * silu(W_g x_t))

Yang et al. 2023, arXiv:2312.06635.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from regard.checks import is_part, positive, whole
from regard.decays import logsigmoid_decay
from regard.mixers.base import Record
from regard.mixers.parts import GatedRMSNorm, low_rank, merge_heads, split_heads
from regard.mixers.recurrent import RecurrentLayer, States, TokenSequence, identity
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


class GatedLinearAttention(RecurrentLayer):
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
        self.dim, self.heads = whole("dim", dim, 1), whole("heads", heads, 1)
        self.key_dim = whole("key_dim", dim // (2 * heads) if key_dim is None else key_dim, 1)
        self.value_dim = whole("value_dim", dim // heads if value_dim is None else value_dim, 1)
        is_part("decay", decay, GLADecay)
        self.decay, self.bidirectional = GLADecay() if decay is None else decay, bidirectional
        keys, values = heads * self.key_dim, heads * self.value_dim
        self.q_proj = nn.Linear(dim, keys, bias=False)
        self.k_proj = nn.Linear(dim, keys, bias=False)
        self.v_proj = nn.Linear(dim, values, bias=False)
        self.g_proj = nn.Linear(dim, values, bias=False)
        self.decay_proj = low_rank(dim, self.decay.rank, heads if self.decay.per_head else keys, bias=True)
        self.norm = GatedRMSNorm(self.value_dim)
        self.o_proj = nn.Linear(values, dim, bias=False)

    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        return {"state": (self.heads, self.key_dim, self.value_dim)}

    def mix_tokens(self, seq: TokenSequence, states: States) -> tuple[Tensor, Tensor | None, dict[str, Tensor]]:
        out, state = self._recur(seq, split_heads(self.v_proj(seq.x), self.heads), states.get("state"))
        return out, None, {"state": state}

    def project_output(self, x: Tensor, mixed: Tensor, gate_input: Tensor | None) -> Tensor:
        gate = split_heads(self.g_proj(x), self.heads)
        out: Tensor = self.o_proj(merge_heads(self.norm(mixed, gate)))
        return out

    def matrix(self, seq: TokenSequence) -> tuple[Tensor, Tensor]:
        matrix, _ = self._recur(seq, identity(seq, self.heads), None)
        return matrix, split_heads(self.v_proj(seq.x), self.heads)

    def _recur(self, seq: TokenSequence, v: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        q, k = (split_heads(proj(seq.x), self.heads) for proj in (self.q_proj, self.k_proj))
        raw = split_heads(self.decay_proj(seq.x), self.heads)
        log_decay = logsigmoid_decay(raw.squeeze(-1) if self.decay.per_head else raw, self.decay.tau, self.decay.low)
        if self.bidirectional:
            out = seq.recur_both_ways(q, k, v, Decay(log_decay))
            return out, out.new_zeros(0)  # no cache keeps a state
        return seq.recur(q, k, v, Decay(log_decay), state)


records = (
    Record(
        name="gla",
        summary="gated linear attention: a decay per key channel",
        source="Yang et al. 2023, arXiv:2312.06635",
        build=lambda dim, heads: GatedLinearAttention(dim, heads),
        causal=True,
        kind="recurrent",
        counts_slots=False,
    ),
    Record(
        name="gla_bidirectional",
        summary="gated linear attention over the tokens before and after",
        source="Yang et al. 2023, arXiv:2312.06635, in two passes",
        build=lambda dim, heads: GatedLinearAttention(dim, heads, bidirectional=True),
        causal=False,
        cached=False,
        kind="recurrent",
        counts_slots=False,
    ),
    Record(
        name="simple_gla",
        summary="gated linear attention with one decay per head",
        source="Yang et al. 2023, arXiv:2312.06635; Peng et al. 2021, arXiv:2103.02143",
        build=lambda dim, heads: GatedLinearAttention(dim, heads, decay=GLADecay(rank=None, per_head=True)),
        causal=True,
        kind="recurrent",
        counts_slots=False,
    ),
)
