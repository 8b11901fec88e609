"""An encoder and a decoder that reads what the encoder made of another sequence."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from regard.models.cache import ModelCache
from regard.models.decoder import Decoder
from regard.models.model import Model

__all__ = ["EncoderDecoder"]


class EncoderDecoder(Model):
    """``decoder(ids, context=encoder(source))`` (Vaswani et al. 2017, arXiv:1706.03762).

    Args:
        encoder: from a source to its hidden states (B, S, context dim): an `Encoder`, or another module that takes the
            source and ``keep``.
        decoder: a `Decoder` of which some blocks read a context (`CrossPreNorm`, `CrossPostNorm`).

    >>> from regard.masks import Causal
    >>> from regard.models import MLP, CrossPreNorm, Embedding, Encoder, PreNorm, activation
    >>> from regard.nn import MultiHeadAttention
    >>> def norms(count):
    ...     return tuple(nn.LayerNorm(8) for _ in range(count))
    >>> def reading(i):
    ...     return PreNorm(MultiHeadAttention(8, 2), MLP(8, 16, activation("relu")), *norms(2))
    >>> def writing(i):
    ...     attention = MultiHeadAttention(8, 2, mask=Causal()), MultiHeadAttention(8, 2)
    ...     return CrossPreNorm(*attention, MLP(8, 16, activation("relu")), norms(3))
    >>> encoder = Encoder(Embedding(nn.Embedding(11, 8)), [reading])
    >>> model = EncoderDecoder(encoder, Decoder(Embedding(nn.Embedding(13, 8)), [writing]))
    >>> cache = model.init_cache(1, 4, source=3)
    >>> model(torch.tensor([[1, 2]]), source=torch.tensor([[4, 5, 6]]), cache=cache).shape
    torch.Size([1, 2, 13])
    >>> model(torch.tensor([[7]]), cache=cache).shape  # the source is not read again
    torch.Size([1, 1, 13])
    """

    def __init__(self, encoder: nn.Module, decoder: Decoder) -> None:
        super().__init__()
        self.encoder = encoder
        self.decoder = decoder

    def forward(
        self,
        ids: Tensor,
        *,
        source: Tensor | None = None,
        source_keep: Tensor | None = None,
        source_global: Tensor | None = None,
        keep: Tensor | None = None,
        positions: Tensor | None = None,
        cache: ModelCache | None = None,
        last_only: bool = False,
    ) -> Tensor:
        """Logits ``(B, T, vocabulary)`` of the tokens after each of ``ids (B, T)``.

        Args:
            source: what the encoder takes; with a cache it is given once, for every layer keeps its keys and values.
            source_keep: ``(B, S)`` bool, which of the encoder's tokens are real.
            source_global: ``(B, S)`` bool, the encoder's `global_tokens`, where it takes them.
            keep, positions, cache, last_only: as of `Decoder.forward`, for the decoder's tokens.

        Raises:
            ValueError, TypeError: as the encoder and the decoder do; also without a source where the cache holds none,
                and with one where it does.
            CacheFull: where the tokens do not fit; the cache is unchanged.
        """
        for name, given in (("source_keep", source_keep), ("source_global", source_global)):
            if source is None and given is not None:
                raise ValueError(f"{name}: expected None without a source, got a tensor")
        more = {} if source_global is None else {"global_tokens": source_global}
        context = None if source is None else self.encoder(source, keep=source_keep, **more)
        logits: Tensor = self.decoder(
            ids,
            keep=keep,
            positions=positions,
            cache=cache,
            context=context,
            context_keep=source_keep,
            last_only=last_only,
        )
        return logits

    def init_cache(
        self,
        batch: int,
        capacity: int,
        *,
        source: int | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> ModelCache:
        """A cache for ``batch`` rows of at most ``capacity`` tokens, and of ``source`` (default as many) to read."""
        return self.decoder.init_cache(batch, capacity, context=source, dtype=dtype, device=device)
