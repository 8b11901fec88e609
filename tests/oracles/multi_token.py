"""Multi-token attention as loops in numpy float64 (Golovneva et al. 2025, arXiv:2504.00927, section 3)."""

from __future__ import annotations

import math

import numpy as np


def turned(rows: np.ndarray) -> np.ndarray:
    """Rotary positions, pairs interleaved, of one head's (T, D)."""
    out = rows.copy()
    for t in range(len(rows)):
        for m in range(rows.shape[1] // 2):
            angle = t * 10000.0 ** (-2 * m / rows.shape[1])
            a, b = rows[t, 2 * m], rows[t, 2 * m + 1]
            out[t, 2 * m] = a * math.cos(angle) - b * math.sin(angle)
            out[t, 2 * m + 1] = a * math.sin(angle) + b * math.cos(angle)
    return out


def convolved(table: np.ndarray, kernel: np.ndarray) -> np.ndarray:
    """A sum over earlier rows and neighbouring columns, those outside the table counting 0."""
    out = np.zeros_like(table)
    rows, columns = kernel.shape
    for i in range(len(table)):
        for j in range(len(table)):
            for a in range(rows):
                for b in range(columns):
                    r, c = i - (rows - 1) + a, j - columns // 2 + b
                    if 0 <= r and 0 <= c < len(table):
                        out[i, j] += kernel[a, b] * table[r, c]
    return out


def multi_token(
    x: np.ndarray, weights: dict[str, np.ndarray], heads: int, rotary: bool = True, depth: int | None = 1
) -> np.ndarray:
    size = weights["q_proj.weight"].shape[0] // heads
    groups = weights["k_proj.weight"].shape[0] // size
    q = [x @ rows.T for rows in np.split(weights["q_proj.weight"], heads)]
    k, v = ([x @ rows.T for rows in np.split(weights[f"{name}_proj.weight"], groups)] for name in "kv")
    q, k = ([turned(rows) for rows in part] if rotary else part for part in (q, k))
    past = np.tril(np.ones((len(x), len(x)), dtype=bool))
    scores = []
    for h in range(heads):
        table = np.where(past, q[h] @ k[h // (heads // groups)].T / math.sqrt(size), 0.0)
        scores.append(convolved(table, weights["conv_before"][h]))
    if "heads_before" in weights:
        scores = [sum(weights["heads_before"][o, h] * scores[h] for h in range(heads)) for o in range(heads)]
    shares = []
    for h in range(heads):
        table = np.zeros_like(scores[h])
        for i in range(len(x)):
            powers = np.exp(scores[h][i, : i + 1] - scores[h][i, : i + 1].max())
            table[i, : i + 1] = powers / powers.sum()
        if "conv_after" in weights:
            table = np.where(past, convolved(table, weights["conv_after"][h]), 0.0)
        shares.append(table)
    mix, out = weights["heads_after"], []
    for h in range(heads):
        group, inner = divmod(h, mix.shape[1])
        table = sum(mix[group, i, inner] * shares[group * mix.shape[1] + i] for i in range(mix.shape[1]))
        y = table @ v[h // (heads // groups)]
        y = y / np.sqrt((y * y).mean(1, keepdims=True) + 1e-5) * weights["norm.weight"]
        y = y if depth is None else y * (1 - (0.8 - 0.6 * math.exp(-0.3 * depth)))
        if "gate_proj.weight" in weights:
            y = y / (1 + np.exp(-(y @ weights["gate_proj.weight"].T + weights["gate_proj.bias"])))
        out.append(y)
    return np.concatenate(out, 1) @ weights["o_proj.weight"].T


def after(x: np.ndarray, weights: dict[str, np.ndarray], heads: int) -> np.ndarray:
    return multi_token(x, weights, heads, rotary=False, depth=None)


ORACLES = {"multi_token": multi_token, "multi_token_after": after}
