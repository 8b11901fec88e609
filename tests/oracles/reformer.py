"""Hashed attention as loops over pairs of tokens in numpy float64 (Kitaev et al. 2020, arXiv:2001.04451, section 2)."""

from __future__ import annotations

import math
from functools import partial

import numpy as np


def hashed(
    x: np.ndarray, weights: dict[str, np.ndarray], heads: int, reach: int = 2, causal: bool = True
) -> np.ndarray:
    q, v = ((x @ weights[f"{name}_proj.weight"].T).reshape(len(x), heads, -1) for name in ("qk", "v"))
    rotations, out = weights["rotations"], np.zeros_like(v)
    for h in range(heads):
        keys = [row / math.sqrt(float(row @ row) / len(row) + 1e-6) / math.sqrt(len(row)) for row in q[:, h]]
        for i in range(len(x)):
            tops, sums, parts = [], [], []
            for n in range(rotations.shape[2]):
                turned = [row @ rotations[h, :, n] for row in q[:, h]]
                bucket = [int(np.argmax(np.concatenate([row, -row]))) for row in turned]
                before = [j for j in range(i) if bucket[j] == bucket[i]][-reach:]
                after = [] if causal else [j for j in range(i + 1, len(x)) if bucket[j] == bucket[i]][:reach]
                scores = [float(q[i, h] @ keys[j]) for j in before + after]
                if not scores:
                    continue
                powers = [math.exp(score - max(scores)) for score in scores]
                tops.append(max(scores) + math.log(sum(powers)))
                sums.append(sum(powers))
                parts.append(
                    sum(power / sum(powers) * v[j, h] for power, j in zip(powers, before + after, strict=True))
                )
            if not parts:
                out[i, h] = v[i, h]
                continue
            shares = np.exp(np.array(tops) - max(tops))
            out[i, h] = sum(share * part for share, part in zip(shares / shares.sum(), parts, strict=True))
    return out.reshape(len(x), -1) @ weights["o_proj.weight"].T


ORACLES = {"hashed": hashed, "hashed_bidirectional": partial(hashed, causal=False)}
