"""State spaces and recurrences per channel of one sequence, as loops in numpy float64, from the papers' formulas."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np

Weights = Mapping[str, np.ndarray]


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1.0 / (1.0 + np.exp(-x))


def silu(x: np.ndarray) -> np.ndarray:
    return x * sigmoid(x)


def softplus(x: np.ndarray) -> np.ndarray:
    return np.log1p(np.exp(x))


def gelu_tanh(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1.0 + np.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)))


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / math.sqrt(float(np.mean(x * x)) + eps) * weight


def linear(weights: Weights, name: str, x: np.ndarray) -> np.ndarray:
    out = weights[f"{name}.weight"] @ x
    return out + weights[f"{name}.bias"] if f"{name}.bias" in weights else out


def convolved(weights: Weights, rows: list[np.ndarray], t: int) -> np.ndarray:
    """Causal and depthwise at token t; the last tap is the token's own."""
    taps = weights["conv.weight"]
    width = taps.shape[1]
    out = weights["conv.bias"].copy() if "conv.bias" in weights else np.zeros(len(taps))
    for i in range(width):
        source = t - (width - 1) + i
        if source >= 0:
            out = out + taps[:, i] * rows[source]
    return out


def mamba2(
    tokens: np.ndarray,
    weights: Weights,
    heads: int,
    head_dim: int,
    state_dim: int,
    groups: int,
    *,
    limits: tuple[float, float] = (0.0, math.inf),
    both_ways: bool = False,
) -> np.ndarray:
    """Dao and Gu 2024: the state S (H, P, N) token by token; both ways by the definition of the sum over tokens."""
    width, shared = heads * head_dim, groups * state_dim
    rows = [linear(weights, "in_proj", u) for u in tokens]
    inner = [row[width : 2 * width + 2 * shared] for row in rows]
    x, B, C, dt = [], [], [], []
    for t, row in enumerate(rows):
        mixed = silu(convolved(weights, inner, t))
        x.append(mixed[:width].reshape(heads, head_dim))
        B.append(mixed[width : width + shared].reshape(groups, state_dim))
        C.append(mixed[width + shared :].reshape(groups, state_dim))
        dt.append(np.clip(softplus(row[-heads:] + weights["dt_bias"]), *limits))
    A, out = -np.exp(weights["A_log"]), np.zeros_like(tokens)
    states = np.zeros((heads, head_dim, state_dim))
    for t, row in enumerate(rows):
        y = np.zeros((heads, head_dim))
        for h in range(heads):
            g = h // (heads // groups)
            states[h] = math.exp(A[h] * dt[t][h]) * states[h] + dt[t][h] * np.outer(x[t][h], B[t][g])
            y[h] = states[h] @ C[t][g] + weights["D"][h] * x[t][h]
            if both_ways:
                for later in range(t + 1, len(rows)):
                    decay = math.exp(A[h] * sum(dt[s][h] for s in range(t, later)))
                    y[h] += decay * float(C[t][g] @ B[later][g]) * dt[later][h] * x[later][h]
        gated = y.reshape(-1) * silu(row[:width])
        parts = zip(np.split(gated, groups), np.split(weights["norm.weight"], groups), strict=True)
        out[t] = linear(weights, "out_proj", np.concatenate([rms_norm(part, w, 1e-5) for part, w in parts]))
    return out


def mamba(tokens: np.ndarray, weights: Weights, state_dim: int, rank: int) -> np.ndarray:
    """Gu and Dao 2023, algorithm 2; with norms on dt, B and C where there are weights of them."""

    def normed(name: str, x: np.ndarray) -> np.ndarray:
        return rms_norm(x, weights[f"{name}.weight"], 1e-6) if f"{name}.weight" in weights else x

    rows = [linear(weights, "in_proj", u) for u in tokens]
    width = len(rows[0]) // 2
    A, out = -np.exp(weights["A_log"]), np.zeros_like(tokens)
    h = np.zeros((width, state_dim))
    for t, row in enumerate(rows):
        x = silu(convolved(weights, [r[:width] for r in rows], t))
        given = weights["x_proj.weight"] @ x
        dt = softplus(linear(weights, "dt_proj", normed("dt_norm", given[:rank])))
        B, C = normed("B_norm", given[rank : rank + state_dim]), normed("C_norm", given[rank + state_dim :])
        for d in range(width):
            for n in range(state_dim):
                h[d, n] = math.exp(dt[d] * A[d, n]) * h[d, n] + dt[d] * B[n] * x[d]
        out[t] = linear(weights, "out_proj", (h @ C + weights["D"] * x) * silu(row[width:]))
    return out


