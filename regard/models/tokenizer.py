"""Text to token ids and back, by the ``tokenizers`` package."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from regard.errors import CheckpointError
from regard.models.files import check_readable

__all__ = ["TextStream", "Tokenizer"]

_SPECIAL = 3  # the token_type by which GGUF marks control tokens


class Tokenizer:
    """A checkpoint's tokenizer.

    Args:
        backend: a ``tokenizers.Tokenizer``.
        bos_id: the token that begins a text, or ``None``.
    """

    def __init__(self, backend: Any, bos_id: int | None = None) -> None:
        self.backend = backend
        self.bos_id = bos_id

    @classmethod
    def from_file(cls, path: Path, about: Mapping[str, Any]) -> Tokenizer:
        """From ``tokenizer.json``; ``about`` is what ``tokenizer_config.json`` says.

        Raises:
            CheckpointError: for a file that cannot be read.
        """
        from tokenizers import Tokenizer as Backend

        check_readable(path)
        try:
            backend = Backend.from_file(str(path))
        except Exception as e:  # the package raises bare Exception
            raise CheckpointError(f"{path}: not a readable tokenizer ({e})") from None
        bos = about.get("bos_token")
        bos = bos.get("content") if isinstance(bos, dict) else bos
        return cls(backend, backend.token_to_id(bos) if isinstance(bos, str) else None)

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Tokenizer | str:
        """From a GGUF file's metadata; where it is of a kind not known here, the reason as text."""
        from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
        from tokenizers import Tokenizer as Backend

        kind, split = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
        tokens, merges = metadata.get("tokenizer.ggml.tokens"), metadata.get("tokenizer.ggml.merges")
        if kind != "gpt2" or not isinstance(tokens, list) or not isinstance(merges, list):
            accepted = "'gpt2' (byte-level BPE) with tokens and merges"
            return f"the file's tokenizer is of the kind {kind!r}; accepted: {accepted}"
        bytes_first = pre_tokenizers.ByteLevel(
            add_prefix_space=bool(metadata.get("tokenizer.ggml.add_space_prefix", False))
        )
        splits = {"gpt-2": bytes_first, "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(True), bytes_first])}
        if split not in splits:
            return f"the file splits words by {split!r}; accepted: {', '.join(sorted(splits))}"
        pairs = [tuple(m.split(" ", 1)) for m in merges]
        vocab = {token: i for i, token in enumerate(tokens)}
        if len(vocab) != len(tokens) or any(len(p) != 2 for p in pairs):
            return "the file's tokens repeat, or its merges are not pairs"
        backend = Backend(models.BPE(vocab, pairs))
        backend.pre_tokenizer = splits[split]
        backend.decoder = decoders.ByteLevel()
        types = metadata.get("tokenizer.ggml.token_type", [])
        backend.add_special_tokens(
            [
                AddedToken(t, special=True, normalized=False)
                for t, n in zip(tokens, types, strict=False)
                if n == _SPECIAL
            ]
        )
        bos = metadata.get("tokenizer.ggml.bos_token_id")
        if bos is not None and metadata.get("tokenizer.ggml.add_bos_token", False):
            backend.post_processor = processors.TemplateProcessing(
                single=f"{tokens[bos]} $A", special_tokens=[(tokens[bos], bos)]
            )
        return cls(backend, bos)

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, with the special tokens that the tokenizer puts round every text."""
        ids: list[int] = self.backend.encode(text).ids
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """The text of token ids, without special tokens; bytes that are no character become U+FFFD."""
        text: str = self.backend.decode(list(ids), skip_special_tokens=True)
        return text

    def stream(self) -> TextStream:
        """A decoder for ids that come one at a time."""
        return TextStream(self)

    def to_json(self) -> str:
        """The content of ``tokenizer.json``."""
        text: str = self.backend.to_str(pretty=True)
        return text


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
