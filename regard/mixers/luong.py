"""Luong's attention over an encoder's states: three scores, over all of them or near a position.

    dot: h_t . c_s,   general: h_t . W c_s,   concat: w . tanh(W_h h_t + W_c c_s),   a_t(s) = softmax_s(score)
    y_t = tanh(W_o [sum_s a_t(s) c_s ; h_t])

Local attention reads the positions within D of p_t only: p_t = t ("monotonic"), or p_t = S sigmoid(v . tanh(W_p h_t))
("predictive"), whose weights are multiplied by exp(-(s - p_t)^2 / (2 (D/2)^2)) and not normalised again.
Luong, Pham, Manning 2015, arXiv:1508.04025, equations 5 to 10.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from regard.caches import KVView
from regard.checks import is_part, whole
from regard.masks import Band, Dense, Mask
from regard.mixers.base import Record
from regard.mixers.scored import ScoredCrossAttention
from regard.ops.additive import additive_scores

__all__ = ["LocalAlignment", "LuongAttention", "records"]


@dataclass(frozen=True)
class LocalAlignment:
    """Reading within `reach` positions of a place: the query's own number ("monotonic") or a predicted one."""

    reach: int
    kind: Literal["monotonic", "predictive"] = "predictive"

    def __post_init__(self) -> None:
        whole("reach", self.reach, 1)
        if self.kind not in ("monotonic", "predictive"):
            raise ValueError(f"kind: expected 'monotonic' or 'predictive', got {self.kind!r}")


class LuongAttention(ScoredCrossAttention):
    """Multiplicative (Luong) attention over a context, with its attentional state ``tanh(W_o [c_t ; h_t])``.

    Args:
        dim: width of the tokens that ask, such as a decoder's current states.
        context_dim: width of the context's tokens; `dim` by default.
        score: "dot" (widths must agree), "general" or "concat". None is scaled by ``D ** -0.5``.
        local: `LocalAlignment`, or None to read all of the context.
        bias: a bias of the query's projection in "concat".
        out_dim: width of the output; `dim` by default.
        state: whether the attentional state is formed; without it the output is the context vector.

    Parameters: ``q_proj k_proj score_vector`` as the score needs them, ``place_proj place_vector``, ``o_proj``. In the
    paper the decoder's *current* state asks. Positions count from 0; p_t is not rounded; S is the number of the row's
    kept tokens; a query near which there is none gets 0. With a cache the context is given once. Raises ValueError and
    TypeError for sizes and tensors that do not fit. Cost 2 T Tk (dim + context_dim) FLOPs; "concat" T Tk dim tanh.

    >>> layer = LuongAttention(16, context_dim=12, local=LocalAlignment(3))
    >>> layer(torch.randn(2, 5, 16), torch.randn(2, 9, 12)).shape
    torch.Size([2, 5, 16])
    """

    def __init__(
        self,
        dim: int,
        *,
        context_dim: int | None = None,
        score: Literal["dot", "general", "concat"] = "general",
        local: LocalAlignment | None = None,
        bias: bool = False,
        out_dim: int | None = None,
        state: bool = True,
    ) -> None:
        if score not in ("dot", "general", "concat"):
            raise ValueError(f"score: expected 'dot', 'general' or 'concat', got {score!r}")
        is_part("local", local, LocalAlignment)
        source = dim if context_dim is None else context_dim
        if score == "dot" and source != dim:
            raise ValueError(f"context_dim: expected dim={dim} with the score 'dot', got {source}")
        super().__init__(dim, context_dim, dim if score == "concat" else source)
        self.score, self.local = score, local
        concat = score == "concat"
        self.q_proj = None if score == "dot" else nn.Linear(dim, self.key_dim, bias=bias and concat)
        self.k_proj = nn.Linear(self.context_dim, self.key_dim, bias=False) if concat else None
        self.score_vector = nn.Parameter(torch.empty(self.key_dim)) if concat else None
        predicts = local is not None and local.kind == "predictive"
        self.place_proj = nn.Linear(dim, dim, bias=False) if predicts else None
        self.place_vector = nn.Parameter(torch.empty(dim)) if predicts else None
        width = self.context_dim + dim
        self.o_proj = nn.Linear(width, dim if out_dim is None else out_dim, bias=False) if state else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Starts the layer's own parameters anew; its parts have the same method."""
        for vector in (self.score_vector, self.place_vector):
            if vector is not None:
                nn.init.uniform_(vector, -0.1, 0.1)

    def queries(self, x: Tensor) -> Tensor:
        return x if self.q_proj is None else self.q_proj(x)

    def keys(self, context: Tensor) -> Tensor:
        return context if self.k_proj is None else self.k_proj(context)

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        if self.score_vector is not None:
            return additive_scores(q, k.to(q.dtype), self.score_vector)
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        return q.to(wide) @ k.to(wide).mT

    def pattern(self, x: Tensor, view: KVView, start: int) -> tuple[Mask | None, Tensor | None]:
        if self.local is None:
            return None, None
        reach = self.local.reach
        if self.local.kind == "monotonic":
            return Band(reach, reach), None
        place = self.places(x, view)[:, None, :, None]
        distance = torch.arange(view.k.shape[2], device=x.device) - place  # (B, 1, T, Tk)
        return Dense(distance.abs() <= reach), torch.exp(-2 * (distance / reach) ** 2)

    def places(self, x: Tensor, view: KVView) -> Tensor:
        """p_t (B, T): the positions that predictive alignment reads around."""
        assert self.place_proj is not None and self.place_vector is not None
        batch, _, tokens, _ = view.k.shape
        length = view.k.new_full((batch,), tokens) if view.keep is None else view.keep.sum(1)
        share = torch.sigmoid((torch.tanh(self.place_proj(x)) * self.place_vector).sum(-1))
        return length[:, None] * (share.double() if x.dtype == torch.float64 else share.float())

    def finish(self, mixed: Tensor, x: Tensor) -> Tensor:
        return mixed if self.o_proj is None else torch.tanh(self.o_proj(torch.cat([mixed, x], -1)))

    def label(self) -> str:
        """The layer in a few words."""
        near = "" if self.local is None else f", within {self.local.reach} of a {self.local.kind} place"
        return f"Luong attention over a context, score {self.score}{near}"


records = (
    Record(
        name="luong",
        summary="Luong's attention over a context: bilinear scores, an attentional state",
        source="Luong, Pham and Manning 2015, arXiv:1508.04025",
        build=lambda dim, heads: LuongAttention(dim, context_dim=dim + 4),
    ),
    Record(
        name="luong_local",
        summary="Luong's local attention: near a predicted place, weights fading with the distance",
        source="Luong, Pham and Manning 2015, arXiv:1508.04025",
        build=lambda dim, heads: LuongAttention(
            dim, context_dim=dim + 4, score="concat", local=LocalAlignment(3), bias=True
        ),
    ),
)
