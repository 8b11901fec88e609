"""Softmax attention as the papers write it: loops over batch, heads, queries and keys, in float64 numpy.

Nothing is imported from the library: the formula, the order of its steps and the alignment are written out once more.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def softmax_attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    allowed: Callable[[int, int, int, int], bool] | None = None,
    bias: Callable[[int, int, int, int], float] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sink: Array | None = None,
    q_start: list[int] | None = None,
) -> tuple[Array, Array, Array]:
    """(out (B, Hq, Tq, Dv), weights (B, Hq, Tq, Tk), lse (B, Hq, Tq)) of q (B, Hq, Tq, Dk), k and v (B, Hkv, Tk, ...).

    `allowed(b, h, i, j)` and `bias(b, h, i, j)` take slots: key c stands at slot c, query r at `q_start[b] + r`, and by
    default the queries are the last slots. Scores are scaled, then capped, then biased, then masked; the sink joins the
    denominator of the weights and nothing else; a query that may attend to nothing gives 0 and a log-sum-exp of -inf.
    """
    batch, q_heads, q_len, width = q.shape
    kv_heads, k_len = k.shape[1], k.shape[2]
    scale = 1.0 / math.sqrt(width) if scale is None else scale
    out = np.zeros((batch, q_heads, q_len, v.shape[3]))
    weights = np.zeros((batch, q_heads, q_len, k_len))
    lse = np.full((batch, q_heads, q_len), -np.inf)
    for b in range(batch):
        start = k_len - q_len if q_start is None else q_start[b]
        for h in range(q_heads):
            g = h // (q_heads // kv_heads)
            for r in range(q_len):
                i = start + r
                scores = {}
                for j in range(k_len):
                    if allowed is not None and not allowed(b, h, i, j):
                        continue
                    s = scale * sum(q[b, h, r, d] * k[b, g, j, d] for d in range(width))
                    if softcap is not None:
                        s = softcap * math.tanh(s / softcap)
                    if bias is not None:
                        s += bias(b, h, i, j)
                    if s != -math.inf:
                        scores[j] = s
                if not scores:
                    continue
                top = max(scores.values())
                total = sum(math.exp(s - top) for s in scores.values())
                lse[b, h, r] = top + math.log(total)
                if sink is not None:
                    total += math.exp(sink[h] - top)
                for j, s in scores.items():
                    weights[b, h, r, j] = math.exp(s - top) / total
                    out[b, h, r] += weights[b, h, r, j] * v[b, g, j]
    return out, weights, lse
