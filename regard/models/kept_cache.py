"""A decoder's cache that outlives one generation."""

from __future__ import annotations

from collections.abc import Sequence

from regard.errors import CacheError
from regard.models.decoder import Decoder

__all__ = ["KeptCache"]


class KeptCache:
    """A cache that outlives a call of `stream`: a later prompt that begins alike is read from where it differs.

    Results are those of a cache of their own, up to rounding. Layers whose states cannot go back are read anew.

    Args:
        model: the decoder whose texts it holds.
        tokens: how many there is room for.
    """

    def __init__(self, model: Decoder, tokens: int) -> None:
        self.cache = model.init_cache(1, tokens)
        self.tokens = tokens
        self.ids: list[int] = []

    def rest(self, prompt: Sequence[int]) -> list[int]:
        """What must still be read of a prompt, at least its last token; the cache then holds all before that."""
        most = min(len(self.ids), len(prompt) - 1, self.cache.length)
        same = next((n for n in range(most) if self.ids[n] != prompt[n]), most)
        try:
            self.cache.crop(same)
        except CacheError:
            same = 0
            self.cache.reset()
        self.ids = list(prompt[:same])
        return list(prompt[same:])

    def reset(self) -> None:
        """Forgets every token."""
        self.ids = []
        self.cache.reset()
