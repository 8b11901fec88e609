"""Layers with a matrix state as loops over tokens and heads in numpy float64, from the papers' formulas.

Each takes one sequence (T, dim), the layer's weights by name, and numbers that the weights do not show.
"""

from __future__ import annotations

import math
from functools import partial

import numpy as np

Weights = dict[str, np.ndarray]


def sigmoid(x):
    return 1.0 / (1.0 + np.exp(-x))


def silu(x):
    return x * sigmoid(x)


def rms(x, eps):
    return x / math.sqrt(float(np.mean(x * x)) + eps)


def linear(weights: Weights, name: str, x: np.ndarray) -> np.ndarray:
    """One row through `name`, whole or as two matrices `name.0` and `name.1`."""
    if f"{name}.weight" in weights:
        out = weights[f"{name}.weight"] @ x
    else:
        name, out = f"{name}.1", weights[f"{name}.1.weight"] @ (weights[f"{name}.0.weight"] @ x)
    return out + weights.get(f"{name}.bias", 0.0)


# ---- the delta rules -------------------------------------------------------------------------------------------------


def convolved(x: np.ndarray, weights: Weights) -> np.ndarray:
    """silu of each channel of [q, k, v] mixed with those of the tokens just before, the last tap the token's own."""
    rows = np.stack([np.concatenate([linear(weights, f"{name}_proj", row) for name in "qkv"]) for row in x])
    taps = weights["conv.weight"]
    out = np.zeros_like(rows)
    for t in range(len(x)):
        for i in range(taps.shape[1]):
            back = t - (taps.shape[1] - 1) + i
            if back >= 0:
                out[t] += taps[:, i] * rows[back]
    return silu(out)


def delta_layer(
    x: np.ndarray,
    weights: Weights,
    heads: int,
    key_heads: int,
    *,
    kind: str,
    beta_max: float = 1.0,
    low: float | None = None,
    gate: str | None = "silu",
    eps: float = 1e-5,
) -> np.ndarray:
    """`kind` is "deltanet", "gated_deltanet" or "kda"."""
    keys = weights["q_proj.weight"].shape[0]
    dk, dv = keys // key_heads, weights["v_proj.weight"].shape[0] // heads
    channels, out = convolved(x, weights), np.zeros_like(x)
    states = [np.zeros((dk, dv)) for _ in range(heads)]
    for t, row in enumerate(x):
        strength = beta_max * sigmoid(linear(weights, "b_proj", row))
        parts = []
        for h in range(heads):
            g = h // (heads // key_heads)
            q, k = channels[t, g * dk : (g + 1) * dk], channels[t, keys + g * dk : keys + (g + 1) * dk]
            v = channels[t, 2 * keys + h * dv : 2 * keys + (h + 1) * dv]
            q, k = (part / math.sqrt(float(part @ part) + 1e-6) for part in (q, k))
            states[h] = decay_of(row, weights, h, dk, kind, low)[:, None] * states[h]
            states[h] = states[h] + strength[h] * np.outer(k, v - states[h].T @ k)
            parts.append(rms(states[h].T @ q / math.sqrt(dk), eps) * weights["norm.weight"])
        mixed = np.concatenate(parts)
        if gate is not None:
            mixed = mixed * {"silu": silu, "sigmoid": sigmoid}[gate](linear(weights, "g_proj", row))
        out[t] = linear(weights, "o_proj", mixed)
    return out


def decay_of(row: np.ndarray, weights: Weights, h: int, dk: int, kind: str, low: float | None) -> np.ndarray:
    """What is left of each key channel of head h."""
    if kind == "deltanet":
        return np.ones(dk)
    rate = math.exp(weights["A_log"][h])
    if kind == "gated_deltanet":
        step = linear(weights, "a_proj", row)[h] + weights["dt_bias"][h]
        return np.full(dk, math.exp(-rate * math.log1p(math.exp(step))))
    channels = slice(h * dk, (h + 1) * dk)
    step = linear(weights, "decay_proj", row)[channels] + weights["dt_bias"][channels]
    return np.exp(-rate * np.log1p(np.exp(step)) if low is None else low * sigmoid(rate * step))


# ---- decays alone ----------------------------------------------------------------------------------------------------


