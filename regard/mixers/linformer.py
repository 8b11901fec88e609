"""Linformer: softmax attention over keys and values that are compressed along the tokens, in linear time.

    K~ = E K,   V~ = F V   (E, F: k x n),   y_t = sum_j softmax_j(q_t . K~_j / sqrt(D)) V~_j

Each compressed key mixes all tokens, later ones too, so there is no causal form and no decoding.
Wang, Li, Khabsa, Fang, Ma 2020, arXiv:2006.04768.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor, nn

from regard.checks import describe, is_part, whole
from regard.masks import Mask, Segments
from regard.mixers.base import Record, Traits, check_tokens
from regard.mixers.parts import merge_heads, split_heads
from regard.ops.attention import attention, attention_weights
from regard.tokens import TokenLayout, resolve_tokens, takes_token_layout

__all__ = ["LengthProjection", "Linformer", "records"]

Sharing = Literal["none", "heads", "keys and values"]


class LengthProjection(nn.Module):
    """The maps E and F along the tokens: ``keys`` and ``values`` (heads | 1, compressed, length).

    Args:
        length: the most tokens n.
        compressed: what they become, k.
        heads: of the keys and values.
        sharing: "none" has E and F for each head, "heads" one E and one F, "keys and values" one map for both. Pass the
            module to several layers for the paper's layerwise sharing.

    Raises ValueError and TypeError for sizes below 1 and other names.

    >>> sum(p.numel() for p in LengthProjection(512, 128, 8, sharing="keys and values").parameters()) == 512 * 128
    True
    """

    def __init__(self, length: int, compressed: int, heads: int, *, sharing: Sharing = "heads") -> None:
        super().__init__()
        self.length, self.compressed = whole("length", length, 1), whole("compressed", compressed, 1)
        if sharing not in ("none", "heads", "keys and values"):
            raise ValueError(f"sharing: expected 'none', 'heads' or 'keys and values', got {sharing!r}")
        shape = whole("heads", heads, 1) if sharing == "none" else 1, compressed, length
        self.keys = nn.Parameter(torch.empty(shape))
        self.values = None if sharing == "keys and values" else nn.Parameter(torch.empty(shape))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Starts the layer's own parameters anew: the uniform distribution of the published code."""
        for one in (self.keys, self.values):
            if one is not None:
                edge = math.sqrt(6 / (self.compressed + self.length)) / math.sqrt(2)
                nn.init.uniform_(one, -edge, edge)

    def extra_repr(self) -> str:
        return f"{self.length} tokens to {self.compressed}, heads {self.keys.shape[0]}, both {self.values is None}"


