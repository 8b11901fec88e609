"""Recurrences token by token over whole tensors, differentiable, in float64.

The state of every row and head moves by one token at a time, as the papers write it; nothing is split into chunks.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

STRETCH = 64  # tokens whose states are kept at once for the backward pass; it changes no number


def matrix_state(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None = None,
    beta: Tensor | None = None,
    state: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """(out (B, Hv, T, Dv), last state (B, Hv, Dk, Dv)) of q, k (B, Hk, T, Dk) and v (B, Hv, T, Dv).

    The state decays by `log_decay` (Hv,), (B, Hv, T) or (B, Hv, T, Dk); with `beta` (B, Hv, T), what the key finds in
    it is taken from the value; the key and value are written, and the query reads.
    """
    batch, heads, tokens, width = v.shape
    groups, size = heads // k.shape[1], k.shape[3]
    q, k = (x.repeat_interleave(groups, 1) for x in (q, k))
    scale = size**-0.5 if scale is None else scale
    log_decay = v.new_zeros(heads) if log_decay is None else log_decay
    if log_decay.ndim == 1:
        log_decay = log_decay[None, :, None].expand(batch, heads, tokens)
    keep = (log_decay if log_decay.ndim == 4 else log_decay[..., None]).exp()
    now = v.new_zeros(batch, heads, size, width) if state is None else state

    def stretch(now, q, k, v, keep, beta):
        outs = []
        for t in range(v.shape[2]):
            now = keep[:, :, t, :, None] * now
            value = v[:, :, t]
            if beta is not None:
                value = beta[:, :, t, None] * (value - torch.einsum("bhk,bhkv->bhv", k[:, :, t], now))
            now = now + k[:, :, t, :, None] * value[:, :, None, :]
            outs.append(scale * torch.einsum("bhk,bhkv->bhv", q[:, :, t], now))
        return torch.stack(outs, 2), now

    outs = []
    for first in range(0, tokens, STRETCH):
        cut = slice(first, first + STRETCH)
        parts = [x[:, :, cut] for x in (q, k, v, keep)]
        some = None if beta is None else beta[:, :, cut]
        out, now = checkpoint(stretch, now, *parts, some, use_reentrant=False)
        outs.append(out)
    return (torch.cat(outs, 2) if outs else torch.zeros_like(v)), now


def vector_state(log_a: Tensor, x: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(y (B, T, d), last y) of ``y_t = exp(log_a_t) y_{t-1} + x_t``."""
    now, outs = torch.zeros_like(x[:, 0]) if state is None else state, []
    for a, new in zip(log_a.exp().unbind(1), x.unbind(1), strict=True):
        now = a * now + new
        outs.append(now)
    return torch.stack(outs, 1), now


def selective(
    x: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    bias: Tensor | None = None,
    state: Tensor | None = None,
    softplus: bool = True,
) -> tuple[Tensor, Tensor]:
    """(y (B, T, d), last state (B, d, N)) of Mamba's scan: x, delta, z (B, T, d), A (d, N), B and C (B, T, N)."""
    delta = delta if bias is None else delta + bias
    delta = F.softplus(delta, threshold=1000.0) if softplus else delta
    keep = torch.exp(delta[..., None] * A)
    new = (delta * x)[..., None] * B[:, :, None, :]
    now, outs = (torch.zeros_like(new[:, 0]) if state is None else state), []
    for a, u, c in zip(keep.unbind(1), new.unbind(1), C.unbind(1), strict=True):
        now = a * now + u
        outs.append((now * c[:, None, :]).sum(-1))
    y = torch.stack(outs, 1)
    y = y if D is None else y + D * x
    return (y if z is None else y * F.silu(z)), now


def space_state(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    bias: Tensor | None = None,
    state: Tensor | None = None,
    limits: tuple[float, float] = (0.0, float("inf")),
) -> tuple[Tensor, Tensor]:
    """(y (B, T, H, P), last state (B, H, P, N)) of Mamba-2.

    x and z are (B, T, H, P), dt (B, T, H), A and D (H,), B and C (B, T, G, N), state (B, H, P, N).
    """
    dt = F.softplus(dt if bias is None else dt + bias, threshold=1000.0).clamp(*limits)
    heads = x.shape[2] // B.shape[2]
    B, C = (each.repeat_interleave(heads, 2) for each in (B, C))
    keep = torch.exp(dt * A)
    now, outs = (x.new_zeros(*x[:, 0].shape, B.shape[3]) if state is None else state), []
    for t in range(x.shape[1]):
        new = (dt[:, t, :, None] * x[:, t])[..., None] * B[:, t, :, None, :]
        now = keep[:, t, :, None, None] * now + new
        outs.append((now * C[:, t, :, None, :]).sum(-1))
    y = torch.stack(outs, 1)
    y = y if D is None else y + D[:, None] * x
    return (y if z is None else y * F.silu(z)), now


def convolved(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    state: Tensor | None = None,
    ids: Tensor | None = None,
    silu: bool = False,
) -> tuple[Tensor, Tensor]:
    """(y (B, T, C), the last W - 1 inputs): each channel's own taps (C, W) over the tokens up to its own, the last tap
    the token's; with ids (B, T), over those of the same id, and `state` belongs to the first id of its row."""
    reach = weight.shape[1] - 1
    line = torch.cat((x.new_zeros(x.shape[0], reach, x.shape[2]) if state is None else state, x), 1)
    y = torch.zeros_like(x) if bias is None else torch.zeros_like(x) + bias
    for tap in range(reach + 1):
        part = line[:, tap : tap + x.shape[1]]
        if ids is not None:
            whole = torch.cat((ids[:, :1].expand(-1, reach), ids), 1)
            part = part * (whole[:, tap : tap + x.shape[1]] == ids)[..., None]
        y = y + weight[:, tap] * part
    return (F.silu(y) if silu else y), line[:, line.shape[1] - reach :]
