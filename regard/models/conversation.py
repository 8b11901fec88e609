"""A conversation with a model, turn by turn."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Any

from regard.checks import whole
from regard.errors import CacheFull
from regard.models.decoder import Decoder
from regard.models.generate import Statistics, stream
from regard.models.kept_cache import KeptCache
from regard.models.sampling import Sampling

__all__ = ["Conversation"]

OPTIONS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")


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
        if unknown := set(sampling) - {*OPTIONS, "max_tokens", "stop"}:
            raise TypeError(f"{min(unknown)}: expected max_tokens, stop, {', '.join(OPTIONS)}, got {min(unknown)}")
        Sampling(**{name: value for name, value in sampling.items() if name in OPTIONS})  # raises what is out of range
        self.model, self.system, self.template = model, system, template
        self.max_tokens = whole("max_tokens", sampling.pop("max_tokens", 512), 1)
        self.sampling, self.statistics = sampling, Statistics()
        self._kept = KeptCache(model, whole("context", context, 1))
        self._open: Generator[str, None, None] | None = None
        self.reset()
        self._ids(*self.messages, {"role": "user", "content": "?"})  # raises where there is no template
        self._ends = (*model.end_ids, *model.tokenizer.turn_end_ids())

    @property
    def context(self) -> int:
        """Tokens that there is room for."""
        return self._kept.tokens

    def reset(self) -> None:
        """Forgets every turn."""
        self._close()
        self._kept.reset()
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        self.messages: list[dict[str, str]] = system

    def say(self, text: str) -> Iterator[str]:
        """The answer to one more turn, piece by piece.

        When it ends, or is left early, turn and answer (as far as it got) are part of the conversation; where an error
        ends it, they are not. An answer that is still open is left as soon as another turn is begun. The answer ends
        where there is no more room.
        """
        self._close()
        asked = {"role": "user", "content": text}
        ids = self._ids(*self.messages, asked)
        most = min(self.max_tokens, self._kept.tokens - len(ids) + 1)
        if most < 1:
            raise CacheFull(f"context: expected a conversation of at most {self._kept.tokens} tokens, got {len(ids)}")
        pieces = stream(self.model, ids, max_tokens=most, kept=self._kept, end_ids=self._ends, **self.sampling)
        self._open = self._answer(asked, pieces)
        return self._open

    def _answer(self, asked: dict[str, str], pieces: Any) -> Generator[str, None, None]:
        answer = ""
        try:
            for piece in pieces:
                answer += piece
                yield piece
        except Exception:
            raise
        except BaseException:  # left early: closed, or interrupted
            self._keep(asked, answer, pieces)
            raise
        self._keep(asked, answer, pieces)

    def _keep(self, asked: dict[str, str], answer: str, pieces: Any) -> None:
        self.statistics = pieces.statistics
        self.messages += [asked, {"role": "assistant", "content": answer}]

    def _close(self) -> None:
        """Leave an answer that is still open."""
        if self._open is not None:
            self._open.close()
            self._open = None

    def _ids(self, *messages: dict[str, str]) -> list[int]:
        return self.model.tokenizer.chat_ids(messages, template=self.template)
