"""One encoder for every family: an embedding, blocks from factories, and a pooler where there is one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from regard.checks import describe
from regard.models.blocks import Embedding, tied_table, tokens_of_call
from regard.models.cache import check_ids
from regard.models.masked_words import MaskedWordsHead
from regard.models.model import Model
from regard.tokens import resolve_tokens

__all__ = ["Encoder", "FirstTokenPooler"]


def _takes_global_tokens(layer: nn.Module) -> bool:
    return bool(getattr(getattr(layer, "mixer", layer), "takes_global_tokens", False))


class FirstTokenPooler(nn.Module):
    """``act(W x_0 + b)``: one vector a row from its first token (Devlin et al. 2018, arXiv:1810.04805).

    Args:
        dim: width of the tokens.
        out: width of the vector; that of the tokens by default.
        act: the activation; tanh by default.
    """

    def __init__(self, dim: int, *, out: int | None = None, act: nn.Module | None = None) -> None:
        super().__init__()
        self.dense = nn.Linear(dim, dim if out is None else out)
        self.act = nn.Tanh() if act is None else act

    def forward(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.act(self.dense(hidden[:, 0]))
        return out


class Encoder(Model):
    """A stack that reads all tokens at once: ``norm(block_n(... block_1(embedding(inputs))))``.

    Args:
        embedding: an `Embedding`, from ids, positions and token types to ``(B, T, dim)``; or any other module from the
            inputs alone to ``(B, T, dim)``, such as one that cuts images into patches and adds their positions.
        layers: one factory a layer, called with the layer's number.
        norm: the last norm, or ``None``.
        pooler: from the last hidden state to one vector a row, or ``None``; see `pool`.
        head: from the last hidden state to logits of words, or ``None``; see `logits`.

    >>> import torch
    >>> class Patches(nn.Module):  # squares of 2 by 2 pixels as tokens
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.proj = nn.Conv2d(3, 8, kernel_size=2, stride=2)
    ...     def forward(self, images):
    ...         return self.proj(images).flatten(2).transpose(1, 2)
    >>> Encoder(Patches(), [])(torch.zeros(1, 3, 4, 6)).shape
    torch.Size([1, 6, 8])
    """

    def __init__(
        self,
        embedding: nn.Module,
        layers: Sequence[Callable[[int], nn.Module]],
        norm: nn.Module | None = None,
        pooler: nn.Module | None = None,
        head: MaskedWordsHead | None = None,
    ) -> None:
        super().__init__()
        self.embedding = embedding
        self.layers = nn.ModuleList([make(i) for i, make in enumerate(layers)])
        self.norm = norm
        self.pooler = pooler
        self.head = head

    def forward(
        self,
        inputs: Tensor,
        *,
        types: Tensor | None = None,
        keep: Tensor | None = None,
        positions: Tensor | None = None,
        segments: Tensor | None = None,
        global_tokens: Tensor | None = None,
    ) -> Tensor:
        """The last hidden state ``(B, T, dim)`` of ids ``(B, T)``, or of whatever the embedding takes.

        Args:
            types: ``(B, T)``, the token types; default all 0.
            keep: ``(B, T)`` bool, which tokens are real; the rows of the others mean nothing.
            positions: ``(B, T)``, default the running count of kept tokens from 0 in each segment.
            segments: ``(B, T)``, non-decreasing: documents packed into one row do not see each other.
            global_tokens: ``(B, T)`` bool, which tokens everybody reads and which read everything, for layers that have
                such (`regard.nn.Longformer`); default those that the layers name themselves.

        Raises:
            ValueError, TypeError: for a tensor of a wrong shape or dtype, an id outside the vocabulary, where the
                embedding does not give ``(B, T, dim)``, and for global tokens where no layer has such.
        """
        takers = [_takes_global_tokens(layer) for layer in self.layers]
        if global_tokens is not None and not any(takers):
            raise ValueError(
                "global_tokens: expected None, for no layer of this encoder has global tokens, got a tensor"
            )
        call: dict[str, Any] = {"keep": keep, "positions": positions, "segments": segments}
        if isinstance(self.embedding, Embedding):
            resolved = resolve_tokens(*check_ids(inputs), inputs.device, **call)
            x: Tensor = self.embedding(inputs, resolved.positions, types)
        elif types is not None:
            raise ValueError("types: expected None, for this model's embedding takes no token types, got a tensor")
        else:
            x = self.embedding(inputs)
            if not isinstance(x, Tensor) or x.dim() != 3:
                raise ValueError(f"embedding: expected one that gives (B, T, dim), got one that gives {describe(x)}")
            resolved = resolve_tokens(x.shape[0], x.shape[1], x.device, **call)
        for layer, takes in zip(self.layers, takers, strict=True):
            more = {"global_tokens": global_tokens} if takes and global_tokens is not None else {}
            x = layer(x, **tokens_of_call(layer, resolved, segments), **more)
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

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits ``(..., vocabulary)`` of the words that stand behind masks, from the last hidden state ``(..., dim)``.

        Raises:
            ValueError: where the model has no such head.
        """
        if self.head is None:
            raise ValueError("head: expected an encoder that was built or loaded with a head of words, got none")
        table = tied_table(self.embedding) if self.head.weight is None else None
        out: Tensor = self.head(hidden, table)
        return out
