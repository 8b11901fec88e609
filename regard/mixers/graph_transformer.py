"""Graph transformers: dot-product attention over the neighbours in a graph, at the cost of the edges."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn

from regard.checks import describe, whole
from regard.mixers.base import check_dtype
from regard.mixers.graph_layer import GraphLayer, GraphOptions, Nodes
from regard.ops.edges import check_edges, edge_attention, edge_products, edge_softmax, edge_sum

__all__ = ["EdgeGraphTransformer", "GraphTransformer"]


class GraphTransformer(GraphLayer):
    """Dot-product attention over neighbours, with edge features in keys and values, and a skip that may be gated.

    ``w_ij = softmax_i(q_i . (k_j + W_e e_ij) / sqrt(D))``,  ``y_i = ||_h sum_j w_ij (v_j + W_e e_ij)``, and the output
    ``y + W x_i``, or ``b W x_i + (1 - b) y`` with ``b = sigmoid(w . [y, W x_i, y - W x_i])``

    Arguments, shapes and errors as `GraphAttention`; it has no self loops of its own by default. `skip`: "add", "gate"
    or None for none. Cost O(N dim width + E width). (Shi et al. 2020, UniMP, arXiv:2009.03509, equations 3 to 6.)

    >>> layer = GraphTransformer(16, 8, heads=4, skip="gate")
    >>> layer(torch.randn(5, 16), torch.tensor([[0, 1, 2], [1, 1, 3]])).shape
    torch.Size([5, 32])
    """

    def __init__(
        self,
        dim: int | tuple[int, int],
        head_dim: int,
        heads: int = 1,
        *,
        edge_dim: int | None = None,
        skip: Literal["add", "gate"] | None = "add",
        options: GraphOptions | None = None,
    ) -> None:
        own = GraphOptions(self_loops=False) if options is None else options
        super().__init__(dim, head_dim, heads, edge_dim, own)
        if skip not in ("add", "gate", None):
            raise ValueError(f"skip: expected 'add', 'gate' or None, got {skip!r}")
        bias = own.bias
        self.bias = None  # the projections have them
        self.q_proj = nn.Linear(self.target_dim, self.width, bias=bias)
        self.k_proj = nn.Linear(self.source_dim, self.width, bias=bias)
        self.v_proj = nn.Linear(self.source_dim, self.width, bias=bias)
        self.edge_proj = None if self.edge_dim is None else nn.Linear(self.edge_dim, self.width, bias=False)
        self.skip_proj = None if skip is None else nn.Linear(self.target_dim, self.out_dim, bias=bias)
        self.gate_proj = nn.Linear(3 * self.out_dim, 1, bias=False) if skip == "gate" else None

    def forward(self, x: Nodes, edges: Tensor, features: Tensor | None = None) -> Tensor:
        """What every target receives, with its skip (N, out_dim)."""
        source, target, edges, features = self._call(x, edges, features)
        v = self._heads(self.v_proj(source))
        if self.edge_proj is None and not (self.training and self.options.dropout):
            q, k = self._heads(self.q_proj(target)), self._heads(self.k_proj(source))
            received = edge_attention(q, k, v, edges)
        else:
            weights, e = self._weights(source, target, edges, features)
            weights = self._dropped(weights)
            received = edge_sum(weights, v, edges, len(target))
            if e is not None:
                numbered = torch.stack([torch.arange(len(e), device=edges.device), edges[1]])
                received = received + edge_sum(weights, e, numbered, len(target))
        y = self._joined(received, target)
        if self.skip_proj is None:
            return y
        skip = self.skip_proj(target)
        if self.gate_proj is None:
            return torch.add(y, skip)
        gate = torch.sigmoid(self.gate_proj(torch.cat([y, skip, y - skip], -1)))
        return torch.lerp(y, skip, gate)

    def edge_weights(self, x: Nodes, edges: Tensor, features: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(the edges used (2, E'), and their weights (E', H))."""
        source, target, edges, features = self._call(x, edges, features)
        return edges, self._weights(source, target, edges, features)[0]

    def _weights(
        self, source: Tensor, target: Tensor, edges: Tensor, features: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """(the weights of edges, their projected features)."""
        q, k = self._heads(self.q_proj(target)), self._heads(self.k_proj(source))
        e = None if self.edge_proj is None else self._heads(self.edge_proj(features))
        scores = edge_products(q, k, edges)
        if e is not None:
            scores = scores + (q[edges[1]] * e).sum(-1)
        return edge_softmax(scores * self.head_dim**-0.5, edges[1], len(target)).to(q.dtype), e


class EdgeGraphTransformer(nn.Module):
    """The graph transformer that carries edges along: nodes and edges both leave it anew.

    ``s_ij = (q_i * k_j / sqrt(D)) * (E e_ij)`` per channel,  ``p_ij = exp(sum of s_ij, clipped to ±5)``,
    ``y_i = O_h ||_h sum_j p_ij v_j / (sum_j p_ij + 1e-6)``,  ``e'_ij = O_e s_ij``

    Args:
        dim: width of nodes and edges, a multiple of `heads`.
        heads: how many.

    Raises ValueError and TypeError for sizes and tensors that do not fit. Residuals, norms and the feed-forward parts
    are a block's. (Dwivedi and Bresson 2020, arXiv:2012.09699, equations 9 to 12; clipping and 1e-6 as in their code.)

    >>> layer = EdgeGraphTransformer(16, heads=4)
    >>> y, e = layer(torch.randn(5, 16), torch.tensor([[0, 1, 2], [1, 1, 3]]), torch.randn(3, 16))
    >>> y.shape, e.shape
    (torch.Size([5, 16]), torch.Size([3, 16]))
    """

    clip, eps = 5.0, 1e-6

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.dim, self.heads = whole("dim", dim, 1), whole("heads", heads, 1)
        if dim % heads:
            raise ValueError(f"heads: expected a divisor of dim={dim}, got {heads}")
        self.q_proj, self.k_proj = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.v_proj, self.edge_proj = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.o_proj, self.edge_o_proj = nn.Linear(dim, dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor, edges: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """(nodes (N, dim), edges (E, dim))."""
        if x.ndim != 2 or x.shape[1] != self.dim:
            raise ValueError(f"x: expected (N, {self.dim}), got {describe(x)}")
        check_dtype(self, "x", x)
        check_edges(edges, len(x), len(x))
        if features.shape != (edges.shape[1], self.dim):
            raise ValueError(f"features: expected ({edges.shape[1]}, {self.dim}), got {describe(features)}")
        projected = self.q_proj(x), self.k_proj(x), self.v_proj(x), self.edge_proj(features)
        q, k, v, e = (y.view(len(y), self.heads, -1) for y in projected)
        per_channel = q[edges[1]] * k[edges[0]] / math.sqrt(q.shape[-1]) * e
        powers = per_channel.sum(-1).clamp(-self.clip, self.clip).exp()
        ones = torch.ones(edges.shape[1], self.heads, 1, dtype=powers.dtype, device=x.device)
        numbered = torch.stack([torch.arange(edges.shape[1], device=edges.device), edges[1]])
        total = edge_sum(powers, ones, numbered, len(x)) + self.eps
        received = edge_sum(powers, v, edges, len(x)) / total
        return self.o_proj(received.flatten(1)), self.edge_o_proj(per_channel.flatten(1))
