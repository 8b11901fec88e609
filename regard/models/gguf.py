"""Reading models from GGUF files."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from regard.errors import CheckpointError
from regard.models.chat import stated_in_metadata
from regard.models.config import Config, naming
from regard.models.files import Asked
from regard.models.gguf_families import FAMILIES, Opened, renamed
from regard.models.gguf_file import GGUFSource
from regard.models.gguf_rotary import ROTARY_FACTORS, as_written
from regard.models.gguf_split import open_gguf
from regard.models.gguf_tokens import named_ids
from regard.models.layouts import LAYOUTS, Plan
from regard.models.layouts.base import bounds
from regard.models.model import Origin
from regard.models.tables import ComputedTensor
from regard.models.tokenizer import Tokenizer

__all__ = ["GGUFSource", "read_gguf"]


def read_gguf(path: Path) -> tuple[Opened, Origin, Plan]:
    """A model in a GGUF file, or in the files that it is split over: its tensors, where it comes from (as a folder of
    its family), and how to build it.

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
    if not isinstance(architecture, str) or architecture not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise CheckpointError(f"{path}: general.architecture: expected {known}, got {architecture!r}")
    c = _stated(source, architecture)
    family = FAMILIES[architecture](c)
    layout = LAYOUTS[family.model_type]
    starts, ends = named_ids(metadata, source.where)
    end = ends[0] if len(ends) == 1 else ends or None
    config = {**family.options(c, source), **starts, "eos_token_id": end}
    asked = Asked(source.has)
    plan = layout.read(config, str(path), asked, source.shapes())
    rows, tied = renamed(plan, architecture, config, family.interleaved)
    factors = tuple(
        ComputedTensor(name, shape, partial(source.read, name))  # they are among the options already
        for name, shape in source.shapes().items()
        if name in ROTARY_FACTORS
    )
    plan = dataclasses.replace(plan, rows=rows, tied=tied, computed=factors)
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


def _stated(source: Opened, architecture: str) -> Config:
    """The metadata of the architecture, to be read as options."""
    own = {
        k.removeprefix(f"{architecture}."): as_written(v) if isinstance(v, float) else v
        for k, v in source.metadata.items()
        if k.startswith(f"{architecture}.")
    }
    limits = bounds(source.shapes())
    most = {"block_count": limits["num_hidden_layers"], "attention.head_count": limits["num_attention_heads"]}
    most["expert_count"] = limits["num_local_experts"]
    return Config(own, f"{source.where}: metadata {architecture}.*", most=most)


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
