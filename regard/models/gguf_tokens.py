"""What GGUF metadata say of tokens: the tokenizer, the kinds of its tokens, those that begin and end a text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from regard.errors import CheckpointError

__all__ = ["backend_of", "named_ids"]

_PREFIX = "tokenizer.ggml."
ENDS = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
"""The named tokens after which nothing is generated, as llama.cpp has it: of a text, a turn, a message, a file."""
OTHERS = (
    *("bos", "unknown", "seperator", "separator", "padding", "mask", "cls"),
    *("fim_pre", "fim_suf", "fim_mid", "prefix", "suffix", "middle"),
)
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 1, 2, 3, 4, 5  # 6 is a byte, which this kind of tokenizer lacks
_FLAGS = ("add_bos_token", "add_eos_token", "add_sep_token", "add_space_prefix", "remove_extra_whitespaces")
# What is read here or elsewhere, and what changes nothing for a byte-level BPE.
_KNOWN = (
    *("model", "pre", "tokens", "merges", "token_type", "scores", "eos_token_ids", *_FLAGS),
    *(f"{name}_token_id" for name in (*ENDS, *OTHERS)),
)


def named_ids(metadata: Mapping[str, Any], where: str) -> tuple[dict[str, int | None], list[int]]:
    """The options of ``config.json`` for the tokens that begin and pad a text, and the ids of those that end one.

    Raises:
        CheckpointError: for what is no token of the file.
    """
    tokens = metadata.get(f"{_PREFIX}tokens")
    known = len(tokens) if isinstance(tokens, list) else None

    def checked(key: str, value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < 0 or (known is not None and value >= known):
            below = "" if known is None else f" below {known}"
            raise CheckpointError(f"{where}: {_PREFIX}{key}: expected a token id{below}, or none, got {value!r}")
        return value

    keys = [f"{name}_token_id" for name in (*ENDS, *OTHERS)]
    ids = {key: checked(key, metadata[_PREFIX + key]) for key in keys if metadata.get(_PREFIX + key) is not None}
    several = metadata.get(f"{_PREFIX}eos_token_ids") or []
    if not isinstance(several, list):
        raise CheckpointError(
            f"{where}: {_PREFIX}eos_token_ids: expected a list of token ids, or none, got {several!r}"
        )
    ends = [ids[f"{name}_token_id"] for name in ENDS if f"{name}_token_id" in ids]
    ends += [checked("eos_token_ids", value) for value in several]
    starts = {"bos_token_id": ids.get("bos_token_id"), "pad_token_id": ids.get("padding_token_id")}
    return starts, list(dict.fromkeys(ends))


def backend_of(metadata: Mapping[str, Any]) -> Any:
    """A ``tokenizers.Tokenizer``; where the file's is of a kind not known here, the reason as text."""
    from tokenizers import AddedToken, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Backend

    own = {k.removeprefix(_PREFIX): v for k, v in metadata.items() if k.startswith(_PREFIX)}
    kind, split, tokens, merges = (own.get(name) for name in ("model", "pre", "tokens", "merges"))
    if kind != "gpt2" or not isinstance(tokens, list) or not isinstance(merges, list):
        return f"{_PREFIX}model: expected 'gpt2' (byte-level BPE) with tokens and merges, got {kind!r}"
    if reason := _refused(own, len(tokens)):
        return reason
    bytes_first = pre_tokenizers.ByteLevel(add_prefix_space=own.get("add_space_prefix", False))
    splits = {"gpt-2": bytes_first, "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(True), bytes_first])}
    if split not in splits:
        return f"{_PREFIX}pre: expected {' or '.join(sorted(splits))}, got {split!r}"
    pairs = [tuple(m.split(" ", 1)) for m in merges]
    vocab = {token: i for i, token in enumerate(tokens)}
    if len(vocab) != len(tokens) or any(len(p) != 2 for p in pairs):
        return "the file's tokens repeat, or its merges are not pairs"
    backend = Backend(models.BPE(vocab, pairs))
    backend.pre_tokenizer = splits[split]
    backend.decoder = decoders.ByteLevel()
    whole = (_UNKNOWN, _CONTROL, _USER_DEFINED)  # found in a text before its words are split
    backend.add_tokens(
        [
            AddedToken(t, special=n != _USER_DEFINED, normalized=False)
            for t, n in zip(tokens, own.get("token_type") or (), strict=False)
            if n in whole
        ]
    )
    return _surrounded(backend, own, tokens)


def _refused(own: Mapping[str, Any], count: int) -> str | None:
    """Why the tokenizer cannot be used: something that it states and that is not known here."""
    if unknown := sorted(k for k, v in own.items() if k not in _KNOWN and v is not False and v not in ("", [])):
        return f"the file's tokenizer states {', '.join(_PREFIX + k for k in unknown)}, which is not known here"
    for name in _FLAGS:
        if not isinstance(own.get(name, False), bool):
            return f"{_PREFIX}{name}: expected true or false, got {own[name]!r}"
    for name in ("add_sep_token", "remove_extra_whitespaces"):
        if own.get(name, False):
            return f"{_PREFIX}{name}: expected false for this kind of tokenizer, got True"
    for flag, name in (("add_bos_token", "bos"), ("add_eos_token", "eos")):
        if own.get(flag, False) and own.get(f"{name}_token_id") is None:
            return f"{_PREFIX}{flag}: expected false without {name}_token_id, got True"
    types = own.get("token_type")
    if types and (not isinstance(types, list) or len(types) != count):
        return f"{_PREFIX}token_type does not give each of the {count} tokens its kind"
    if odd := sorted({t for t in types or () if t not in range(_NORMAL, _UNUSED + 1)}, key=repr):
        return f"{_PREFIX}token_type: expected 1 (normal) to 5 (unused) for this kind of tokenizer, got {odd[0]!r}"
    return None


def _surrounded(backend: Any, own: Mapping[str, Any], tokens: list[str]) -> Any:
    """The same, putting the tokens that the file asks for round every text."""
    from tokenizers import processors

    before = [own["bos_token_id"]] if own.get("add_bos_token", False) else []
    after = [own["eos_token_id"]] if own.get("add_eos_token", False) else []
    if before or after:
        # by number, for a token's text may hold anything
        names = {i: f"<{i}>" for i in (*before, *after)}
        backend.post_processor = processors.TemplateProcessing(
            single=" ".join([*(names[i] for i in before), "$A", *(names[i] for i in after)]),
            special_tokens=[{"id": name, "ids": [i], "tokens": [tokens[i]]} for i, name in names.items()],
        )
    return backend
