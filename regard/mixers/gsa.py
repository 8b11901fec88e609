"""Gated slot attention: softmax attention over a fixed number of slots, into which keys and values are written softly.

    g_t = log sigmoid(W_f x_t) / tau,   s_t = 1 - exp(g_t),   a number per slot
    K_t = diag(exp(g_t)) K_{t-1} + s_t k_t^T   (slots, Dk),   V_t = diag(exp(g_t)) V_{t-1} + s_t v_t^T
    q, k, v = silu(W x_t),   o_t = V_t^T softmax(K_t q_t),   y_t = W_o rmsnorm(silu(o_t))

Two linear recurrences with a softmax between them. Zhang et al. 2024, arXiv:2409.07146.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.checks import positive, whole
from regard.decays import logsigmoid_decay
from regard.mixers.base import Record
from regard.mixers.matrix_state import MatrixInputs, MatrixStateLayer
from regard.mixers.parts import RMSNorm, merge_heads, split_heads
from regard.mixers.recurrent import States
from regard.mixers.sequence import TokenSequence, widened
from regard.transitions import Decay

__all__ = ["GatedSlotAttention", "records"]


class GatedSlotAttention(MatrixStateLayer):
    """GSA; ``(B, T, dim)`` in and out, causal.

    Args:
        dim: width of the tokens.
        heads: H.
        slots: of a head; `key_dim` by default.
        key_dim: Dk of a head; ``dim // heads`` by default.
        value_dim: Dv of a head; ``dim // heads`` by default.
        tau: divides the log-decay: larger remembers longer.
        eps: of the norm over all heads.

    Parameters: ``q_proj k_proj v_proj f_proj o_proj`` (heads contiguous), ``norm`` (H * Dv). The states are the slots'
    keys (H, slots, Dk) and values (H, slots, Dv). ``M @ V`` has ``V = v``: the weights of slots are in M, which so
    depends on queries and keys through a softmax. Raises ValueError for sizes below 1 and a tau out of range.

    Cost: 2 T H (C (Dk + Dv + 2 slots) + 2 slots (Dk + Dv)) FLOPs beside the projections with chunks of C tokens. To
    `regard.recurrence` the slots are H * slots heads of one channel, each with its own decays, and memory is theirs.

    >>> GatedSlotAttention(64, 4, slots=8)(torch.randn(2, 10, 64)).shape
    torch.Size([2, 10, 64])
    """

    title = "gated slot attention"
    scale = 1.0
    norm: nn.Module

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        slots: int | None = None,
        key_dim: int | None = None,
        value_dim: int | None = None,
        tau: float = 8.0,
        eps: float = 1e-5,
    ) -> None:
        super().__init__()
        self.make_projections(dim, heads, key_dim=key_dim, value_dim=value_dim)
        self.slots, self.tau = whole("slots", self.key_dim if slots is None else slots, 1), positive("tau", tau)
        self.f_proj = nn.Linear(dim, heads * self.slots, bias=False)
        self.norm = RMSNorm(heads * self.value_dim, eps=eps)
        self.o_proj = nn.Linear(heads * self.value_dim, dim, bias=False)

    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        return {"keys": (self.heads, self.slots, self.key_dim), "state": (self.heads, self.slots, self.value_dim)}

    def inputs(self, seq: TokenSequence, states: States) -> MatrixInputs:
        log_decay = logsigmoid_decay(split_heads(self.f_proj(seq.x), self.heads), self.tau)
        q, k, v = (F.silu(widened(part)) for part in self.head_inputs(seq.x))
        share = -torch.expm1(log_decay)
        scores, keys = slot_scores(seq, q, k, share, log_decay, states.get("keys"), self.scale)
        return MatrixInputs(torch.softmax(scores, -1), share, v, Decay(log_decay), states={"keys": keys})

    def project_output(self, x: Tensor, mixed: Tensor, gate_input: Tensor | None) -> Tensor:
        out: Tensor = self.o_proj(self.norm(F.silu(merge_heads(mixed))).to(x.dtype))
        return out


def slot_scores(
    seq: TokenSequence,
    q: Tensor,
    k: Tensor,
    share: Tensor,
    log_decay: Tensor,
    state: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """``scale K_t q_t`` (B, H, T, slots) and the slots' last keys (B, H, slots, Dk), from `state` or from 0.

    q and k are (B, H, T, Dk), what each token writes to a slot (`share`) and the log-decays (B, H, T, slots). A slot's
    score is a sum of ``q_t . k_s`` over tokens, with the slot's own shares and decays: to the recurrence it is a value
    head of one channel, and all slots of a head read that head's queries and keys.
    """
    values = share.transpose(2, 3).flatten(1, 2)[..., None]
    decay = Decay(log_decay.transpose(2, 3).flatten(1, 2))
    before = None if state is None else state.flatten(1, 2)[..., None]
    scores, last = seq.recur(q, k, values, decay, before, scale)
    sizes = share.shape[1], share.shape[3]
    return scores.squeeze(-1).unflatten(1, sizes).transpose(2, 3), last.squeeze(-1).unflatten(1, sizes)


records = (
    Record(
        name="gsa",
        summary="gated slot attention: softmax over a fixed number of slots, which fade and are written to",
        source="Zhang et al. 2024, arXiv:2409.07146",
        build=lambda dim, heads: GatedSlotAttention(dim, heads),
    ),
)
