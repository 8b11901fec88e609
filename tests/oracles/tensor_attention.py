"""Softmax attention over whole tensors, differentiable, in the dtype of its inputs: dense scores, then a softmax.

Give float64 for the true value, or a low dtype for what plain torch makes of it. Queries are aligned to the right end:
with lengths, query r of a row with `a` real queries and `b` real keys stands at slot ``b - a + r``.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] = (None, None),
    softcap: float = 0.0,
    slopes: Tensor | None = None,
    q_lengths: Tensor | None = None,
    k_lengths: Tensor | None = None,
    k_first: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(out (B, Hq, Tq, Dv), log-sum-exp (B, Hq, Tq)) of q (B, Hq, Tq, D), k and v (B, Hkv, Tk, ...).

    `window` is how many keys to the left and to the right of its own slot a query reads; `slopes` (Hq,) lower a score
    by slope times distance; real keys are the slots from `k_first` to `k_lengths`, both (B,). Queries past `q_lengths`
    and queries without any key give 0.
    """
    batch, heads, rows, size = q.shape
    columns, groups = k.shape[2], heads // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = (q / math.sqrt(size)) @ k.transpose(-1, -2)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    all_rows, all_columns = torch.full((batch,), rows), torch.full((batch,), columns)
    q_lengths = all_rows if q_lengths is None else q_lengths
    k_lengths = all_columns if k_lengths is None else k_lengths
    column = torch.arange(columns)
    slot = torch.arange(rows)[None, :, None] + (k_lengths - q_lengths)[:, None, None]
    ahead = column - slot  # (B, Tq, Tk)
    left, right = window
    right = 0 if causal else right
    hidden = column >= k_lengths[:, None, None]
    if k_first is not None:
        hidden = hidden | (column < k_first[:, None, None])
    if left is not None:
        hidden = hidden | (ahead < -left)
    if right is not None:
        hidden = hidden | (ahead > right)
    hidden = (hidden | (torch.arange(rows)[None, :, None] >= q_lengths[:, None, None]))[:, None]
    if slopes is not None:
        scores = scores - (slopes.to(q.dtype)[:, None, None] * ahead.abs()[:, None].to(q.dtype))
    scores = scores.masked_fill(hidden, -math.inf)
    weights = torch.softmax(scores, -1).masked_fill(hidden.all(-1, keepdim=True), 0.0)
    return weights @ v, torch.logsumexp(scores.detach(), -1)


def rotated(x: Tensor, positions: Tensor, size: int, interleaved: bool, base: float = 10000.0) -> Tensor:
    """The first `size` channels of x (B, H, T, D) turned by positions (B, T): adjacent pairs, or half a size apart."""
    if not size:
        return x
    angle = positions[:, None, :, None] * base ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
    cos, sin, turning = angle.cos(), angle.sin(), x[..., :size].double()
    if interleaved:
        a, b = turning[..., 0::2], turning[..., 1::2]
        turned = torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)
    else:
        a, b = turning.chunk(2, -1)
        turned = torch.cat((a * cos - b * sin, a * sin + b * cos), -1)
    return torch.cat((turned.to(x.dtype), x[..., size:]), -1)
