"""Attention along the edges of a graph: a softmax over each target's incoming edges, in memory of their number.

Edges are an integer tensor (2, E), row 0 the sources j, row 1 the targets i, in any order; an edge that is there twice
counts twice, and a target without edges gets 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from regard.backends.call import is_batched, may_be_transformed, recorded_gradients
from regard.checks import describe, is_dense, is_number_type, scale_of, whole
from regard.coordinates import can_read

__all__ = ["check_edges", "edge_attention", "edge_softmax", "edge_sum"]

AT_ONCE = 1 << 22  # numbers of messages that are held at a time


def edge_softmax(scores: Tensor, targets: Tensor, nodes: int) -> Tensor:
    """Weights of edges: ``w_e = exp(s_e) / sum_{f into the same target} exp(s_f)``, per head.

    Args:
        scores: (E, …), any further axes (heads).
        targets: int64 (E,), each from 0 to `nodes` - 1.
        nodes: how many targets there are.

    Returns:
        (E, …) in the dtype of the scores, computed in float32 at least. An edge whose score is -inf weighs 0; so do all
        edges of a target that has no others.

    Raises TypeError and ValueError for tensors of other kinds or shapes. Cost O(E) time and memory.
    (Veličković et al. 2018, arXiv:1710.10903, equation 3.)

    >>> edge_softmax(torch.tensor([[0.0], [0.0], [5.0]]), torch.tensor([1, 1, 0]), 3).flatten().tolist()
    [0.5, 0.5, 1.0]
    """
    is_dense("scores", scores)
    is_number_type("scores", scores)
    whole("nodes", nodes, 0)
    if scores.ndim < 1 or targets.shape != scores.shape[:1]:
        raise ValueError(f"targets: expected one for each of the scores' edges, got {describe(targets)}")
    _check_nodes("targets", targets, nodes)
    wide = scores.to(torch.float64 if scores.dtype == torch.float64 else torch.float32)
    index = _along(targets, wide)
    top = wide.new_full((nodes, *wide.shape[1:]), -torch.inf)
    top = top.scatter_reduce(0, index, wide.detach(), "amax", include_self=True)
    top = torch.where(top == -torch.inf, 0.0, top)
    powers = (wide - top.index_select(0, targets)).exp()
    sums = torch.zeros_like(top).scatter_add(0, index, powers)
    sums = torch.where(sums == 0, 1.0, sums)
    return (powers / sums.index_select(0, targets)).to(scores.dtype)


def edge_sum(weights: Tensor, values: Tensor, edges: Tensor, nodes: int) -> Tensor:
    """What targets receive: ``y_i = sum_{e = (j, i)} w_e v_j``.

    Args:
        weights: (E, H).
        values: (sources, H, D).
        edges: int64 (2, E).
        nodes: how many targets there are.

    Returns:
        (nodes, H, D) in the dtype of the values; sums are float32 at least.

    Raises TypeError and ValueError for tensors of other kinds or shapes. Memory O(E H + nodes H D), forward and
    backward: messages are formed some at a time.

    >>> edge_sum(torch.ones(2, 1), torch.tensor([[[1.0]], [[2.0]]]), torch.tensor([[0, 1], [0, 0]]), 1).tolist()
    [[[3.0]]]
    """
    for name, x in (("weights", weights), ("values", values)):
        is_dense(name, x)
        is_number_type(name, x)
    whole("nodes", nodes, 0)
    if values.ndim != 3 or weights.ndim != 2 or weights.shape[1] != values.shape[1]:
        raise ValueError(
            f"weights: expected (E, H) for values (sources, H, D), got {describe(weights)} and {describe(values)}"
        )
    check_edges(edges, values.shape[0], nodes)
    if edges.shape[1] != weights.shape[0]:
        raise ValueError(f"weights: expected one row for each of {edges.shape[1]} edges, got {describe(weights)}")
    dtype = torch.float64 if values.dtype == torch.float64 else torch.float32
    wide, numbers = weights.to(dtype), values.to(dtype)
    if may_be_transformed() or torch.compiler.is_compiling():
        return _plain_sum(wide, numbers, edges, nodes).to(values.dtype)
    found: Tensor = _Sum.apply(wide, numbers, edges, nodes)  # type: ignore[no-untyped-call]
    return found.to(values.dtype)


def edge_attention(
    q: Tensor, k: Tensor, v: Tensor, edges: Tensor, *, bias: Tensor | None = None, scale: float | None = None
) -> Tensor:
    """Softmax attention of every target over the sources of its edges.

    ``y_i = sum_{e = (j, i)} softmax_e(scale q_i . k_j + bias_e) v_j``: `regard.attention` with the mask
    `regard.masks.Edges`, at the cost of the edges alone; but an edge that is there twice counts twice.

    Args:
        q: (targets, H, Dk); k: (sources, H, Dk); v: (sources, H, Dv).
        edges: int64 (2, E): sources, targets.
        bias: (E, H) or (E, 1), added to the scores; -inf leaves an edge out.
        scale: ``Dk ** -0.5`` by default.

    Returns:
        (targets, H, Dv) in q's dtype, 0 for a target without edges.

    Raises TypeError and ValueError for tensors of other kinds or shapes. Cost O(E H (Dk + Dv)) time; O(E H) memory.

    >>> q = torch.randn(4, 2, 8)
    >>> edge_attention(q, q, q, torch.tensor([[0, 1, 2], [1, 1, 3]])).shape
    torch.Size([4, 2, 8])
    """
    if q.ndim != 3 or k.ndim != 3 or q.shape[1:] != k.shape[1:]:
        raise ValueError(f"k: expected (sources, H, Dk) as q (targets, H, Dk), got {describe(q)} and {describe(k)}")
    if v.ndim != 3 or v.shape[:2] != k.shape[:2]:
        raise ValueError(f"v: expected (sources, H, Dv) for k (sources, H, Dk), got {describe(k)} and {describe(v)}")
    check_edges(edges, k.shape[0], q.shape[0])
    scores = edge_products(q, k, edges) * scale_of(scale, q.shape[2], q.dtype)
    if bias is not None:
        scores = scores + bias
    return edge_sum(edge_softmax(scores, edges[1], q.shape[0]), v, edges, q.shape[0]).to(q.dtype)


def edge_products(q: Tensor, k: Tensor, edges: Tensor) -> Tensor:
    """``q_i . k_j`` of every edge, (E, H), in float32 at least."""
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    wide = q.to(dtype), k.to(dtype)
    if may_be_transformed() or torch.compiler.is_compiling():
        return _plain_products(*wide, edges)
    found: Tensor = _Products.apply(*wide, edges)  # type: ignore[no-untyped-call]
    return found


def check_edges(edges: Tensor, sources: int, targets: int) -> None:
    """Raise unless `edges` are integers (2, E) that name nodes there are."""
    if not isinstance(edges, Tensor) or edges.dtype != torch.int64:
        raise TypeError(f"edges: expected an int64 tensor (2, E), got {describe(edges)}")
    if edges.ndim != 2 or edges.shape[0] != 2:
        raise ValueError(f"edges: expected (2, E), row 0 sources, row 1 targets, got {describe(edges)}")
    _check_nodes("edges: sources", edges[0], sources)
    _check_nodes("edges: targets", edges[1], targets)


def _check_nodes(name: str, index: Tensor, nodes: int) -> None:
    if index.dtype != torch.int64:
        raise TypeError(f"{name}: expected int64, got {describe(index)}")
    if index.numel() and can_read(index):
        low, high = (int(x) for x in index.aminmax())
        if low < 0 or high >= nodes:
            raise ValueError(f"{name}: expected nodes from 0 to {nodes - 1}, got {low if low < 0 else high}")


# ---- messages, some at a time ----------------------------------------------------------------------------------------


def _along(index: Tensor, like: Tensor) -> Tensor:
    """An index of rows for scatter, in the shape of what is scattered."""
    return index.view(-1, *(1,) * (like.ndim - 1)).expand_as(like)


def _plain_sum(weights: Tensor, values: Tensor, edges: Tensor, nodes: int) -> Tensor:
    messages = weights.unsqueeze(-1) * values.index_select(0, edges[0])
    return values.new_zeros(nodes, *values.shape[1:]).index_add(0, edges[1], messages)


def _plain_products(q: Tensor, k: Tensor, edges: Tensor) -> Tensor:
    return (q.index_select(0, edges[1]) * k.index_select(0, edges[0])).sum(-1)


def _parts(edges: Tensor, width: int) -> Iterator[slice]:
    step = max(AT_ONCE // max(width, 1), 1)
    for first in range(0, edges.shape[1], step):
        yield slice(first, first + step)


def _add_rows(to: Tensor, index: Tensor, rows: Tensor) -> None:
    """``to[index] += rows``: flat rows, which scatter_add adds in parallel where its index is expanded."""
    flat = rows.flatten(1)
    to.flatten(1).scatter_add_(0, _along(index, flat), flat)


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weights: Tensor, values: Tensor, edges: Tensor, nodes: int) -> Tensor:
        ctx.save_for_backward(weights, values, edges)
        ctx.nodes = nodes
        out = values.new_zeros(nodes, *values.shape[1:])
        for part in _parts(edges, values[0:1].numel()):
            messages = values.index_select(0, edges[0, part]) * weights[part].unsqueeze(-1)
            _add_rows(out, edges[1, part], messages)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        weights, values, edges = ctx.saved_tensors
        nodes, wanted = ctx.nodes, ctx.needs_input_grad[:2]
        if torch.is_grad_enabled() or is_batched(grads):
            with torch.enable_grad():
                own = recorded_gradients(
                    lambda x: [_plain_sum(x[0], x[1], edges, nodes)],  # type: ignore[arg-type]
                    (weights, values),
                    grads,
                    wanted,
                )
            return *own, None, None
        d_weights = torch.empty_like(weights) if wanted[0] else None
        d_values = torch.zeros_like(values) if wanted[1] else None
        for part in _parts(edges, values[0:1].numel()):
            source, d_out = edges[0, part], grads[0].index_select(0, edges[1, part])
            if d_weights is not None:
                d_weights[part] = (d_out * values.index_select(0, source)).sum(-1)
            if d_values is not None:
                _add_rows(d_values, source, d_out.mul_(weights[part].unsqueeze(-1)))
        return d_weights, d_values, None, None


class _Products(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, edges: Tensor) -> Tensor:
        ctx.save_for_backward(q, k, edges)
        out = q.new_empty(edges.shape[1], q.shape[1])
        for part in _parts(edges, q[0:1].numel()):
            out[part] = _plain_products(q, k, edges[:, part])
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, edges = ctx.saved_tensors
        wanted = ctx.needs_input_grad[:2]
        if torch.is_grad_enabled() or is_batched(grads):
            with torch.enable_grad():
                own = recorded_gradients(
                    lambda x: [_plain_products(x[0], x[1], edges)],  # type: ignore[arg-type]
                    (q, k),
                    grads,
                    wanted,
                )
            return *own, None
        found = [torch.zeros_like(x) if want else None for x, want in zip((q, k), wanted, strict=True)]
        for part in _parts(edges, q[0:1].numel()):
            source, target, d = edges[0, part], edges[1, part], grads[0][part].unsqueeze(-1)
            for grad, index, other in ((found[0], target, k[source]), (found[1], source, q[target])):
                if grad is not None:
                    _add_rows(grad, index, other.mul_(d))
        return *found, None
