"""RWKV-6's time mixing token by token in numpy float64 (Peng et al. 2024, arXiv:2404.05892, eq. 14-20)."""

from __future__ import annotations

import math

import numpy as np


def lora(weights: dict[str, np.ndarray], name: str, x: np.ndarray) -> np.ndarray:
    inner = np.tanh(weights[f"{name}.0.weight"] @ x)
    return weights[f"{name}.2.bias"] + weights[f"{name}.2.weight"] @ inner


def rwkv6(x: np.ndarray, weights: dict[str, np.ndarray], heads: int, eps: float = 64e-5) -> np.ndarray:
    """The sum over earlier tokens as the paper writes it: a pair at a time, faded by the tokens strictly between."""
    rows: dict[str, list[np.ndarray]] = {name: [] for name in "qkvwg"}
    for t, now in enumerate(x):
        back = (x[t - 1] if t else np.zeros_like(now)) - now
        seen = now + back * weights["mu"]
        for name, made in rows.items():
            mixed = now + back * lora(weights, f"mix.{name}", seen)
            made.append(
                np.exp(-np.exp(lora(weights, "decay", mixed)))
                if name == "w"
                else weights[f"{name}_proj.weight"] @ mixed
            )
    r, k, v, w = (np.stack(rows[name]).reshape(len(x), heads, -1) for name in "qkvw")
    out = np.zeros_like(x)
    for t in range(len(x)):
        parts = []
        for h in range(heads):
            mixed = float(np.sum(r[t, h] * weights["bonus"][h] * k[t, h])) * v[t, h]
            for s in range(t):
                fade = np.prod(w[s + 1 : t, h], axis=0)
                mixed = mixed + float(np.sum(r[t, h] * fade * k[s, h])) * v[s, h]
            centred = mixed - mixed.mean()
            normed = centred / math.sqrt(float(np.mean(centred * centred)) + eps)
            parts.append(normed * weights["norm.weight"][h] + weights["norm.bias"][h])
        gate = rows["g"][t]
        out[t] = weights["o_proj.weight"] @ (np.concatenate(parts) * gate / (1.0 + np.exp(-gate)))
    return out


ORACLES = {"rwkv6": rwkv6}
