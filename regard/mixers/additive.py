"""Bahdanau's additive attention over an encoder's states.

    e_ij = w . tanh(W_q s_i + W_k h_j),   y_i = sum_j softmax_j(e_ij) h_j

In the paper the decoder's *previous* state asks, and what it gets enters the next step of its recurrence.
Bahdanau, Cho, Bengio 2014, arXiv:1409.0473.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from regard.checks import whole
from regard.mixers.base import Record
from regard.mixers.scored import ScoredCrossAttention
from regard.ops.additive import additive_scores

__all__ = ["AdditiveAttention", "records"]


class AdditiveAttention(ScoredCrossAttention):
    """Additive (Bahdanau) attention over a context, ``y_i = sum_j softmax_j(w . tanh(W_q x_i + W_k c_j)) c_j``.

    Args:
        dim: width of the tokens that ask, such as a decoder's states.
        context_dim: width of the context's tokens and of the output; `dim` by default.
        hidden: width under the tanh; `dim` by default.
        bias: biases of both projections (the paper has none).
        out_dim: width of a linear map after it, with a bias; None for none.

    Parameters: ``q_proj k_proj score``, ``o_proj``. The score vector starts at 0, so that a new layer averages, as in
    the paper. With a cache the context is given once. Raises ValueError and TypeError for sizes and tensors that do not
    fit. Cost T Tk hidden tanh and 2 T Tk context_dim FLOPs; the cache holds (hidden + context_dim) Tk numbers.
    (Bahdanau, Cho, Bengio 2014, arXiv:1409.0473, appendix A.1.2 and B.1.)

    >>> layer = AdditiveAttention(16, context_dim=12)
    >>> layer(torch.randn(2, 5, 16), torch.randn(2, 9, 12)).shape
    torch.Size([2, 5, 12])
    """

    def __init__(
        self,
        dim: int,
        *,
        context_dim: int | None = None,
        hidden: int | None = None,
        bias: bool = False,
        out_dim: int | None = None,
    ) -> None:
        super().__init__(dim, context_dim, dim if hidden is None else whole("hidden", hidden, 1))
        self.q_proj = nn.Linear(self.dim, self.key_dim, bias=bias)
        self.k_proj = nn.Linear(self.context_dim, self.key_dim, bias=bias)
        self.score = nn.Parameter(torch.empty(self.key_dim))
        self.o_proj = None if out_dim is None else nn.Linear(self.context_dim, whole("out_dim", out_dim, 1))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Starts the layer's own parameters anew; its parts have the same method."""
        nn.init.zeros_(self.score)

    def queries(self, x: Tensor) -> Tensor:
        asked: Tensor = self.q_proj(x)
        return asked

    def keys(self, context: Tensor) -> Tensor:
        keys: Tensor = self.k_proj(context)
        return keys

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return additive_scores(q, k.to(q.dtype), self.score)

    def finish(self, mixed: Tensor, x: Tensor) -> Tensor:
        return mixed if self.o_proj is None else self.o_proj(mixed)

    def label(self) -> str:
        """The layer in a few words."""
        return f"additive attention over a context, {self.key_dim} channels"


records = (
    Record(
        name="additive",
        summary="Bahdanau's additive attention over a context: scores by a tanh of sums",
        source="Bahdanau, Cho and Bengio 2014, arXiv:1409.0473",
        build=lambda dim, heads: AdditiveAttention(dim, context_dim=dim + 4, hidden=2 * dim, out_dim=dim),
    ),
)
