"""Reformer's hashed attention: a token reads the nearest tokens whose vectors fall into its bucket.

    bucket(x) = argmax([x R, -x R]),   k_j = q_j / |q_j|,   y_i = sum_j softmax_j(q_i . k_j) v_j   over the bucket

Queries are keys too; a token reads itself only where its bucket holds no other. Rounds of other rotations R are merged
by their log-sum-exp. Kitaev, Kaiser, Levskaya 2020, arXiv:2001.04451.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from regard.caches import KVCache, KVView
from regard.checks import describe, whole
from regard.coordinates import has_values, plain_tensors
from regard.masks import Dense, Mask
from regard.mixers.attention_parts import hide_unread
from regard.mixers.base import Record, Traits, check_tokens, floating, no_context
from regard.mixers.costs import attention_macs, causal_pairs, keys_read
from regard.mixers.parts import merge_heads, split_heads
from regard.ops.attention import attention, attention_weights
from regard.ops.lsh import hash_buckets, hashed_attention, merged_rounds, same_bucket
from regard.tokens import TokenLayout, resolve_tokens, takes_token_layout

__all__ = ["HashedAttention", "records"]


class HashedAttention(nn.Module):
    """Attention among tokens of equal hashes, causal or not; ``(B, T, dim)`` in and out.

    Args:
        dim: width of the tokens.
        heads: heads H.
        buckets: of the hash, an even number, the same for any length (published: twice the number of chunks).
        reach: how many tokens of the bucket before it, and after it where bidirectional, a token reads.
        rounds: hashes of other rotations.
        causal: a token reads earlier ones alone.
        seed: of the rotations, a buffer that checkpoints keep.

    Parameters: ``qk_proj v_proj o_proj`` without biases. A key that several rounds find counts for each, as published.
    Which tokens share a bucket's window never depends on later tokens, so the causal layer does not leak; the released
    code's chunks do (`regard.mixers.reformer_published` has them, for its checkpoints). Padding and other packed texts
    have buckets of their own. A cache holds queries and values; hashes are formed anew. Raises ValueError and TypeError
    for sizes and tensors that do not fit, and for masks. Cost rounds (4 T reach H D + T log T) FLOPs; memory linear in
    T.

    >>> HashedAttention(64, 8, buckets=8, reach=16, rounds=2)(torch.randn(2, 100, 64)).shape
    torch.Size([2, 100, 64])
    """

    rotations: Tensor

    def __init__(
        self, dim: int, heads: int, buckets: int, reach: int, *, rounds: int = 1, causal: bool = True, seed: int = 0
    ) -> None:
        super().__init__()
        self.dim, self.heads, self.reach = whole("dim", dim, 1), whole("heads", heads, 1), whole("reach", reach, 1)
        if dim % heads:
            raise ValueError(f"heads: expected a divisor of dim={dim}, got {heads}")
        if whole("buckets", buckets, 2) % 2:
            raise ValueError(f"buckets: expected an even number, got {buckets}")
        self.head_dim, self.buckets, self.rounds = dim // heads, buckets, whole("rounds", rounds, 1)
        self.causal, self.seed = causal, whole("seed", seed, None)
        self.qk_proj, self.v_proj = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.o_proj = nn.Linear(dim, dim, bias=False)
        self.register_buffer("rotations", torch.empty(heads, self.head_dim, rounds, buckets // 2))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """The rotations of the layer's seed."""
        if has_values(self.rotations):
            with plain_tensors():
                drawn = torch.randn(self.rotations.shape, generator=torch.Generator().manual_seed(self.seed))
            self.rotations.copy_(drawn)

    @property
    def traits(self) -> Traits:
        """What the layer promises."""
        return Traits("softmax", causal=self.causal, cached=self.causal)

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
        y: Tensor = self.o_proj(merge_heads(self._mix(view, tokens)))
        if cache is not None:
            cache.commit(*view.fresh)
        return y

    def mixed(self, x: Tensor, **arguments: Any) -> Tensor:
        """What the layer mixes (B, H, T, D), before the output projection; a cache stays as it is."""
        return self._mix(*self._read(x, **arguments))

    def mixing(self, x: Tensor, **arguments: Any) -> tuple[Tensor, Tensor]:
        """(M (B, H, T, Tk), V (B, H, Tk, D)); a cache stays as it is."""
        view, tokens = self._read(x, **arguments)
        q, k, buckets, start = self._hashed(view, tokens)
        eye = torch.eye(view.k.shape[2], device=q.device, dtype=torch.bool)[start:]
        maps, sums = [], []
        for n in range(self.rounds):
            read = self._pairs(buckets[:, :, n], start)
            _, weights, lse = attention_weights(q, k, view.v, mask=Dense(read), scale=1.0)
            maps.append(weights)
            sums.append(lse)
        shares = torch.stack(sums)
        weights = merged_rounds(torch.stack(maps), shares, eye.to(maps[0].dtype).expand_as(maps[0]))
        return weights, hide_unread(weights, view.v)

    def init_cache(
        self, batch: int, capacity: int, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None
    ) -> KVCache:
        """An empty cache for `batch` rows of up to `capacity` tokens: queries and values."""
        like = floating(self.qk_proj, self)
        where = dtype or like.dtype, device or like.device
        return KVCache(batch, capacity, self.heads, self.head_dim, self.head_dim, *where)

    def label(self) -> str:
        """The layer in a few words."""
        return f"hashed attention, {self.heads} heads of {self.head_dim}, {self.buckets} buckets, {self.rounds} rounds"

    def prefill_macs(self, tokens: int) -> int:
        """Multiply-accumulates between `tokens` tokens, at most, and of their hashes."""
        hashes = self.heads * tokens * self.head_dim * self.rounds * self.buckets // 2
        pairs = self.rounds * causal_pairs(tokens, self.reach) * (1 if self.causal else 2)
        return attention_macs(self.heads, self.head_dim, self.head_dim, pairs) + hashes

    def step_macs(self, cached: int) -> int:
        """The same for one token: hashes of all that are cached, and scores with them."""
        hashes = self.heads * cached * self.head_dim * self.rounds * self.buckets // 2
        seen = self.rounds * keys_read(cached, None)
        return attention_macs(self.heads, self.head_dim, self.head_dim, seen) + hashes

    def extra_repr(self) -> str:
        parts = f"buckets={self.buckets}, reach={self.reach}, rounds={self.rounds}, causal={self.causal}"
        return f"{self.dim}, {self.heads} heads of {self.head_dim}, {parts}"

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
        check_tokens(self, "x", x, self.dim)
        if mask is not None:
            raise ValueError(f"mask: expected None, tokens are read by their hashes; got {describe(mask)}")
        if cache is not None and not (self.causal and isinstance(cache, KVCache)):
            raise TypeError(f"cache: expected what init_cache of a causal layer gives, or None, got {describe(cache)}")
        given: dict[str, Any] = {"keep": keep, "positions": positions, "segments": segments}
        resolve: Any = resolve_tokens if cache is None else cache.resolve_tokens
        layout: TokenLayout = resolve(x.shape[0], x.shape[1], x.device, **given)
        x = layout.real(x)
        q, v = split_heads(self.qk_proj(x), self.heads), split_heads(self.v_proj(x), self.heads)
        return (KVView.alone(q, v, layout) if cache is None else cache.extend(q, v, layout)), x.shape[1]

    def _hashed(self, view: KVView, tokens: int) -> tuple[Tensor, Tensor, Tensor, int]:
        """(new queries, all keys, all buckets (B, H, rounds, Tk), the slot of the first query)."""
        seen = view.k
        wide = seen.to(torch.promote_types(seen.dtype, torch.float32))
        k = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6) / math.sqrt(self.head_dim)).to(seen.dtype)
        buckets = hash_buckets(seen, self.rotations)
        if view.segments is not None:
            buckets = buckets + view.segments[:, None, None] * (self.buckets + 1)
        if view.keep is not None:
            buckets = torch.where(view.keep[:, None, None], buckets, -1)
        start = seen.shape[2] - tokens
        return seen[:, :, start:], k, buckets, start

    def _pairs(self, buckets: Tensor, start: int) -> Tensor:
        """The pairs (B, H, Tq, Tk) that one round reads."""
        read = same_bucket(buckets[..., start:], buckets, start, self.reach)
        if self.causal:
            return read
        back = same_bucket(buckets.flip(-1), buckets.flip(-1), 0, self.reach).flip(-1, -2)
        return read | back

    def _mix(self, view: KVView, tokens: int) -> Tensor:
        q, k, buckets, start = self._hashed(view, tokens)
        if start == 0:
            return hashed_attention(q, k, view.v, buckets, self.reach, causal=self.causal, scale=1.0)
        outs, sums = [], []
        for n in range(self.rounds):
            mask = Dense(self._pairs(buckets[:, :, n], start))
            out, lse = attention(q, k, view.v, mask=mask, scale=1.0, return_lse=True)
            outs.append(out)
            sums.append(lse)
        return merged_rounds(torch.stack(outs), torch.stack(sums), view.v[:, :, start:])


records = (
    Record(
        name="hashed",
        summary="Reformer's hashed attention: the nearest earlier tokens of a token's bucket",
        source="Kitaev et al. 2020, arXiv:2001.04451",
        build=lambda dim, heads: HashedAttention(dim, heads, buckets=2, reach=2, rounds=2),
    ),
    Record(
        name="hashed_bidirectional",
        summary="hashed attention over tokens on either side",
        source="Kitaev et al. 2020, arXiv:2001.04451",
        build=lambda dim, heads: HashedAttention(dim, heads, buckets=2, reach=2, causal=False),
    ),
)
