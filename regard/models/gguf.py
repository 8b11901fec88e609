"""Reading Llama models from GGUF files, quantised or not.

The format (versions 2 and 3, little endian): a magic word, counts, metadata as typed key/value pairs, a list of
tensors, then their aligned data. https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import dataclasses
import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.errors import CheckpointError
from regard.models.config import Config, naming
from regard.models.files import check_readable
from regard.models.layouts import LAYOUTS, Plan
from regard.models.layouts.base import bounds
from regard.models.model import Origin
from regard.models.tables import RotaryPermuted, Row, expand, same
from regard.models.tokenizer import Tokenizer

__all__ = ["GGUFSource", "read_gguf"]

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9


class _Cursor:
    """Reads a byte string from front to back; running past its end is an error that names the file."""

    def __init__(self, data: memoryview, where: str) -> None:
        self.data, self.where, self.at = data, where, 0

    def take(self, count: int) -> memoryview:
        if count > len(self.data) - self.at:
            raise CheckpointError(
                f"{self.where}: ends too early: {count} bytes wanted at {self.at} of {len(self.data)}"
            )
        self.at += count
        return self.data[self.at - count : self.at]

    def number(self, code: str) -> Any:
        (value,) = struct.unpack(code, self.take(struct.calcsize(code)))
        return value

    def text(self) -> str:
        raw = bytes(self.take(self.number("<Q")))
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            raise CheckpointError(f"{self.where}: text at {self.at} is not UTF-8") from None

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            inner, count = self.number("<I"), self.number("<Q")
            if inner in _SCALARS:
                code = _SCALARS[inner]
                raw = self.take(count * struct.calcsize(code))
                return [v for (v,) in struct.iter_unpack(code, raw)]
            if count > len(self.data):
                raise CheckpointError(
                    f"{self.where}: an array of {count} entries at {self.at} of {len(self.data)} bytes"
                )
            return [self.value(inner) for _ in range(count)]
        if kind not in _SCALARS:
            raise CheckpointError(f"{self.where}: unknown kind of value {kind} at {self.at}")
        return self.number(_SCALARS[kind])


class _Info(NamedTuple):
    """One tensor: its shape (rows first), its quantisation and where its data begin."""

    shape: tuple[int, ...]
    kind: Any
    start: int
    nbytes: int


class GGUFSource:
    """The metadata and tensors of a GGUF file; tensors are dequantised to float32 as they are read.

    Raises:
        CheckpointError: for a file of another kind or version, one that ends too early, and an unknown quantisation.
    """

    mapped = False  # every tensor is dequantised or copied

    def __init__(self, path: Path) -> None:
        import numpy as np

        self.where = str(path)
        check_readable(path)
        if path.stat().st_size == 0:
            raise CheckpointError(f"{path}: is empty; accepted: a GGUF file")
        self._data = np.memmap(path, mode="r")
        cursor = _Cursor(memoryview(self._data), self.where)  # type: ignore[arg-type]  # numpy's stubs before 2.3
        magic = bytes(cursor.take(min(4, len(self._data))))
        if magic != b"GGUF":
            raise CheckpointError(f"{path}: begins with {magic!r}; accepted: a GGUF file, which begins with b'GGUF'")
        version = cursor.number("<I")
        if version not in (2, 3):
            raise CheckpointError(f"{path}: GGUF version {version}; accepted: 2 or 3, little endian")
        tensors, pairs = cursor.number("<Q"), cursor.number("<Q")
        self.metadata: dict[str, Any] = {}
        for _ in range(pairs):
            key = cursor.text()
            self.metadata[key] = cursor.value(cursor.number("<I"))
        self._infos = self._read_infos(cursor, tensors)

    def _read_infos(self, cursor: _Cursor, count: int) -> dict[str, _Info]:
        raw = []
        for _ in range(count):
            name, dims = cursor.text(), cursor.number("<I")
            shape = tuple(cursor.number("<Q") for _ in range(dims))[::-1]
            raw.append((name, shape, cursor.number("<I"), cursor.number("<Q")))
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise CheckpointError(f"{self.where}: general.alignment={alignment!r}; accepted: a positive integer")
        base = -(-cursor.at // alignment) * alignment
        infos: dict[str, _Info] = {}
        for name, shape, code, offset in raw:
            if name in infos:
                raise CheckpointError(f"{self.where}: holds {name} twice")
            infos[name] = self._info(name, shape, code, base + offset)
        return infos

    def _info(self, name: str, shape: tuple[int, ...], code: int, start: int) -> _Info:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        try:
            kind = GGMLQuantizationType(code)
        except ValueError:
            raise CheckpointError(f"{self.where}: {name} has the unknown quantisation {code}") from None
        block, size = GGML_QUANT_SIZES[kind]
        if not shape or shape[-1] % block:
            raise CheckpointError(
                f"{self.where}: {name} of shape {shape} does not divide into {kind.name} blocks of {block}"
            )
        nbytes = math.prod(shape) // block * size
        if start + nbytes > len(self._data):
            raise CheckpointError(
                f"{self.where}: ends too early: {name} needs {start + nbytes} of {len(self._data)} bytes"
            )
        return _Info(shape, kind, start, nbytes)

    def has(self, name: str) -> bool:
        return name in self._infos

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: info.shape for name, info in self._infos.items()}

    def foreign(self) -> Mapping[str, str]:
        whole = ("I8", "I16", "I32", "I64")
        return {name: info.kind.name for name, info in self._infos.items() if info.kind.name in whole}

    def read(self, name: str) -> Tensor:
        from gguf import quants

        info = self._infos[name]
        raw = self._data[info.start : info.start + info.nbytes].reshape(*info.shape[:-1], -1)
        try:
            values = quants.dequantize(raw, info.kind)
        except NotImplementedError as e:
            raise CheckpointError(f"{self.where}: {name}: {info.kind.name} cannot be dequantised ({e})") from None
        return torch.from_numpy(
            values.reshape(info.shape).copy() if not values.flags.owndata else values.reshape(info.shape)
        )

    def read_once(self, name: str) -> Tensor:
        return self.read(name)


def read_gguf(path: Path) -> tuple[GGUFSource, Origin, Plan]:
    """A Llama model in a GGUF file: its tensors, where it comes from (as a Llama folder), and how to build it.

    Raises:
        CheckpointError: for another architecture, an option that is not known, and all that :class:`GGUFSource`
        refuses.
    """
    with naming(str(path)):
        return _read(GGUFSource(path), path)


def _read(source: GGUFSource, path: Path) -> tuple[GGUFSource, Origin, Plan]:
    metadata = source.metadata
    architecture = metadata.get("general.architecture")
    if architecture != "llama":
        raise CheckpointError(f"{path}: general.architecture={architecture!r}; accepted: llama")
    layout = LAYOUTS["llama"]
    config = _config(source, architecture)
    plan = layout.read(config, str(path), source.has, source.shapes())
    tied = ("token_embd.weight", "output.weight") if config["tie_word_embeddings"] else ()
    plan = dataclasses.replace(plan, rows=_rows(config), tied=tied)
    tokenizer = Tokenizer.from_gguf(metadata)
    origin = Origin(
        layout=layout,
        config=config,
        tokenizer=tokenizer,
        end_ids=() if config["eos_token_id"] is None else (config["eos_token_id"],),
        extras=_extras(metadata, tokenizer),
    )
    return source, origin, plan


def _config(source: GGUFSource, architecture: str) -> dict[str, Any]:
    """The options of ``config.json`` that say what the metadata say."""
    own = {
        k.removeprefix(f"{architecture}."): v for k, v in source.metadata.items() if k.startswith(f"{architecture}.")
    }
    limits = bounds(source.shapes())
    most = {"block_count": limits["num_hidden_layers"], "attention.head_count": limits["num_attention_heads"]}
    c = Config(own, f"{source.where}: metadata {architecture}.*", most=most)
    tokens = source.metadata.get("tokenizer.ggml.tokens")
    heads = c.count("attention.head_count", 0)
    dim = c.count("embedding_length", 0)
    head_dim = c.count("attention.key_length", dim // heads)
    c.only("attention.value_length", (None, head_dim), "one size for keys and values")
    c.only("rope.dimension_count", (None, head_dim), "rotation of whole heads")
    c.only("expert_count", (None, 0), "a dense model")
    kind = c.get("rope.scaling.type")
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": c.amount("rope.freq_base", 10000.0)}
    if kind not in (None, "none"):
        rope |= {"rope_type": kind, "factor": c.positive("rope.scaling.factor", None)}
        rope |= {"original_max_position_embeddings": c.get("rope.scaling.original_context_length")}
    config = {
        "model_type": "llama",
        "vocab_size": c.count("vocab_size", len(tokens) if isinstance(tokens, list) else 0),
        "hidden_size": dim,
        "intermediate_size": c.count("feed_forward_length", 0),
        "num_hidden_layers": c.count("block_count", 0),
        "num_attention_heads": heads,
        "num_key_value_heads": c.count("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": c.count("context_length", 0),
        "rms_norm_eps": c.amount("attention.layer_norm_rms_epsilon", 0.0),
        "rope_parameters": rope,
        "attention_bias": source.has("blk.0.attn_q.bias"),
        "mlp_bias": source.has("blk.0.ffn_gate.bias"),
        "tie_word_embeddings": not source.has("output.weight"),
    }
    for name in ("bos", "eos", "padding"):
        key = {"padding": "pad"}.get(name, name)
        config[f"{key}_token_id"] = _token_id(source, f"tokenizer.ggml.{name}_token_id", tokens)
    c.close({"rope.scaling.finetuned"})
    return config


def _token_id(source: GGUFSource, key: str, tokens: object) -> int | None:
    """The token that the metadata name, which has to be one of the file's."""
    value = source.metadata.get(key)
    known = len(tokens) if isinstance(tokens, list) else math.inf
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < known):
        raise CheckpointError(f"{source.where}: {key}={value!r}; accepted: a token id below {known}, or none")
    return value


