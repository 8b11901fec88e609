"""Lightning attention: linear attention with a fixed decay per head.

    [q k v] = silu(W x),   S_t = exp(-slope_h) S_{t-1} + k_t v_t^T,   o_t = S_t^T q_t
    y_t = W_o (rmsnorm(all heads of o_t) * sigmoid(W_g x_t))

Queries are not scaled, nothing is rotated. Qin et al. 2024, arXiv:2401.04658; MiniMax 2025, arXiv:2501.08313.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from regard.checks import whole
from regard.coordinates import plain_tensors
from regard.decays import fixed_slopes, lightning_slopes
from regard.mixers.base import Record
from regard.mixers.matrix_state import MatrixInputs, MatrixStateLayer, constant_decay
from regard.mixers.parts import GatedRMSNorm, merge_heads
from regard.mixers.recurrent import States
from regard.mixers.sequence import TokenSequence, widened

__all__ = ["LightningAttention", "records"]


class LightningAttention(MatrixStateLayer):
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

    title = "lightning attention"
    scale = 1.0
    norm: nn.Module
    g_proj: nn.Module

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
        size = None if head_dim is None else whole("head_dim", head_dim, 1)
        self.make_projections(dim, heads, key_dim=size, value_dim=size)
        self.head_dim = self.key_dim
        with plain_tensors():
            self.slopes = fixed_slopes(lightning_slopes(heads) if slopes is None else slopes, heads)
        width = heads * self.head_dim
        self.g_proj = nn.Linear(dim, width, bias=False)
        self.norm = GatedRMSNorm(width, eps=eps, gate="sigmoid")
        self.o_proj = nn.Linear(width, dim, bias=False)

    def inputs(self, seq: TokenSequence, states: States) -> MatrixInputs:
        q, k, v = (F.silu(widened(part)) for part in self.head_inputs(seq.x))
        return MatrixInputs(q, k, v, constant_decay(self.slopes, seq.x))

    def project_output(self, x: Tensor, mixed: Tensor, gate_input: Tensor | None) -> Tensor:
        out: Tensor = self.o_proj(self.norm(merge_heads(mixed), self.g_proj(x)))
        return out


records = (
    Record(
        name="lightning",
        summary="linear attention with a fixed decay per head",
        source="Qin et al. 2024, arXiv:2401.04658; MiniMax 2025, arXiv:2501.08313",
        build=lambda dim, heads: LightningAttention(dim, heads),
    ),
)
