"""Multi-token attention: scores are convolved over neighbouring queries and keys, and mixed over heads.

    S = q k^T / sqrt(D), 0 where a query may not look;  S = conv(S);  P = softmax(S where it may)
    P = conv'(P), 0 where it may not;  P'_o = sum_i P_i K_io in groups of heads;  y = norm(P' V)

A convolution reads the rows of earlier queries and the columns of keys near by; later keys count 0, so nothing leaks.
Golovneva, Wang, Weston, Sukhbaatar 2025, arXiv:2504.00927.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from regard.backends.call import inside_transform, may_be_transformed
from regard.caches import KVCache, KVView
from regard.checks import describe, is_part, whole
from regard.coordinates import has_values
from regard.masks import Mask
from regard.mixers.base import Record, Traits, check_tokens, floating, no_context
from regard.mixers.costs import attention_macs, causal_pairs
from regard.mixers.parts import RMSNorm, merge_heads, split_heads
from regard.mixers.unpacked import Unpacked
from regard.ops.checks import without_autocast
from regard.ops.score_convolution import convolved_rows, hide_later, mixed_heads
from regard.positions import Rotary
from regard.tokens import TokenLayout, resolve_tokens, takes_token_layout

__all__ = ["MultiTokenAttention", "TokenKernels", "records"]

ROWS = 128  # query rows whose scores are held at a time


@dataclass(frozen=True)
class TokenKernels:
    """What scores and weights of neighbours do to each other.

    Args:
        before: (queries, keys) of the convolution before the softmax; None for none.
        after: the same after it.
        mix_before: a linear mixing of all heads before the softmax.
        mix_after: heads of a group that are mixed after it; "all" for one linear map; None for none.
        pad: "both" centres the keys' window (an odd number), "left" ends it at the key itself.
    """

    before: tuple[int, int] | None = (6, 11)
    after: tuple[int, int] | None = None
    mix_before: bool = False
    mix_after: int | Literal["all"] | None = 2
    pad: Literal["both", "left"] = "both"

    def __post_init__(self) -> None:
        for name in ("before", "after"):
            size = getattr(self, name)
            if size is None:
                continue
            if not isinstance(size, tuple) or len(size) != 2:
                raise TypeError(f"{name}: expected (queries, keys) or None, got {describe(size)}")
            if whole(name, size[0], 1) and whole(name, size[1], 1) % 2 == 0 and self.pad == "both":
                raise ValueError(f"{name}: expected an odd number of keys with pad='both', got {size[1]}")
        if self.pad not in ("both", "left"):
            raise ValueError(f"pad: expected 'both' or 'left', got {self.pad!r}")

    @property
    def rows(self) -> int:
        """Earlier query rows that one row reads."""
        return sum(size[0] - 1 for size in (self.before, self.after) if size is not None)


class MultiTokenAttention(nn.Module):
    """Causal attention whose scores are convolved over neighbouring tokens; ``(B, T, dim)`` in and out.

    Args:
        dim: width of the tokens.
        heads: heads H.
        kernels: `TokenKernels`.
        kv_heads: key and value heads, a divisor of `heads`; `heads` by default.
        rotary: a `regard.positions.Rotary` for queries and keys (published: interleaved).
        norm: an RMS norm of each head's output, one weight for all heads (the paper's group norm).
        depth: the layer's number from 0, for the published factor ``1 - (0.8 - 0.6 exp(-0.3 depth))`` on the normed
            output; None for none.
        gate: a sigmoid gate per head and token, from the normed output.

    Parameters: ``q_proj k_proj v_proj o_proj``, ``conv_before conv_after`` (H, queries, keys), ``heads_before
    heads_after``, ``norm``, ``gate_proj``. Kernels start as the identity: a new layer is plain attention. Weights after
    the softmax need not sum to 1 and may be negative. Padding and other packed sequences take no part in a convolution.
    A cache holds keys, values and queries: the latest rows' scores are formed anew. Raises ValueError and TypeError for
    tensors that do not fit, and for masks. Cost 4 T^2 H D + 2 T^2 H (queries x keys) FLOPs; memory linear in T, since
    scores are held for 128 rows at a time, forward and backward.

    >>> layer = MultiTokenAttention(64, 8)
    >>> layer(torch.randn(2, 10, 64)).shape
    torch.Size([2, 10, 64])
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        kernels: TokenKernels | None = None,
        *,
        kv_heads: int | None = None,
        rotary: Rotary | None = None,
        norm: bool = True,
        depth: int | None = None,
        gate: bool = False,
    ) -> None:
        super().__init__()
        self.dim, self.heads = whole("dim", dim, 1), whole("heads", heads, 1)
        self.kv_heads = self.heads if kv_heads is None else whole("kv_heads", kv_heads, 1)
        if dim % heads or self.heads % self.kv_heads:
            raise ValueError(f"heads: expected a divisor of dim={dim} and a multiple of kv_heads, got {heads}")
        is_part("kernels", kernels, TokenKernels)
        is_part("rotary", rotary, Rotary)
        self.kernels, self.rotary, self.head_dim = kernels or TokenKernels(), rotary, dim // heads
        group = self.kernels.mix_after
        if isinstance(group, int) and heads % whole("mix_after", group, 1):
            raise ValueError(f"mix_after: expected a divisor of heads={heads}, got {group}")
        self.factor = 1.0 if depth is None else 1 - (0.8 - 0.6 * math.exp(-0.3 * whole("depth", depth, 0)))
        width = self.kv_heads * self.head_dim
        self.q_proj, self.k_proj = nn.Linear(dim, dim, bias=False), nn.Linear(dim, width, bias=False)
        self.v_proj, self.o_proj = nn.Linear(dim, width, bias=False), nn.Linear(dim, dim, bias=False)
        before, after = (None if size is None else (heads, *size) for size in (self.kernels.before, self.kernels.after))
        self.conv_before = None if before is None else nn.Parameter(torch.empty(before))
        self.conv_after = None if after is None else nn.Parameter(torch.empty(after))
        self.heads_before = nn.Parameter(torch.empty(heads, heads)) if self.kernels.mix_before else None
        shape = (1, heads, heads) if group == "all" else None if group is None else (heads // group, group, group)
        self.heads_after = None if shape is None else nn.Parameter(torch.empty(shape))  # [group, from, to]
        self.norm = RMSNorm(self.head_dim, 1e-5) if norm else None
        self.gate_proj = nn.Linear(self.head_dim, 1) if gate else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Starts the kernels anew, as the identity."""
        for kernel in (self.conv_before, self.conv_after):
            if kernel is not None:
                nn.init.zeros_(kernel)
                with torch.no_grad():
                    kernel[:, -1, kernel.shape[2] // 2 if self.kernels.pad == "both" else -1] = 1
        for mixing in (self.heads_before, self.heads_after):
            if mixing is not None:
                with torch.no_grad():
                    mixing.copy_(torch.eye(mixing.shape[-1], device=mixing.device).expand_as(mixing))

    @property
    def traits(self) -> Traits:
        """What the layer promises."""
        return Traits("softmax", causal=True, cached=True, off_kernels="its scores are convolved before the softmax")

    @takes_token_layout
    def forward(
        self,
        x: Tensor,
        context: None = None,
        *,
        mask: None = None,
        keep: Tensor | None = None,
        positions: Tensor | TokenLayout | None = None,
        segments: Tensor | None = None,
        cache: KVCache | None = None,
    ) -> Tensor:
        """The mixed tokens (B, T, dim)."""
        no_context(self, context)
        given: dict[str, Any] = {"mask": mask, "keep": keep, "positions": positions, "segments": segments}
        view, tokens = self._read(x, cache=cache, **given)
        y: Tensor = self.o_proj(merge_heads(self._finish(self._mix(view, tokens))))
        if cache is not None:
            cache.commit(*view.fresh)
        return y

    def mixed(self, x: Tensor, **arguments: Any) -> Tensor:
        """What the layer mixes (B, H, T, D), before norm, gate and output projection; a cache stays as it is."""
        return self._mix(*self._read(x, **arguments))

    def mixing(self, x: Tensor, **arguments: Any) -> tuple[Tensor, Tensor]:
        """(M (B, H, T, Tk), V (B, H, Tk, D)); a cache stays as it is."""
        view, tokens = self._read(x, **arguments)
        apart, q, k, _, first = self._apart(view, tokens)
        weights = self._weights(q, k, first, q.shape[2])
        if first:
            weights = F.pad(weights, (0, 0, first, 0))
        if apart is not None:
            weights = apart.columns(apart.together(weights))
        return weights[:, :, -tokens:] if tokens else weights[:, :, :0], self._repeated(view.v.to(weights.dtype))

    def init_cache(
        self, batch: int, capacity: int, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None
    ) -> KVCache:
        """An empty cache for `batch` rows of up to `capacity` tokens: keys with their queries, and values."""
        like = floating(self.k_proj, self)
        width = (self.heads // self.kv_heads + 1) * self.head_dim  # a key, and the queries of the heads that share it
        where = dtype or like.dtype, device or like.device
        return KVCache(batch, capacity, self.kv_heads, width, self.head_dim, *where)

    def label(self) -> str:
        """The layer in a few words."""
        return f"multi-token attention, {self.heads} heads of {self.head_dim}, kernels {self.kernels.before}"

    def prefill_macs(self, tokens: int) -> int:
        """Multiply-accumulates between `tokens` tokens, and in the convolutions of their scores."""
        taps = sum(math.prod(size) for size in (self.kernels.before, self.kernels.after) if size is not None)
        pairs = causal_pairs(tokens, None)
        return attention_macs(self.heads, self.head_dim, self.head_dim, pairs) + self.heads * taps * pairs

    def step_macs(self, cached: int) -> int:
        """The same for one token, whose convolutions form the scores of earlier rows again."""
        rows = min(1 + self.kernels.rows, cached)
        taps = sum(math.prod(size) for size in (self.kernels.before, self.kernels.after) if size is not None)
        return self.heads * cached * (rows * self.head_dim + self.head_dim + taps)

    # ---- the steps of a call -----------------------------------------------------------------------------------------

    def _read(
        self,
        x: Tensor,
        *,
        mask: Mask | None = None,
        keep: Tensor | None = None,
        positions: Tensor | TokenLayout | None = None,
        segments: Tensor | None = None,
        cache: KVCache | None = None,
    ) -> tuple[KVView, int]:
        """The tokens seen, each key beside the queries of its heads, and how many of them are new."""
        check_tokens(self, "x", x, self.dim)
        if mask is not None:
            raise ValueError(f"mask: expected None, convolutions count places; got {describe(mask)}")
        if cache is not None and not isinstance(cache, KVCache):
            raise TypeError(f"cache: expected what init_cache gives, or None, got {describe(cache)}")
        given: dict[str, Any] = {"keep": keep, "positions": positions, "segments": segments}
        batch, tokens, _ = x.shape
        resolve: Any = resolve_tokens if cache is None else cache.resolve_tokens
        layout: TokenLayout = resolve(batch, tokens, x.device, **given)
        x = layout.real(x)
        q, k = split_heads(self.q_proj(x), self.heads), split_heads(self.k_proj(x), self.kv_heads)
        if self.rotary is not None:
            q, k = self.rotary(q, layout.positions), self.rotary(k, layout.positions)
        asked = q.unflatten(1, (self.kv_heads, -1)).transpose(2, 3).flatten(3)  # (B, Hkv, T, G D)
        v = split_heads(self.v_proj(x), self.kv_heads)
        both = torch.cat([k, asked], 3)
        return (KVView.alone(both, v, layout) if cache is None else cache.extend(both, v, layout)), tokens

    def _apart(self, view: KVView, tokens: int) -> tuple[Unpacked | None, Tensor, Tensor, Tensor, int]:
        """(where sequences went, their queries, keys, values, the first row that is new in any of them)."""
        batch, _, seen, _ = view.k.shape
        apart = Unpacked.of(view.keep, view.segments, batch, seen)
        both, v, first = view.k, view.v, seen - tokens
        if apart is not None:
            if not has_values(apart.real):
                first = 0
            elif first:
                new = (torch.arange(seen, device=v.device) >= first) & apart.real
                first = int(torch.where(new, apart.at, apart.longest).min()) if new.numel() else 0
            both, v = apart.apart(both), apart.apart(v)
        k, asked = both[..., : self.head_dim], both[..., self.head_dim :]
        q = asked.unflatten(3, (-1, self.head_dim)).transpose(2, 3).flatten(1, 2)
        return apart, q, self._repeated(k), self._repeated(v), first

    def _repeated(self, x: Tensor) -> Tensor:
        return x.repeat_interleave(self.heads // self.kv_heads, 1)

    def _mix(self, view: KVView, tokens: int) -> Tensor:
        apart, q, k, v, first = self._apart(view, tokens)
        out = [v.new_zeros(*q.shape[:2], first, self.head_dim)] if first else []
        for low in range(first, max(q.shape[2], first + 1), ROWS):  # once at least, for the gradients of kernels
            high = min(low + ROWS, q.shape[2])
            plain = not torch.compiler.is_compiling() and not (may_be_transformed() and inside_transform((q, k, v)))
            if torch.is_grad_enabled() and q.shape[2] > ROWS and plain:
                rows = checkpoint(self._rows, q, k, v, low, high, use_reentrant=False, preserve_rng_state=False)
            else:
                rows = self._rows(q, k, v, low, high)
            out.append(rows)
        whole_rows = torch.cat(out, 2) if out else v[:, :, :0]
        if apart is not None:
            whole_rows = apart.together(whole_rows)
        return whole_rows[:, :, whole_rows.shape[2] - tokens :]

    def _rows(self, q: Tensor, k: Tensor, v: Tensor, low: int, high: int) -> Tensor:
        weights = self._weights(q, k, low, high)
        return (weights @ v[:, :, :high].to(weights.dtype)).to(v.dtype)

    def _weights(self, q: Tensor, k: Tensor, low: int, high: int) -> Tensor:
        """The weights of rows low ... high on keys 0 ... high, 0 behind them up to the last key."""
        start = max(low - self.kernels.rows, 0)  # rows before it only feed rows that are cut off below
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        with without_autocast(q):
            scores = (q[:, :, start:high].to(wide) @ k[:, :, :high].to(wide).mT) * self.head_dim**-0.5
            first, pad = start, self.kernels.pad  # `first`: the row that a convolution leaves first
            if self.conv_before is not None:
                scores, first = convolved_rows(hide_later(scores, first, 0.0), self.conv_before.to(wide), first, pad)
            if self.heads_before is not None:
                scores = mixed_heads(scores.unsqueeze(1), self.heads_before.to(wide)[None]).flatten(1, 2)
            weights = hide_later(scores, first, -torch.inf).softmax(-1) if high else scores
            if self.conv_after is not None:
                weights, first = convolved_rows(weights, self.conv_after.to(wide), first, pad)
                weights = hide_later(weights, first, 0.0)
            if self.heads_after is not None:
                groups = weights.unflatten(1, self.heads_after.shape[:2])
                weights = mixed_heads(groups, self.heads_after.to(wide).mT).flatten(1, 2)
        rows: Tensor = weights[:, :, low - first :]
        return rows

    def _finish(self, mixed: Tensor) -> Tensor:
        if self.norm is not None:
            mixed = torch.mul(self.norm(mixed), self.factor)
        if self.gate_proj is not None:
            mixed = torch.mul(mixed, torch.sigmoid(self.gate_proj(mixed)))
        return mixed


records = (
    Record(
        name="multi_token",
        summary="multi-token attention: scores convolved over queries and keys, heads mixed after the softmax",
        source="Golovneva et al. 2025, arXiv:2504.00927",
        build=lambda dim, heads: MultiTokenAttention(
            dim, heads, TokenKernels((3, 5)), rotary=Rotary(dim // heads, style="interleaved"), depth=1
        ),
    ),
    Record(
        name="multi_token_after",
        summary="multi-token attention with a convolution of the weights, all heads mixed, gated",
        source="Golovneva et al. 2025, arXiv:2504.00927",
        build=lambda dim, heads: MultiTokenAttention(
            dim,
            heads,
            TokenKernels((2, 3), (2, 3), mix_before=True, mix_after="all"),
            kv_heads=heads // 2,
            gate=True,
        ),
    ),
)