def rglru(x: np.ndarray, r: np.ndarray, i: np.ndarray, p: np.ndarray, first: int = 0) -> np.ndarray:
    """De et al. 2024, eq. 1-4, for tokens at positions first, first + 1, ...; r and i are the two gates."""
    h, out = np.zeros(x.shape[1]), np.zeros_like(x)
    for t in range(len(x)):
        a = np.exp(-8.0 * r[t] * softplus(p))
        share = np.sqrt(1.0 - a * a)
        if first + t == 0:
            a, share = np.zeros_like(a), np.ones_like(a)
        h = a * h + share * i[t] * x[t]
        out[t] = h
    return out


def griffin(tokens: np.ndarray, weights: Weights, first: int = 0) -> np.ndarray:
    """Griffin's recurrent block, De et al. 2024, sec. 2.3-2.4."""

    def gate(name: str, u: np.ndarray) -> np.ndarray:
        blocks, biases = weights[f"{name}.weight"], weights[f"{name}.bias"]
        parts = np.split(u, len(blocks))
        return sigmoid(np.concatenate([part @ W + b for part, W, b in zip(parts, blocks, biases, strict=True)]))

    rows = [linear(weights, "x_proj", x) for x in tokens]
    u = np.stack([convolved(weights, rows, t) for t in range(len(rows))])
    gates = (np.stack([gate(name, each) for each in u]) for name in ("recurrence_gate", "input_gate"))
    h = rglru(u, *gates, weights["p"], first)
    y = (gelu_tanh(linear(weights, "y_proj", x)) for x in tokens)
    return np.stack([linear(weights, "o_proj", a * b) for a, b in zip(h, y, strict=True)])


def hgrn(tokens: np.ndarray, weights: Weights, low: np.ndarray | float) -> np.ndarray:
    """Qin et al. 2023, eq. 1-5, in real numbers."""
    h, out = np.zeros(len(weights["i_proj.weight"])), np.zeros_like(tokens)
    for t, x in enumerate(tokens):
        f = low + (1.0 - low) * sigmoid(linear(weights, "f_proj", x))
        h = f * h + (1.0 - f) * silu(linear(weights, "i_proj", x))
        gate = silu(linear(weights, "g_proj", x))
        out[t] = linear(weights, "o_proj", rms_norm(h, weights["norm.weight"], 1e-5) * gate)
    return out


def ema(tokens: np.ndarray, weights: Weights) -> np.ndarray:
    """z_t = alpha x_t + (1 - alpha) z_{t-1}, as the sum that it is."""
    alpha = sigmoid(weights["logit"])
    return np.stack(
        [sum(alpha * (1.0 - alpha) ** (t - s) * tokens[s] for s in range(t + 1)) for t in range(len(tokens))]
    )


def damped_ema(tokens: np.ndarray, weights: Weights, both_ways: bool = False, reach: float = math.inf) -> np.ndarray:
    """Ma et al. 2022, eq. 2-3: the kernel over distances, forwards and, with the later rows, backwards."""
    dim, count = tokens.shape[1], len(tokens)

    def kernel(rows: slice, distance: int) -> np.ndarray:
        if distance >= reach:
            return np.zeros(dim)
        p, a = sigmoid(weights["delta"][rows]), sigmoid(weights["alpha"][rows])
        terms = p * weights["beta"][rows] * weights["gamma"][rows] * (1.0 - p * a) ** distance
        return terms.sum(1) / math.sqrt(p.shape[1])

    out = np.zeros_like(tokens)
    for t in range(count):
        y = weights["omega"] * tokens[t]
        for s in range(t + 1):
            y = y + kernel(slice(0, dim), t - s) * tokens[s]
        if both_ways:
            for s in range(t, count):
                y = y + kernel(slice(dim, None), s - t) * tokens[s]
        out[t] = silu(y)
    return out


# ---- the catalogue's layers ------------------------------------------------------------------------------------------


def hgrn_second_of_two(tokens: np.ndarray, weights: Weights) -> np.ndarray:
    """The bound of layer i is the sum of the softmax over layers, from the second up to i."""
    raised = np.exp(weights["low.table.weight"])
    return hgrn(tokens, weights, raised[1] / raised.sum(0))


ORACLES: dict[str, Callable[..., np.ndarray]] = {
    "ema": lambda x, w, heads: ema(x, w),
    "mega_ema": lambda x, w, heads: damped_ema(x, w),
    "mega_ema_truncated": lambda x, w, heads: damped_ema(x, w, reach=3),
    "mega_ema_bidirectional": lambda x, w, heads: damped_ema(x, w, both_ways=True),
    "rglru": lambda x, w, heads: griffin(x, w),
    "hgrn": lambda x, w, heads: hgrn_second_of_two(x, w),
    "mamba": lambda x, w, heads: mamba(x, w, 16, 1),
    "jamba": lambda x, w, heads: mamba(x, w, 16, 1),
    "mamba2": lambda x, w, heads: mamba2(x, w, heads, 2 * x.shape[1] // heads, 128, 1),
    "mamba2_bidirectional": lambda x, w, heads: mamba2(x, w, heads, 2 * x.shape[1] // heads, 128, 1, both_ways=True),
}
