"""Functions with torch's signatures and torch's meanings, run by this library's backends."""

from __future__ import annotations

import torch
from torch import Tensor

from regard.masks import Causal
from regard.ops.attention import attention

__all__ = ["scaled_dot_product_attention"]


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """torch's function of that name through `regard.attention`: the same arguments, the same meanings.

    query (..., H, T, D), key (..., Hkv, S, D), value (..., Hkv, S, Dv), at least 2-D. A bool `attn_mask` marks what may
    be attended to, a float one is added. ``is_causal`` is aligned to the top-left corner, as torch's is (query t sees
    keys 0..t), and may not be combined with a mask. `enable_gqa` must be given where the head counts differ. Dropout
    draws this library's bits.

    Raises ValueError for shapes that do not fit, and for a mask together with `is_causal`.

    >>> q = torch.randn(2, 4, 5, 8)
    >>> theirs = torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
    >>> torch.allclose(scaled_dot_product_attention(q, q, q, is_causal=True), theirs, atol=1e-6)
    True
    """
    if min(query.ndim, key.ndim, value.ndim) < 2:
        raise ValueError(
            f"query, key, value: expected at least 2 dimensions, got {query.ndim}, {key.ndim}, {value.ndim}"
        )
    if is_causal and attn_mask is not None:
        raise ValueError("is_causal: it cannot be combined with attn_mask; put the causal rule into the mask")
    batch = torch.broadcast_shapes(query.shape[:-3], key.shape[:-3], value.shape[:-3])
    q, k, v = (_four(x, batch) for x in (query, key, value))
    if not enable_gqa and not (q.shape[1] == k.shape[1] == v.shape[1]):
        heads = torch.broadcast_shapes((q.shape[1],), (k.shape[1],), (v.shape[1],))[0]
        q, k, v = (x.expand(-1, heads, -1, -1) for x in (q, k, v))
    mask = bias = None
    if attn_mask is not None:
        full = (*batch, q.shape[1], q.shape[2], k.shape[2]) if query.ndim > 2 else (q.shape[2], k.shape[2])
        given = attn_mask.expand(torch.broadcast_shapes(attn_mask.shape, full))
        given = given.reshape(-1, q.shape[1], *given.shape[-2:]) if given.ndim > 2 else given
        mask, bias = (given, None) if attn_mask.dtype == torch.bool else (None, given)
    out: Tensor = attention(
        q,
        k,
        v,
        mask=Causal() if is_causal else mask,
        bias=bias,
        dropout_p=dropout_p,
        scale=scale,
        q_start=0 if is_causal else None,
    )
    return out[0, 0] if query.ndim == 2 else out.reshape(*batch, *out.shape[1:])


def _four(x: Tensor, batch: torch.Size) -> Tensor:
    """(..., H, T, D) as (B, H, T, D); 2-D inputs get a head of their own."""
    if x.ndim == 2:
        x = x[None]
    x = x.expand(*batch, *x.shape[-3:])
    return x.reshape(-1, *x.shape[-3:])
