"""Performer as loops over pairs of tokens in numpy float64: the weights are estimates from the layer's projection.

    a_ts = mean over rows w of exp(w . z_t - |z_t|^2 / 2) exp(w . z_s - |z_s|^2 / 2),  z = x Dk^(-1/4)

(Choromanski et al. 2020, arXiv:2009.14794, lemma 1 and section 4.2.)
"""

from __future__ import annotations

import math
from functools import partial

import numpy as np


def softmax_kernel(rows: np.ndarray, q: np.ndarray, k: np.ndarray) -> float:
    q, k = q * len(q) ** -0.25, k * len(k) ** -0.25
    return sum(math.exp(float(w @ (q + k) - (q @ q + k @ k) / 2)) for w in rows) / len(rows)


def relu_kernel(rows: np.ndarray, q: np.ndarray, k: np.ndarray) -> float:
    q, k = q * len(q) ** -0.25, k * len(k) ** -0.25
    return sum((max(float(w @ q), 0.0) + 1e-3) * (max(float(w @ k), 0.0) + 1e-3) for w in rows)


def performer(
    x: np.ndarray, weights: dict[str, np.ndarray], heads: int, kernel: object = softmax_kernel, causal: bool = True
) -> np.ndarray:
    rows = weights["feature_map.projection"]
    q, k, v = ((x @ weights[f"{name}_proj.weight"].T).reshape(len(x), heads, -1) for name in "qkv")
    out = np.zeros((len(x), heads, v.shape[2]))
    for t in range(len(x)):
        for h in range(heads):
            seen = range(t + 1) if causal else range(len(x))
            shares = {s: kernel(rows, q[t, h], k[s, h]) for s in seen}
            for s, share in shares.items():
                out[t, h] += share / sum(shares.values()) * v[s, h]
    return out.reshape(len(x), -1) @ weights["o_proj.weight"].T


ORACLES = {
    "performer": performer,
    "performer_bidirectional": partial(performer, causal=False),
    "performer_relu": partial(performer, kernel=relu_kernel),
}
