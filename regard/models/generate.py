"""Continuing texts with a decoder and its cache, and writing what an encoder's source asks for."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn

from regard.errors import CacheFull
from regard.mixers.base import floating
from regard.models.decoder import Decoder
from regard.models.encoder_decoder import EncoderDecoder
from regard.models.kept_cache import KeptCache
from regard.models.prompts import Prompt, Source, is_id, items, padded, prompts_of
from regard.models.sampling import Sampling
from regard.models.tokenizer import TextStream

__all__ = ["Continuation", "Generation", "Statistics", "Stream", "generate", "stream"]

Finish = Literal["length", "end", "stop"]


@dataclass
class Statistics:
    """What a generation took: tokens (without padding), seconds, bytes of cache at its end."""

    prompt_tokens: int = 0
    new_tokens: int = 0
    steps: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    cache_bytes: int = 0
    cache_tokens: int = 0

    @property
    def prefill_rate(self) -> float:
        """Prompt tokens a second."""
        return self.prompt_tokens / self.prefill_seconds if self.prefill_seconds else 0.0

    @property
    def decode_rate(self) -> float:
        """Steps a second after the first token; each gives one token a row."""
        return self.steps / self.decode_seconds if self.decode_seconds else 0.0


@dataclass(frozen=True)
class Continuation:
    """What follows one prompt: new ids (with the end token), their text where there is a tokenizer, why it ends."""

    ids: list[int]
    text: str | None
    finish: Finish


@dataclass(frozen=True)
class Generation:
    """One continuation a prompt, in their order."""

    continuations: list[Continuation]
    statistics: Statistics

    def __getitem__(self, row: int) -> Continuation:
        return self.continuations[row]

    def __len__(self) -> int:
        return len(self.continuations)


@dataclass(frozen=True)
class _Ends:
    """When a text ends, beside its length."""

    ids: frozenset[int]
    stop: tuple[str, ...]


class _Row:
    """The text of one row as it grows: finds stop strings across tokens, and holds back what may become one."""

    def __init__(self, ends: _Ends, text: TextStream | None) -> None:
        self.ends = ends
        self.stream = text
        self.ids: list[int] = []
        self.finish: Finish | None = None
        self.text = ""
        self._given = 0

    def push(self, token: int) -> None:
        self.ids.append(token)
        if token in self.ends.ids:
            self.finish = "end"
        if self.stream is not None:
            # the end token's own text, where it has one, is no part of the continuation
            self._add(self.stream.flush() if self.finish == "end" else self.stream.push(token))

    def end(self) -> None:
        """The length is reached: whatever is open or held back is final."""
        if self.finish is None:
            self.finish = "length"
            if self.stream is not None:
                self._add(self.stream.flush())

    def _add(self, piece: str) -> None:
        longest = max((len(s) for s in self.ends.stop), default=1)
        before = max(0, len(self.text) - longest + 1)
        self.text += piece
        hits = [at for s in self.ends.stop if (at := self.text.find(s, before)) >= 0]
        if hits:
            self.text = self.text[: min(hits)]
            self.finish = "stop"

    def ready(self) -> str:
        """The text since the last call that no stop string can claim any more."""
        safe = len(self.text)
        if self.finish is None:
            for s in self.ends.stop:
                held = next((n for n in range(min(len(s) - 1, len(self.text)), 0, -1) if self.text.endswith(s[:n])), 0)
                safe = min(safe, len(self.text) - held)
        piece = self.text[self._given : safe]
        self._given = max(self._given, safe)
        return piece


def generate(
    model: Decoder | EncoderDecoder,
    prompts: Prompt | Sequence[Prompt],
    *,
    max_tokens: int,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float | None = None,
    seed: int | None = None,
    stop: str | Sequence[str] = (),
    end_ids: Iterable[int] | None = None,
    start: Sequence[int] | None = None,
) -> Generation:
    """Continues one or several prompts, together, with a cache.

    Prompts of different lengths are padded on the left; padding changes no result. A row that has ended waits for the
    others.

    An `EncoderDecoder` reads the prompts with its encoder, once, and writes texts that begin with `start`: the answer
    to a question, a translation, what a recording says. Keys and values of what was read are cached too.

    Args:
        prompts: a text, a list of token ids or a tensor ``(T,)``; or a list of such, or a tensor ``(B, T)``. For an
            encoder of other features (Whisper's) a float tensor of them, with or without a batch axis, or a list.
        max_tokens: new tokens a row at most.
        temperature, top_k, top_p, min_p, repetition_penalty, seed: see `Sampling`; the default takes the most
            probable token.
        stop: texts that end a continuation as soon as one of them is complete, across the borders of tokens too; they
            are no part of it.
        end_ids: tokens that end a continuation; default the checkpoint's, ``()`` for none.
        start: the token ids that each text of an `EncoderDecoder` starts with, no part of the result; default the
            checkpoint's ``decoder_start_token_id``.

    Raises:
        ValueError, TypeError: for an empty prompt where the tokenizer has no token that begins a text, for texts or
            ``stop`` without a tokenizer, for no prompts, and for an argument of another kind or out of its range.
        ValueError: where a row's logits hold NaN or infinity, or are -infinity for every token; it names the row and
            the step, 0 being the one that reads the prompts.

    >>> from regard.models import load
    >>> model = load("tests/checkpoints/llama")
    >>> len(generate(model, [[5, 9, 11], [7]], max_tokens=4, end_ids=())[1].ids)
    4
    """
    sampling = Sampling(temperature, top_k, top_p, seed, min_p, repetition_penalty)
    rows, source = prompts_of(model, prompts, start, "prompts")
    run = _Run(model, rows, max_tokens, sampling, stop, end_ids, source)
    for _ in run:
        pass
    texts = [None if row.stream is None else row.text for row in run.rows]
    finishes: list[Finish] = [row.finish or "length" for row in run.rows]
    done = [Continuation(row.ids, text, why) for row, text, why in zip(run.rows, texts, finishes, strict=True)]
    return Generation(done, run.statistics)


def stream(
    model: Decoder | EncoderDecoder,
    prompt: Prompt,
    *,
    max_tokens: int,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float | None = None,
    seed: int | None = None,
    stop: str | Sequence[str] = (),
    end_ids: Iterable[int] | None = None,
    start: Sequence[int] | None = None,
    kept: KeptCache | None = None,
) -> Stream:
    """Continues one prompt and gives its text piece by piece; the arguments are `generate`'s, and `kept`.

    With a `KeptCache`, what its earlier calls have read is not read again, as far as the prompts begin alike.

    A piece never ends inside a character, and never holds a beginning of a stop string that may still come. The pieces
    joined are the text that `generate` gives.

    Raises:
        ValueError, TypeError: as `generate`, at once; and for a model without a tokenizer.
    """
    sampling = Sampling(temperature, top_k, top_p, seed, min_p, repetition_penalty)
    empty = isinstance(prompt, Sequence) and not len(prompt)  # one prompt without tokens, rather than no prompts
    rows, source = prompts_of(model, [prompt] if empty else prompt, start, "prompt")
    if len(rows) != 1:
        raise ValueError(f"prompt: expected one text, got {len(rows)}")
    model.tokenizer  # noqa: B018  raises where there is none
    return Stream(_Run(model, rows, max_tokens, sampling, stop, end_ids, source, kept))


class Stream:
    """An iterator of text pieces; `statistics`, `ids` and `finish` are final when it is exhausted."""

    def __init__(self, run: _Run) -> None:
        self._run = run
        self._pieces = _pieces(run)  # which does not know the stream: a stream that is dropped ends its run at once

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        return next(self._pieces)

    @property
    def statistics(self) -> Statistics:
        """Counts and times so far."""
        return self._run.statistics

    @property
    def ids(self) -> list[int]:
        """The new token ids so far."""
        return list(self._run.rows[0].ids)

    @property
    def finish(self) -> Finish | None:
        """Why the text ended; ``None`` before that."""
        return self._run.rows[0].finish


def _pieces(run: _Run) -> Iterator[str]:
    (row,) = run.rows
    for _ in run:
        if piece := row.ready():
            yield piece


@contextlib.contextmanager
def _evaluating(modules: Sequence[nn.Module]) -> Iterator[None]:
    """These modules in evaluation mode; several texts may be written in turns, and the model trained between steps."""
    training = [module for module in modules if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


@dataclass
class _Run:
    """One generation: prefill, then steps until every row has ended. Iterating advances it by a token a row."""

    model: Decoder | EncoderDecoder
    prompts: list[list[int]]
    max_tokens: int
    sampling: Sampling
    stop: str | Sequence[str]
    end_ids: Iterable[int] | None
    source: Source | None = None
    kept: KeptCache | None = None
    rows: list[_Row] = field(init=False)
    statistics: Statistics = field(init=False)

    def __post_init__(self) -> None:
        if isinstance(self.max_tokens, bool) or not isinstance(self.max_tokens, int) or self.max_tokens < 1:
            raise ValueError(f"max_tokens: expected a positive integer, got {self.max_tokens!r}")
        stops = items("stop", (self.stop,) if isinstance(self.stop, str) else self.stop, "texts that are not empty")
        if any(not isinstance(s, str) or not s for s in stops):
            raise ValueError(f"stop: expected texts that are not empty, got {self.stop!r}")
        last = self._decoder.embedding.tokens.weight.shape[0] - 1
        expected = f"token ids of 0 to {last}, or None for the checkpoint's"
        ids = self.model.end_ids if self.end_ids is None else items("end_ids", self.end_ids, expected)
        known = self.end_ids is None or all(is_id(i) and 0 <= i <= last for i in ids)
        if isinstance(self.end_ids, (str, bytes)) or not known:
            raise ValueError(f"end_ids: expected {expected}, got {self.end_ids!r}")
        ends = _Ends(frozenset(ids), stops)
        origin = self.model.origin
        with_text = origin is not None and not isinstance(origin.tokenizer, str)
        if self.kept is not None:
            if self.source is not None:
                raise ValueError("kept: expected None for a model that reads a source, got a KeptCache")
            wanted = max(map(len, self.prompts)) + self.max_tokens - 1
            if wanted > self.kept.tokens:
                raise CacheFull(f"kept: it has room for {self.kept.tokens} tokens, and the text may take {wanted}")
        if stops:
            self.model.tokenizer  # noqa: B018  raises where there is none
        self.rows = [_Row(ends, self.model.tokenizer.stream() if with_text else None) for _ in self.prompts]
        self.statistics = Statistics(prompt_tokens=sum(map(len, self.prompts)))

    @property
    def _decoder(self) -> Decoder:
        return self.model.decoder if isinstance(self.model, EncoderDecoder) else self.model

    def __iter__(self) -> Iterator[None]:
        device, decoder, s = floating(self.model).device, self._decoder, self.statistics
        modules = list(self.model.modules())
        ids, keep = padded(self.prompts, device)
        room = len(self.prompts), ids.shape[1] + self.max_tokens - 1
        began, context = time.perf_counter(), dict[str, Tensor | None]()
        if self.kept is not None:
            cache, rest = self.kept.cache, self.kept.rest(self.prompts[0], self)
            ids, s.prompt_tokens = torch.tensor([rest], device=device), len(rest)
        elif self.source is None:
            cache = decoder.init_cache(*room)
        else:
            with _evaluating(modules):
                read, real = self.source.read(), self.source.keep
            context = {"context": read, "context_keep": real}
            cache = decoder.init_cache(*room, context=read.shape[1])
            s.prompt_tokens += read.shape[0] * read.shape[1] if real is None else int(real.sum())
        reading = time.perf_counter() - began
        choose = self.sampling.chooser(len(self.prompts), self.prompts)
        for step in range(self.max_tokens):
            start = time.perf_counter()
            if self.kept is not None:
                self.kept.check(self)
            with torch.no_grad(), _evaluating(modules):
                logits = decoder(ids, keep=keep, cache=cache, last_only=True, **context)
                if self.kept is not None:
                    self.kept.ids += ids[0].tolist()
                logits = logits[:, -1]
                ended = [row.finish is not None for row in self.rows]
                if any(ended):  # their next tokens are not used
                    logits = logits.masked_fill(torch.tensor(ended, device=device)[:, None], 0.0)
                ids = choose(logits, step)[:, None]
            keep, context = None, {}  # the cache holds what was made of them
            tokens = ids[:, 0].tolist()
            took = time.perf_counter() - start
            if step == 0:
                s.prefill_seconds = reading + took
            else:
                s.decode_seconds += took
                s.steps += 1
            s.cache_bytes, s.cache_tokens = cache.nbytes, cache.length
            for row, token in zip(self.rows, tokens, strict=True):
                if row.finish is None:
                    row.push(token)
                    s.new_tokens += 1
                    if step + 1 == self.max_tokens:
                        row.end()
            yield
            if all(row.finish is not None for row in self.rows):
                return
