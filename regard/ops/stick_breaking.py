"""Stick-breaking attention: each key, from the query's own back, takes a share of what is left."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from regard.checks import describe, is_dense, is_number_type, scale_of
from regard.coordinates import Coordinates
from regard.masks import Causal, Mask, as_mask, split_packing

__all__ = ["stick_breaking", "stick_breaking_weights"]

ROWS = 128  # query rows whose weights are held at a time


def stick_breaking(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Mask | Tensor | None = None,
    attend_current: bool = False,
    scale: float | None = None,
    q_start: int | None = None,
) -> tuple[Tensor, Tensor]:
    """``y_i = sum_{j < i} w_ij v_j``,  ``w_ij = sigmoid(z_ij) prod_{j < l < i} (1 - sigmoid(z_il))``,  ``z = s q . k``.

    Args:
        q: (B, Hq, Tq, D); k: (B, Hkv, Tk, D); v: (B, Hkv, Tk, Dv), Hkv a divisor of Hq.
        mask: which pairs take part, on top of the causal rule; the others take nothing.
        attend_current: whether a query breaks a piece off for its own key first.
        scale: ``D ** -0.5`` by default.
        q_start: the slot of the first query; the queries are the last slots by default.

    Returns:
        (y (B, Hq, Tq, Dv) in q's dtype, the rest of the stick (B, Hq, Tq): what no key took). A row without keys is 0.

    There are no positions: nearer keys come first. Raises TypeError and ValueError for tensors that do not fit. Cost
    2 B Hq Tq Tk (D + Dv) FLOPs in float32 at least; memory linear in the length, rows formed again backward.
    (Tan, Shen et al. 2024, arXiv:2410.17980, equations 1 and 2.)

    >>> q = torch.zeros(1, 1, 3, 2)
    >>> y, rest = stick_breaking(q, q, torch.ones(1, 1, 3, 1))
    >>> y.flatten().tolist(), rest.flatten().tolist()
    ([0.0, 0.5, 0.75], [1.0, 0.5, 0.25])
    """
    for name, one in (("q", q), ("k", k), ("v", v)):
        is_dense(name, one)
        is_number_type(name, one)
        if one.ndim != 4:
            raise ValueError(f"{name}: expected (B, H, T, D), got {describe(one)}")
    if k.shape[:3] != v.shape[:3] or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError(f"k, v: expected shapes that fit q {tuple(q.shape)}, got {describe(k)} and {describe(v)}")
    if not k.shape[1] or q.shape[1] % k.shape[1]:
        raise ValueError(f"k: expected a number of heads that divides {q.shape[1]}, got {k.shape[1]}")
    outs, rests = [], []
    for low in range(0, max(q.shape[2], 1), ROWS):
        high = min(low + ROWS, q.shape[2])
        given = (q, k, v, mask, attend_current, scale, q_start, low, high)
        if torch.is_grad_enabled() and q.shape[2] > ROWS and not torch.compiler.is_compiling():
            out, rest = checkpoint(_rows, *given, use_reentrant=False, preserve_rng_state=False)
        else:
            out, rest = _rows(*given)
        outs.append(out)
        rests.append(rest)
    return torch.cat(outs, 2), torch.cat(rests, 2)


def stick_breaking_weights(q: Tensor, k: Tensor, **options: Any) -> Tensor:
    """The weights (B, Hq, Tq, Tk) of `stick_breaking`; options as there."""
    given = (options.get("mask"), options.get("attend_current", False), options.get("scale"), options.get("q_start"))
    return _weights(q, k, *given, 0, q.shape[2])[0]


def _rows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask | Tensor | None,
    attend_current: bool,
    scale: float | None,
    q_start: int | None,
    low: int,
    high: int,
) -> tuple[Tensor, Tensor]:
    weights, rest = _weights(q, k, mask, attend_current, scale, q_start, low, high)
    read = (weights != 0).any(2).unflatten(1, (k.shape[1], -1)).any(2)[..., None]
    values = torch.where(read, v.to(weights.dtype), 0.0).repeat_interleave(q.shape[1] // k.shape[1], 1)
    return (weights @ values).to(q.dtype), rest


def _weights(
    q: Tensor,
    k: Tensor,
    mask: Mask | Tensor | None,
    attend_current: bool,
    scale: float | None,
    q_start: int | None,
    low: int,
    high: int,
) -> tuple[Tensor, Tensor]:
    batch, heads, q_len, dim = q.shape
    k_len = k.shape[2]
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    keys = k.to(wide).repeat_interleave(heads // k.shape[1], 1)
    given = as_mask(mask)
    rule: Mask = Causal() if given is None else given & Causal()
    rule.check(batch, heads, q_len, k_len)
    start = k_len - q_len if q_start is None else q_start
    coordinates = Coordinates(batch, heads, q_len, k_len, start, split_packing(rule), q.device)
    indices = coordinates.indices((low, high), (0, k_len))
    allowed = rule.allows_at(indices)
    if not attend_current:
        allowed = allowed & (indices.i != indices.j)
    z = q[:, :, low:high].to(wide) @ keys.mT * scale_of(scale, dim, q.dtype)
    left = torch.where(allowed, F.logsigmoid(-z), 0.0)  # of the stick, in logarithms, after each key
    after = left.flip(-1).cumsum(-1).flip(-1)
    weights = torch.where(allowed, torch.exp(F.logsigmoid(z) + after - left), 0.0)
    rest = after[..., 0].exp() if k_len else z.new_ones(batch, heads, high - low)
    return weights, rest.to(q.dtype)
