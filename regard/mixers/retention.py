"""Retention: linear attention with rotary positions and a fixed decay per head.

    S_t = gamma_h S_{t-1} + rot(k_t) v_t^T,   o_t = S_t^T rot(q_t) / sqrt(Dk),   gamma_h = 1 - 2^(-5 - h)
    y_t = W_o (rmsnorm_head(o_t) * silu(W_g x_t))

The paper also divides rows by sums of their weights; the norm that follows takes such a factor out again. Sun et al.
2023, arXiv:2307.08621.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from regard.checks import is_part
from regard.coordinates import plain_tensors
from regard.decays import fixed_slopes, retention_slopes
from regard.mixers.base import Record
from regard.mixers.matrix_state import MatrixInputs, MatrixStateLayer, constant_decay
from regard.mixers.parts import GatedRMSNorm
from regard.mixers.recurrent import States
from regard.mixers.sequence import TokenSequence, widened
from regard.positions import Rotary

__all__ = ["Retention", "records"]


def retention_rotary(key_dim: int) -> Rotary:
    """RetNet's rotation: adjacent pairs, with frequencies from 1 to 1/10000, both ends included.

    >>> round(retention_rotary(8).frequencies()[-1].item(), 9)
    0.0001
    """
    pairs = key_dim // 2  # base^(-m / pairs) is to be 10000^(-m / (pairs - 1))
    return Rotary(key_dim, base=10000.0 ** (pairs / (pairs - 1)) if pairs > 1 else 10000.0, style="interleaved")


class Retention(MatrixStateLayer):
    """Multi-scale retention; ``(B, T, dim)`` in and out, causal.

    Args:
        dim: width of the tokens.
        heads: H.
        key_dim: Dk of a head; ``dim // heads`` by default.
        value_dim: Dv of a head; ``2 * dim // heads`` by default.
        slopes: H decay rates >= 0, nats per token; ``-log(1 - 2^(-5 - h))`` by default.
        rotary: positions of queries and keys: True for the paper's (`retention_rotary`), False for none, or a `Rotary`.
        eps: of the norm of each head.

    Parameters: ``q_proj k_proj v_proj g_proj o_proj`` (heads contiguous), ``norm`` (Dv). The state is (Dk, Dv) per
    head. Raises ValueError for sizes below 1, an odd Dk to rotate, another number of slopes than heads, and slopes
    out of range.

    >>> import torch
    >>> Retention(64, 4)(torch.randn(2, 10, 64)).shape
    torch.Size([2, 10, 64])
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        key_dim: int | None = None,
        value_dim: int | None = None,
        slopes: Tensor | Sequence[float] | None = None,
        rotary: Rotary | bool = True,
        eps: float = 1e-6,
    ) -> None:
        super().__init__()
        self.make_projections(dim, heads, key_dim=key_dim, value_dim=value_dim)
        with plain_tensors():
            self.slopes = fixed_slopes(retention_slopes(heads) if slopes is None else slopes, heads)
        is_part("rotary", rotary, Rotary, bool)
        if rotary is True and self.key_dim % 2:
            raise ValueError(f"key_dim: expected an even number of channels to rotate, got {self.key_dim}")
        self.rotary = (retention_rotary(self.key_dim) if rotary else None) if isinstance(rotary, bool) else rotary
        values = heads * self.value_dim
        self.g_proj = nn.Linear(dim, values, bias=False)
        self.norm = GatedRMSNorm(self.value_dim, eps=eps)
        self.o_proj = nn.Linear(values, dim, bias=False)

    def default_value_dim(self) -> int:
        return 2 * self.dim // self.heads

    def inputs(self, seq: TokenSequence, states: States) -> MatrixInputs:
        q, k, v = self.head_inputs(seq.x)
        if self.rotary is not None:
            q, k = (self.rotary(widened(part), seq.positions) for part in (q, k))
        return MatrixInputs(q, k, v, constant_decay(self.slopes, seq.x))


records = (
    Record(
        name="retention",
        summary="linear attention with rotary positions and a fixed decay per head",
        source="Sun et al. 2023, arXiv:2307.08621",
        build=lambda dim, heads: Retention(dim, heads),
    ),
)
