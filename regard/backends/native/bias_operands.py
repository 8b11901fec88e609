"""What the kernels read of a bias: a dense part, and one vector per head of what depends on ``j - i`` alone.

Both are made in torch, so autograd leads gradients back to slopes and tables.
"""

from __future__ import annotations

import functools
import operator

import torch
from torch import Tensor

from regard.backends.call import AttentionCall
from regard.backends.native.mask_operands import broadcast4
from regard.backends.terms import packed_shift
from regard.biases import Bias
from regard.coordinates import TileIndices

__all__ = ["bias_operands"]


def bias_operands(call: AttentionCall) -> tuple[Tensor | None, Tensor | None, int]:
    """The dense bias, the bias by distance, and the place of distance 0 in that."""
    terms = call.bias_terms
    parts = [bias.tensor.to(torch.float32) for bias in terms.dense]
    parts += [bias.scores(call.coordinates.indices(), torch.float32) for bias in terms.others]
    written = functools.reduce(operator.add, map(broadcast4, parts)) if parts else None
    vector, zero = _by_distance(call, terms.by_distance) if terms.by_distance else (None, 0)
    return written, vector, zero


def _by_distance(call: AttentionCall, parts: list[Bias]) -> tuple[Tensor, int]:
    """The values (Hq, n) by distance from the smallest ``j - i`` of the call on, and the place of distance 0."""
    q_len, k_len, device = call.q.shape[2], call.k.shape[2], call.q.device
    if call.packing is not None:
        starts = (packed_shift(call.packing) or 0,) * 2
    else:
        assert call.coordinates.start_range is not None
        starts = call.coordinates.start_range
    zero = starts[1] + q_len - 1
    j = torch.arange(-zero, max(k_len - starts[0], -zero), device=device).view(1, 1, 1, -1)  # none without pairs
    i = torch.zeros(1, 1, 1, 1, dtype=torch.int64, device=device)
    h = torch.arange(call.q.shape[1], device=device).view(1, -1, 1, 1)
    indices = TileIndices(i, h, i, j, i, j)
    values = functools.reduce(operator.add, (part.scores(indices, torch.float32) for part in parts))
    return values.expand(1, call.q.shape[1], 1, j.shape[3])[0, :, 0].contiguous(), zero
