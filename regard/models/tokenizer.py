"""Text to token ids and back, by the ``tokenizers`` package."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from regard.errors import CheckpointError
from regard.models.added_tokens import ABOUT, ADDED, NAMES, SPECIAL, Places, add_tokens
from regard.models.chat import (
    Message,
    chat_templates_of,
    choose_template,
    stated_in_files,
    stated_in_metadata,
    write_chat,
)
from regard.models.files import check_readable, is_file, read_json
from regard.models.gguf_tokens import backend_of

__all__ = ["EXTRAS", "TextStream", "Tokenizer", "read_end_ids", "read_extras", "read_tokenizer"]

GENERATION = "generation_config.json"
PREPARATION = "preprocessor_config.json"  # of pictures
EXTRAS = (GENERATION, ABOUT, SPECIAL, ADDED, PREPARATION)
"""The small files of a folder that are read beside ``config.json``, and written back."""


class Tokenizer:
    """A checkpoint's tokenizer.

    A text is always encoded whole and in the same way: truncation, padding and random merges, which a tokenizer's file
    may ask for, are switched off. (`to_json` writes them back.)

    Args:
        backend: a ``tokenizers.Tokenizer``; where it asks for such a thing, a copy of it is used.
        bos_id: the token that begins a text, or ``None``.
        eos_id: the token that ends a text, or ``None``.
        chat_templates: how conversations become texts, by name; ``default`` is used where none is asked for.
        named_tokens: the texts of special tokens by their names (``bos_token``), which templates read.
    """

    def __init__(
        self,
        backend: Any,
        bos_id: int | None = None,
        eos_id: int | None = None,
        *,
        chat_templates: Mapping[str, str] | None = None,
        named_tokens: Mapping[str, str] | None = None,
    ) -> None:
        self._asides = {"truncation": backend.truncation, "padding": backend.padding, "sampling": _sampling(backend)}
        if any(self._asides.values()):
            backend = _copy(backend)
            backend.no_truncation()
            backend.no_padding()
            for name in self._asides["sampling"]:
                setattr(backend.model, name, None)
        self.backend = backend
        self.bos_id = bos_id
        self.eos_id = eos_id
        self.chat_templates = dict(chat_templates or {})
        self.named_tokens = dict(named_tokens or {})

    @classmethod
    def from_file(
        cls, path: Path, about: Mapping[str, Any], others: Mapping[str, Mapping[str, Any]] | None = None
    ) -> Tokenizer:
        """From ``tokenizer.json`` and what the folder's other files state of added and special tokens.

        What stands round every text is the post-processor of ``tokenizer.json`` alone, as in transformers.

        Args:
            about: the content of ``tokenizer_config.json``.
            others: that of ``special_tokens_map.json`` and ``added_tokens.json``, by name.

        Raises:
            CheckpointError: for a file that cannot be read, and for tokens or ids that contradict each other.
        """
        from tokenizers import Tokenizer as Backend

        check_readable(path)
        try:
            backend = Backend.from_file(str(path))
        except Exception as e:  # the package raises bare Exception
            raise CheckpointError(f"{path}: not a readable tokenizer ({e})") from None
        _check_own_ids(path, backend)
        places = Places(str(path.parent), {**(others or {}), ABOUT: about})
        add_tokens(backend, places)
        split = about.get("split_special_tokens", False)
        if not isinstance(split, bool):
            raise CheckpointError(f"{path.parent / ABOUT}: split_special_tokens: expected true or false, got {split!r}")
        backend.encode_special_tokens = split
        ids = (backend.token_to_id(places.named[n].content) if n in places.named else None for n in NAMES[:2])
        return cls(
            backend,
            *ids,
            chat_templates=chat_templates_of(about.get("chat_template"), str(path.parent / ABOUT)),
            named_tokens={name: token.content for name, token in places.named.items()},
        )

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Tokenizer | str:
        """From a GGUF file's metadata; where it is of a kind not known here, the reason as text."""
        backend = backend_of(metadata)
        if isinstance(backend, str):
            return backend
        named = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
        ids = {name: metadata.get(f"tokenizer.ggml.{own}_token_id") for name, own in named.items()}
        tokens = metadata["tokenizer.ggml.tokens"]
        return cls(
            backend,
            ids["bos_token"],
            ids["eos_token"],
            chat_templates=chat_templates_of(stated_in_metadata(metadata), "the file's metadata"),
            named_tokens={name: tokens[i] for name, i in ids.items() if isinstance(i, int) and 0 <= i < len(tokens)},
        )

    def encode(self, text: str, *, surround: bool = True) -> list[int]:
        """Token ids of a text, with the special tokens that the tokenizer puts round every text.

        Args:
            surround: whether these tokens stand round it; those in the text itself are read either way.
        """
        ids: list[int] = self.backend.encode(text, add_special_tokens=surround).ids
        return ids

    def chat(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template: str | None = None,
    ) -> str:
        """A conversation as the text that the model was trained on, by the checkpoint's chat template.

        The text holds all special tokens that belong there, so it is encoded without others round it (`chat_ids`).
        The template runs in a sandbox, with bounded work. It may tell today's date.

        Args:
            messages: objects with a ``role`` (``system``, ``user``, ``assistant``, …) and ``content``, in order; what
                else they hold is the template's to read.
            add_generation_prompt: end with the beginning of an answer, where the template has one.
            tools: JSON schemas of functions that the model may call, for templates that write them.
            template: a template's name, or its text; default the checkpoint's own, ``tool_use`` where it has such a
                one and ``tools`` are given.

        Raises:
            ValueError: where there is no template, where it does not take the messages (in its own words), where it is
                none or does not end; and for messages without role or content.
            TypeError: for arguments of another kind.

        >>> from regard.models import Tokenizer
        >>> from tokenizers import Tokenizer as Backend, models
        >>> template = "{% for m in messages %}[{{ m.role }}] {{ m.content }}{{ eos_token }}{% endfor %}"
        >>> tokenizer = Tokenizer(Backend(models.BPE()), named_tokens={"eos_token": "</s>"})
        >>> tokenizer.chat([{"role": "user", "content": "Hello"}], template=template)
        '[user] Hello</s>'
        """
        text = choose_template(self.chat_templates, template, tools)
        return write_chat(text, messages, self.named_tokens, add_generation_prompt=add_generation_prompt, tools=tools)

    def chat_ids(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template: str | None = None,
    ) -> list[int]:
        """Token ids of `chat`'s text, with nothing round it: the template has written what begins a text.

        A special token that a message spells out is read as that token, as in transformers.
        """
        text = self.chat(messages, add_generation_prompt=add_generation_prompt, tools=tools, template=template)
        return self.encode(text, surround=False)

    def turn_end_ids(self) -> tuple[int, ...]:
        """The special token that the chat template puts behind an answer; empty where it puts none there."""
        if not self.chat_templates:
            return ()
        answer = "answered"
        messages = [{"role": "user", "content": "asked"}, {"role": "assistant", "content": answer}]
        behind = self.chat(messages, add_generation_prompt=False).rpartition(answer)[2].lstrip()
        ids = self.encode(behind, surround=False)[:1]
        special = {i for i, token in self.backend.get_added_tokens_decoder().items() if token.special}
        return tuple(i for i in ids if i in special)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of token ids, without special tokens; bytes that are no character become U+FFFD."""
        text: str = self.backend.decode(list(ids), skip_special_tokens=True)
        return text

    def stream(self) -> TextStream:
        """A decoder for ids that come one at a time."""
        return TextStream(self)

    def to_json(self) -> str:
        """The content of ``tokenizer.json``."""
        backend = self.backend
        if any(self._asides.values()):
            backend = _copy(backend)
            if self._asides["truncation"]:
                backend.enable_truncation(**self._asides["truncation"])
            if self._asides["padding"]:
                backend.enable_padding(**self._asides["padding"])
            for name, value in self._asides["sampling"].items():
                setattr(backend.model, name, value)
        text: str = backend.to_str(pretty=True)
        return text


def _sampling(backend: Any) -> dict[str, Any]:
    """What makes a tokenizer's model draw one of several encodings of a text, as in training."""
    return {name: v for name in ("dropout", "alpha", "nbest_size") if (v := getattr(backend.model, name, None))}


