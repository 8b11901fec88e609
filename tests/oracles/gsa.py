"""Gated slot attention token by token in numpy float64 (Zhang et al. 2024, arXiv:2409.07146, eq. 4-6)."""

from __future__ import annotations

import math

import numpy as np


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1.0 + np.exp(-x))


def gated_slots(
    x: np.ndarray, weights: dict[str, np.ndarray], heads: int, tau: float = 8.0, eps: float = 1e-5
) -> np.ndarray:
    """Each head's slots as a list of keys and values, which attention reads at every token."""
    made = {name: (x @ weights[f"{name}_proj.weight"].T).reshape(len(x), heads, -1) for name in "qkvf"}
    q, k, v = (silu(made[name]) for name in "qkv")
    kept = (1.0 + np.exp(-made["f"])) ** (-1.0 / tau)
    slots, out = kept.shape[2], np.zeros_like(x)
    keys = np.zeros((heads, slots, k.shape[2]))
    values = np.zeros((heads, slots, v.shape[2]))
    for t in range(len(x)):
        mixed = np.zeros((heads, v.shape[2]))
        for h in range(heads):
            for m in range(slots):
                share = kept[t, h, m]
                keys[h, m] = share * keys[h, m] + (1.0 - share) * k[t, h]
                values[h, m] = share * values[h, m] + (1.0 - share) * v[t, h]
            scores = [math.exp(float(q[t, h] @ key)) for key in keys[h]]
            for score, value in zip(scores, values[h], strict=True):
                mixed[h] += score / sum(scores) * value
        row = silu(mixed.reshape(-1))
        normed = row / math.sqrt(float(np.mean(row * row)) + eps) * weights["norm.weight"]
        out[t] = weights["o_proj.weight"] @ normed
    return out


ORACLES = {"gsa": gated_slots}
