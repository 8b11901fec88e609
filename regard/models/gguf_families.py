"""The families that GGUF files hold: their metadata as options of a ``config.json``, their tensor names.

A family's table is its folder's, under the names that the `gguf` package knows for the folder's names. Two things lie
otherwise in a GGUF file: the experts of a layer are one tensor, and rows of query and key projections come in the order
of interleaved rotary pairs where llama.cpp rotates those.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from regard.errors import CheckpointError
from regard.models.config import Config
from regard.models.gguf_file import GGUFSource
from regard.models.gguf_rotary import rotary_options
from regard.models.gguf_split import SplitGGUF
from regard.models.layouts import Plan
from regard.models.tables import RotaryPermuted, Row

__all__ = ["FAMILIES", "Family", "Opened", "renamed"]

Opened = GGUFSource | SplitGGUF
Options = dict[str, Any]


def _nothing(c: Config, source: Opened, base: Options) -> Options:
    return {}


@dataclass(frozen=True)
class Family:
    """What an architecture of GGUF is here.

    Args:
        model_type: the layout that builds it.
        further: the family's own options, from the metadata, the file and the options so far.
        attention_bias, mlp_bias: whether the layout has these options; a file's tensors then say what they are.
        interleaved: whether query and key rows lie in the order of interleaved pairs.
        partial: whether a part of each head may rotate.
    """

    model_type: str
    further: Callable[[Config, Opened, Options], Options] = _nothing
    attention_bias: bool = False
    mlp_bias: bool = False
    interleaved: bool = False
    partial: bool = False

    def options(self, c: Config, source: Opened) -> Options:
        """The metadata as options of a ``config.json``."""
        tokens = source.metadata.get("tokenizer.ggml.tokens")
        heads, dim = c.count("attention.head_count", 0), c.count("embedding_length", 0)
        head_dim = c.count("attention.key_length", dim // heads)
        c.only("attention.value_length", (None, head_dim), "one size for keys and values")
        c.only("attention.causal", (None, True), "a causal model")
        width = c.count("rope.dimension_count", head_dim)
        if not self.partial:
            c.only("rope.dimension_count", (None, head_dim), "rotation of whole heads")
        context = c.count("context_length", 0)
        options: Options = {
            "model_type": self.model_type,
            "vocab_size": c.count("vocab_size", len(tokens) if isinstance(tokens, list) else 0),
            "hidden_size": dim,
            "intermediate_size": c.count("feed_forward_length", 0),
            "num_hidden_layers": c.count("block_count", 0),
            "num_attention_heads": heads,
            "num_key_value_heads": c.count("attention.head_count_kv", heads),
            "head_dim": head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": context,
            "rms_norm_eps": c.amount("attention.layer_norm_rms_epsilon", 0.0),
            "tie_word_embeddings": not source.has("output.weight"),
            "rope_parameters": rotary_options(c, source, width, context),
        }
        if width != head_dim:
            options["rope_parameters"]["partial_rotary_factor"] = width / head_dim
        if self.attention_bias:
            options["attention_bias"] = source.has("blk.0.attn_q.bias")
        if self.mlp_bias:
            options["mlp_bias"] = source.has("blk.0.ffn_gate.bias")
        options |= self.further(c, source, options)
        c.close({"rope.scaling.finetuned"}, false_is_off=False)  # converters write only metadata that mean something
        return options


def _granite(c: Config, source: Opened, base: Options) -> Options:
    """The four factors; a stated 0 means absent, as in llama.cpp."""

    def factor(name: str, default: float) -> float:
        return c.number(name, 0.0, least=0.0) or default

    return {
        "embedding_multiplier": factor("embedding_scale", 1.0),
        "residual_multiplier": factor("residual_scale", 1.0),
        "logits_scaling": factor("logit_scale", 1.0),
        "attention_multiplier": factor("attention.scale", base["head_dim"] ** -0.5),
    }


def _phi3(c: Config, source: Opened, base: Options) -> Options:
    """A window, where one is stated; the context that a scaled model was trained on stands beside the scaling too."""
    window = c.get("attention.sliding_window")
    original = base["rope_parameters"].get("original_max_position_embeddings", base["max_position_embeddings"])
    return {
        "sliding_window": c.count("attention.sliding_window", 1) if window else None,
        "original_max_position_embeddings": original,
    }


def _experts(c: Config, source: Opened, base: Options) -> Options:
    return {
        "num_local_experts": c.count("expert_count", 0),
        "num_experts_per_tok": c.count("expert_used_count", 0),
    }


def _dense(c: Config, source: Opened, base: Options) -> Options:
    c.only("expert_count", (None, 0), "a dense model")
    c.only("expert_used_count", (None, 0), "a dense model")
    return {}


_LLAMA = Family("llama", _dense, attention_bias=True, mlp_bias=True, interleaved=True)
_MIXTRAL = Family("mixtral", _experts, interleaved=True)
FAMILIES: dict[str, Callable[[Config], Family]] = {
    "granite": lambda c: Family("granite", _granite, attention_bias=True, mlp_bias=True, interleaved=True),
    "llama": lambda c: _MIXTRAL if c.get("expert_count") else _LLAMA,
    "olmo2": lambda c: Family("olmo2", attention_bias=True),
    "phi3": lambda c: Family("phi3", _phi3, partial=True),
    "qwen2": lambda c: Family("qwen2"),
    "qwen3": lambda c: Family("qwen3", attention_bias=True),
}
"""By ``general.architecture``; Mistral's and Mixtral's files say llama."""

_EXPERT = re.compile(r"(?P<before>.*\.experts)\.[0-9]+(?P<after>\..*)")


def renamed(plan: Plan, architecture: str, options: Options, interleaved: bool) -> tuple[list[Row], tuple[str, ...]]:
    """A folder's table, and its tied names, under the names of a GGUF file.

    Raises:
        CheckpointError: for a tensor of the family that has no name in GGUF.
    """
    from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, get_tensor_name_map

    arch = next(one for one in MODEL_ARCH if MODEL_ARCH_NAMES[one] == architecture)
    names = get_tensor_name_map(arch, options["num_hidden_layers"])

    def name(stored: str) -> str:
        found: str | None = names.get_name(stored, try_suffixes=(".weight", ".bias"))
        if found is None:
            raise CheckpointError(f"general.architecture: GGUF has no name for {stored} of {architecture}")
        return found

    rows = [Row(name(row.stored), row.own, row.reshape) for row in _stacked(plan.rows)]
    return (_interleaved(rows, options) if interleaved else rows), tuple(map(name, plan.tied))


def _stacked(rows: Iterable[Row]) -> Iterable[Row]:
    """The same with the experts of a layer in one tensor, in the order of their numbers."""
    seen = set()
    for row in rows:
        found = _EXPERT.fullmatch(row.stored)
        if found is None:
            yield row
            continue
        (own,) = {one.partition("[")[0] for one in row.own}
        if own not in seen:
            seen.add(own)
            yield Row(f"{found['before']}{found['after']}", (own,))


def _interleaved(rows: Sequence[Row], options: Options) -> list[Row]:
    """The same with the rows of query and key projections in the order of interleaved pairs."""
    heads = {"q_proj": options["num_attention_heads"], "k_proj": options["num_key_value_heads"]}

    def turned(row: Row) -> Row:
        part = row.own[0].split(".")[-2] if ".mixer." in row.own[0] else ""
        return Row(row.stored, row.own, RotaryPermuted(heads[part])) if part in heads else row

    return [turned(row) for row in rows]
