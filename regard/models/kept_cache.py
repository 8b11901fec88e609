"""A decoder's cache that outlives one generation."""

from __future__ import annotations

from collections.abc import Sequence

from regard.checks import whole
from regard.errors import CacheError
from regard.models.decoder import Decoder

__all__ = ["KeptCache"]


class KeptCache:
    """A cache that outlives a call of `stream`: a later prompt that begins alike is read from where it differs.

    Results are those of a cache of their own, up to rounding, as long as the weights stay what they are. Layers whose
    states cannot go back are read anew. One text is written at a time: an earlier one cannot go on once another has
    begun.

    Args:
        model: the decoder whose texts it holds.
        tokens: how many there is room for.
    """

    def __init__(self, model: Decoder, tokens: int) -> None:
        if not isinstance(model, Decoder):
            raise TypeError(f"model: expected a Decoder, which keeps caches, got {type(model).__name__}")
        self.tokens = whole("tokens", tokens, 1)
        self.cache = model.init_cache(1, tokens)
        self.ids: list[int] = []
        self._writer: object = None

    def rest(self, prompt: Sequence[int], writer: object = None) -> list[int]:
        """What must still be read of a prompt, at least its last token; the cache then holds all before that."""
        self._writer = writer
        try:
            most = min(len(self.ids), len(prompt) - 1, self.cache.length)
            same = next((n for n in range(most) if self.ids[n] != prompt[n]), most)
            self.cache.crop(same)
        except CacheError:  # states that cannot go back, or an interrupted call left the layers at different lengths
            same = 0
            self.cache.reset()
        self.ids = list(prompt[:same])
        return list(prompt[same:])

    def check(self, writer: object) -> None:
        """Raise CacheError where another text has been begun since `writer` began its own."""
        if writer is not self._writer:
            raise CacheError("kept: another text has been read into this cache since; this one cannot go on")

    def reset(self) -> None:
        """Forgets every token."""
        self.ids, self._writer = [], None
        self.cache.reset()
