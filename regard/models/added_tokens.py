"""Added and special tokens: the places where a folder states them, brought together in its tokenizer.

A folder may state such tokens in ``tokenizer.json``, in ``tokenizer_config.json`` (``added_tokens_decoder``, the tokens
with a name, the further special ones), in ``special_tokens_map.json`` and in ``added_tokens.json``. All are read. Where
two places describe one token, ``added_tokens_decoder`` is followed, as in transformers; ids that differ are an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from regard.errors import CheckpointError

__all__ = ["Places", "Stated", "add_tokens"]

FLAGS = ("lstrip", "rstrip", "single_word", "normalized", "special")
NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
LISTS = ("additional_special_tokens", "extra_special_tokens")
ABOUT, SPECIAL, ADDED = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
_DECODER = "added_tokens_decoder"


@dataclass(frozen=True)
class Stated:
    """A token as one place states it: its text, the place's name, and its id and flags as far as given."""

    content: str
    where: str
    id: int | None = None
    flags: Mapping[str, bool] = field(default_factory=dict)


class Places:
    """What the small files of a folder say about tokens beside ``tokenizer.json``.

    Args:
        folder: as errors name it.
        files: the content of ``tokenizer_config.json``, ``special_tokens_map.json`` and ``added_tokens.json``, as far
            as the folder has them.

    Raises:
        CheckpointError: for a token that is not described as one.
    """

    def __init__(self, folder: str, files: Mapping[str, Mapping[str, Any]]) -> None:
        self._folder = folder
        about, special, added = (files.get(name, {}) for name in (ABOUT, SPECIAL, ADDED))
        decoder = about.get(_DECODER)
        if decoder is not None and not isinstance(decoder, dict):
            raise self._error(ABOUT, _DECODER, decoder, "an object from ids to tokens, or null")
        self.numbered = [self._token(ABOUT, f"{_DECODER}.{i}", t, i) for i, t in (decoder or {}).items()]
        # the older file says less of its tokens, so it comes last
        self.legacy = [self._token(ADDED, content, content, i) for content, i in added.items()]
        # a folder with numbered tokens is a newer one, whose tokenizer_config.json is the one to go by
        order = ((SPECIAL, special), (ABOUT, about)) if decoder is not None else ((ABOUT, about), (SPECIAL, special))
        self.named: dict[str, Stated] = {}
        self.further: list[Stated] = []
        for file, content in order:
            self._read_special(file, content)
        # new tokens get their ids in the order of the names
        self.named = {name: self.named[name] for name in (*NAMES, *self.named) if name in self.named}

    def _read_special(self, file: str, content: Mapping[str, Any]) -> None:
        for key, value in content.items():
            if key in LISTS and isinstance(value, dict):
                self.named |= {name: self._token(file, f"{key}.{name}", token) for name, token in value.items()}
            elif key in LISTS and isinstance(value, list):
                self.further += [self._token(file, f"{key}[{i}]", token) for i, token in enumerate(value)]
            elif key in LISTS and value is not None:
                raise self._error(file, key, value, "a list of tokens, an object of them, or null")
            elif key in NAMES and value is not None:
                self.named[key] = self._token(file, key, value)
            elif key.endswith("_token") and (isinstance(value, str) or _is_described(value)):
                self.named[key] = self._token(file, key, value)  # a name of this model's own, such as image_token

    def _token(self, file: str, key: str, value: object, number: object = None) -> Stated:
        content, flags = value, {}
        if isinstance(value, dict):
            flags = {k: v for k, v in value.items() if k not in ("content", "__type", "id")}
            content = value.get("content")
            if unknown := sorted(k for k in flags if k not in FLAGS):
                raise self._error(file, key, value, f"content and {', '.join(FLAGS)}, not {', '.join(unknown)}")
            if not all(isinstance(v, bool) for v in flags.values()):
                raise self._error(file, key, value, f"true or false for {', '.join(flags)}")
        if not isinstance(content, str):
            raise self._error(file, key, value, "a text, or an object with a text as its content")
        where = f"{self._folder}/{file}: {key}"
        return Stated(content, where, None if number is None else self._id(file, key, number), flags)

    def _id(self, file: str, key: str, number: object) -> int:
        if isinstance(number, str) and number.isascii() and number.isdigit():
            number = int(number)
        if isinstance(number, bool) or not isinstance(number, int) or number < 0:
            raise self._error(file, key, number, "a token id")
        return number

    def _error(self, file: str, key: str, value: object, expected: str) -> CheckpointError:
        return CheckpointError(f"{self._folder}/{file}: {key}: expected {expected}, got {value!r}")


def _is_described(value: object) -> bool:
    return isinstance(value, dict) and "content" in value


def add_tokens(backend: Any, places: Places) -> None:
    """Adds to a ``tokenizers.Tokenizer`` what the places state and it does not know, and checks every stated id.

    Raises:
        CheckpointError: where two places give one token two ids, or one id two tokens, or where the id is not the one
            that the token gets behind the vocabulary of ``tokenizer.json``.
    """
    numbered = {token.content: token for token in places.numbered}
    named = {token.content: token for token in places.named.values()}
    _check_agreement(places)
    known = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    special = named.keys() | {token.content for token in places.further if token.flags.get("special", True)}
    new: dict[str, Any] = {"": None}  # the empty text is no token
    # new tokens get their ids in this order
    in_order = sorted((*places.numbered, *places.legacy), key=lambda token: token.id or 0)
    for stated in (*in_order, *named.values(), *places.further):
        content = stated.content
        if content in new:
            continue
        if content in numbered:
            token = _made(content, numbered[content].flags)
        elif content in known:
            token = _made(content, _flags(known[content]))
        else:
            token = _made(content, {**stated.flags, "special": content in special})
        token.special = token.special or content in named
        if content not in known or _flags(token) != _flags(known[content]):
            new[content] = token
    backend.add_tokens([token for token in new.values() if token is not None])
    for stated in in_order:
        if stated.content and (got := backend.token_to_id(stated.content)) != stated.id:
            held = backend.id_to_token(stated.id)
            there = f"it has the id {got}" if held in (None, stated.content) else f"{stated.id} is {held!r}"
            raise CheckpointError(
                f"{stated.where}: {stated.content!r} has the id {stated.id}; by tokenizer.json {there}"
            )


def _made(content: str, flags: Mapping[str, bool]) -> Any:
    from tokenizers import AddedToken

    return AddedToken(content, **flags)


def _flags(token: Any) -> dict[str, bool]:
    return {name: getattr(token, name) for name in FLAGS}


def _check_agreement(places: Places) -> None:
    ids: dict[str, Stated] = {}
    contents: dict[int, Stated] = {}
    for stated in (*places.numbered, *places.legacy):
        assert stated.id is not None
        other = ids.setdefault(stated.content, stated)
        if other.id != stated.id:
            raise CheckpointError(
                f"{stated.where}: {stated.content!r} has the id {stated.id}; by {other.where} it is {other.id}"
            )
        other = contents.setdefault(stated.id, stated)
        if other.content != stated.content:
            raise CheckpointError(
                f"{stated.where}: {stated.content!r} has the id {stated.id}; by {other.where} that is {other.content!r}"
            )
