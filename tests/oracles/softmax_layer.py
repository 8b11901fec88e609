"""Multi-head attention of one layer as loops in numpy float64, from the papers' formulas."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np


def rotate(x: np.ndarray, position: int, base: float = 10000.0) -> np.ndarray:
    """Su et al. 2021, eq. 34, half-split pairs: (x_m, x_{m + d/2}) turned by position * base^(-2m/d)."""
    half = len(x) // 2
    out = x.copy()
    for m in range(half):
        angle = position * base ** (-2 * m / len(x))
        a, b = x[m], x[m + half]
        out[m], out[m + half] = a * math.cos(angle) - b * math.sin(angle), a * math.sin(angle) + b * math.cos(angle)
    return out


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float = 1e-6) -> np.ndarray:
    return x / math.sqrt(float(np.mean(x * x)) + eps) * weight


def layer(
    x: np.ndarray,
    weights: dict[str, np.ndarray],
    heads: int,
    kv_heads: int,
    *,
    context: np.ndarray | None = None,
    allowed: Callable[[int, int], bool] = lambda i, j: True,
    bias: Callable[[int, int, int], float] = lambda h, i, j: 0.0,
    softcap: float | None = None,
    rotary: bool = True,
    turned: int | None = None,
) -> np.ndarray:
    """One sequence (T, dim) through the layer, token by token and head by head; `turned` channels of a head rotate."""

    def project(name: str, row: np.ndarray) -> np.ndarray:
        out = weights[f"{name}.weight"] @ row
        return out + weights[f"{name}.bias"] if f"{name}.bias" in weights else out

    source = x if context is None else context
    size = weights["q_proj.weight"].shape[0] // heads

    def head(name: str, norm: str, rows: np.ndarray, t: int, h: int) -> np.ndarray:
        part = project(name, rows[t])[h * size : (h + 1) * size]
        if f"{norm}.weight" in weights:
            part = rms_norm(part, weights[f"{norm}.weight"])
        if not rotary or context is not None:
            return part
        return np.concatenate([rotate(part[:turned], t), part[turned:]]) if turned else rotate(part, t)

    out = np.zeros_like(x)
    for i in range(len(x)):
        mixed = []
        for h in range(heads):
            g = h // (heads // kv_heads)
            q = head("q_proj", "q_norm", x, i, h)
            scores, values = [], []
            for j in range(len(source)):
                if not allowed(i, j):
                    continue
                s = float(q @ head("k_proj", "k_norm", source, j, g)) / math.sqrt(size)
                if softcap is not None:
                    s = softcap * math.tanh(s / softcap)
                scores.append(s + bias(h, i, j))
                values.append(project("v_proj", source[j])[g * size : (g + 1) * size])
            total = sum(math.exp(s) for s in scores)
            if "sink" in weights:
                total += math.exp(weights["sink"][h])
            mixed.append(sum((math.exp(s) / total * v for s, v in zip(scores, values, strict=True)), np.zeros(size)))
        row = np.concatenate(mixed)
        if "gate_proj.weight" in weights:
            row = row / (1.0 + np.exp(-project("gate_proj", x[i])))
        out[i] = project("o_proj", row)
    return out


def past(i: int, j: int) -> bool:
    return j <= i


def four_latest(i: int, j: int) -> bool:
    return 0 <= i - j < 4


def fading(h: int, i: int, j: int) -> float:
    return -(2.0 ** (-2 * (h + 1))) * (i - j)  # ALiBi of four heads


ORACLES: dict[str, Callable[..., np.ndarray]] = {
    "mha": lambda x, w, heads: layer(x, w, heads, heads, allowed=past),
    "mqa": lambda x, w, heads: layer(x, w, heads, 1, allowed=past),
    "gqa": lambda x, w, heads: layer(x, w, heads, heads // 2, allowed=past),
    "window": lambda x, w, heads: layer(x, w, heads, heads, allowed=four_latest),
    "griffin_attention": lambda x, w, heads: layer(x, w, heads, 1, allowed=four_latest, turned=2),
    "alibi": lambda x, w, heads: layer(x, w, heads, heads, allowed=past, rotary=False, bias=fading),
    "sink": lambda x, w, heads: layer(x, w, heads, heads, allowed=past),
    "softcap": lambda x, w, heads: layer(x, w, heads, heads, allowed=past, softcap=5.0),
    "gated": lambda x, w, heads: layer(x, w, heads, heads, allowed=past),
    "encoder": lambda x, w, heads: layer(x, w, heads, heads, rotary=False),
    "cross": lambda x, w, heads, context: layer(x, w, heads, heads, rotary=False, context=context),
}
