"""What the graph layers share: options, self loops, the checks of a call, heads and residuals.

Nodes are rows (N, dim), without a batch: several graphs are one with their nodes numbered through. Edges are int64
(2, E), row 0 the sources j, row 1 the targets i, as PyTorch Geometric's ``edge_index``; edge features (E, edge_dim).
Node i attends over the sources of the edges that point to it. An edge that is there twice counts twice; a node without
any receives 0. `regard.ops.edges` has the softmax and the sums.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.checks import describe, is_dense, is_part, real, whole
from regard.mixers.base import check_dtype
from regard.ops.edges import check_edges

__all__ = ["GraphLayer", "GraphOptions", "Nodes", "edge_matrix", "with_self_loops"]

Nodes = Tensor | tuple[Tensor, Tensor]  # the same nodes on both sides, or (sources, targets)
Fill = float | Literal["mean", "add", "min", "max", "mul"]


@dataclass(frozen=True)
class GraphOptions:
    """What a graph layer does beside its scores.

    Args:
        out: "concat" puts the heads' outputs side by side, "mean" averages them.
        bias: biases of the output (and, in GATv2 and the graph transformer, of the projections).
        self_loops: every node is its own neighbour; loops that are there are taken away first.
        fill: an edge feature of those loops: a number, or what "mean", "add", "min", "max" or "mul" makes of the edges
            that point to the node.
        residual: adds a linear map of the target.
        slope: of the leaky ReLU for negative numbers.
        dropout: share of the weights dropped in training.
    """

    out: Literal["concat", "mean"] = "concat"
    bias: bool = True
    self_loops: bool = True
    fill: Fill = "mean"
    residual: bool = False
    slope: float = 0.2
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if self.out not in ("concat", "mean"):
            raise ValueError(f"out: expected 'concat' or 'mean', got {self.out!r}")
        if isinstance(self.fill, str) and self.fill not in ("mean", "add", "min", "max", "mul"):
            raise ValueError(f"fill: expected a number or 'mean', 'add', 'min', 'max' or 'mul', got {self.fill!r}")
        if not 0 <= real("dropout", self.dropout, "a number in [0, 1]") <= 1:
            raise ValueError(f"dropout: expected a number in [0, 1], got {self.dropout}")


def with_self_loops(
    edges: Tensor, features: Tensor | None, sources: int, targets: int, fill: Fill = "mean"
) -> tuple[Tensor, Tensor | None]:
    """Edges (and their features) without self loops, and then one for each node that is on both sides.

    >>> with_self_loops(torch.tensor([[0, 1], [1, 1]]), None, 2, 2)[0].tolist()
    [[0, 0, 1], [1, 0, 1]]
    """
    others = edges[0] != edges[1]
    loops = torch.arange(min(sources, targets), device=edges.device)
    kept = edges[:, others]
    found = torch.cat([kept, loops.expand(2, -1)], 1)
    if features is None:
        return found, None
    features = features[others]
    own = features.new_zeros(targets, features.shape[1])
    if isinstance(fill, str):
        how = {"add": "sum", "min": "amin", "max": "amax", "mul": "prod"}.get(fill, fill)
        index = kept[1].unsqueeze(1).expand_as(features)
        own = own.scatter_reduce(0, index, features, how, include_self=False)
    else:
        own = own + fill
    return found, torch.cat([features, own[: len(loops)]])


def edge_matrix(weights: Tensor, edges: Tensor, sources: int, targets: int) -> Tensor:
    """Weights of edges (E, H) as dense matrices (H, targets, sources), to look at; repeated edges add up."""
    dense = weights.new_zeros(weights.shape[1], targets * sources)
    return dense.index_add(1, edges[1] * sources + edges[0], weights.T).view(-1, targets, sources)


class GraphLayer(nn.Module):
    """Projections of sources and targets, an output of heads, and the checks of a call."""

    def __init__(
        self, dim: int | tuple[int, int], head_dim: int, heads: int, edge_dim: int | None, options: GraphOptions | None
    ) -> None:
        super().__init__()
        pair = dim if isinstance(dim, tuple) else (dim, dim)
        self.source_dim, self.target_dim = (whole("dim", one, 1) for one in pair)
        self.head_dim, self.heads = whole("head_dim", head_dim, 1), whole("heads", heads, 1)
        self.edge_dim = None if edge_dim is None else whole("edge_dim", edge_dim, 1)
        is_part("options", options, GraphOptions)
        self.options = options or GraphOptions()
        self.width = self.heads * self.head_dim
        self.out_dim = self.width if self.options.out == "concat" else self.head_dim
        self.residual_proj = nn.Linear(self.target_dim, self.out_dim, bias=False) if self.options.residual else None
        self.bias = nn.Parameter(torch.empty(self.out_dim)) if self.options.bias else None

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], self.heads, self.head_dim)

    def _call(self, x: Nodes, edges: Tensor, features: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """(sources, targets, edges, features), checked, self loops included."""
        source, target = x if isinstance(x, tuple) else (x, x)
        for name, one, dim in (("sources", source, self.source_dim), ("targets", target, self.target_dim)):
            if not isinstance(one, Tensor) or one.ndim != 2 or one.shape[1] != dim:
                raise ValueError(f"x: expected {name} (N, {dim}), got {describe(one)}")
            is_dense("x", one)
            check_dtype(self, "x", one)
        check_edges(edges, source.shape[0], target.shape[0])
        if (features is None) != (self.edge_dim is None):
            wanted = "none" if self.edge_dim is None else f"(E, {self.edge_dim})"
            raise ValueError(f"features: expected {wanted}, got {'none' if features is None else describe(features)}")
        if features is not None and features.shape != (edges.shape[1], self.edge_dim):
            raise ValueError(f"features: expected ({edges.shape[1]}, {self.edge_dim}), got {describe(features)}")
        if self.options.self_loops:
            edges, features = with_self_loops(edges, features, len(source), len(target), self.options.fill)
        return source, target, edges, features

    def _dropped(self, weights: Tensor) -> Tensor:
        return F.dropout(weights, self.options.dropout, self.training)

    def _joined(self, received: Tensor, target: Tensor) -> Tensor:
        """The heads (N, H, D) together, with residual and bias."""
        y = received.flatten(1) if self.options.out == "concat" else received.mean(1)
        if self.residual_proj is not None:
            y = y + self.residual_proj(target)
        return y if self.bias is None else y + self.bias

    def extra_repr(self) -> str:
        return f"{self.source_dim}, {self.heads} heads of {self.head_dim}, edge_dim={self.edge_dim}, {self.options}"
