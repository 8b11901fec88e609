"""Lightning attention: linear attention with a fixed decay per head.

    [q k v] = silu(W x),   S_t = exp(-slope_h) S_{t-1} + k_t v_t^T,   o_t = S_t^T q_t
    y_t = W_o (rmsnorm(all heads of o_t) * sigmoid(W_g x_t))

Queries are not scaled, nothing is rotated. Qin et al. 2024, arXiv:2401.04658; MiniMax 2025, arXiv:2501.08313.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.checks import whole
from regard.coordinates import plain_tensors
from regard.decays import fixed_slopes, lightning_slopes
from regard.mixers.base import Record
from regard.mixers.parts import GatedRMSNorm, merge_heads, split_heads
from regard.mixers.recurrent import RecurrentLayer, States, TokenSequence, compute_dtype, identity, widened
from regard.transitions import Decay

__all__ = ["LightningAttention", "records"]


class LightningAttention(RecurrentLayer):
    """Lightning attention; ``(B, T, dim)`` in and out, causal.

    Args:
        dim: width of the tokens.
        heads: H.
        head_dim: D of a head; ``dim // heads`` by default.
        slopes: H decay rates >= 0, nats per token; by default ALiBi's. `regard.decays.lightning_slopes` also gives
            MiniMax's, which fall with a layer's depth.
        eps: of the norm over all heads.

    Parameters: ``q_proj k_proj v_proj g_proj o_proj`` (heads contiguous), ``norm`` (H * D). The state is (D, D) per
    head. Raises ValueError for sizes below 1, another number of slopes than heads, and slopes out of range.

    >>> import torch
    >>> from regard.decays import lightning_slopes
    >>> LightningAttention(64, 4, slopes=lightning_slopes(4, 2, 80))(torch.randn(2, 10, 64)).shape
    torch.Size([2, 10, 64])
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        head_dim: int | None = None,
        slopes: Tensor | Sequence[float] | None = None,
        eps: float = 1e-6,
    ) -> None:
        super().__init__()
        self.dim, self.heads = whole("dim", dim, 1), whole("heads", heads, 1)
        self.head_dim = whole("head_dim", dim // heads if head_dim is None else head_dim, 1)
        with plain_tensors():
            self.slopes = fixed_slopes(lightning_slopes(heads) if slopes is None else slopes, heads)
        width = heads * self.head_dim
        self.q_proj = nn.Linear(dim, width, bias=False)
        self.k_proj = nn.Linear(dim, width, bias=False)
        self.v_proj = nn.Linear(dim, width, bias=False)
        self.g_proj = nn.Linear(dim, width, bias=False)
        self.norm = GatedRMSNorm(width, eps=eps, gate="sigmoid")
        self.o_proj = nn.Linear(width, dim, bias=False)

    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        return {"state": (self.heads, self.head_dim, self.head_dim)}

    def mix_tokens(self, seq: TokenSequence, states: States) -> tuple[Tensor, Tensor | None, dict[str, Tensor]]:
        out, state = self._recur(seq, self._head(self.v_proj, seq), states.get("state"))
        return out, None, {"state": state}

    def project_output(self, x: Tensor, mixed: Tensor, gate_input: Tensor | None) -> Tensor:
        out: Tensor = self.o_proj(self.norm(merge_heads(mixed), self.g_proj(x)))
        return out

    def matrix(self, seq: TokenSequence) -> tuple[Tensor, Tensor]:
        matrix, _ = self._recur(seq, identity(seq, self.heads), None)
        return matrix, self._head(self.v_proj, seq)

    def _head(self, proj: nn.Module, seq: TokenSequence) -> Tensor:
        return split_heads(F.silu(widened(proj(seq.x))), self.heads)

    def _recur(self, seq: TokenSequence, v: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        x = seq.x
        decay = Decay(-torch.tensor(self.slopes, dtype=compute_dtype(x), device=x.device))
        return seq.recur(self._head(self.q_proj, seq), self._head(self.k_proj, seq), v, decay, state, scale=1.0)


records = (
    Record(
        name="lightning",
        summary="linear attention with a fixed decay per head",
        source="Qin et al. 2024, arXiv:2401.04658; MiniMax 2025, arXiv:2501.08313",
        build=lambda dim, heads: LightningAttention(dim, heads),
        causal=True,
        kind="recurrent",
        counts_slots=False,
    ),
)
