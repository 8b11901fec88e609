"""The masks of torch's `nn.MultiheadAttention`, where True means *may not attend*, as masks and biases of `regard`."""

from __future__ import annotations

import functools
import operator

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.biases import Bias, as_bias
from regard.checks import describe, is_dense
from regard.coordinates import can_read
from regard.masks import Causal, Dense, KeyPadding, Mask

__all__ = ["from_torch_masks"]


def from_torch_masks(
    key_padding_mask: Tensor | None, attn_mask: Tensor | None, sizes: tuple[int, int, int, int], *, appended: int = 0
) -> tuple[Mask | None, Bias | None]:
    """What torch's two masks allow, and what they add to the scores.

    A float mask that can be read and holds 0 and -inf alone is a bool one, which is what torch's encoder makes of bool
    masks; one that is the causal mask becomes the rule. The first query stands at slot 0.

    Args:
        key_padding_mask: (B, S); bool, True = ignored, or float, added.
        attn_mask: (T, S) or (B * H, T, S); bool, True = may not attend, or float, added.
        sizes: B, H, T, S.
        appended: keys after the S that have no entry in the masks; every query may attend to them.

    >>> from_torch_masks(None, torch.ones(3, 3).triu(1).bool(), (2, 1, 3, 3))
    (Causal(), None)
    """
    batch, heads, q_len, k_len = sizes
    allowed: list[Mask] = []
    added: list[Bias] = []
    if key_padding_mask is not None:
        _check("key_padding_mask", key_padding_mask, (batch, k_len))
        keep, bias = _read(key_padding_mask, appended)
        if keep is not None:
            allowed.append(KeyPadding(keep))
        if bias is not None:
            added.append(_added(bias[:, None, None]))
    if attn_mask is not None:
        _check("attn_mask", attn_mask, (q_len, k_len), (batch * heads, q_len, k_len))
        pairs, bias = _read(attn_mask, appended)
        if pairs is not None:
            allowed.append(Causal() if not appended and _is_causal(pairs) else Dense(_by_head(pairs, heads)))
        if bias is not None:
            added.append(_added(_by_head(bias, heads)))
    mask = functools.reduce(operator.and_, allowed) if allowed else None
    return mask, functools.reduce(operator.add, added) if added else None


def _check(name: str, mask: Tensor, *shapes: tuple[int, ...]) -> None:
    accepted = " or ".join(map(str, shapes))
    if not isinstance(mask, Tensor) or not (mask.dtype == torch.bool or mask.is_floating_point()):
        raise TypeError(f"{name}: expected a bool or float tensor {accepted}, got {describe(mask)}")
    is_dense(name, mask)
    if tuple(mask.shape) not in shapes:
        raise ValueError(f"{name}: expected shape {accepted}, got {tuple(mask.shape)}")


def _read(mask: Tensor, appended: int) -> tuple[Tensor | None, Tensor | None]:
    """(where torch's mask allows, what it adds): one of them."""
    allowed = None
    if mask.dtype == torch.bool:
        allowed = ~mask
    elif not mask.requires_grad and can_read(mask):
        allowed = mask == 0
        if not torch.equal(allowed, mask != -torch.inf):
            allowed = None
    if allowed is not None:
        return (F.pad(allowed, (0, appended), value=True) if appended else allowed), None
    return None, F.pad(mask, (0, appended)) if appended else mask


def _is_causal(allowed: Tensor) -> bool:
    return allowed.ndim == 2 and can_read(allowed) and torch.equal(allowed, torch.ones_like(allowed).tril())


def _by_head(pairs: Tensor, heads: int) -> Tensor:
    """(T, S), or (B * H, T, S) as (B, H, T, S)."""
    return pairs if pairs.ndim == 2 else pairs.unflatten(0, (-1, heads))


def _added(values: Tensor) -> Bias:
    bias = as_bias(values)
    assert bias is not None
    return bias
