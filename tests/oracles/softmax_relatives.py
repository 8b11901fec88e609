"""Differential, forgetting and stick-breaking attention as loops over pairs in numpy float64."""

from __future__ import annotations

import math

import numpy as np

Weights = dict[str, np.ndarray]


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def softmax(scores: list[float]) -> list[float]:
    powers = [math.exp(score - max(scores)) for score in scores]
    return [power / sum(powers) for power in powers]


def made(x: np.ndarray, weights: Weights, heads: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Queries, and the keys and values of the head that each of them reads, (heads, T, D)."""
    size = weights["q_proj.weight"].shape[0] // heads
    q = np.stack([x @ rows.T for rows in np.split(weights["q_proj.weight"], heads)])
    groups = weights["k_proj.weight"].shape[0] // size
    k, v = (
        np.stack(
            [x @ rows.T for rows in np.split(weights[f"{name}_proj.weight"], groups) for _ in range(heads // groups)]
        )
        for name in "kv"
    )
    return q, k, v


def turned(rows: np.ndarray) -> np.ndarray:
    """Rotary positions, half-split pairs, of (T, D)."""
    half, out = rows.shape[1] // 2, rows.copy()
    for t, row in enumerate(rows):
        for m in range(half):
            angle = t * 10000.0 ** (-m / half)
            out[t, m] = row[m] * math.cos(angle) - row[m + half] * math.sin(angle)
            out[t, m + half] = row[m] * math.sin(angle) + row[m + half] * math.cos(angle)
    return out


def differential(x: np.ndarray, weights: Weights, heads: int) -> np.ndarray:
    """Equations 1 to 3 of arXiv:2410.05258 for layer 0."""
    q, k, v = made(x, weights, heads)
    start, half = 0.8 - 0.6, heads // 2
    share = math.exp(weights["lambda_q1"] @ weights["lambda_k1"]) - math.exp(
        weights["lambda_q2"] @ weights["lambda_k2"]
    )
    out = []
    for h in range(half):
        both = np.concatenate([v[h], v[h + half]], 1)
        y = np.zeros_like(both)
        for n, sign in ((h, 1.0), (h + half, -(share + start))):
            asked, kept = turned(q[n]), turned(k[n])
            for i in range(len(x)):
                row = softmax([float(asked[i] @ kept[j]) / math.sqrt(asked.shape[1]) for j in range(i + 1)])
                y[i] += sign * sum(weight * both[j] for j, weight in enumerate(row))
        out.append(y / np.sqrt((y * y).mean(1, keepdims=True) + 1e-5) * (1 - start))
    return np.concatenate(out, 1) @ weights["o_proj.weight"].T


def forgetting(x: np.ndarray, weights: Weights, heads: int) -> np.ndarray:
    """Equation 6 of arXiv:2503.02130: the logarithms of all gates after a key, up to the query's own."""
    q, k, v = made(x, weights, heads)
    gates = x @ weights["forget_proj.weight"].T + weights["forget_proj.bias"]
    out = []
    for h in range(heads):
        y = np.zeros_like(v[h])
        for i in range(len(x)):
            scores = [
                float(q[h, i] @ k[h, j]) / math.sqrt(q.shape[2])
                + sum(math.log(sigmoid(gates[n, h])) for n in range(j + 1, i + 1))
                for j in range(i + 1)
            ]
            y[i] = sum(weight * v[h, j] for j, weight in enumerate(softmax(scores)))
        out.append(y)
    return np.concatenate(out, 1) @ weights["o_proj.weight"].T


def stick_breaking(x: np.ndarray, weights: Weights, heads: int) -> np.ndarray:
    """Each query walks back from its own key, and each key takes its share of what is left."""
    q, k, v = made(x, weights, heads)
    out = []
    for h in range(heads):
        y = np.zeros_like(v[h])
        for i in range(len(x)):
            left = 1.0
            for j in range(i - 1, -1, -1):
                share = sigmoid(float(q[h, i] @ k[h, j]) / math.sqrt(q.shape[2]))
                y[i] += left * share * v[h, j]
                left *= 1 - share
        out.append(y)
    return np.concatenate(out, 1) @ weights["o_proj.weight"].T


ORACLES = {"differential": differential, "forgetting": forgetting, "stick_breaking": stick_breaking}
