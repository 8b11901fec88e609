"""GAT and GATv2: attention over the neighbours in a graph by sums, at the cost of the edges."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.mixers.graph_layer import GraphLayer, GraphOptions, Nodes
from regard.ops.edges import edge_softmax, edge_sum

__all__ = ["GraphAttention", "GraphAttentionV2"]


class _Additive(GraphLayer):
    """A layer whose values are one projection of the sources, with weights from a nonlinear function of sums."""

    def forward(self, x: Nodes, edges: Tensor, features: Tensor | None = None) -> Tensor:
        """What every target receives (N, out_dim)."""
        source, target, edges, features = self._call(x, edges, features)
        values, weights = self._weights(source, target, edges, features)
        return self._joined(edge_sum(self._dropped(weights), values, edges, len(target)), target)

    def edge_weights(self, x: Nodes, edges: Tensor, features: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(the edges used (2, E'), self loops last, and their weights (E', H))."""
        source, target, edges, features = self._call(x, edges, features)
        return edges, self._weights(source, target, edges, features)[1]

    def _weights(self, source: Tensor, target: Tensor, edges: Tensor, features: Tensor | None) -> tuple[Tensor, Tensor]:
        """(values of the sources, weights of the edges)."""
        raise NotImplementedError


class GraphAttention(_Additive):
    """GAT: a score for the source and one for the target, the same ranking of sources for every target.

    ``w_ij = softmax_i(leaky_relu(a_s . W x_j + a_t . W x_i + a_e . W_e e_ij))``,  ``y_i = ||_h sum_j w_ij W x_j``

    Args:
        dim: width of the nodes; (sources, targets) for two kinds, each with a projection of its own.
        head_dim: channels of a head; the output has ``heads * head_dim`` (``head_dim`` where heads are averaged).
        heads: how many.
        edge_dim: width of the edges' features, which count in the scores alone; None for none.
        options: `GraphOptions`.

    Raises ValueError and TypeError for sizes and tensors that do not fit. Cost O(N dim width + E width). (Veličković et
    al. 2018, arXiv:1710.10903, equations 1 to 6.)

    >>> layer = GraphAttention(16, 8, heads=4)
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
        options: GraphOptions | None = None,
    ) -> None:
        super().__init__(dim, head_dim, heads, edge_dim, options)
        self.proj = nn.Linear(self.source_dim, self.width, bias=False)
        self.target_proj = nn.Linear(self.target_dim, self.width, bias=False) if isinstance(dim, tuple) else None
        self.source_score = nn.Parameter(torch.empty(self.heads, self.head_dim))
        self.target_score = nn.Parameter(torch.empty(self.heads, self.head_dim))
        self.edge_proj = None if self.edge_dim is None else nn.Linear(self.edge_dim, self.width, bias=False)
        self.edge_score = None if self.edge_dim is None else nn.Parameter(torch.empty(self.heads, self.head_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Starts the layer's own parameters anew; its parts have the same method."""
        for score in (self.source_score, self.target_score, self.edge_score):
            if score is not None:
                nn.init.xavier_uniform_(score)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def _weights(self, source: Tensor, target: Tensor, edges: Tensor, features: Tensor | None) -> tuple[Tensor, Tensor]:
        values = self._heads(self.proj(source))
        own = self._heads((self.proj if self.target_proj is None else self.target_proj)(target))
        scores = (values * self.source_score).sum(-1)[edges[0]] + (own * self.target_score).sum(-1)[edges[1]]
        if self.edge_proj is not None and self.edge_score is not None:
            scores = scores + (self._heads(self.edge_proj(features)) * self.edge_score).sum(-1)
        return values, edge_softmax(F.leaky_relu(scores, self.options.slope), edges[1], len(target))


class GraphAttentionV2(_Additive):
    """GATv2: the nonlinearity stands before the score vector, so each target ranks its sources in its own way.

    ``w_ij = softmax_i(a . leaky_relu(W_t x_i + W_s x_j + W_e e_ij))``,  ``y_i = ||_h sum_j w_ij W_s x_j``

    Arguments, shapes and errors as `GraphAttention`; `shared` uses one projection for both sides. Cost O(N dim width +
    E width). (Brody, Alon, Yahav 2021, arXiv:2105.14491, equation 7.)

    >>> layer = GraphAttentionV2(16, 8, heads=4, edge_dim=3)
    >>> layer(torch.randn(5, 16), torch.tensor([[0, 1, 2], [1, 1, 3]]), torch.randn(3, 3)).shape
    torch.Size([5, 32])
    """

    def __init__(
        self,
        dim: int | tuple[int, int],
        head_dim: int,
        heads: int = 1,
        *,
        edge_dim: int | None = None,
        shared: bool = False,
        options: GraphOptions | None = None,
    ) -> None:
        super().__init__(dim, head_dim, heads, edge_dim, options)
        if shared and self.source_dim != self.target_dim:
            raise ValueError(f"shared: expected one width of sources and targets, got {dim}")
        bias = self.options.bias
        self.proj = nn.Linear(self.source_dim, self.width, bias=bias)
        self.target_proj = None if shared else nn.Linear(self.target_dim, self.width, bias=bias)
        self.score = nn.Parameter(torch.empty(self.heads, self.head_dim))
        self.edge_proj = None if self.edge_dim is None else nn.Linear(self.edge_dim, self.width, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Starts the layer's own parameters anew; its parts have the same method."""
        nn.init.xavier_uniform_(self.score)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def _weights(self, source: Tensor, target: Tensor, edges: Tensor, features: Tensor | None) -> tuple[Tensor, Tensor]:
        values = self._heads(self.proj(source))
        own = self._heads((self.proj if self.target_proj is None else self.target_proj)(target))
        sums = values[edges[0]] + own[edges[1]]
        if self.edge_proj is not None:
            sums = sums + self._heads(self.edge_proj(features))
        scores = (F.leaky_relu(sums, self.options.slope) * self.score).sum(-1)
        return values, edge_softmax(scores, edges[1], len(target))
