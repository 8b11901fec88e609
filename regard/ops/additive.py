"""Additive scores, ``e_ij = w . tanh(q_i + k_j)``, and softmax attention over scores that are given."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from regard.backends.call import is_batched, may_be_transformed, recorded_gradients
from regard.biases import Dense
from regard.checks import describe, is_dense, is_number_type
from regard.ops.attention import attention, attention_weights

__all__ = ["additive_attention", "additive_scores", "attend_by_scores", "weights_of_scores"]

AT_ONCE = 1 << 20  # numbers of ``tanh(q_i + k_j)`` that are held at a time


def additive_scores(q: Tensor, k: Tensor, weight: Tensor) -> Tensor:
    """``e_ij = w . tanh(q_i + k_j)`` for every query and key.

    Args:
        q: (B, H, Tq, n), k: (B, H, Tk, n): projected already.
        weight: (n,), the score vector.

    Returns:
        (B, H, Tq, Tk), float32 at least. The (Tq, Tk, n) numbers under the tanh are formed some at a time, forward and
        backward.

    Raises TypeError and ValueError for tensors that do not fit. Cost B H Tq Tk n tanh. (Bahdanau, Cho, Bengio 2014,
    arXiv:1409.0473, appendix A.1.2.)

    >>> additive_scores(torch.zeros(1, 1, 2, 3), torch.zeros(1, 1, 4, 3), torch.ones(3)).shape
    torch.Size([1, 1, 2, 4])
    """
    for name, x in (("q", q), ("k", k), ("weight", weight)):
        is_dense(name, x)
        is_number_type(name, x)
    if q.ndim != 4 or k.ndim != 4 or q.shape[:2] != k.shape[:2] or q.shape[3] != k.shape[3]:
        raise ValueError(f"k: expected (B, H, Tk, n) for q (B, H, Tq, n), got {describe(q)} and {describe(k)}")
    if weight.shape != q.shape[3:]:
        raise ValueError(f"weight: expected ({q.shape[3]},), got {describe(weight)}")
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    q, k, weight = q.to(dtype), k.to(dtype), weight.to(dtype)
    if may_be_transformed() or torch.compiler.is_compiling():
        return _plain(q, k, weight)
    found: Tensor = _Scores.apply(q, k, weight)  # type: ignore[no-untyped-call]
    return found


def attend_by_scores(scores: Tensor, v: Tensor, **options: Any) -> Tensor:
    """Softmax attention over scores (B, H, Tq, Tk) that come from elsewhere; mask, dropout_p, … as `attention`."""
    q, k, bias = _empty(scores, v)
    found: Tensor = attention(q, k, v, bias=bias, scale=1.0, **options)
    return found


def weights_of_scores(scores: Tensor, v: Tensor, **options: Any) -> Tensor:
    """The weights (B, H, Tq, Tk) that `attend_by_scores` mixes `v` with."""
    q, k, bias = _empty(scores, v)
    return attention_weights(q, k, v, bias=bias, scale=1.0, **options)[1]


def additive_attention(q: Tensor, k: Tensor, v: Tensor, weight: Tensor, **options: Any) -> Tensor:
    """Additive attention, ``y_i = sum_j softmax_j(w . tanh(q_i + k_j)) v_j``.

    Arguments as `additive_scores`; v is (B, H, Tk, Dv); mask, dropout_p, q_start as in `regard.attention`. A row that
    may attend to nothing gives 0. (Bahdanau, Cho, Bengio 2014, arXiv:1409.0473.)

    >>> q = torch.randn(2, 1, 5, 8)
    >>> additive_attention(q, q, torch.randn(2, 1, 5, 3), torch.randn(8)).shape
    torch.Size([2, 1, 5, 3])
    """
    return attend_by_scores(additive_scores(q, k, weight), v, **options)


def _empty(scores: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Dense]:
    """Queries and keys of no channels, whose products are 0, and the scores as a bias."""
    batch, heads, q_len, k_len = scores.shape
    return v.new_zeros(batch, heads, q_len, 0), v.new_zeros(batch, heads, k_len, 0), Dense(scores)


def _plain(q: Tensor, k: Tensor, weight: Tensor) -> Tensor:
    return torch.tanh(q.unsqueeze(3) + k.unsqueeze(2)) @ weight


def _rows(q: Tensor, k: Tensor) -> Iterator[slice]:
    step = max(AT_ONCE // max(q.shape[0] * q.shape[1] * k.shape[2] * q.shape[3], 1), 1)
    for first in range(0, q.shape[2], step):
        yield slice(first, first + step)


class _Scores(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(q, k, weight)
        out = q.new_empty(*q.shape[:3], k.shape[2])
        for rows in _rows(q, k):
            out[:, :, rows] = _plain(q[:, :, rows], k, weight)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, weight = ctx.saved_tensors
        if torch.is_grad_enabled() or is_batched(grads):
            with torch.enable_grad():
                return recorded_gradients(
                    lambda x: [_plain(*x)],  # type: ignore[arg-type]
                    (q, k, weight),
                    grads,
                    ctx.needs_input_grad,
                )
        d_q, d_k, d_weight = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(weight)
        for rows in _rows(q, k):
            bent = torch.tanh(q[:, :, rows].unsqueeze(3) + k.unsqueeze(2))
            d = grads[0][:, :, rows].unsqueeze(-1)
            d_weight += (bent * d).flatten(0, -2).sum(0)
            d_sum = bent.square_().neg_().add_(1).mul_(d).mul_(weight)
            d_q[:, :, rows] = d_sum.sum(3)
            d_k += d_sum.sum(2)
        return d_q, d_k, d_weight