def lightning(x: np.ndarray, weights: Weights, slopes: list[float], eps: float = 1e-6) -> np.ndarray:
    heads = len(slopes)
    d = weights["q_proj.weight"].shape[0] // heads
    states, out = [np.zeros((d, d)) for _ in slopes], np.zeros_like(x)
    for t, row in enumerate(x):
        q, k, v = (silu(linear(weights, f"{name}_proj", row)) for name in "qkv")
        parts = []
        for h, slope in enumerate(slopes):
            own = slice(h * d, (h + 1) * d)
            states[h] = math.exp(-slope) * states[h] + np.outer(k[own], v[own])
            parts.append(states[h].T @ q[own])
        mixed = rms(np.concatenate(parts), eps) * weights["norm.weight"] * sigmoid(linear(weights, "g_proj", row))
        out[t] = linear(weights, "o_proj", mixed)
    return out


def turned(x: np.ndarray, position: int) -> np.ndarray:
    """Adjacent pairs turned by position times a frequency that falls from 1 to 1/10000."""
    pairs, out = len(x) // 2, x.copy()
    for m in range(pairs):
        angle = position * 10000.0 ** (-m / (pairs - 1) if pairs > 1 else 0.0)
        a, b = x[2 * m], x[2 * m + 1]
        out[2 * m], out[2 * m + 1] = (
            a * math.cos(angle) - b * math.sin(angle),
            b * math.cos(angle) + a * math.sin(angle),
        )
    return out


def retention(x: np.ndarray, weights: Weights, heads: int, eps: float = 1e-6) -> np.ndarray:
    """The parallel form: every pair of tokens by itself."""
    dk, dv = (weights[f"{name}_proj.weight"].shape[0] // heads for name in "kv")
    q, k, v = (np.stack([linear(weights, f"{name}_proj", row) for row in x]) for name in "qkv")
    out = np.zeros_like(x)
    for i, row in enumerate(x):
        parts = []
        for h in range(heads):
            keys, values = slice(h * dk, (h + 1) * dk), slice(h * dv, (h + 1) * dv)
            gamma, mixed = 1.0 - 2.0 ** (-5 - h), np.zeros(dv)
            for j in range(i + 1):
                score = turned(q[i, keys], i) @ turned(k[j, keys], j) / math.sqrt(dk)
                mixed += gamma ** (i - j) * score * v[j, values]
            parts.append(rms(mixed, eps) * weights["norm.weight"])
        out[i] = linear(weights, "o_proj", np.concatenate(parts) * silu(linear(weights, "g_proj", row)))
    return out


def gla(
    x: np.ndarray,
    weights: Weights,
    heads: int,
    *,
    tau: float = 16.0,
    low: float = -math.inf,
    bidirectional: bool = False,
    eps: float = 1e-5,
) -> np.ndarray:
    """A pair of tokens at a time; every token between them, its own side's end included, lets the earlier one fade."""
    dk, dv = (weights[f"{name}_proj.weight"].shape[0] // heads for name in "kv")
    q, k, v, raw = (np.stack([linear(weights, f"{name}_proj", row) for row in x]) for name in ("q", "k", "v", "decay"))
    log_decay = np.maximum(np.log(sigmoid(raw)) / tau, low).reshape(len(x), heads, -1)
    out = np.zeros_like(x)
    for i, row in enumerate(x):
        parts = []
        for h in range(heads):
            keys, values, mixed = slice(h * dk, (h + 1) * dk), slice(h * dv, (h + 1) * dv), np.zeros(dv)
            for j in range(len(x) if bidirectional else i + 1):
                between = log_decay[j + 1 : i + 1, h] if j <= i else log_decay[i:j, h]
                weight = np.exp(between.sum(0)) * np.ones(dk)
                mixed += float(np.sum(q[i, keys] * weight * k[j, keys])) / math.sqrt(dk) * v[j, values]
            parts.append(rms(mixed, eps) * weights["norm.weight"])
        out[i] = linear(weights, "o_proj", np.concatenate(parts) * silu(linear(weights, "g_proj", row)))
    return out


# ---- the catalogue's layers ------------------------------------------------------------------------------------------


def delta(groups: int = 1, **given):
    return lambda x, w, heads: delta_layer(x, w, heads, heads // groups, **given)


ORACLES = {
    "deltanet": delta(kind="deltanet", gate=None),
    "deltanet_negative": delta(kind="deltanet", beta_max=2.0),
    "gated_deltanet": delta(groups=2, kind="gated_deltanet"),
    "kda": delta(kind="kda", gate="sigmoid"),
    "kda_bounded": delta(kind="kda", low=-5.0, gate="sigmoid"),
    "lightning": lambda x, w, heads: lightning(x, w, [2.0 ** (-8 * (h + 1) / heads) for h in range(heads)]),
    "retention": retention,
    "gla": gla,
    "gla_bidirectional": partial(gla, bidirectional=True),
    "simple_gla": gla,
}
