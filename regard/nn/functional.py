"""Functions with torch's signatures and torch's meanings, run by this library's backends."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from regard.checks import is_dense, is_torch_rule
from regard.masks import Causal, Mask
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

    query (..., H, T, D), key (..., Hkv, S, D), value (..., Hkv, S, Dv), at least 2-D; the axes before the last two
    broadcast. A bool `attn_mask` marks what may be attended to, a float one is added, and torch's own `CausalBias` is
    the rule that it stands for. ``is_causal`` is aligned to the top-left corner, as torch's is (query t sees
    keys 0..t), and may not be combined with a mask. `enable_gqa` must be given where the head counts differ. Dropout
    draws this library's bits.

    Raises ValueError for shapes that do not fit, and for a mask together with `is_causal`.

    >>> q = torch.randn(2, 4, 5, 8)
    >>> theirs = torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
    >>> torch.allclose(scaled_dot_product_attention(q, q, q, is_causal=True), theirs, atol=1e-6)
    True
    """
    for name, x in (("query", query), ("key", key), ("value", value)):
        is_dense(name, x)
    if min(query.ndim, key.ndim, value.ndim) < 2:
        raise ValueError(
            f"query, key, value: expected at least 2 dimensions, got {query.ndim}, {key.ndim}, {value.ndim}"
        )
    if is_causal and attn_mask is not None:
        raise ValueError("is_causal: it cannot be combined with attn_mask; put the causal rule into the mask")
    tensors = query, key, value
    grouped = enable_gqa and min(x.ndim for x in tensors) > 2
    axes = -3 if grouped else -2  # the axes before these broadcast
    lead = torch.broadcast_shapes(*(x.shape[:axes] for x in tensors))
    q, k, v = (x.expand(*lead, *x.shape[axes:]) for x in tensors)
    lead = q.shape[:-2]
    if grouped:
        k, v = _as_many_heads(q, k, v)
    q, k, v = map(_four, (q, k, v))
    if not k.shape[1]:  # no head to read: torch gives zeros
        return q.new_zeros(*lead, q.shape[2], v.shape[3])
    rule = _rule(attn_mask, q.shape[2], k.shape[2]) if is_torch_rule(attn_mask) else None
    mask: Mask | Tensor | None = Causal() if is_causal else rule
    bias = None
    if attn_mask is not None and rule is None:
        given = _broadcast(attn_mask, (*lead, q.shape[2], k.shape[2]))
        mask, bias = (given, None) if attn_mask.dtype == torch.bool else (None, given)
    top_left = is_causal or (rule is not None and not _is_lower(attn_mask))
    out: Tensor = attention(
        q,
        k,
        v,
        mask=mask,
        bias=bias,
        dropout_p=_number(dropout_p),
        scale=_number(scale),
        q_start=0 if top_left else None,
    )
    return out.reshape(*lead, *out.shape[2:])


def _as_many_heads(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values with one number of heads: torch lets each have its own divisor of the query heads."""
    heads = [x.shape[-3] for x in (q, k, v)]
    if heads[1] == heads[2] or 0 in heads or heads[0] % heads[1] or heads[0] % heads[2]:
        return k, v
    return tuple(x.repeat_interleave(heads[0] // x.shape[-3], -3) for x in (k, v))  # type: ignore[return-value]


def _number(x: Any) -> Any:
    """A plain number for a tensor of one number, which torch takes too where it wants no gradient."""
    return x.item() if isinstance(x, Tensor) and x.ndim == 0 and not x.requires_grad else x


def _four(x: Tensor) -> Tensor:
    """(..., H, T, D) as (B, H, T, D), both 1 where they are absent."""
    while x.ndim < 4:
        x = x.unsqueeze(0)
    return x.reshape(math.prod(x.shape[:-3]), *x.shape[-3:])


def _broadcast(mask: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A mask in four dimensions, its own axes of one entry kept: so its gradient is summed in the compute dtype."""
    torch.broadcast_shapes(mask.shape, shape)
    if mask.ndim > len(shape) or mask.expand(shape).shape != torch.Size(shape):
        raise ValueError(f"attn_mask: expected a shape that broadcasts to {shape}, got {tuple(mask.shape)}")
    mask = mask[(None,) * (max(len(shape), 4) - mask.ndim)]
    batches = mask.shape[:-3]
    if all(size == 1 for size in batches):
        return mask.reshape(1, *mask.shape[-3:])
    if len(batches) > 1:
        mask = mask.to(torch.float32) if mask.dtype in (torch.bfloat16, torch.float16) else mask
        mask = mask.expand(*shape[:-3], *mask.shape[-3:])
    return mask.reshape(math.prod(mask.shape[:-3]), *mask.shape[-3:])


def _is_lower(rule: Any) -> bool:
    name: str = rule.variant.name
    return name == "LOWER_RIGHT"


def _rule(rule: Any, q_len: int, k_len: int) -> Mask:
    """torch's `CausalBias` as a mask; it stands for sizes, which the lower-right rule depends on."""
    if _is_lower(rule) and (rule.seq_len_q, rule.seq_len_kv) != (q_len, k_len):
        raise ValueError(
            f"attn_mask: expected a CausalBias for {q_len} queries and {k_len} keys, got one for "
            f"{rule.seq_len_q} and {rule.seq_len_kv}"
        )
    return Causal()