class Linformer(nn.Module):
    """Attention over a compressed sequence, its own or a context's; ``(B, T, dim)`` in and out, not causal.

    Args:
        dim: width of the tokens.
        heads: query heads H.
        projection: a `LengthProjection`; it bounds the tokens that are compressed.
        kv_heads: key and value heads, a divisor of `heads`; `heads` by default.
        head_dim: channels D of a head; ``dim // heads`` by default.
        context_dim: width of a context that keys and values come from; None reads the tokens themselves.
        bias: a bias of the output projection.

    Parameters: ``q_proj k_proj v_proj o_proj projection.*``. Padding is taken out before tokens are mixed: no mask can
    take it out afterwards; a token's place is the number of real tokens before it in its segment, so padding moves
    nothing. Shorter sequences use the first columns of E and F. The softmax is over all k compressed keys, however few
    tokens there are: one that nothing was written to scores 0 and keeps its share of the weight, and its value is 0.
    Packed segments are compressed each by itself.
    Raises ValueError for more tokens than the projection takes, for masks (a compressed key is no token), and for sizes
    that do not fit. Cost 2 T k H (2 D) + 4 T k Hkv D FLOPs beside the projections.

    >>> layer = Linformer(64, 8, LengthProjection(128, 16, 8))
    >>> layer(torch.randn(2, 100, 64)).shape
    torch.Size([2, 100, 64])
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        projection: LengthProjection,
        *,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        context_dim: int | None = None,
        bias: bool = False,
    ) -> None:
        super().__init__()
        self.dim, self.heads = whole("dim", dim, 1), whole("heads", heads, 1)
        self.kv_heads = self.heads if kv_heads is None else whole("kv_heads", kv_heads, 1)
        if self.heads % self.kv_heads:
            raise ValueError(f"heads: expected a multiple of kv_heads={self.kv_heads}, got {heads}")
        if head_dim is None and dim % heads:
            raise ValueError(f"heads: expected a divisor of dim={dim} where head_dim is not given, got {heads}")
        is_part("projection", projection, LengthProjection)
        if projection.keys.shape[0] not in (1, self.kv_heads):
            raise ValueError(f"projection: expected one for {self.kv_heads} heads, got {projection.keys.shape[0]}")
        self.projection = projection
        self.head_dim = dim // heads if head_dim is None else whole("head_dim", head_dim, 1)
        self.crosses = context_dim is not None
        self.context_dim = dim if context_dim is None else whole("context_dim", context_dim, 1)
        wide, width = self.heads * self.head_dim, self.kv_heads * self.head_dim
        self.q_proj, self.k_proj = nn.Linear(dim, wide, bias=False), nn.Linear(self.context_dim, width, bias=False)
        self.v_proj, self.o_proj = nn.Linear(self.context_dim, width, bias=False), nn.Linear(wide, dim, bias=bias)

    @property
    def traits(self) -> Traits:
        """What the layer promises."""
        return Traits("softmax", causal=False, cached=False, context=self.crosses)

    @takes_token_layout
    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        mask: Mask | None = None,
        keep: Tensor | None = None,
        positions: Tensor | TokenLayout | None = None,
        segments: Tensor | None = None,
        cache: None = None,
    ) -> Tensor:
        """The mixed tokens (B, T, dim); with a context, `keep` describes its tokens."""
        given: dict[str, Any] = {"mask": mask, "keep": keep, "positions": positions, "segments": segments}
        y: Tensor = self.o_proj(merge_heads(self.mixed(x, context, cache=cache, **given)))
        return y

    def mixed(self, x: Tensor, context: Tensor | None = None, **arguments: Any) -> Tensor:
        """What the layer mixes (B, H, T, D), before the output projection."""
        q, source, layout = self._read(x, context, **arguments)
        k, v, mask = self._compressed(source, layout)
        out: Tensor = attention(q, k, v, mask=mask)
        return out

    def mixing(self, x: Tensor, context: Tensor | None = None, **arguments: Any) -> tuple[Tensor, Tensor]:
        """(M (B, H, T, Tk), V (B, H, Tk, D)): weights of the compressed values times F, and the tokens' values.

        Entries may be negative and rows need not sum to 1."""
        q, source, layout = self._read(x, context, **arguments)
        k, v, mask = self._compressed(source, layout)
        weights = attention_weights(q, k, v, mask=mask)[1]
        maps = torch.cat([self._maps(layout, "values", one) for one in self._segments(layout)], 2)
        values = split_heads(self.v_proj(source), self.kv_heads)
        spread = maps.expand(-1, self.kv_heads, -1, -1).repeat_interleave(self.heads // self.kv_heads, 1)
        return weights @ spread.to(weights.dtype), values.repeat_interleave(self.heads // self.kv_heads, 1)

    def label(self) -> str:
        """The layer in a few words."""
        return f"Linformer, {self.heads} heads of {self.head_dim}, {self.projection.compressed} compressed keys"

    def prefill_macs(self, tokens: int) -> int:
        """Multiply-accumulates between `tokens` tokens: compression of keys and values, scores and sums."""
        pairs = tokens * self.projection.compressed
        return 2 * pairs * self.head_dim * (self.heads + self.kv_heads)

    # ---- the steps of a call -----------------------------------------------------------------------------------------

    def _read(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        mask: Mask | None = None,
        keep: Tensor | None = None,
        positions: Tensor | TokenLayout | None = None,
        segments: Tensor | None = None,
        cache: None = None,
    ) -> tuple[Tensor, Tensor, TokenLayout]:
        """(queries, the tokens to compress with 0 at padding, their layout)."""
        check_tokens(self, "x", x, self.dim)
        if mask is not None:
            raise ValueError(f"mask: expected None, a compressed key mixes all tokens; got {describe(mask)}")
        if cache is not None:
            raise ValueError("cache: expected None, the layer is not causal and does not decode")
        if self.crosses != (context is not None):
            wanted = f"tokens (B, Tk, {self.context_dim})" if self.crosses else "None, the layer has no context_dim"
            raise ValueError(f"context: expected {wanted}, got {describe(context)}")
        source = x if context is None else context
        if context is not None:
            check_tokens(self, "context", context, self.context_dim, x)
            if segments is not None:
                raise ValueError("segments: with a context they have no meaning; mask the context with keep")
            positions = None
        layout = resolve_tokens(
            source.shape[0], source.shape[1], source.device, keep=keep, positions=positions, segments=segments
        )
        if source.shape[1] > self.projection.length:
            name = "x" if context is None else "context"
            raise ValueError(f"{name}: expected at most {self.projection.length} tokens, got {source.shape[1]}")
        q = split_heads(self.q_proj(layout.real(x) if context is None else x), self.heads)
        return q, layout.real(source), layout

    def _compressed(self, source: Tensor, layout: TokenLayout) -> tuple[Tensor, Tensor, Mask | None]:
        """Keys and values (B, Hkv, segments * k, D), and which of them queries may read."""
        k, v = (split_heads(proj(source), self.kv_heads) for proj in (self.k_proj, self.v_proj))
        segments = self._segments(layout)
        joined = []
        for name, tokens in (("keys", k), ("values", v)):
            parts = [self._maps(layout, name, one).to(tokens.dtype) @ tokens for one in segments]
            joined.append(torch.cat(parts, 2))
        if layout.segments is None:
            return joined[0], joined[1], None
        ids = torch.stack([one for one in segments if one is not None]).repeat_interleave(self.projection.compressed)
        return joined[0], joined[1], Segments(layout.segments, ids.expand(len(source), -1))

    @staticmethod
    def _segments(layout: TokenLayout) -> list[Tensor | None]:
        """The ids of the segments that there are, or None for one of all tokens."""
        return [None] if layout.segments is None else list(layout.segments.unique())

    def _maps(self, layout: TokenLayout, name: str, segment: Tensor | None) -> Tensor:
        """E or F for the tokens of a segment (B | 1, Hkv | 1, k, T), with 0 at the others and at padding."""
        own = self.projection.values if name == "values" and self.projection.values is not None else None
        rows = self.projection.keys if own is None else own
        if layout.keep is None and segment is None:
            return rows[None, :, :, : layout.positions.shape[1]]
        assert layout.counts is not None
        places = (layout.counts - 1).clamp(min=0)
        maps = rows[:, :, places].permute(2, 0, 1, 3)  # (B, Hkv | 1, k, T)
        real = torch.ones_like(places, dtype=torch.bool) if layout.keep is None else layout.keep
        if segment is not None and layout.segments is not None:
            real = real & (layout.segments == segment)
        return torch.where(real[:, None, None], maps, 0.0)


records = (
    Record(
        name="linformer",
        summary="Linformer: keys and values compressed along the tokens, by one map each",
        source="Wang et al. 2020, arXiv:2006.04768",
        build=lambda dim, heads: Linformer(dim, heads, LengthProjection(64, 6, heads)),
    ),
    Record(
        name="linformer_per_head",
        summary="Linformer with maps of its own for each head, grouped keys",
        source="Wang et al. 2020, arXiv:2006.04768",
        build=lambda dim, heads: Linformer(
            dim, heads, LengthProjection(64, 6, heads // 2, sharing="none"), kv_heads=heads // 2
        ),
    ),
    Record(
        name="linformer_cross",
        summary="Linformer over a context, one map for keys and values",
        source="Wang et al. 2020, arXiv:2006.04768",
        build=lambda dim, heads: Linformer(
            dim, heads, LengthProjection(64, 6, heads, sharing="keys and values"), context_dim=dim + 4
        ),
    ),
)
