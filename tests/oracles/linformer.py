"""Linformer as loops over tokens in numpy float64 (Wang et al. 2020, arXiv:2006.04768, equation 7)."""

from __future__ import annotations

import math

import numpy as np


def linformer(
    x: np.ndarray, weights: dict[str, np.ndarray], heads: int, context: np.ndarray | None = None
) -> np.ndarray:
    """Keys and values are mixed along the tokens first; then a softmax over what they became."""
    source = x if context is None else context
    dim = weights["q_proj.weight"].shape[0] // heads
    groups = weights["k_proj.weight"].shape[0] // dim
    q = (x @ weights["q_proj.weight"].T).reshape(len(x), heads, dim)
    k, v = ((source @ weights[f"{name}_proj.weight"].T).reshape(len(source), groups, dim) for name in "kv")
    e = weights["projection.keys"]
    f = weights.get("projection.values", e)
    out = np.zeros((len(x), heads, dim))
    for h in range(heads):
        g = h // (heads // groups)
        small_k, small_v = np.zeros((e.shape[1], dim)), np.zeros((e.shape[1], dim))
        for j in range(e.shape[1]):
            for s in range(len(source)):
                small_k[j] += e[g % len(e), j, s] * k[s, g]
                small_v[j] += f[g % len(f), j, s] * v[s, g]
        for t in range(len(x)):
            scores = [float(q[t, h] @ one) / math.sqrt(dim) for one in small_k]
            powers = [math.exp(score - max(scores)) for score in scores]
            for power, value in zip(powers, small_v, strict=True):
                out[t, h] += power / sum(powers) * value
    return out.reshape(len(x), -1) @ weights["o_proj.weight"].T


ORACLES = {"linformer": linformer, "linformer_per_head": linformer, "linformer_cross": linformer}
