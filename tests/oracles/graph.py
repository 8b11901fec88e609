"""Graph attention edge by edge in numpy float64: GAT, GATv2, UniMP's graph transformer and Dwivedi's."""

from __future__ import annotations

import math

import numpy as np

Edges = list[tuple[int, int]]


def leaky(x: np.ndarray, slope: float) -> np.ndarray:
    return np.where(x > 0, x, slope * x)


def neighbours(scores: list[float], edges: Edges, target: int) -> list[tuple[int, float]]:
    """(edge, weight) of the edges into a target: a softmax of their scores."""
    own = [n for n, (_, i) in enumerate(edges) if i == target]
    top = max((scores[n] for n in own), default=0.0)
    powers = [math.exp(scores[n] - top) for n in own]
    return [(n, p / sum(powers)) for n, p in zip(own, powers, strict=True)]


def received(scores: list[float], edges: Edges, values: list[np.ndarray], nodes: int, width: int) -> np.ndarray:
    """Per target the weighted sum of one value for each edge."""
    out = np.zeros((nodes, width))
    for i in range(nodes):
        for n, weight in neighbours(scores, edges, i):
            out[i] += weight * values[n]
    return out


def gat(x: np.ndarray, edges: Edges, w: dict[str, np.ndarray], heads: int, slope: float = 0.2) -> np.ndarray:
    """Equations 1 to 5 of arXiv:1710.10903; heads side by side."""
    parts = []
    for h, matrix in enumerate(np.split(w["proj.weight"], heads)):
        sent = [matrix @ row for row in x]
        a, b = w["source_score"][h], w["target_score"][h]
        scores = [float(leaky(a @ sent[j] + b @ sent[i], slope)) for j, i in edges]
        parts.append(received(scores, edges, [sent[j] for j, _ in edges], len(x), len(matrix)))
    return np.concatenate(parts, 1) + w["bias"]


def gatv2(
    x: np.ndarray, edges: Edges, features: np.ndarray, w: dict[str, np.ndarray], heads: int, slope: float = 0.2
) -> np.ndarray:
    """Equation 7 of arXiv:2105.14491, with edge features; heads side by side."""
    parts, names = [], ("proj.weight", "proj.bias", "target_proj.weight", "target_proj.bias", "edge_proj.weight")
    for h, (s, sb, t, tb, e) in enumerate(zip(*(np.split(w[name], heads) for name in names), strict=True)):
        sent = [s @ row + sb for row in x]
        scores = []
        for (j, i), feature in zip(edges, features, strict=True):
            scores.append(float(w["score"][h] @ leaky(t @ x[i] + tb + sent[j] + e @ feature, slope)))
        parts.append(received(scores, edges, [sent[j] for j, _ in edges], len(x), len(s)))
    return np.concatenate(parts, 1) + w["bias"]


def unimp(x: np.ndarray, edges: Edges, features: np.ndarray, w: dict[str, np.ndarray], heads: int) -> np.ndarray:
    """Equations 3 to 6 of arXiv:2009.03509, with the gated skip."""
    parts, names = [], [f"{part}_proj.{kind}" for part in "qkv" for kind in ("weight", "bias")] + ["edge_proj.weight"]
    for q, qb, k, kb, v, vb, e in zip(*(np.split(w[name], heads) for name in names), strict=True):
        scores, values = [], []
        for (j, i), feature in zip(edges, features, strict=True):
            scores.append(float((q @ x[i] + qb) @ (k @ x[j] + kb + e @ feature)) / math.sqrt(len(q)))
            values.append(v @ x[j] + vb + e @ feature)
        parts.append(received(scores, edges, values, len(x), len(q)))
    y, skip = np.concatenate(parts, 1), x @ w["skip_proj.weight"].T + w["skip_proj.bias"]
    gate = 1 / (1 + np.exp(-np.concatenate([y, skip, y - skip], 1) @ w["gate_proj.weight"].T))
    return gate * skip + (1 - gate) * y


def dwivedi(
    x: np.ndarray, edges: Edges, features: np.ndarray, w: dict[str, np.ndarray], heads: int
) -> tuple[np.ndarray, np.ndarray]:
    """Equations 9 to 12 of arXiv:2012.09699: nodes and edges."""
    nodes, along = [], []
    parts = (np.split(w[f"{name}_proj.weight"], heads) for name in ("q", "k", "v", "edge"))
    for q, k, v, e in zip(*parts, strict=True):
        sums, totals, own = np.zeros((len(x), len(q))), np.full(len(x), 1e-6), []
        for (j, i), feature in zip(edges, features, strict=True):
            channels = (q @ x[i]) * (k @ x[j]) / math.sqrt(len(q)) * (e @ feature)
            power = math.exp(min(max(float(channels.sum()), -5.0), 5.0))
            sums[i] += power * (v @ x[j])
            totals[i] += power
            own.append(channels)
        nodes.append(sums / totals[:, None])
        along.append(np.array(own).reshape(len(edges), len(q)))
    y, s = np.concatenate(nodes, 1), np.concatenate(along, 1)
    return y @ w["o_proj.weight"].T + w["o_proj.bias"], s @ w["edge_o_proj.weight"].T + w["edge_o_proj.bias"]
