"""BigBird as loops over pairs of tokens in numpy float64, one token a block (Zaheer et al. 2020, arXiv:2007.14062).

What is drawn is no part of the formula: `ROWS` is the layer's own draw for seven tokens, four heads and seed 0.
"""

from __future__ import annotations

import math

import numpy as np

ROWS = ((4, 5, 1, 2, 3), (4, 5, 5, 1, 2), (3, 4, 1, 1, 3), (4, 4, 1, 2, 3))  # of a head: what blocks 1 to 5 draw
DRAWN = {(h, block): [one] for h, row in enumerate(ROWS) for block, one in enumerate(row, 1)}


def bigbird(
    x: np.ndarray, weights: dict[str, np.ndarray], heads: int, drawn: dict[tuple[int, int], list[int]] = DRAWN
) -> np.ndarray:
    q, k, v = (
        (x @ weights[f"{name}_proj.weight"].T + weights[f"{name}_proj.bias"]).reshape(len(x), heads, -1)
        for name in "qkv"
    )
    last, out = len(x) - 1, np.zeros_like(q)
    for i in range(len(x)):
        for h in range(heads):
            near = {0, last, *(j for j in (i - 1, i, i + 1) if 0 <= j <= last)}
            seen = sorted(range(len(x)) if i in (0, last) else near | set(drawn[h, i]))
            scores = [float(q[i, h] @ k[j, h]) / math.sqrt(q.shape[2]) for j in seen]
            powers = [math.exp(score - max(scores)) for score in scores]
            for power, j in zip(powers, seen, strict=True):
                out[i, h] += power / sum(powers) * v[j, h]
    return out.reshape(len(x), -1) @ weights["o_proj.weight"].T + weights["o_proj.bias"]


ORACLES = {"bigbird": bigbird}
