"""Luong's attention pair by pair in numpy float64 (arXiv:1508.04025, equations 5 to 10)."""

from __future__ import annotations

import math

import numpy as np


def attentional(weights: dict[str, np.ndarray], mixed: np.ndarray, row: np.ndarray) -> np.ndarray:
    return np.tanh(weights["o_proj.weight"] @ np.concatenate([mixed, row]))


def luong(x: np.ndarray, weights: dict[str, np.ndarray], heads: int, context: np.ndarray) -> np.ndarray:
    """Global attention with the score "general"."""
    out = []
    for row in x:
        scores = [float((weights["q_proj.weight"] @ row) @ h) for h in context]
        powers = [math.exp(score - max(scores)) for score in scores]
        mixed = sum(power / sum(powers) * h for power, h in zip(powers, context, strict=True))
        out.append(attentional(weights, mixed, row))
    return np.array(out)


def luong_local(
    x: np.ndarray, weights: dict[str, np.ndarray], heads: int, context: np.ndarray, reach: int = 3
) -> np.ndarray:
    """Local predictive attention with the score "concat": a softmax over the window, then the bell, not normalised."""
    out = []
    for row in x:
        place = float(weights["place_vector"] @ np.tanh(weights["place_proj.weight"] @ row))
        place = len(context) / (1 + math.exp(-place))
        near = [s for s in range(len(context)) if abs(s - place) <= reach]
        asked = weights["q_proj.weight"] @ row + weights["q_proj.bias"]
        scores = {
            s: float(weights["score_vector"] @ np.tanh(asked + weights["k_proj.weight"] @ context[s])) for s in near
        }
        powers = {s: math.exp(score - max(scores.values())) for s, score in scores.items()}
        mixed = np.zeros(context.shape[1])
        for s, power in powers.items():
            bell = math.exp(-((s - place) ** 2) / (2 * (reach / 2) ** 2))
            mixed += power / sum(powers.values()) * bell * context[s]
        out.append(attentional(weights, mixed, row))
    return np.array(out)


ORACLES = {"luong": luong, "luong_local": luong_local}
