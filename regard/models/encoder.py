"""One encoder for every family: an embedding, blocks from factories, and what may stand behind them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, nn

from regard.models.blocks import Embedding
from regard.models.cache import check_ids
from regard.models.model import Model
from regard.tokens import resolve_tokens

__all__ = ["Encoder", "FirstTokenPooler"]


class FirstTokenPooler(nn.Module):
    """``tanh(W x_0 + b)``: one vector a row from its first token (Devlin et al. 2018, arXiv:1810.04805)."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dense = nn.Linear(dim, dim)

    def forward(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.dense(hidden[:, 0]).tanh()
        return out


class Encoder(Model):
    """A stack that reads a whole text at once: ``norm(block_n(... block_1(embedding(ids))))``.

    Args:
        embedding: ids, positions and token types to ``(B, T, dim)``.
        layers: one factory a layer, called with the layer's number.
        norm: the last norm, or ``None``.
        pooler: from the last hidden state to one vector a row, or ``None``; see `pool`.
    """

    def __init__(
        self,
        embedding: Embedding,
        layers: Sequence[Callable[[int], nn.Module]],
        norm: nn.Module | None = None,
        pooler: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.embedding = embedding
        self.layers = nn.ModuleList([make(i) for i, make in enumerate(layers)])
        self.norm = norm
        self.pooler = pooler

    def forward(
        self,
        ids: Tensor,
        *,
        types: Tensor | None = None,
        keep: Tensor | None = None,
        positions: Tensor | None = None,
        segments: Tensor | None = None,
    ) -> Tensor:
        """The last hidden state ``(B, T, dim)`` of ``ids (B, T)``.

        Args:
            types: ``(B, T)``, the token types; default all 0.
            keep: ``(B, T)`` bool, which tokens are real; the rows of the others mean nothing.
            positions: ``(B, T)``, default the running count of kept tokens from 0 in each segment.
            segments: ``(B, T)``, non-decreasing: documents packed into one row do not see each other.

        Raises:
            ValueError, TypeError: for a tensor of a wrong shape or dtype, or an id outside the vocabulary.
        """
        batch, tokens = check_ids(ids)
        layout = resolve_tokens(batch, tokens, ids.device, keep=keep, positions=positions, segments=segments)
        x: Tensor = self.embedding(ids, layout.positions, types)
        for layer in self.layers:
            x = layer(x, keep=layout.keep, positions=layout.positions, segments=segments)
        return x if self.norm is None else self.norm(x)

    def pool(self, hidden: Tensor) -> Tensor:
        """One vector a row, ``(B, dim)``, from the last hidden state.

        Raises:
            ValueError: where the model has no pooler.
        """
        if self.pooler is None:
            raise ValueError("pooler: expected an encoder that was built or loaded with one, got none")
        out: Tensor = self.pooler(hidden)
        return out
