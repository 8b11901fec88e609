"""RWKV-6 (Finch): a decay per key channel, and a state that is read before the token is written to it.

    lora(x) = l + B tanh(A x),   x^i_t = x_t + b_t * lora_i(x_t + mu * b_t),   b_t = x_{t-1} - x_t,   i = q, k, v, w, g
    q, k, v = W_q x^q, W_k x^k, W_v x^v,   log a_t = -exp(lora(x^w_t)),   a number per key channel
    o_t = (S_{t-1} + (u * k_t) v_t^T)^T q_t,   S_t = diag(a_t) S_{t-1} + k_t v_t^T
    y_t = W_o (layernorm_head(o_t) * silu(W_g x^g_t))

The query (the paper's receptance r) meets the state of the token before, which a_t has not faded yet; the token's own
key and value it meets through a learned bonus u. Peng et al. 2024, arXiv:2404.05892, eq. 14-20.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.checks import norm_eps, whole
from regard.decays import state_rate
from regard.mixers.base import Record
from regard.mixers.matrix_state import MatrixInputs, MatrixStateLayer
from regard.mixers.parts import linear_with_start, merge_heads, split_heads
from regard.mixers.recurrent import States
from regard.mixers.sequence import TokenSequence, widened
from regard.ops.checks import scale_of, without_autocast
from regard.ops.packing import segment_starts_of
from regard.transitions import Decay

__all__ = ["RWKV6", "records"]

INPUTS = ("q", "k", "v", "w", "g")  # what each token is mixed with the one before it for


class HeadLayerNorm(nn.Module):
    """Layer norm of each head, in the compute dtype; ``weight`` and ``bias`` (heads, size)."""

    def __init__(self, heads: int, size: int, eps: float) -> None:
        super().__init__()
        self.eps = norm_eps(eps)
        self.weight = nn.Parameter(torch.empty(heads, size))
        self.bias = nn.Parameter(torch.empty(heads, size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        """x (B, H, T, D), times silu(z), in z's dtype."""
        weight, bias = (p[:, None].to(x.dtype) for p in (self.weight, self.bias))
        normed = F.layer_norm(x, (x.shape[-1],), eps=self.eps) * weight + bias
        return (normed * F.silu(z.to(x.dtype))).to(z.dtype)