def _copy(backend: Any) -> Any:
    split = backend.encode_special_tokens  # no part of the file
    copied = type(backend).from_str(backend.to_str())
    copied.encode_special_tokens = split
    return copied


def _check_own_ids(path: Path, backend: Any) -> None:
    """Raises where an added token of ``tokenizer.json`` has not got the id that stands there."""
    for entry in json.loads(path.read_text(encoding="utf-8")).get("added_tokens") or []:
        got = backend.token_to_id(entry["content"])
        if got != entry["id"]:
            raise CheckpointError(
                f"{path}: added_tokens gives {entry['content']!r} the id {entry['id']}; by its vocabulary it is {got}"
            )


class TextStream:
    """Decodes ids as they come; a character whose bytes are spread over tokens appears when it is whole.

    The pieces joined are the text of all ids at once.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._start = 0  # first id of the window that is decoded together
        self._shown = 0  # first id whose text has not been given out

    def push(self, token: int) -> str:
        """The text that this token completes; empty while a character is open."""
        self._ids.append(token)
        before, now = self._window()
        if now.endswith("�") or not now.startswith(before):
            return ""
        self._start, self._shown = self._shown, len(self._ids)
        return now[len(before) :]

    def flush(self) -> str:
        """The rest, where the last token leaves a character open."""
        before, now = self._window()
        self._start = self._shown = len(self._ids)
        return now[len(before) :]

    def _window(self) -> tuple[str, str]:
        decode = self._tokenizer.decode
        return decode(self._ids[self._start : self._shown]), decode(self._ids[self._start :])


def read_extras(folder: Path) -> dict[str, Any]:
    """The content of a folder's files of `EXTRAS`, by name; a chat template in a file of its own stands in
    ``tokenizer_config.json``, where it comes before what that file states, as in transformers.

    Raises:
        CheckpointError: for a file that cannot be read.
    """
    extras = {name: read_json(folder / name) for name in EXTRAS if is_file(folder / name)}
    if (stated := stated_in_files(folder)) is not None:
        extras[ABOUT] = {**extras.get(ABOUT, {}), "chat_template": stated}
    return extras


def read_tokenizer(folder: Path, config: Mapping[str, Any], extras: Mapping[str, Any]) -> Tokenizer | str:
    """The tokenizer of a folder, or as text why it has none; ``extras`` are the files of `EXTRAS`, by name.

    Raises:
        CheckpointError: as `Tokenizer.from_file`.
    """
    path = folder / "tokenizer.json"
    if not is_file(path):
        return "the folder has no tokenizer.json"
    tokenizer = Tokenizer.from_file(path, extras.get(ABOUT, {}), extras)
    if tokenizer.bos_id is None:
        tokenizer.bos_id = next(iter(_ids("bos_token_id", folder, config, extras)), None)
    return tokenizer


def read_end_ids(
    folder: Path, config: Mapping[str, Any], extras: Mapping[str, Any], tokenizer: Tokenizer | str
) -> tuple[int, ...]:
    """The ids of ``generation_config.json``, else of ``config.json``, and the one that the tokenizer ends a text with.

    Raises:
        CheckpointError: for what is no token id.
    """
    ids = _ids("eos_token_id", folder, config, extras)
    if isinstance(tokenizer, Tokenizer) and tokenizer.eos_id is not None:
        ids.append(tokenizer.eos_id)
    return tuple(dict.fromkeys(ids))


def _ids(name: str, folder: Path, config: Mapping[str, Any], extras: Mapping[str, Any]) -> list[int]:
    value = extras.get(GENERATION, {}).get(name, config.get(name))
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise CheckpointError(f"{folder}: {name}: expected a token id, a list of them, or null, got {value!r}")
    return [i for i in ids if i >= 0]
