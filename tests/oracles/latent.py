"""Multi-head latent attention as loops in numpy float64 (DeepSeek-V2, arXiv:2405.04434, eq. 9-19)."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import numpy as np


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float = 1e-6) -> np.ndarray:
    return x / math.sqrt(float(np.mean(x * x)) + eps) * weight


def rotate(x: np.ndarray, position: int, interleaved: bool, base: float) -> np.ndarray:
    """Each pair turned by position * base^(-2m/d); pairs are (2m, 2m + 1) or (m, m + d/2)."""
    half, out = len(x) // 2, x.copy()
    for m in range(half):
        first, second = (2 * m, 2 * m + 1) if interleaved else (m, m + half)
        angle = position * base ** (-2 * m / len(x))
        a, b = x[first], x[second]
        out[first] = a * math.cos(angle) - b * math.sin(angle)
        out[second] = a * math.sin(angle) + b * math.cos(angle)
    return out


def layer(
    x: np.ndarray,
    weights: dict[str, np.ndarray],
    heads: int,
    *,
    rank: int,
    nope: int,
    rope: int,
    turn: str | None = None,
    base: float = 10000.0,
) -> np.ndarray:
    """One sequence (T, dim), causal, with every head's keys and values; `turn` names the pairs that rotate."""

    def project(name: str, row: np.ndarray) -> np.ndarray:
        return weights[f"{name}.weight"] @ row + weights.get(f"{name}.bias", 0.0)

    def turned(part: np.ndarray, position: int) -> np.ndarray:
        return part if turn is None else rotate(part, position, turn == "interleaved", base)

    value = weights["kv_b_proj.weight"].shape[0] // heads - nope
    latents, shared = [], []
    for t in range(len(x)):
        made = project("kv_a_proj", x[t])
        latents.append(rms_norm(made[:rank], weights["kv_a_norm.weight"]))
        shared.append(turned(made[rank:], t))
    out = np.zeros_like(x)
    for t in range(len(x)):
        if "q_proj.weight" in weights:
            queries = project("q_proj", x[t])
        else:
            queries = project("q_b_proj", rms_norm(project("q_a_proj", x[t]), weights["q_a_norm.weight"]))
        mixed = []
        for h in range(heads):
            q = queries[h * (nope + rope) : (h + 1) * (nope + rope)]
            q = np.concatenate([q[:nope], turned(q[nope:], t)])
            rows = weights["kv_b_proj.weight"][h * (nope + value) : (h + 1) * (nope + value)]
            scores, values = [], []
            for s in range(t + 1):
                key = np.concatenate([rows[:nope] @ latents[s], shared[s]])
                scores.append(float(q @ key) / math.sqrt(nope + rope))
                values.append(rows[nope:] @ latents[s])
            top = max(scores)
            shares = [math.exp(score - top) for score in scores]
            total = sum(shares)
            head = sum((share / total * v for share, v in zip(shares, values, strict=True)), np.zeros(value))
            if "gate_proj.weight" in weights:
                gate = 1.0 / (1.0 + np.exp(-project("gate_proj", x[t])))
                head = head * (gate[h] if len(gate) == heads else gate[h * value : (h + 1) * value])
            mixed.append(head)
        out[t] = project("o_proj", np.concatenate(mixed))
    return out


SIZES = {"rank": 8, "nope": 4, "rope": 2}  # of tokens 16 wide and four heads
ORACLES: dict[str, Callable[..., np.ndarray]] = {
    "mla": partial(layer, **SIZES, turn="interleaved"),
    "mla_nope": partial(layer, **SIZES),
    "mla_gated": partial(layer, **SIZES),
}
