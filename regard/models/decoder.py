"""One decoder for every family: an embedding, blocks from factories, a last norm, a head."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.models.blocks import Embedding, tied_table, tokens_of_call
from regard.models.cache import ModelCache, check_ids
from regard.models.cross import check_context
from regard.models.model import Model
from regard.tokens import TokenLayout, resolve_tokens

__all__ = ["Decoder"]


class Decoder(Model):
    """A causal language model: ``logits = finish(head(norm(block_n(... block_1(embedding(ids))))))``.

    Nothing here knows what a block does with other tokens: softmax attention, a recurrence or a mixture of both stand
    in any place. Positions are computed once a call and handed to every layer.

    Args:
        embedding: ids and positions to ``(B, T, dim)``.
        layers: one factory a layer, called with the layer's number.
        norm: the last norm, or ``None``.
        head: ``dim`` to the vocabulary; ``None`` ties it to the embedding's table.
        finish: what is done to the logits last (a soft cap, a scale), or ``None``.

    >>> from regard.models import Embedding, GatedMLP, PreNorm, activation
    >>> from regard.nn import MultiHeadAttention
    >>> from regard.masks import Causal
    >>> def layer(i):
    ...     norms = torch.nn.LayerNorm(8), torch.nn.LayerNorm(8)
    ...     return PreNorm(MultiHeadAttention(8, 2, mask=Causal()), GatedMLP(8, 16, activation("silu")), *norms)
    >>> model = Decoder(Embedding(torch.nn.Embedding(11, 8)), [layer, layer], torch.nn.LayerNorm(8))
    >>> model(torch.tensor([[1, 2, 3]])).shape
    torch.Size([1, 3, 11])
    """

    def __init__(
        self,
        embedding: Embedding,
        layers: Sequence[Callable[[int], nn.Module]],
        norm: nn.Module | None = None,
        head: nn.Linear | None = None,
        *,
        finish: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.embedding = embedding
        self.layers = nn.ModuleList([make(i) for i, make in enumerate(layers)])
        self.norm = norm
        self.head = head
        self.finish = finish

    def forward(
        self,
        ids: Tensor,
        *,
        keep: Tensor | None = None,
        positions: Tensor | None = None,
        segments: Tensor | None = None,
        cache: ModelCache | None = None,
        context: Tensor | None = None,
        context_keep: Tensor | None = None,
        last_only: bool = False,
    ) -> Tensor:
        """Logits ``(B, T, vocabulary)`` of the tokens after each of ``ids (B, T)``.

        Args:
            keep: ``(B, T)`` bool, which tokens of this call are real; the logits of the others mean nothing.
            positions: ``(B, T)``, default the running count of kept tokens, the cache's included, from 0 in each
                segment.
            segments: ``(B, T)``, non-decreasing: documents packed into one row do not see each other.
            cache: from `init_cache`; the call continues it and appends its tokens.
            context: ``(B, S, context dim)``, read by blocks with cross-attention (`CrossPreNorm`, `CrossPostNorm`).
                With a cache it is given once, and later calls read what the cache keeps of it.
            context_keep: ``(B, S)`` bool, which tokens of the context are real.
            last_only: compute only the last token's logits, ``(B, 1, vocabulary)``.

        Raises:
            ValueError, TypeError: for a tensor of a wrong shape or dtype, or an id outside the vocabulary.
            CacheFull: where the tokens do not fit; the cache is unchanged.
        """
        if self.head is None:
            tied_table(self.embedding)  # raises before anything changes
        x = self.hidden(
            ids,
            keep=keep,
            positions=positions,
            segments=segments,
            cache=cache,
            context=context,
            context_keep=context_keep,
        )
        if last_only:
            x = x[:, -1:]
        logits = F.linear(x, tied_table(self.embedding)) if self.head is None else self.head(x)
        return logits if self.finish is None else self.finish(logits)

    def hidden(
        self,
        ids: Tensor,
        *,
        keep: Tensor | None = None,
        positions: Tensor | None = None,
        segments: Tensor | None = None,
        cache: ModelCache | None = None,
        context: Tensor | None = None,
        context_keep: Tensor | None = None,
    ) -> Tensor:
        """What the head reads: ``(B, T, dim)`` after the last norm. The arguments are those of `forward`."""
        batch, tokens = check_ids(ids)
        readers = [bool(getattr(layer, "reads_context", False)) for layer in self.layers]
        check_context(readers, None if cache is None else cache.layers, context, context_keep, segments)
        given = {"context": context, "context_keep": context_keep}
        call: dict[str, Any] = {"keep": keep, "positions": positions, "segments": segments}
        if cache is None:
            resolved = resolve_tokens(batch, tokens, ids.device, **call)
            x = self._through(ids, resolved, segments, [None] * len(self.layers), given)
        else:
            start = cache.length
            cache.room_for(tokens)
            resolved = cache.resolve_tokens(batch, tokens, ids.device, **call)
            try:
                x = self._through(ids, resolved, segments, cache.layers, given)
            except BaseException:
                cache.roll_back(start)
                if context is not None:
                    for own in itertools.compress(cache.layers, readers):
                        own.context.reset()
                raise
        return x if self.norm is None else self.norm(x)

    def _through(
        self, ids: Tensor, resolved: TokenLayout, segments: Tensor | None, caches: list[Any], context: dict[str, Any]
    ) -> Tensor:
        x: Tensor = self.embedding(ids, resolved.positions)
        for layer, cache in zip(self.layers, caches, strict=True):
            more = context if getattr(layer, "reads_context", False) else {}
            x = layer(x, **tokens_of_call(layer, resolved, segments), cache=cache, **more)
        return x

    def init_cache(
        self,
        batch: int,
        capacity: int,
        *,
        context: int | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> ModelCache:
        """A cache for ``batch`` rows of at most ``capacity`` tokens: each layer's own kind.

        Args:
            context: the most tokens of a context, for blocks that read one; default ``capacity``.
            dtype, device: default to the parameters'.
        """
        layers: list[Any] = []
        for layer in self.layers:
            more = {"context": context} if getattr(layer, "reads_context", False) else {}
            layers.append(layer.init_cache(batch, capacity, dtype=dtype, device=device, **more))  # type: ignore[operator]
        return ModelCache(layers)
