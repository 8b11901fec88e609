"""Bahdanau's additive attention pair by pair in numpy float64 (arXiv:1409.0473, appendix A.1.2)."""

from __future__ import annotations

import math

import numpy as np


def additive(x: np.ndarray, weights: dict[str, np.ndarray], heads: int, context: np.ndarray) -> np.ndarray:
    """Each query's weights by a softmax over its scores, one tanh a pair."""
    out = []
    for row in x:
        asked = weights["q_proj.weight"] @ row
        scores = [math.fsum(weights["score"] * np.tanh(asked + weights["k_proj.weight"] @ h)) for h in context]
        powers = [math.exp(score - max(scores)) for score in scores]
        mixed = sum(power / sum(powers) * h for power, h in zip(powers, context, strict=True))
        out.append(weights["o_proj.weight"] @ mixed + weights["o_proj.bias"])
    return np.array(out)


ORACLES = {"additive": additive}
