"""DeltaNet: before a value is written, what the state holds at its key is taken out.

    S_t = S_{t-1} + beta_t k_t (v_t - S_{t-1}^T k_t)^T,   o_t = S_t^T q_t / sqrt(Dk)
    y_t = W_o rmsnorm_head(o_t),   or W_o (rmsnorm_head(o_t) * silu(W_g x_t))

Schlag et al. 2021, arXiv:2102.11174; Yang et al. 2024, arXiv:2406.06484; beta up to 2: Grazzi et al. 2024,
arXiv:2411.12537.
"""

from __future__ import annotations

from torch import nn

from regard.mixers.base import Record
from regard.mixers.delta_rule import DeltaRuleLayer
from regard.mixers.parts import GatedRMSNorm, RMSNorm

__all__ = ["DeltaNet", "records"]


class DeltaNet(DeltaRuleLayer):
    """DeltaNet; ``(B, T, dim)`` in and out, causal.

    Args:
        dim: width of the tokens.
        heads: H.
        key_dim: Dk of a head; ``dim // heads`` by default.
        value_dim: Dv of a head; `key_dim` by default.
        conv_size: tokens that the convolution reads.
        beta_max: the largest writing strength beta, in (0, 2]; above 1 a step can flip a sign in the state.
        gate: the normed output is multiplied by ``silu(g_proj(x))``.
        eps: of the output's norm.

    Parameters: ``q_proj k_proj v_proj b_proj o_proj``, ``conv`` over the channels [q, k, v], ``norm``, and
    ``g_proj`` with `gate`. The states are (H, Dk, Dv) and the convolution's last ``conv_size - 1`` inputs. Raises
    ValueError for sizes below 1 and for a `beta_max` out of range.

    >>> import torch
    >>> DeltaNet(64, 4, beta_max=2.0)(torch.randn(2, 10, 64)).shape
    torch.Size([2, 10, 64])
    """

    decays = False

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        key_dim: int | None = None,
        value_dim: int | None = None,
        conv_size: int = 4,
        beta_max: float = 1.0,
        gate: bool = False,
        eps: float = 1e-5,
    ) -> None:
        super().__init__(dim, heads, None, key_dim, value_dim, conv_size, beta_max)
        values = heads * self.value_dim
        if gate:
            self.g_proj = nn.Linear(dim, values, bias=False)
        self.norm = GatedRMSNorm(self.value_dim, eps=eps) if gate else RMSNorm(self.value_dim, eps=eps)
        self.o_proj = nn.Linear(values, dim, bias=False)


records = (
    Record(
        name="deltanet",
        summary="the delta rule: a write first takes out what its key holds",
        source="Schlag et al. 2021, arXiv:2102.11174; Yang et al. 2024, arXiv:2406.06484",
        build=lambda dim, heads: DeltaNet(dim, heads),
    ),
    Record(
        name="deltanet_negative",
        summary="DeltaNet with beta up to 2 (negative eigenvalues) and an output gate",
        source="Grazzi et al. 2024, arXiv:2411.12537",
        build=lambda dim, heads: DeltaNet(dim, heads, beta_max=2.0, gate=True),
    ),
)
