"""Reading Llama models from GGUF files."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from regard.errors import CheckpointError
from regard.models.chat import stated_in_metadata
from regard.models.config import Config, naming
from regard.models.files import Asked
from regard.models.gguf_file import GGUFSource
from regard.models.gguf_split import SplitGGUF, open_gguf
from regard.models.gguf_tokens import named_ids
from regard.models.layouts import LAYOUTS, Plan
from regard.models.layouts.base import bounds
from regard.models.layouts.shared.rows import FF, MIXER, kinds, module_rows
from regard.models.model import Origin
from regard.models.tables import RotaryPermuted, Row, per_layer
from regard.models.tokenizer import Tokenizer

__all__ = ["GGUFSource", "read_gguf"]

Opened = GGUFSource | SplitGGUF


def read_gguf(path: Path) -> tuple[Opened, Origin, Plan]:
    """A Llama model in a GGUF file, or in the files that it is split over: its tensors, where it comes from (as a Llama
    folder), and how to build it.

    Raises:
        CheckpointError: for another architecture, an option that is not known, and all that
            `open_gguf` refuses.
    """
    with naming(str(path)):
        return _read(open_gguf(path), path)


def _read(source: Opened, path: Path) -> tuple[Opened, Origin, Plan]:
    metadata = source.metadata
    content = metadata.get("general.type", "model")
    if content != "model":
        raise CheckpointError(f"{path}: general.type: expected model, got {content!r}")
    if (adapter := metadata.get("adapter.type")) is not None:
        raise CheckpointError(f"{path}: adapter.type: expected a whole model, not an adapter, got {adapter!r}")
    architecture = metadata.get("general.architecture")
    if architecture != "llama":
        raise CheckpointError(f"{path}: general.architecture: expected llama, got {architecture!r}")
    layout = LAYOUTS["llama"]
    starts, ends = named_ids(metadata, source.where)
    config = {**_config(source, architecture), **starts, "eos_token_id": ends[0] if len(ends) == 1 else ends or None}
    asked = Asked(source.has)
    plan = layout.read(config, str(path), asked, source.shapes())
    tied = ("token_embd.weight", "output.weight") if config["tie_word_embeddings"] else ()
    plan = dataclasses.replace(plan, rows=_rows(config), tied=tied)
    tokenizer = Tokenizer.from_gguf(metadata)
    origin = Origin(
        layout=layout,
        config=config,
        tokenizer=tokenizer,
        end_ids=tuple(ends),
        extras=_extras(config, metadata, tokenizer),
        parts=asked.answers,
    )
    return source, origin, plan


def _config(source: Opened, architecture: str) -> dict[str, Any]:
    """The metadata as options of a ``config.json``."""
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
    c.only("attention.causal", (None, True), "a causal model")
    c.close({"rope.scaling.finetuned"}, false_is_off=False)  # converters write only metadata that mean something
    return config


def _rows(config: Mapping[str, Any]) -> list[Row]:
    """The names of a GGUF Llama. Rows of query and key projections lie in the order of interleaved rotary pairs."""
    attention, mlp = kinds(config["attention_bias"]), kinds(config["mlp_bias"])
    permuted = {"attn_q": ("q_proj", "num_attention_heads"), "attn_k": ("k_proj", "num_key_value_heads")}
    rows = [
        Row(f"blk.{{i}}.{stored}.{kind}", (f"{MIXER}.{own}.{kind}",), RotaryPermuted(config[heads]))
        for stored, (own, heads) in permuted.items()
        for kind in attention
    ]
    rows += module_rows({"blk.{i}.attn_v": f"{MIXER}.v_proj", "blk.{i}.attn_output": f"{MIXER}.o_proj"}, attention)
    rows += module_rows({f"blk.{{i}}.ffn_{name}": f"{FF}.{name}_proj" for name in ("gate", "up", "down")}, mlp)
    rows += module_rows({"blk.{i}.attn_norm": "layers.{i}.mixer_norm", "blk.{i}.ffn_norm": "layers.{i}.ff_norm"})
    ends = {"token_embd": "embedding.tokens", "output_norm": "norm"}
    ends |= {} if config["tie_word_embeddings"] else {"output": "head"}
    return module_rows(ends) + [row for i in range(config["num_hidden_layers"]) for row in per_layer(rows, i)]


def _extras(config: Mapping[str, Any], metadata: Mapping[str, Any], tokenizer: Tokenizer | str) -> dict[str, Any]:
    """The metadata as the small files of a folder."""
    generation = {name: config[name] for name in ("bos_token_id", "eos_token_id")}
    extras: dict[str, Any] = {"generation_config.json": {k: v for k, v in generation.items() if v is not None}}
    if isinstance(tokenizer, Tokenizer):
        names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
        tokens = metadata["tokenizer.ggml.tokens"]
        about: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        for key, name in names.items():
            token = metadata.get(f"tokenizer.ggml.{name}_token_id")
            if isinstance(token, int) and 0 <= token < len(tokens):
                about[key] = tokens[token]
        if (stated := stated_in_metadata(metadata)) is not None:
            about["chat_template"] = stated
        extras["tokenizer_config.json"] = about
    return extras