class RWKV6(MatrixStateLayer):
    """RWKV-6's time mixing; ``(B, T, dim)`` in and out, causal.

    Args:
        dim: width of the tokens.
        heads: H.
        key_dim: Dk of a head; ``dim // heads`` by default.
        value_dim: Dv of a head; ``dim // heads`` by default.
        mix_rank: inner width of the five maps that say how much of the token before enters.
        decay_rank: inner width of the decay's map.
        eps: of the layer norm of each head.

    Parameters: ``q_proj k_proj v_proj g_proj o_proj`` (heads contiguous; q is the receptance), ``mu`` (dim), ``mix``
    (``q k v w g``, each with ``0.weight 2.weight 2.bias``), ``decay`` (the same three), ``bonus`` (H, Dk), ``norm``.
    The states are (H, Dk, Dv) and the last token. Raises ValueError for sizes below 1.

    Cost: as other decays per channel, 2 T H (C (Dk + Dv) + 2 Dk Dv) FLOPs beside the projections.

    >>> RWKV6(64, 4)(torch.randn(2, 10, 64)).shape
    torch.Size([2, 10, 64])
    """

    title = "RWKV-6"
    scale = 1.0
    conv_states = ("last",)
    g_proj: nn.Module

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        key_dim: int | None = None,
        value_dim: int | None = None,
        mix_rank: int = 32,
        decay_rank: int = 64,
        eps: float = 64e-5,
    ) -> None:
        super().__init__()
        self.make_projections(dim, heads, key_dim=key_dim, value_dim=value_dim)
        keys, values = heads * self.key_dim, heads * self.value_dim
        self.g_proj = nn.Linear(dim, values, bias=False)
        self.mu = nn.Parameter(torch.empty(dim))
        self.mix = nn.ModuleDict({name: _lora(dim, whole("mix_rank", mix_rank, 1), dim, _half) for name in INPUTS})
        self.decay = _lora(dim, whole("decay_rank", decay_rank, 1), keys, _slow_to_fast)
        self.bonus = nn.Parameter(torch.empty(heads, self.key_dim))
        self.norm = HeadLayerNorm(heads, self.value_dim, eps)
        self.o_proj = nn.Linear(values, dim, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Starts the layer's own parameters anew: half of the token before enters, the bonus is near 0."""
        nn.init.constant_(self.mu, 0.5)
        with torch.no_grad():
            channels = torch.arange(self.bonus.numel(), device=self.bonus.device)
            self.bonus.copy_((0.1 * ((channels + 1) % 3 - 1.0)).view_as(self.bonus))

    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        return {**super().state_shapes(), "last": (1, self.dim)}

    def inputs(self, seq: TokenSequence, states: States) -> MatrixInputs:
        before_it = torch.tensor([1.0, 0.0], device=seq.x.device).expand(self.dim, 2)
        earlier, last = seq.conv(seq.x, before_it, None, states.get("last"))
        x, back = widened(seq.x), earlier - widened(seq.x)
        seen = (x + widened(self.mu) * back).to(seq.x.dtype)
        q, k, v, w, g = ((x + back * widened(self.mix[name](seen))).to(seq.x.dtype) for name in INPUTS)
        return MatrixInputs(
            split_heads(self.q_proj(q), self.heads),
            split_heads(self.k_proj(k), self.heads),
            split_heads(self.v_proj(v), self.heads),
            Decay(split_heads(state_rate(self.decay(w)), self.heads)),
            gate_input=self.g_proj(g),
            states={"last": last},
        )

    def recur(
        self, seq: TokenSequence, given: MatrixInputs, v: Tensor, state: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        assert isinstance(given.transition, Decay)
        return read_then_write(seq, given.q, given.k, v, given.transition, self.bonus, state, self.scale)

    def project_output(self, x: Tensor, mixed: Tensor, gate_input: Tensor | None) -> Tensor:
        assert gate_input is not None and self.norm is not None
        out: Tensor = self.o_proj(merge_heads(self.norm(mixed, split_heads(gate_input, self.heads))))
        return out


def read_then_write(
    seq: TokenSequence,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Decay,
    bonus: Tensor,
    state: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """``o_t = scale (S_{t-1} + (bonus * k_t) v_t^T)^T q_t``, then ``S_t = a_t * S_{t-1} + k_t v_t^T``: (o, S_T).

    Shapes as in `regard.recurrence`; bonus (H, Dk). The recurrence reads a state when it has been written, so each
    token reads with the query of the token that follows it, and what that gives belongs to the follower; the first
    token of the call reads `state`, the first one of a segment reads nothing. The token's own term is added.
    """
    q, k, v = (widened(x) for x in (q, k, v))
    opens = segment_starts_of(seq.segments, q.shape[0], q.shape[2])
    opens = None if opens is None else opens[:, None, :, None]

    def cut(x: Tensor) -> Tensor:
        """0 at the first tokens of segments, so nothing of the segment before gets there, gradients neither."""
        return x if opens is None else torch.where(opens, 0.0, x)

    with without_autocast(q):
        factor = scale_of(scale, k.shape[3], k.dtype)
        following = torch.cat((cut(q)[:, :, 1:], torch.zeros_like(q[:, :, :1])), 2)
        read, last = seq.recur(following, k, v, decay, state, scale)
        first = torch.zeros_like(read[:, :, :1]) if state is None else factor * q[:, :, :1] @ state.to(q.dtype)
        past = cut(torch.cat((first, read[:, :, :-1]), 2))
        own = factor * (q * bonus.to(q.dtype)[:, None] * k).sum(-1, keepdim=True)
        return past + own * v, last


def _start_inner(linear: nn.Linear) -> None:
    """A of ``l + B tanh(A x)`` starts at 0."""
    nn.init.zeros_(linear.weight)


def _start_outer(begin: Callable[[Tensor], Tensor], linear: nn.Linear) -> None:
    """B starts small, and l as `begin` says for every channel's place from 0 to 1."""
    nn.init.uniform_(linear.weight, -0.01, 0.01)
    with torch.no_grad():
        linear.bias.copy_(begin(torch.linspace(0.0, 1.0, linear.out_features, device=linear.bias.device)))


def _half(place: Tensor) -> Tensor:
    return torch.full_like(place, 0.5)


def _slow_to_fast(place: Tensor) -> Tensor:
    """The decay's l, by a channel's place from 0 to 1."""
    return -6.0 + 5.0 * place**0.7


def _lora(dim: int, rank: int, out: int, begin: Callable[[Tensor], Tensor]) -> nn.Sequential:
    """``l + B tanh(A x)``, which begins as l."""
    inner = linear_with_start(dim, rank, _start_inner, bias=False)
    return nn.Sequential(inner, nn.Tanh(), linear_with_start(rank, out, partial(_start_outer, begin)))


records = (
    Record(
        name="rwkv6",
        summary="RWKV-6: a decay per key channel, read before it is written, with a bonus for the token itself",
        source="Peng et al. 2024, arXiv:2404.05892",
        build=lambda dim, heads: RWKV6(dim, heads),
    ),
)
