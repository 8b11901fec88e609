"""The definition of softmax attention, written once, dense, in plain torch, for every dtype and every transform.

    S = softcap(scale * Q K^T) + bias,   P_ij = exp(S_ij) [allowed] / (sum_j exp(S_ij) [allowed] + exp(sink)),   Y =
    dropout(P) V

A row that may attend to nothing gives 0. Every other backend is compared with this one. Memory O(B Hq Tq Tk).
"""

from __future__ import annotations

import torch
from torch import Tensor

from regard.backends.call import AttentionCall, sink_share, zero_unread
from regard.backends.dropout import dropout_factor
from regard.coordinates import is_recording

__all__ = ["defer", "reject", "run", "weights"]


def reject(call: AttentionCall) -> str | None:
    """It runs every call."""
    return None


def defer(call: AttentionCall) -> str | None:
    """It never leaves a call to others by itself; it stands last in the order."""
    return None


def _softmax(call: AttentionCall) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Over the keys alone: (weights (B, Hq, Tq, Tk), log-sum-exp (B, Hq, Tq), what that lost by rounding, v).

    v has unread keys zeroed.
    """
    dtype = call.compute_dtype
    batch, q_heads, kv_heads, q_len, k_len, _ = call.sizes
    indices = call.coordinates.indices()
    q, k, v = (x.to(dtype) for x in (call.q, call.k, call.v))
    zero, never = (torch.full((), x, dtype=dtype, device=q.device) for x in (0.0, -torch.inf))
    allowed = call.mask.allows_at(indices).expand(batch, q_heads, q_len, k_len) if call.mask is not None else None
    if allowed is not None:
        k, v = zero_unread(allowed, k, v)
    grouped = (q * call.scale).unflatten(1, (kv_heads, call.group))
    scores = call.scores.apply(torch.matmul(grouped, k.unsqueeze(2).transpose(-1, -2)).flatten(1, 2))
    if (bias := call.wide_bias) is not None:
        scores = scores + bias.scores(indices, dtype)
    if allowed is not None:
        scores = torch.where(allowed, scores, never)
    top = scores.detach().amax(-1, keepdim=True) if k_len else never.expand(batch, q_heads, q_len, 1)
    top = torch.where(top == never, zero, top)
    unrecorded = not torch.is_grad_enabled() and not is_recording()  # then the largest tensors are changed in place
    lifted = scores.sub_(top).exp_() if unrecorded else torch.exp(scores - top)
    total = lifted.sum(-1, keepdim=True)
    dead = total == 0
    total = torch.where(dead, 1.0, total)  # on the input of log and division, so that no gradient is NaN
    log_total = torch.log(total)
    lse = torch.where(dead, never, top + log_total)
    low = torch.where(dead, zero, (top - lse) + log_total).detach()
    p = lifted.div_(total) if unrecorded else lifted / total
    return p, lse.squeeze(-1), low.squeeze(-1), v


def weights(call: AttentionCall) -> tuple[Tensor, Tensor]:
    """(P before dropout (B, Hq, Tq, Tk), the keys' log-sum-exp (B, Hq, Tq)), in the compute dtype."""
    p, lse, low, _ = _softmax(call)
    return (p if call.sink is None else p * sink_share(lse, call.sink, low).unsqueeze(-1)), lse


def run(call: AttentionCall) -> tuple[Tensor, Tensor, Tensor]:
    """(output before the sink takes its share, log-sum-exp, what that lost by rounding), in the compute dtype."""
    p, lse, low, v = _softmax(call)
    if call.dropout_p > 0:
        assert call.seed is not None
        p = p * dropout_factor(call.coordinates.indices(), call.seed, call.dropout_p, p.dtype)
    out = torch.matmul(p.unflatten(1, (call.k.shape[1], call.group)), v.unsqueeze(2)).flatten(1, 2)
    return out, lse, low
