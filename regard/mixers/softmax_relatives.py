"""Relatives of softmax attention on its layer: differential, forgetting and stick-breaking attention.

    differential:   y = (softmax(q1 k1^T) - lambda softmax(q2 k2^T)) v     two maps of half the heads, one subtracted
    forgetting:     y_i = sum_j softmax_j(q_i . k_j + sum_{j < l <= i} log f_l) v_j,  f = sigmoid(W x + b)
    stick-breaking: w_ij = sigmoid(z_ij) prod_{j < l < i} (1 - sigmoid(z_il))

Ye et al. 2024, arXiv:2410.05258; Lin et al. 2025, arXiv:2503.02130; Tan, Shen et al. 2024, arXiv:2410.17980.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.biases import Dense
from regard.caches import KVCache, KVView, WindowCache
from regard.checks import norm_eps, whole
from regard.masks import Causal, Mask, Window
from regard.masks.base import reach
from regard.mixers.attention_parts import hide_unread
from regard.mixers.base import Record, Traits, floating
from regard.mixers.costs import attention_macs, causal_pairs, keys_read, window_of
from regard.mixers.multi_head import MultiHeadAttention
from regard.mixers.parts import Projections, Scores, linear_with_start
from regard.ops.attention import attention, attention_weights
from regard.ops.scan import scan
from regard.ops.stick_breaking import stick_breaking, stick_breaking_weights
from regard.positions import Rotary

__all__ = ["DifferentialAttention", "ForgettingAttention", "StickBreakingAttention", "records"]


class DifferentialAttention(MultiHeadAttention):
    """Causal attention of pairs of heads, whose second map is subtracted; ``(B, T, dim)`` in and out.

    ``y = rms((P1 - lambda P2) [v1, v2]) (1 - lambda_init)``, ``lambda = exp(a1 . b1) - exp(a2 . b2) + lambda_init``,
    ``lambda_init = 0.8 - 0.6 exp(-0.3 depth)``. Head h of the first half of the heads is paired with head h of the
    second half.

    Args:
        dim: width of the tokens.
        heads: heads H, an even number.
        depth: the layer's number, from 0.
        kv_heads: key and value heads, a divisor of `heads`; `heads` by default.
        head_dim: size of a head; ``dim // heads`` by default.
        rotary: a `regard.positions.Rotary` for queries and keys.
        window: only so many latest tokens are read; None for all.
        eps: of the norm, which has no weight.

    Parameters: ``q_proj k_proj v_proj o_proj`` without biases, ``lambda_q1 lambda_k1 lambda_q2 lambda_k2`` (head_dim).
    Rows of ``mixing`` sum to ``1 - lambda``. Raises ValueError and TypeError for sizes that do not fit. Cost 6 T^2 H D
    FLOPs. (Ye et al. 2024, arXiv:2410.05258, equations 1 to 3; pairs as in the Hugging Face layout.)

    >>> DifferentialAttention(64, 8)(torch.randn(2, 10, 64)).shape
    torch.Size([2, 10, 64])
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        depth: int = 0,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        rotary: Rotary | None = None,
        window: int | None = None,
        eps: float = 1e-5,
    ) -> None:
        if whole("heads", heads, 2) % 2:
            raise ValueError(f"heads: expected an even number, got {heads}")
        mask: Mask = Causal() if window is None else Window(window)
        super().__init__(dim, heads, kv_heads=kv_heads, head_dim=head_dim, mask=mask, rotary=rotary)
        self.start, self.eps = 0.8 - 0.6 * math.exp(-0.3 * whole("depth", depth, 0)), norm_eps(eps)
        self.lambda_q1 = nn.Parameter(torch.empty(self.head_dim))
        self.lambda_k1 = nn.Parameter(torch.empty(self.head_dim))
        self.lambda_q2 = nn.Parameter(torch.empty(self.head_dim))
        self.lambda_k2 = nn.Parameter(torch.empty(self.head_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Starts the four vectors anew, from N(0, 0.1^2) as published."""
        super().reset_parameters()
        if hasattr(self, "lambda_k2"):
            for vector in (self.lambda_q1, self.lambda_k1, self.lambda_q2, self.lambda_k2):
                nn.init.normal_(vector, std=0.1)

    def lambda_full(self) -> Tensor:
        """lambda, a number in float32 at least."""
        wide = torch.promote_types(self.lambda_q1.dtype, torch.float32)
        q1, k1, q2, k2 = (one.to(wide) for one in (self.lambda_q1, self.lambda_k1, self.lambda_q2, self.lambda_k2))
        return torch.exp((q1 * k1).sum()) - torch.exp((q2 * k2).sum()) + self.start

    def mixing(self, x: Tensor, context: Tensor | None = None, **arguments: Any) -> tuple[Tensor, Tensor]:
        """(M (B, H / 2, T, Tk), V (B, H / 2, Tk, 2 D)): the difference, and the two halves' values side by side."""
        _, q, view, options = self._read(x, context, **arguments)
        k, v = self._pairs(view)
        half = self.heads // 2
        maps = [attention_weights(q[:, n : n + half], k[:, n : n + half], v, **options)[1] for n in (0, half)]
        weights = maps[0] - self.lambda_full().to(maps[0].dtype) * maps[1]
        return weights, hide_unread(maps[0] + maps[1], v)

    def prefill_macs(self, tokens: int) -> int:
        """Multiply-accumulates between `tokens` tokens."""
        return attention_macs(self.heads, self.head_dim, 2 * self.head_dim, causal_pairs(tokens, window_of(self)))

    def step_macs(self, cached: int) -> int:
        """The same for one token."""
        return attention_macs(self.heads, self.head_dim, 2 * self.head_dim, keys_read(cached, window_of(self)))

    def _pairs(self, view: KVView) -> tuple[Tensor, Tensor]:
        """Keys of every head, and the values of both heads of a pair."""
        k, v = (one.repeat_interleave(self.heads // self.kv_heads, 1) for one in (view.k, view.v))
        return k, torch.cat(v.chunk(2, 1), -1)

    def _mix(self, q: Tensor, view: KVView, options: dict[str, Any]) -> Tensor:
        k, v = self._pairs(view)
        half = self.heads // 2
        first, second = (attention(q[:, n : n + half], k[:, n : n + half], v, **options) for n in (0, half))
        wide = torch.promote_types(first.dtype, torch.float32)
        found: Tensor = (first.to(wide) - self.lambda_full().to(wide) * second.to(wide)).to(first.dtype)
        return found

    def _write(self, x: Tensor, out: Tensor) -> Tensor:
        normed = F.rms_norm(out, out.shape[-1:], None, self.eps) * (1 - self.start)
        return super()._write(x, normed)


class ForgettingAttention(MultiHeadAttention):
    """Causal attention whose scores fade by a forget gate that each token computes; ``(B, T, dim)`` in and out.

    ``s_ij = q_i . k_j / sqrt(D) + sum_{j < l <= i} log f_l``, ``f_l = sigmoid(w . x_l + b)`` per head

    Args:
        dim: width of the tokens.
        heads: heads H.
        kv_heads: key and value heads, a divisor of `heads`; `heads` by default.
        head_dim: size of a head; ``dim // heads`` by default.
        projections: `Projections`: biases, q/k norm, output gate.
        rotary: positions, which the paper leaves out.
        window: only so many latest tokens are read; None for all.

    Parameters: as `MultiHeadAttention`, and ``forget_proj`` (dim to H). A token's own gate does not fade its own key.
    A cache holds the gates' inputs beside the keys. Padding does not fade anything. Raises ValueError and TypeError for
    sizes that do not fit. Cost 4 T^2 H D FLOPs; the gates are one bias a key, made of one running sum.
    (Lin et al. 2025, arXiv:2503.02130, equation 6.)

    >>> ForgettingAttention(64, 8)(torch.randn(2, 10, 64)).shape
    torch.Size([2, 10, 64])
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        projections: Projections | None = None,
        rotary: Rotary | None = None,
        window: int | None = None,
    ) -> None:
        mask: Mask = Causal() if window is None else Window(window)
        super().__init__(
            dim, heads, kv_heads=kv_heads, head_dim=head_dim, projections=projections, mask=mask, rotary=rotary
        )
        if self.projections.context_dim is not None:
            raise ValueError("projections: expected no context_dim, the gates are of the tokens themselves")
        self.forget_proj = linear_with_start(dim, self.heads, _open)

    def init_cache(
        self, batch: int, capacity: int, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None
    ) -> KVCache | WindowCache:
        """An empty cache: keys with the gates' inputs of the heads that share them, and values."""
        like = floating(self.k_proj, self)
        width = self.head_dim + self.heads // self.kv_heads
        where = (self.kv_heads, width, self.head_dim, dtype or like.dtype, device or like.device)
        window = reach(self.mask) if self.mask is not None else None
        return KVCache(batch, capacity, *where) if window is None else WindowCache(batch, window + 1, *where)

    def mixing(self, x: Tensor, context: Tensor | None = None, **arguments: Any) -> tuple[Tensor, Tensor]:
        """(M (B, H, T, Tk), V (B, H, Tk, D)): the weights before dropout and what they mix."""
        _, q, view, options = self._read(x, context, **arguments)
        view, options = self._faded(view, options)
        weights = attention_weights(q, view.k, view.v, **options)[1]
        return weights, hide_unread(weights, view.v.repeat_interleave(self.heads // self.kv_heads, 1))

    def _keys(self, x: Tensor, positions: Tensor | None) -> tuple[Tensor, Tensor]:
        k, v = super()._keys(x, positions)
        gates = self.forget_proj(x).unflatten(-1, (self.kv_heads, -1)).transpose(1, 2)
        return torch.cat([k, gates.to(k.dtype)], -1), v

    def _mix(self, q: Tensor, view: KVView, options: dict[str, Any]) -> Tensor:
        return super()._mix(q, *self._faded(view, options))

    def _faded(self, view: KVView, options: dict[str, Any]) -> tuple[KVView, dict[str, Any]]:
        """The keys without the gates, and the bias of every key: minus its own and earlier gates' logarithms.

        Softmax does not see what a row's scores have in common, so the sum up to the query is left out; a sum from the
        end would do as well, but round by what comes later.
        """
        k, gates = view.k.split([self.head_dim, self.heads // self.kv_heads], -1)
        wide = torch.float64 if gates.dtype == torch.float64 else torch.float32
        faded = F.logsigmoid(gates.to(wide))
        if view.keep is not None:
            faded = torch.where(view.keep[:, None, :, None], faded, 0.0)
        if view.segments is None:
            earlier = faded.cumsum(2, dtype=torch.float64).to(wide)  # (B, Hkv, Tk, G)
        else:  # a running sum of each segment alone, so that not even a rounding crosses
            flat = faded.transpose(1, 2).flatten(2)
            sums = scan(torch.zeros_like(flat), flat, segments=view.segments)[0]
            earlier = sums.unflatten(2, (self.kv_heads, -1)).transpose(1, 2)
        bias = Dense(-earlier.transpose(2, 3).flatten(1, 2).unsqueeze(2))
        return dataclasses.replace(view, k=k), {**options, "bias": bias}


class StickBreakingAttention(MultiHeadAttention):
    """Causal attention in which nearer keys take their share first; no positions; ``(B, T, dim)`` in and out.

    Args:
        dim: width of the tokens.
        heads: heads H.
        kv_heads: key and value heads, a divisor of `heads`; `heads` by default.
        head_dim: size of a head; ``dim // heads`` by default.
        projections: `Projections`: biases, q/k norm, output gate.
        attend_current: whether a token's own key takes a share; it does not by default.

    Parameters: as `MultiHeadAttention`. Rows of ``mixing`` sum to at most 1; the first token reads nothing by default.
    Raises ValueError and TypeError for sizes that do not fit. Cost 4 T^2 H D FLOPs, by torch's products; memory linear
    in the length. (Tan, Shen et al. 2024, arXiv:2410.17980.)

    >>> StickBreakingAttention(64, 8)(torch.randn(2, 10, 64)).shape
    torch.Size([2, 10, 64])
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        projections: Projections | None = None,
        attend_current: bool = False,
    ) -> None:
        super().__init__(
            dim, heads, kv_heads=kv_heads, head_dim=head_dim, projections=projections, scores=Scores(), mask=Causal()
        )
        self.attend_current = attend_current

    @property
    def traits(self) -> Traits:
        """What the layer promises."""
        return Traits("softmax", causal=True, cached=True, off_kernels="its weights are products, not a softmax")

    def mixing(self, x: Tensor, context: Tensor | None = None, **arguments: Any) -> tuple[Tensor, Tensor]:
        """(M (B, H, T, Tk), V (B, H, Tk, D))."""
        _, q, view, options = self._read(x, context, **arguments)
        weights = stick_breaking_weights(q, view.k, **self._breaking(options))
        return weights, hide_unread(weights, view.v.repeat_interleave(self.heads // self.kv_heads, 1))

    def _mix(self, q: Tensor, view: KVView, options: dict[str, Any]) -> Tensor:
        return stick_breaking(q, view.k, view.v, **self._breaking(options))[0]

    def _breaking(self, options: dict[str, Any]) -> dict[str, Any]:
        return {
            "mask": options["mask"],
            "attend_current": self.attend_current,
            "scale": options["scale"],
            "q_start": options["q_start"],
        }


def _open(proj: nn.Linear) -> None:
    """Gates that start nearly open: a bias of 5, sigmoid(5) = 0.993."""
    nn.init.normal_(proj.weight, std=0.02)
    nn.init.constant_(proj.bias, 5.0)


records = (
    Record(
        name="differential",
        summary="differential attention: of each pair of heads one map is subtracted from the other",
        source="Ye et al. 2024, arXiv:2410.05258",
        build=lambda dim, heads: DifferentialAttention(dim, heads, kv_heads=heads // 2, rotary=Rotary(dim // heads)),
    ),
    Record(
        name="forgetting",
        summary="forgetting attention (FoX): scores fade by a forget gate of every later token",
        source="Lin et al. 2025, arXiv:2503.02130",
        build=lambda dim, heads: ForgettingAttention(dim, heads, kv_heads=heads // 2),
    ),
    Record(
        name="stick_breaking",
        summary="stick-breaking attention: nearer keys take their share of the weight first",
        source="Tan et al. 2024, arXiv:2410.17980",
        build=lambda dim, heads: StickBreakingAttention(dim, heads, kv_heads=heads // 2),
    ),
)
