"""Longformer as loops over pairs of tokens in numpy float64 (Beltagy et al. 2020, arXiv:2004.05150, section 3.1)."""

from __future__ import annotations

import math

import numpy as np


def longformer(
    x: np.ndarray,
    weights: dict[str, np.ndarray],
    heads: int,
    reach: int = 2,
    global_tokens: tuple[int, ...] = (0, 3),
) -> np.ndarray:
    def made(name: str) -> np.ndarray:
        return (x @ weights[f"{name}_proj.weight"].T + weights[f"{name}_proj.bias"]).reshape(len(x), heads, -1)

    local, wide = [made(name) for name in "qkv"], [made(f"{name}_global") for name in "qkv"]
    out = np.zeros_like(local[0])
    for i in range(len(x)):
        q, k, v = wide if i in global_tokens else local
        seen = [j for j in range(len(x)) if i in global_tokens or j in global_tokens or abs(i - j) <= reach]
        for h in range(heads):
            scores = [float(q[i, h] @ k[j, h]) / math.sqrt(q.shape[2]) for j in seen]
            powers = [math.exp(score - max(scores)) for score in scores]
            for power, j in zip(powers, seen, strict=True):
                out[i, h] += power / sum(powers) * v[j, h]
    return out.reshape(len(x), -1) @ weights["o_proj.weight"].T + weights["o_proj.bias"]


ORACLES = {"longformer": longformer}
