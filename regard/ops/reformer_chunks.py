"""Reformer's attention as the released code has it: chunks that read themselves and their neighbours, circularly.

For the numbers of its checkpoints; `regard.ops.lsh.hashed_attention` is the mechanism without the leak.
Kitaev, Kaiser, Levskaya 2020, arXiv:2001.04451.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.checks import whole

__all__ = ["Chunks", "published_hashed_attention", "published_local_attention"]

HIDDEN, ITSELF = -1e9, -1e5  # scores of what is not read, and of a token with itself where queries are keys


@dataclass(frozen=True)
class Chunks:
    """Chunks of `size` tokens that read themselves, `before` chunks before them and `after` behind, circularly.

    With fewer chunks than that a key is read, and counted, several times.
    """

    size: int
    before: int = 1
    after: int = 0

    def __post_init__(self) -> None:
        whole("size", self.size, 1)
        whole("before", self.before, 0)
        whole("after", self.after, 0)

    def split(self, x: Tensor) -> Tensor:
        """(B, H, T, ...) as (B, H, T / size, size, ...)."""
        if x.shape[2] % self.size:
            raise ValueError(f"size: expected a divisor of {x.shape[2]} tokens, got {self.size}")
        split: Tensor = x.unflatten(2, (x.shape[2] // self.size, self.size))
        return split

    def beside(self, x: Tensor) -> Tensor:
        """Each chunk's neighbours and itself, in order, along the axis of its tokens."""
        return torch.cat([x.roll(n, 2) for n in range(self.before, -self.after - 1, -1)], 3)

    def attend(
        self,
        operands: tuple[Tensor, Tensor, Tensor],
        places: Tensor,
        *,
        real: Tensor | None,
        causal: bool,
        itself: float | None,
        dropout_p: float,
    ) -> tuple[Tensor, Tensor]:
        """(outputs (B, H, N, D), log-sum-exp (B, H, N)) of N tokens in this order, which stand at `places` (…, N)."""
        q, k, v = (self.split(x) for x in operands)
        own = self.split(places)
        seen, k, v = self.beside(own), self.beside(k), self.beside(v)
        scores = (q @ k.mT).to(torch.promote_types(q.dtype, torch.float32))
        if real is not None:
            scores = torch.where(self.beside(self.split(real)).unsqueeze(-2), scores, HIDDEN)
        if causal:
            scores = torch.where(own.unsqueeze(-1) >= seen.unsqueeze(-2), scores, HIDDEN)
        if itself is not None:
            scores = torch.where(own.unsqueeze(-1) == seen.unsqueeze(-2), itself, scores)
        lse = scores.logsumexp(-1)
        # as published: in float32 the weights of a token that reads itself alone are off by up to 0.4 %
        weights = F.dropout(torch.exp(scores - lse.unsqueeze(-1)), dropout_p, dropout_p > 0)
        return (weights.to(v.dtype) @ v).flatten(2, 3), lse.flatten(2, 3)


def published_hashed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    buckets: Tensor,
    chunks: Chunks,
    *,
    most: int,
    causal: bool = False,
    keep: Tensor | None = None,
    dropout_p: float = 0.0,
) -> Tensor:
    """Hashed attention as the released code has it: chunks of the sorted tokens of all rounds, whatever their buckets.

    Chunks reach over the ends of rounds. Which tokens share a chunk depends on *all* tokens, so that even a causal
    call, which masks later tokens, leaks: changing a later token moves the chunks.

    Args:
        q, k, v: (B, H, T, D); scores are not scaled.
        buckets: int64 (B, H, rounds, T) in [0, most), T a multiple of the chunk's size.
        keep: bool (B, T), which tokens are real.
    """
    _, heads, rounds, tokens = buckets.shape
    place = torch.arange(tokens, device=q.device)
    codes = (buckets + torch.arange(rounds, device=q.device)[:, None] * most) * tokens + place
    order = codes.flatten(2).argsort(dim=-1, stable=True)  # (B, H, rounds T)
    back, at = order.argsort(dim=-1), order % tokens
    q, k, v = (x.gather(2, at[..., None].expand(-1, -1, -1, x.shape[3])) for x in (q, k, v))
    real = None if keep is None else keep[:, None].expand(-1, heads, -1).gather(2, at)
    out, lse = chunks.attend((q, k, v), at, real=real, causal=causal, itself=ITSELF, dropout_p=dropout_p)
    outs = out.gather(2, back[..., None].expand(-1, -1, -1, v.shape[3])).unflatten(2, (rounds, tokens))
    sums = lse.gather(2, back).unflatten(2, (rounds, tokens))
    shares = torch.exp(sums - sums.logsumexp(2, keepdim=True))
    found: Tensor = (shares.unsqueeze(-1) * outs.to(shares.dtype)).sum(2).to(v.dtype)
    return found


def published_local_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    chunks: Chunks,
    *,
    causal: bool = False,
    keep: Tensor | None = None,
    dropout_p: float = 0.0,
) -> Tensor:
    """Attention within chunks of neighbouring tokens (B, H, T, D) and the chunks beside them; scores are not scaled."""
    places = torch.arange(q.shape[2], device=q.device).expand(q.shape[:3])
    real = None if keep is None else keep[:, None].expand(-1, q.shape[1], -1)
    out, _ = chunks.attend((q, k, v), places, real=real, causal=causal, itself=None, dropout_p=dropout_p)
    return out
