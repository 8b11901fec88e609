"""What the delta-rule layers share: all but the decay and the norm and gate of the output.

    [q k v] = silu(conv([W_q x, W_k x, W_v x])),   q, k of length 1 in each head,   beta_t = beta_max sigmoid(W_b x_t)
    S' = a_t * S_{t-1},   S_t = S' + beta_t k_t (v_t - S'^T k_t)^T,   o_t = S_t^T q_t / sqrt(Dk)

With keys of length 1 the state stays bounded for beta in [0, 2]; above 1 a step can turn a direction of the state round
(its eigenvalue 1 - beta is negative), which counting modulo two needs (Grazzi et al. 2024, arXiv:2411.12537).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from regard.mixers.costs import delta_macs
from regard.mixers.matrix_state import MatrixInputs, MatrixStateLayer
from regard.mixers.parts import ShortConv, l2_normalized, split_heads
from regard.mixers.recurrent import States
from regard.mixers.sequence import TokenSequence, compute_dtype, widened
from regard.transitions import Delta

__all__ = ["DeltaRuleLayer"]


class DeltaRuleLayer(MatrixStateLayer):
    """Queries, keys, values through a short convolution, and the recurrence.

    Subclasses add `log_decay`, and what stands behind the recurrence: ``norm``, ``g_proj``, ``o_proj``.

    Args:
        dim: width of the tokens.
        heads: H, of values, decays and strengths.
        key_heads: Hk, of queries and keys; H by default. Value head h reads key head ``h // (H // Hk)``.
        key_dim: Dk; ``dim // heads`` by default.
        value_dim: Dv; ``expand * key_dim`` by default, `expand` being the class's.
        conv_size: tokens that the convolution reads; 1 only scales each channel.
        beta_max: the largest beta, in (0, 2].

    Parameters: ``q_proj k_proj v_proj`` (heads contiguous), ``conv`` over their channels in that order, ``b_proj``.
    The states are (H, Dk, Dv) and the convolution's last inputs."""

    expand = 1

    def __init__(
        self,
        dim: int,
        heads: int,
        key_heads: int | None,
        key_dim: int | None,
        value_dim: int | None,
        conv_size: int,
        beta_max: float,
    ) -> None:
        super().__init__()
        if isinstance(beta_max, bool) or not isinstance(beta_max, (int, float)) or not 0.0 < beta_max <= 2.0:
            raise ValueError(f"beta_max: expected a number in (0, 2], beyond which states grow, got {beta_max!r}")
        self.make_projections(dim, heads, key_heads=key_heads, key_dim=key_dim, value_dim=value_dim)
        self.beta_max = float(beta_max)
        self.conv = ShortConv(2 * self.key_heads * self.key_dim + heads * self.value_dim, conv_size)
        self.b_proj = nn.Linear(dim, heads, bias=False)

    def default_value_dim(self) -> int:
        return self.expand * self.key_dim

    def log_decay(self, x: Tensor) -> Tensor | None:
        """The log-decays of tokens (B, T, dim): (B, H, T), (B, H, T, Dk), or None."""
        return None

    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        return {"state": (self.heads, self.key_dim, self.value_dim), "conv": self.conv.state_shape}

    def inputs(self, seq: TokenSequence, states: States) -> MatrixInputs:
        x, keys = seq.x, self.key_heads * self.key_dim
        parts = [p(x) for p in (self.q_proj, self.k_proj, self.v_proj)]
        channels, conv_state = self.conv(seq, widened(torch.cat(parts, -1)), states.get("conv"))
        q, k, v = channels.split((keys, keys, channels.shape[-1] - 2 * keys), -1)
        q, k = (l2_normalized(split_heads(part, self.key_heads)) for part in (q, k))
        v = split_heads(v, self.heads)
        return MatrixInputs(q, k, v, self._transition(x), states={"conv": conv_state})

    def prefill_macs(self, tokens: int) -> int:
        return delta_macs(self.heads, self.key_dim, self.value_dim, tokens)

    def step_macs(self, cached: int) -> int:
        return (3 + self.decays) * self.heads * self.key_dim * self.value_dim

    def _transition(self, x: Tensor) -> Delta:
        beta = torch.sigmoid(self.b_proj(x).to(compute_dtype(x)))
        beta = beta if self.beta_max == 1.0 else self.beta_max * beta
        return Delta(beta.transpose(1, 2), self.log_decay(x))
