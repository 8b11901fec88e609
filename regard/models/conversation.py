"""A conversation with a model, turn by turn."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from regard.checks import whole
from regard.models.decoder import Decoder
from regard.models.generate import Statistics, stream
from regard.models.kept_cache import KeptCache

__all__ = ["Conversation"]


class Conversation:
    """Turns of a user and a model, written by the checkpoint's chat template, with one cache for all of them.

    Args:
        model: a decoder whose tokenizer has a chat template.
        system: what the model is told before the first turn; None for nothing (some templates then say something).
        template: a template by name, or its text; the checkpoint's own by default.
        context: tokens that there is room for, those of answers included.
        sampling: of `regard.models.stream`: ``max_tokens`` (512 by default), ``temperature``, ``seed``, ``stop``, …

    Raises ValueError where the model has no template, TypeError for a model that is no decoder, CacheFull for a turn
    that does not fit: the conversation is then as it was before. ::

        talk = Conversation(regard.load("SmolLM2-135M-Instruct"), system="Answer briefly.")
        for piece in talk.say("What is the capital of France?"):
            print(piece, end="")
    """

    def __init__(
        self,
        model: Decoder,
        *,
        system: str | None = None,
        template: str | None = None,
        context: int = 4096,
        **sampling: Any,
    ) -> None:
        if not isinstance(model, Decoder):
            raise TypeError(f"model: expected a Decoder, which continues texts, got {type(model).__name__}")
        self.model, self.system, self.template = model, system, template
        self.sampling = {"max_tokens": 512, **sampling}
        self.messages: list[dict[str, str]] = []
        self.statistics = Statistics()
        self.reset()
        self._ids(*self.messages, {"role": "user", "content": "?"})  # raises where there is no template
        self._ends = (*model.end_ids, *model.tokenizer.turn_end_ids())
        self._kept = KeptCache(model, whole("context", context, 1))

    def reset(self) -> None:
        """Forgets every turn."""
        self.messages = [] if self.system is None else [{"role": "system", "content": self.system}]

    def say(self, text: str) -> Iterator[str]:
        """The answer to one more turn, piece by piece.

        When it ends, or is left early, turn and answer (as far as it got) are part of the conversation.
        """
        asked = {"role": "user", "content": text}
        ids = self._ids(*self.messages, asked)
        pieces = stream(self.model, ids, kept=self._kept, end_ids=self._ends, **self.sampling)
        return self._answer(asked, pieces)

    def _answer(self, asked: dict[str, str], pieces: Any) -> Iterator[str]:
        answer = ""
        try:
            for piece in pieces:
                answer += piece
                yield piece
        finally:
            self.statistics = pieces.statistics
            self.messages += [asked, {"role": "assistant", "content": answer}]

    def _ids(self, *messages: dict[str, str]) -> list[int]:
        return self.model.tokenizer.chat_ids(messages, template=self.template)
