"""Attention among tokens of equal hashes: sorted by hash, then a window along the sorted order.

Kitaev, Kaiser, Levskaya 2020, arXiv:2001.04451.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from regard.checks import describe
from regard.masks import Band, Segments
from regard.ops.attention import attention

__all__ = ["factored_buckets", "hash_buckets", "hashed_attention", "merged_rounds", "same_bucket"]


def hash_buckets(x: Tensor, rotations: Tensor) -> Tensor:
    """``argmax([x R, -x R])``: the bucket of every token, int64 (B, H, rounds, T).

    Args:
        x: (B, H, T, D).
        rotations: (H | 1, D, rounds, buckets / 2), from N(0, 1).

    Near vectors share a bucket more often than far ones, whatever their lengths (angular hashing: Andoni et al. 2015,
    arXiv:1509.02897). Raises ValueError for shapes that do not fit.

    >>> hash_buckets(torch.eye(3)[None, None], torch.eye(3)[None, :, None]).tolist()
    [[[[0, 1, 2]]]]
    """
    if (
        x.ndim != 4
        or rotations.ndim != 4
        or rotations.shape[0] not in (1, x.shape[1])
        or rotations.shape[1] != x.shape[3]
    ):
        raise ValueError(f"rotations: expected (H, D, rounds, n) for x (B, H, T, D), got {describe(rotations)}")
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    turned = torch.einsum("bhtd,hdrn->bhrtn", x.detach().to(wide), rotations.to(wide).expand(x.shape[1], -1, -1, -1))
    return torch.cat([turned, -turned], -1).argmax(-1)


def factored_buckets(x: Tensor, rotations: Tensor, factors: Sequence[int]) -> Tensor:
    """`hash_buckets` of several hashes at once: ``sum_i bucket_i * n_1 ... n_{i-1}``, one of n_1 n_2 … buckets.

    The rotations of the factors, half as many each as it has buckets, stand side by side on the last axis. Raises
    ValueError where they do not fit.

    >>> factored_buckets(torch.eye(3)[None, None], torch.eye(3)[None, :, None], [2, 4]).tolist()
    [[[[0, 0, 2]]]]
    """
    if rotations.shape[-1] != sum(factors) // 2 or any(n < 2 or n % 2 for n in factors):
        raise ValueError(f"rotations: expected half of even factors {list(factors)} in all, got {rotations.shape[-1]}")
    parts = rotations.split([n // 2 for n in factors], -1)
    found, product = hash_buckets(x, parts[0]), factors[0]
    for part, n in zip(parts[1:], factors[1:], strict=True):
        found = found + product * hash_buckets(x, part)
        product *= n
    return found


def merged_rounds(outs: Tensor, lse: Tensor, alone: Tensor) -> Tensor:
    """``sum_r exp(lse_r - logsumexp lse) out_r`` over rounds on axis 0; `alone` where no round reads anything."""
    nothing = (lse == -torch.inf).all(0)
    shares = torch.where(nothing, 0.0, lse).softmax(0)
    found = (shares.unsqueeze(-1) * outs.to(shares.dtype)).sum(0)
    return torch.where(nothing.unsqueeze(-1), alone.to(found.dtype), found).to(outs.dtype)


def hashed_attention(
    q: Tensor, k: Tensor, v: Tensor, buckets: Tensor, reach: int, *, causal: bool = True, **options: Any
) -> Tensor:
    """Each token over the nearest tokens of its bucket, in every round; itself only where there are no others.

    Args:
        q, k: (B, H, T, D); v: (B, H, T, Dv).
        buckets: int64 (B, H, rounds, T): padding and other texts have buckets of their own.
        reach: how many tokens of the bucket on either side, or before it where causal, are read. Which these are does
            not depend on later tokens.
        options: of `regard.attention` (scale, dropout_p, …).

    Returns:
        (B, H, T, Dv): rounds merged by their log-sum-exp, so that a key that several rounds find counts for each.

    Cost O(rounds T (reach D + log T)), memory O(rounds T).
    """
    batch, heads, rounds, tokens = buckets.shape
    if q.shape[2] != tokens or k.shape[2] != tokens:
        raise ValueError(f"buckets: expected one for each of {q.shape[2]} queries and {k.shape[2]} keys, got {tokens}")
    flat = [x.flatten(0, 1) for x in (q, k, v)]
    outs, sums = [], []
    for n in range(rounds):
        ids = buckets[:, :, n].flatten(0, 1)  # (B H, T)
        order = ids.argsort(dim=1, stable=True)
        q_n, k_n, v_n = (x.gather(1, order[..., None].expand(-1, -1, x.shape[2]))[:, None] for x in flat)
        sorted_ids = ids.gather(1, order)
        near = Band(reach, -1) if causal else Band(reach, -1) | Band(-1, reach)
        mask = near & Segments(sorted_ids, sorted_ids)
        out, lse = attention(q_n, k_n, v_n, mask=mask, return_lse=True, q_start=0, **options)
        back = order.argsort(dim=1)
        outs.append(out[:, 0].gather(1, back[..., None].expand(-1, -1, v.shape[3])))
        sums.append(lse[:, 0].gather(1, back))
    alone = flat[2]
    found = merged_rounds(torch.stack(outs), torch.stack(sums), alone)
    return found.view(batch, heads, tokens, v.shape[3])


def same_bucket(q_buckets: Tensor, k_buckets: Tensor, start: int, reach: int) -> Tensor:
    """The pairs of one round that `hashed_attention` reads causally: bool (B, H, Tq, Tk), queries from slot `start` on.

    Of a query's bucket the `reach` latest earlier keys.
    """
    tokens = k_buckets.shape[-1]
    i = start + torch.arange(q_buckets.shape[-1], device=k_buckets.device)[:, None]
    earlier = torch.arange(tokens, device=k_buckets.device) < i
    equal = (q_buckets.unsqueeze(-1) == k_buckets.unsqueeze(-2)) & earlier
    rank = equal.flip(-1).cumsum(-1).flip(-1)  # 1 for the latest
    return equal & (rank <= reach)
