"""Mega as loops over tokens in numpy float64 (Ma et al. 2022, arXiv:2209.10655, section 3)."""

from __future__ import annotations

import math
from functools import partial

import numpy as np


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def silu(x: np.ndarray) -> np.ndarray:
    return x * sigmoid(x)


def averaged(x: np.ndarray, weights: dict[str, np.ndarray], rows: slice) -> np.ndarray:
    """The damped averages of every channel, token by token, as one number a channel."""
    delta, alpha, beta, gamma = (weights[f"ema.{name}"][rows] for name in ("delta", "alpha", "beta", "gamma"))
    p, kept, h = sigmoid(delta), 1 - sigmoid(delta) * sigmoid(alpha), np.zeros_like(delta)
    out = []
    for row in x:
        h = p * beta * row[:, None] + kept * h
        out.append((gamma * h).sum(1) / math.sqrt(delta.shape[1]))
    return np.array(out)


def place(weights: dict[str, np.ndarray], i: int, j: int) -> float:
    if "places.table" in weights:
        table = weights["places.table"]
        return float(table[j - i + len(table) // 2])
    a, b, total = weights["places.first"], weights["places.second"], 0.0
    half = len(a) // 2
    for m in range(half):
        rate = 10000.0 ** (-m / half)
        turned = []
        for vector, t in ((a, i), (b, j)):
            cos, sin = math.cos(t * rate), math.sin(t * rate)
            turned.append((vector[m] * cos - vector[m + half] * sin, vector[m] * sin + vector[m + half] * cos))
        total += turned[0][0] * turned[1][0] + turned[0][1] * turned[1][1]
    return total


def mega(
    x: np.ndarray,
    weights: dict[str, np.ndarray],
    heads: int,
    chunk: int | None = None,
    kind: str = "softmax",
    both: bool = False,
) -> np.ndarray:
    dim = x.shape[1]
    centred = x - x.mean(1, keepdims=True)
    normed = centred / np.sqrt((centred**2).mean(1, keepdims=True) + 1e-5) * weights["norm.weight"]
    normed = normed + weights["norm.bias"]
    v = silu(normed @ weights["v_proj.weight"].T + weights["v_proj.bias"])
    average = averaged(normed, weights, slice(0, dim))
    if both:
        average = average + averaged(normed[::-1], weights, slice(dim, None))[::-1]
    m = silu(average + weights["ema.omega"] * normed)
    key_dim = weights["qk_weight"].shape[1]
    parts = m @ weights["mx_proj.weight"].T + weights["mx_proj.bias"]
    u, z, r, residual = np.split(parts, np.cumsum([dim, key_dim, v.shape[1]]), axis=1)
    z, r = silu(z), silu(r)
    q, k = (z * weights["qk_weight"][n] + weights["qk_bias"][n] for n in (0, 1))
    mixed = np.zeros_like(v)
    for i in range(len(x)):
        first = 0 if chunk is None else i // chunk * chunk
        last = (len(x) if chunk is None else min(first + chunk, len(x))) if both else i + 1
        seen = range(first, last)
        if kind == "softmax":
            scores = [float(q[i] @ k[j]) / math.sqrt(key_dim) + place(weights, i, j) for j in seen]
            powers = [math.exp(score - max(scores)) for score in scores]
            shares = [power / sum(powers) for power in powers]
        else:
            scores = [float(q[i] @ k[j]) / len(seen) + place(weights, i - first, j - first) for j in seen]
            width = math.sqrt(1 / (4 * math.pi)) * math.sqrt(2)
            shares = [0.5 * (1 + math.erf((score - math.sqrt(0.5)) / width)) for score in scores]
        mixed[i] = sum(share * v[j] for share, j in zip(shares, seen, strict=True))
    h = silu(residual + (r * mixed) @ weights["h_proj.weight"].T + weights["h_proj.bias"])
    return x + sigmoid(u) * (h - x)


ORACLES = {"mega": mega, "mega_chunked": partial(mega, chunk=3, kind="laplace", both=True)}
