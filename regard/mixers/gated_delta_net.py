"""Gated DeltaNet: the delta rule on a state that first decays, by a number per head and token.

    g_t = -exp(A) softplus(W_a x_t + b),   S' = exp(g_t) S_{t-1},   S_t = S' + beta_t k_t (v_t - S'^T k_t)^T
    y_t = W_o (rmsnorm_head(S_t^T q_t / sqrt(Dk)) * silu(W_g x_t))

Yang, Kautz and Hatamizadeh 2024, arXiv:2412.06464. Qwen3-Next has twice as many value heads as key heads; OLMo Hybrid
takes beta up to 2.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from regard.checks import is_factory
from regard.decays import fill_step_bias, softplus_decay
from regard.mixers.base import Record
from regard.mixers.delta_rule import DeltaRuleLayer
from regard.mixers.parts import GatedRMSNorm, fill_rates

__all__ = ["GatedDeltaNet", "records"]


class GatedDeltaNet(DeltaRuleLayer):
    """Gated DeltaNet; ``(B, T, dim)`` in and out, causal.

    Args:
        dim: width of the tokens.
        heads: H, of values, decays, strengths and gates.
        key_heads: Hk, of queries and keys, a divisor of H; H by default. Value head h reads key head
            ``h // (H // Hk)``.
        key_dim: Dk of a head; ``dim // heads`` by default.
        value_dim: Dv of a head; ``2 * key_dim`` by default.
        conv_size: tokens that the convolution reads.
        beta_max: the largest writing strength beta, in (0, 2].
        norm: makes the output's norm from Dv: ``partial(GatedRMSNorm, eps=1e-6, gate="sigmoid")``, for instance.

    Parameters: ``q_proj k_proj v_proj g_proj o_proj`` (heads contiguous), ``b_proj a_proj`` (H), ``conv`` over the
    channels [q, k, v], ``A_log dt_bias`` (H), ``norm``; peers that pack projections keep the same rows in another
    order. The states are (H, Dk, Dv) and the convolution's last ``conv_size - 1`` inputs. Raises ValueError for sizes
    below 1, head counts that do not divide and a `beta_max` out of range.

    >>> import torch
    >>> GatedDeltaNet(64, 4, key_heads=2)(torch.randn(2, 10, 64)).shape
    torch.Size([2, 10, 64])
    """

    title = "Gated DeltaNet"
    expand = 2

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
        norm: Callable[[int], nn.Module] = GatedRMSNorm,
    ) -> None:
        super().__init__(dim, heads, key_heads, key_dim, value_dim, conv_size, beta_max)
        is_factory("norm", norm)
        values = heads * self.value_dim
        self.a_proj = nn.Linear(dim, heads, bias=False)
        self.A_log = nn.Parameter(torch.empty(heads))
        self.dt_bias = nn.Parameter(torch.empty(heads))
        self.g_proj = nn.Linear(dim, values, bias=False)
        self.norm = norm(self.value_dim)
        self.o_proj = nn.Linear(values, dim, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Starts the layer's own parameters anew: rates from 0.01 to 16, steps from 0.001 to 0.1."""
        fill_rates(self.A_log, 0.01, 16.0)
        fill_step_bias(self.dt_bias)

    def log_decay(self, x: Tensor) -> Tensor:
        return softplus_decay(self.a_proj(x), self.A_log, self.dt_bias).transpose(1, 2)


records = (
    Record(
        name="gated_deltanet",
        summary="the delta rule on a state with a decay per head and token",
        source="Yang et al. 2024, arXiv:2412.06464",
        build=lambda dim, heads: GatedDeltaNet(dim, heads, key_heads=heads if heads % 2 else heads // 2),
    ),
)
