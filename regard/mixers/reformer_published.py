"""Reformer's two layers as the released code has them, for its checkpoints: hashed and local attention in chunks.

They are no rows of the catalogue: a causal one leaks, since chunks move with later tokens. `HashedAttention` is the
mechanism without that. Kitaev, Kaiser, Levskaya 2020, arXiv:2001.04451.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from regard.checks import whole
from regard.mixers.parts import merge_heads, split_heads
from regard.ops.lsh import factored_buckets
from regard.ops.reformer_chunks import Chunks, published_hashed_attention, published_local_attention

__all__ = ["Hashing", "PublishedHashedAttention", "PublishedLocalAttention"]


@dataclass(frozen=True)
class Hashing:
    """How tokens are hashed: so many rounds, into a product of so many buckets each, by rotations of a seed.

    Args:
        rounds: hashes of other rotations.
        buckets: even factors of the number of buckets; None: by the tokens of a call, twice the chunks, as a power of
            two, in two factors beyond `limit`.
        seed: of the rotations, which are drawn in the dtype of the queries at every call, as published.
        limit: the most buckets in one factor.
    """

    rounds: int
    buckets: Sequence[int] | None
    seed: int
    limit: int

    def factors(self, chunks: int) -> Sequence[int]:
        """The factors for a text of so many chunks."""
        if self.buckets is not None:
            return self.buckets
        power = (2 * chunks).bit_length() - 1
        return [2**power] if 2**power <= self.limit else [2 ** (power // 2), 2 ** (power - power // 2)]

    def __call__(self, x: Tensor, factors: Sequence[int]) -> Tensor:
        """Buckets (B, H, rounds, T) of x (B, H, T, D)."""
        shape = (x.shape[1], x.shape[3], self.rounds, sum(factors) // 2)
        generator = torch.Generator().manual_seed(self.seed)
        rotations = torch.randn(shape, generator=generator, dtype=x.dtype, device="cpu")
        return factored_buckets(x, rotations.to(x.device), factors)


class _InChunks(nn.Module):
    """What both layers share: heads of any size, an output without a bias, chunks, ``(B, T, dim)`` in and out."""

    def __init__(
        self, dim: int, heads: int, head_dim: int, chunks: Chunks, *, causal: bool = True, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.dim, self.heads, self.head_dim = (
            whole("dim", dim, 1),
            whole("heads", heads, 1),
            whole("head_dim", head_dim, 1),
        )
        self.chunks, self.causal, self.dropout = chunks, causal, dropout
        self.o_proj = nn.Linear(heads * head_dim, dim, bias=False)

    def _map(self) -> nn.Linear:
        return nn.Linear(self.dim, self.heads * self.head_dim, bias=False)

    def _chunks(self, tokens: int) -> Chunks:
        """A text of one chunk or less is read whole."""
        return self.chunks if tokens > self.chunks.size else Chunks(max(tokens, 1), 0, 0)

    @property
    def _dropout_p(self) -> float:
        return self.dropout if self.training else 0.0

    def extra_repr(self) -> str:
        return f"{self.dim}, {self.heads} heads of {self.head_dim}, {self.chunks}, causal={self.causal}"


class PublishedLocalAttention(_InChunks):
    """Softmax attention within chunks and the ones beside them, circularly.

    ``q_proj k_proj v_proj o_proj`` without biases; more than one chunk of tokens must be whole chunks.
    """

    def __init__(
        self, dim: int, heads: int, head_dim: int, chunks: Chunks, *, causal: bool = True, dropout: float = 0.0
    ) -> None:
        super().__init__(dim, heads, head_dim, chunks, causal=causal, dropout=dropout)
        self.q_proj, self.k_proj, self.v_proj = self._map(), self._map(), self._map()

    def forward(self, x: Tensor, *, keep: Tensor | None = None) -> Tensor:
        """The mixed tokens; `keep` (B, T) says which are real."""
        q, k, v = (split_heads(project(x), self.heads) for project in (self.q_proj, self.k_proj, self.v_proj))
        out = published_local_attention(
            q,
            k / math.sqrt(self.head_dim),
            v,
            self._chunks(x.shape[1]),
            causal=self.causal,
            keep=keep,
            dropout_p=self._dropout_p,
        )
        mixed: Tensor = self.o_proj(merge_heads(out))
        return mixed


class PublishedHashedAttention(_InChunks):
    """Hashed attention whose queries are keys, in chunks of the sorted tokens of all rounds.

    ``qk_proj v_proj o_proj`` without biases; more than one chunk of tokens must be whole chunks. A text of one chunk is
    read whole, without hashes.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        head_dim: int,
        chunks: Chunks,
        hashing: Hashing,
        *,
        causal: bool = True,
        dropout: float = 0.0,
    ) -> None:
        super().__init__(dim, heads, head_dim, chunks, causal=causal, dropout=dropout)
        self.hashing = hashing
        self.qk_proj, self.v_proj = self._map(), self._map()

    def choices(self, x: Tensor) -> Tensor | None:
        """The buckets of a call, before padding has its own: what a pass that runs the layer again must not redo."""
        if x.shape[1] <= self.chunks.size:
            return None
        return self._hash(split_heads(self.qk_proj(x), self.heads))

    def forward(self, x: Tensor, *, keep: Tensor | None = None, choices: Tensor | None = None) -> Tensor:
        """The mixed tokens; `keep` (B, T) says which are real, `choices` are the buckets where they are known."""
        tokens = x.shape[1]
        q, v = split_heads(self.qk_proj(x), self.heads), split_heads(self.v_proj(x), self.heads)
        k = q * torch.rsqrt(q.square().mean(-1, keepdim=True) + 1e-6) / math.sqrt(self.head_dim)
        if tokens <= self.chunks.size:
            found, most = torch.zeros(*q.shape[:2], 1, tokens, dtype=torch.long, device=q.device), 1
        else:
            found = self._hash(q) if choices is None else choices
            most = math.prod(self.hashing.factors(tokens // self.chunks.size))
            if keep is not None:
                found, most = torch.where(keep[:, None, None], found, most), most + 1
        out = published_hashed_attention(
            *(q, k, v, found, self._chunks(tokens)),
            most=most,
            causal=self.causal,
            keep=keep,
            dropout_p=self._dropout_p,
        )
        mixed: Tensor = self.o_proj(merge_heads(out))
        return mixed

    def _hash(self, q: Tensor) -> Tensor:
        return self.hashing(q, self.hashing.factors(q.shape[2] // self.chunks.size))
