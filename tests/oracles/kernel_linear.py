"""Kernel attention as loops over pairs of tokens in numpy float64, from the kernels themselves: no features, no sums.

It takes one sequence (T, dim), the layer's weights by name, and what these do not show.
"""

from __future__ import annotations

import math

import numpy as np

Weights = dict[str, np.ndarray]


def elu_plus_one(q: np.ndarray, k: np.ndarray) -> float:
    return float(
        sum((a + 1 if a > 0 else math.exp(a)) * (b + 1 if b > 0 else math.exp(b)) for a, b in zip(q, k, strict=True))
    )


def taylor(q: np.ndarray, k: np.ndarray) -> float:
    s = float(q @ k) / math.sqrt(len(q))
    return 1 + s + s * s / 2


def parabola(q: np.ndarray, k: np.ndarray) -> float:
    return float(q @ k) ** 2 / len(q)


def layer_norm(rows: np.ndarray, weight: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """Every row of (T, heads * dim), over all its channels."""
    out = np.zeros_like(rows)
    for t, row in enumerate(rows):
        centred = row - row.mean()
        out[t] = centred / math.sqrt(float(np.mean(centred * centred)) + 1e-5) * weight.reshape(-1) + bias.reshape(-1)
    return out


def kernel_attention(
    x: np.ndarray,
    weights: Weights,
    heads: int,
    key_heads: int,
    *,
    kernel=elu_plus_one,
    eps: float | None = 1e-6,
    causal: bool = True,
    context: np.ndarray | None = None,
) -> np.ndarray:
    source = x if context is None else context
    q, k, v = (rows @ weights[f"{name}_proj.weight"].T for name, rows in zip("qkv", (x, source, source), strict=True))
    if "feature_map.q_weight" in weights:
        q, k = (
            layer_norm(rows, weights[f"feature_map.{name}_weight"], weights[f"feature_map.{name}_bias"])
            for name, rows in (("q", q), ("k", k))
        )
    q, k = (rows.reshape(len(rows), key_heads, -1) for rows in (q, k))
    v = v.reshape(len(v), heads, -1)
    mixed = np.zeros((len(x), heads, v.shape[2]))
    for t in range(len(x)):
        for head in range(heads):
            group = head // (heads // key_heads)
            total = 0.0
            for s in range(t + 1 if causal else len(source)):
                weight = kernel(q[t, group], k[s, group])
                mixed[t, head] += weight * v[s, head]
                total += weight
            row = mixed[t, head]
            if eps is not None:
                mixed[t, head] = row / (total + eps)
            else:
                mixed[t, head] = row / math.sqrt(float(np.mean(row * row)) + 1e-6) * weights["norm.weight"]
    return mixed.reshape(len(x), -1) @ weights["o_proj.weight"].T


def alone(**options):
    return lambda x, w, heads, context=None: kernel_attention(x, w, heads, heads, context=context, **options)


ORACLES = {
    "linear": alone(),
    "linear_bidirectional": alone(causal=False),
    "linear_cross": alone(causal=False),
    "linear_unnormalised": alone(eps=None),
    "based": alone(kernel=taylor, eps=1e-12),
    "rebased": alone(kernel=parabola, eps=1e-12),
}
