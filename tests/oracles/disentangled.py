"""DeBERTa's attention as loops over pairs of tokens in numpy float64 (He et al. 2020, arXiv:2006.03654, equation 4)."""

from __future__ import annotations

import math

import numpy as np


def bucket(distance: int, buckets: int | None, furthest: int) -> int:
    if buckets is None or abs(distance) <= buckets // 2:
        return distance
    mid = buckets // 2
    steps = math.ceil(math.log(abs(distance) / mid) / math.log((furthest - 1) / mid) * (mid - 1) - 1e-9)
    return int(math.copysign(mid + steps, distance))


def disentangled(
    x: np.ndarray,
    weights: dict[str, np.ndarray],
    heads: int,
    span: int = 3,
    buckets: int | None = None,
    furthest: int = 0,
) -> np.ndarray:
    def made(name: str, rows: np.ndarray) -> np.ndarray:
        return (rows @ weights[f"{name}_proj.weight"].T + weights[f"{name}_proj.bias"]).reshape(len(rows), heads, -1)

    table = weights["relative.rows"]
    if "relative.norm.weight" in weights:
        centred = table - table.mean(1, keepdims=True)
        table = centred / np.sqrt((centred**2).mean(1, keepdims=True) + 1e-7)
        table = table * weights["relative.norm.weight"] + weights["relative.norm.bias"]
    shared = "place_k_proj.weight" not in weights
    q, k, v = made("q", x), made("k", x), made("v", x)
    place_k, place_q = (made(name if shared else f"place_{name}", table) for name in "kq")
    out = np.zeros_like(q)
    for i in range(len(x)):
        for h in range(heads):
            scores = []
            for j in range(len(x)):
                d = min(max(bucket(i - j, buckets, furthest) + span, 0), 2 * span - 1)
                total = q[i, h] @ k[j, h] + q[i, h] @ place_k[d, h] + k[j, h] @ place_q[d, h]
                scores.append(float(total) / math.sqrt(3 * q.shape[2]))
            powers = [math.exp(score - max(scores)) for score in scores]
            out[i, h] = sum(power / sum(powers) * v[j, h] for j, power in enumerate(powers))
    return out.reshape(len(x), -1) @ weights["o_proj.weight"].T + weights["o_proj.bias"]


def shared_with_buckets(x: np.ndarray, weights: dict[str, np.ndarray], heads: int) -> np.ndarray:
    return disentangled(x, weights, heads, span=4, buckets=4, furthest=6)


ORACLES = {"disentangled": disentangled, "disentangled_shared": shared_with_buckets}
