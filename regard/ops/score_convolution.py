"""What multi-token attention does to rows of scores: convolutions over neighbours, and a mixture of heads.

Golovneva, Wang, Weston, Sukhbaatar 2025, arXiv:2504.00927.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["convolved_rows", "hide_later", "mixed_heads"]

CHANNELS = 16  # that torch's convolution computes together, in the time of one


def convolved_rows(scores: Tensor, kernel: Tensor, first: int, pad: str) -> tuple[Tensor, int]:
    """(each head's rows with those before them, and columns with their neighbours; the first of these rows).

    Args:
        scores: (B, H, rows, columns), beginning with row `first` of the whole. Row 0 has zeros before it; where the
            rows begin later, those that lack earlier ones are dropped.
        kernel: (H, queries, keys); the last row of it is for a row itself.
        pad: "both" centres the keys' window, "left" ends it at the key itself; zeros stand beyond the columns.
    """
    queries, keys = kernel.shape[1:]
    (batch, heads, rows, columns), kept = scores.shape, queries - 1
    rows, above, first = (rows, kept, 0) if first == 0 else (rows - kept, 0, first + kept)
    if not scores.numel() or not rows:
        return scores[:, :, :rows] * kernel.sum(), first
    bands = CHANNELS // math.gcd(CHANNELS, heads) if rows >= CHANNELS else 1  # of rows, which stand as channels
    height = -(-rows // bands)
    beside, sides = ((0, 0), keys // 2) if pad == "both" else ((keys - 1, 0), 0)
    more = (*beside, above, bands * height - rows)
    padded = F.pad(scores, more) if any(more) else scores
    if bands > 1:
        padded = padded.unfold(2, height + kept, height).transpose(3, 4).flatten(1, 2)
    kernel = kernel[:, None].repeat_interleave(bands, 0)
    found = F.conv2d(padded, kernel, padding=(0, sides), groups=len(kernel))
    return found.reshape(batch, heads, bands * height, columns)[:, :, :rows], first


def hide_later(rows: Tensor, first: int, value: float) -> Tensor:
    """`rows` themselves, which begin with row `first`, with `value` where a key comes after its query."""
    later = torch.ones(rows.shape[2], rows.shape[3] - first, dtype=torch.bool, device=rows.device).triu(1)
    rows[..., first:].masked_fill_(later, value)
    return rows


def mixed_heads(x: Tensor, mixing: Tensor) -> Tensor:
    """(B, groups, heads, Tq, Tk) with heads [to, from] of each group mixed; a product for each row of the batch, whose
    bits then do not depend on the others."""
    rows = mixing.expand(len(x), -1, -1, -1) @ x.flatten(3)
    return rows.view(x.shape)
