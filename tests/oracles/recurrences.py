"""The recurrences as loops over rows, heads and tokens, in numpy."""

from __future__ import annotations

import numpy as np


def delta_recurrence(q, k, v, state, log_decay=None, beta=None, read_key=None, write_key=None, ids=None, scale=None):
    """(outputs (B, Hv, T, Dv), last state): decay, then (with beta) move what the key holds towards the value.

    With a read and a write key, the state is multiplied by ``diag(a) + write read^T`` instead.
    """
    batch, heads, tokens, _ = v.shape
    group = heads // k.shape[1]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    out, last = np.zeros(v.shape), np.array(state, dtype=float)
    for b in range(batch):
        for h in range(heads):
            memory = np.array(state[b, h], dtype=float)
            for t in range(tokens):
                if ids is not None and t and ids[b, t] != ids[b, t - 1]:
                    memory = np.zeros_like(memory)
                moved = np.eye(k.shape[3])
                if log_decay is not None:
                    now = log_decay[h] if log_decay.ndim == 1 else log_decay[b, h, t]
                    moved = np.diag(np.broadcast_to(np.exp(now), k.shape[3:]))
                if read_key is not None:
                    moved = moved + np.outer(write_key[b, h, t], read_key[b, h, t])
                memory = moved @ memory
                key, value = k[b, h // group, t], v[b, h, t]
                if beta is not None:
                    value = beta[b, h, t] * (value - key @ memory)
                memory = memory + np.outer(key, value)
                out[b, h, t] = scale * (q[b, h // group, t] @ memory)
            last[b, h] = memory
    return out, last


def diagonal_scan(a, x, state, ids=None):
    """(y (B, T, d), last state) of ``y_t = a_t y_{t-1} + x_t``."""
    y, last = np.zeros(x.shape), np.array(state, dtype=float)
    for b in range(x.shape[0]):
        now = np.array(state[b], dtype=float)
        for t in range(x.shape[1]):
            if ids is not None and t and ids[b, t] != ids[b, t - 1]:
                now = np.zeros_like(now)
            now = a[b, t] * now + x[b, t]
            y[b, t] = now
        last[b] = now
    return y, last


def selective(x, dt, a, b, c, d, state, ids=None):
    """(y (B, T, d), last state) of Mamba's scan."""
    y, last = np.zeros(x.shape), np.array(state, dtype=float)
    for row in range(x.shape[0]):
        now = np.array(state[row], dtype=float)
        for t in range(x.shape[1]):
            if ids is not None and t and ids[row, t] != ids[row, t - 1]:
                now = np.zeros_like(now)
            step = dt[row, t][:, None]
            now = np.exp(step * a) * now + step * x[row, t][:, None] * b[row, t]
            y[row, t] = now @ c[row, t] + d * x[row, t]
        last[row] = now
    return y, last