def _rows(config: Mapping[str, Any]) -> list[Row]:
    """The names of a GGUF Llama. Rows of query and key projections lie in the order of interleaved rotary pairs."""
    plain = {"attn_v": "mixer.v_proj", "attn_output": "mixer.o_proj"}
    permuted = {"attn_q": ("mixer.q_proj", "num_attention_heads"), "attn_k": ("mixer.k_proj", "num_key_value_heads")}
    mlp = {"ffn_gate": "ff.gate_proj", "ffn_up": "ff.up_proj", "ffn_down": "ff.down_proj"}
    attention_kinds = ("weight", "bias") if config["attention_bias"] else ("weight",)
    mlp_kinds = ("weight", "bias") if config["mlp_bias"] else ("weight",)
    rows = [
        Row(f"blk.{{i}}.{stored}.{kind}", (f"layers.{{i}}.{own}.{kind}",), RotaryPermuted(config[heads]))
        for stored, (own, heads) in permuted.items()
        for kind in attention_kinds
    ]
    rows += same({f"blk.{{i}}.{s}.{k}": f"layers.{{i}}.{o}.{k}" for s, o in plain.items() for k in attention_kinds})
    rows += same({f"blk.{{i}}.{s}.{k}": f"layers.{{i}}.{o}.{k}" for s, o in mlp.items() for k in mlp_kinds})
    norms = {"attn_norm": "mixer_norm", "ffn_norm": "ff_norm"}
    rows += same({f"blk.{{i}}.{s}.weight": f"layers.{{i}}.{o}.weight" for s, o in norms.items()})
    ends = {"token_embd.weight": "embedding.tokens.weight", "output_norm.weight": "norm.weight"}
    ends |= {} if config["tie_word_embeddings"] else {"output.weight": "head.weight"}
    return same(ends) + [row for i in range(config["num_hidden_layers"]) for row in expand(rows, i)]


def _extras(metadata: Mapping[str, Any], tokenizer: Tokenizer | str) -> dict[str, Any]:
    """The small files of a folder that say what the metadata say."""
    generation = {f"{k}_token_id": metadata.get(f"tokenizer.ggml.{k}_token_id") for k in ("bos", "eos")}
    extras: dict[str, Any] = {"generation_config.json": {k: v for k, v in generation.items() if v is not None}}
    if isinstance(tokenizer, Tokenizer):
        names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
        tokens = metadata["tokenizer.ggml.tokens"]
        about: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        for key, name in names.items():
            token = metadata.get(f"tokenizer.ggml.{name}_token_id")
            if isinstance(token, int) and 0 <= token < len(tokens):
                about[key] = tokens[token]
        if "tokenizer.chat_template" in metadata:
            about["chat_template"] = metadata["tokenizer.chat_template"]
        extras["tokenizer_config.json"] = about
    return extras
