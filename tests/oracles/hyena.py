"""The Hyena operator as sums over earlier tokens in numpy float64 (Poli et al. 2023, arXiv:2302.10866)."""

from __future__ import annotations

import math

import numpy as np


def filters(weights: dict[str, np.ndarray], length: int, tokens: int) -> np.ndarray:
    """(T, channels), each time by itself; times and rates as stored, in float32, once they are right."""
    features = weights["filters.maps.0.weight"].shape[1]
    bands = (features - 1) // 2
    waves = np.linspace(1e-4, bands - 1, bands)
    channels = weights["filters.last.weight"].shape[0]
    rates = np.linspace(math.log(1e-2) / 1.5, math.log(1e-2) / 0.3, channels)
    assert np.allclose(rates, weights["filters.rates"], atol=1e-5)
    rows = []
    for t in range(tokens):
        time, hidden = weights["filters.times"][t], weights["filters.places"][t]
        wave = [2 * math.pi * t / length * w for w in waves]
        right = [t / (length - 1), *(math.cos(a) for a in wave), *(-math.sin(a) for a in wave)]
        assert abs(time - right[0]) < 1e-6 and np.allclose(hidden, right, atol=1e-6)
        for n in range(3):
            mapped = weights[f"filters.maps.{n}.weight"] @ hidden + weights[f"filters.maps.{n}.bias"]
            hidden = np.sin(weights["filters.frequencies"][n] * mapped)
        rows.append(weights["filters.last.weight"] @ hidden * np.exp(-time * np.abs(weights["filters.rates"])))
    return np.array(rows)


def hyena(x: np.ndarray, weights: dict[str, np.ndarray], heads: int, length: int = 64) -> np.ndarray:
    tokens, dim = x.shape
    projected = x @ weights["in_proj.weight"].T + weights["in_proj.bias"]
    short = np.zeros_like(projected)
    for t in range(tokens):
        short[t] = weights["short_bias"]
        for lag in range(min(3, t + 1)):
            short[t] += weights["short_filter"][:, 2 - lag] * projected[t - lag]
    *gates, v = np.split(short, projected.shape[1] // dim, axis=1)
    table = filters(weights, length, tokens)
    for o, gate in enumerate(reversed(gates[1:])):
        part = slice(o * dim, (o + 1) * dim)
        gated = v * gate
        v = np.stack([sum(table[t - s, part] * gated[s] for s in range(t + 1)) for t in range(tokens)])
        v = v + weights["skip"][part] * gated
    return (v * gates[0]) @ weights["out_proj.weight"].T + weights["out_proj.bias"]


ORACLES = {"hyena": hyena, "hyena_order3": hyena}
