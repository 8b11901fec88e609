"""ModernBERT: rotary positions, windows in most layers, gated parts (Warner et al. 2024, arXiv:2412.13663)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import nn

from regard.masks import Band
from regard.mixers.parts import Projections, Scores
from regard.models.blocks import Embedding, PreNorm
from regard.models.config import Config
from regard.models.encoder import Encoder
from regard.models.feedforward import ACTIVATIONS, GatedMLP, activation
from regard.models.layouts.base import Layout, Plan
from regard.models.layouts.shared.options import kinds_of, read_eps
from regard.models.layouts.shared.rotary import rotary_from_config
from regard.models.layouts.shared.rows import FF, MIXER, ROTARY_BUFFER, kinds, module_rows
from regard.models.layouts.shared.words import WordsHead
from regard.models.tables import Bundles, FusedQKV, Ignored, Row, fused_rows, per_layer
from regard.nn import MultiHeadAttention
from regard.positions import Rotary

__all__ = ["MODERNBERT"]

LAYER = "model.layers.{i}"
KINDS = {"full_attention": ("global_rope_theta", 160000.0), "sliding_attention": ("local_rope_theta", 10000.0)}
"""The kinds of layers, each with the older option for its rotary base and the base by default."""
WORDS = WordsHead(
    ("ModernBertForMaskedLM",),
    dense="head.dense",
    norm="head.norm",
    decoder="decoder",
    bias=None,
    table="model.embeddings.tok_embeddings",
)


def _rotary(c: Config, head_dim: int) -> dict[str, Rotary]:
    """The rotary part of each kind of layer."""
    given, scaling = c.table("rope_parameters"), c.table("rope_scaling")
    if set(given) - set(KINDS):
        raise c.error("rope_parameters", given, f"an object of {' and '.join(KINDS)}, each with options of its own")
    found = {}
    for kind, (older, base) in KINDS.items():
        stated = c.get(older, base)
        # without a base of their own, windows rotate by that of the whole text
        theta = c.amount(older if stated is not None else "global_rope_theta", base if stated is not None else 160000.0)
        own = given.get(kind) or {}
        if not isinstance(own, dict):
            raise c.error("rope_parameters", given, "an object of options for each kind of layer")
        options = {"rope_parameters": {"rope_theta": theta, **own, **scaling}}
        longest = {"max_position_embeddings": c.count("max_position_embeddings", 8192)}
        found[kind] = rotary_from_config(Config({**options, **longest}, f"{c.source}: {kind}"), head_dim)
    return found


def _layer_rows(
    sizes: tuple[int, int, int], *, first: bool, norm_bias: bool, attention_bias: bool, mlp_bias: bool
) -> list[Row]:
    dim, heads, hidden = sizes
    norms = {f"{LAYER}.mlp_norm": "layers.{i}.ff_norm"}
    norms |= {} if first else {f"{LAYER}.attn_norm": "layers.{i}.mixer_norm"}
    rows = module_rows(norms, kinds(norm_bias))
    qkv = FusedQKV(heads, heads, dim // heads, groups=1)
    rows += fused_rows(f"{LAYER}.attn.Wqkv", f"{MIXER}.*_proj", kinds(attention_bias), qkv)
    rows += module_rows({f"{LAYER}.attn.Wo": f"{MIXER}.o_proj"}, kinds(attention_bias))
    both = Bundles((hidden, hidden), groups=1)
    rows += [
        Row(f"{LAYER}.mlp.Wi.{kind}", (f"{FF}.gate_proj.{kind}", f"{FF}.up_proj.{kind}"), both)
        for kind in kinds(mlp_bias)
    ]
    return rows + module_rows({f"{LAYER}.mlp.Wo": f"{FF}.down_proj"}, kinds(mlp_bias))


def _modernbert(c: Config) -> Plan:
    dim, heads = c.count("hidden_size", 768), c.count("num_attention_heads", 12)
    if dim % heads:
        raise c.error("num_attention_heads", heads, f"a divisor of hidden_size={dim}")
    vocab, layers, hidden = (
        c.count("vocab_size", 50368),
        c.count("num_hidden_layers", 22),
        c.count("intermediate_size", 1152),
    )
    every, reach = c.count("global_attn_every_n_layers", 3), c.count("local_attention", 128) // 2
    kind = kinds_of(c, "layer_types", layers, list(KINDS), lambda i: list(KINDS)[bool(i % every)])
    rotary = _rotary(c, dim // heads)
    norm_bias, attention_bias, mlp_bias = (c.flag(f"{n}_bias", False) for n in ("norm", "attention", "mlp"))
    norm = partial(nn.LayerNorm, dim, read_eps(c, 1e-5, "norm_eps"), bias=norm_bias)
    act, dropout = c.name("hidden_activation", "gelu", ACTIVATIONS), c.dropout("attention_dropout")
    inner, outer = c.dropout("mlp_dropout"), c.dropout("embedding_dropout")
    words = WORDS.read(
        c,
        dim,
        vocab,
        norm,
        act=c.name("classifier_activation", "gelu", ACTIVATIONS),
        dense_bias=c.flag("classifier_bias", False),
        norm_bias=norm_bias,
        bias=c.flag("decoder_bias", True),
    )

    def layer(i: int) -> nn.Module:
        mixer = MultiHeadAttention(
            dim,
            heads,
            projections=Projections(bias=attention_bias),
            scores=Scores(dropout=dropout),
            mask=Band(reach, reach) if kind[i] == "sliding_attention" else None,
            rotary=rotary[kind[i]],
        )
        gate = activation(act)
        ff = GatedMLP(dim, hidden, nn.Sequential(gate, nn.Dropout(inner)) if inner else gate, bias=mlp_bias)
        return PreNorm(mixer, ff, nn.Identity() if i == 0 else norm(), norm(), mixer_dropout=dropout)

    def make() -> Encoder:
        embedding = Embedding(nn.Embedding(vocab, dim), norm=norm(), dropout=outer)
        return Encoder(embedding, [layer] * layers, norm(), head=None if words.make is None else words.make())

    ends = {"embeddings.norm": "embedding.norm", "final_norm": "norm"}
    rows = module_rows({"model.embeddings.tok_embeddings": "embedding.tokens"})
    rows += module_rows({f"model.{stored}": own for stored, own in ends.items()}, kinds(norm_bias)) + words.rows
    biases = {"norm_bias": norm_bias, "attention_bias": attention_bias, "mlp_bias": mlp_bias}
    for i in range(layers):
        rows += per_layer(_layer_rows((dim, heads, hidden), first=i == 0, **biases), i)
    return Plan(make, rows, tied=words.tied, headed=words.headed)


def _start(config: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Normal matrices, the ends of branches narrower; the published code also redraws what lies beyond two widths."""
    return {"std": Config(config, source).amount("initializer_range", 0.02), "depth_scaled": True}


MODERNBERT = Layout(
    "modernbert",
    "ModernBertModel",
    _modernbert,
    prefix="model.",
    headless=True,
    ignored=(
        ROTARY_BUFFER,
        Ignored("head.*", "a task's head, or words where `architectures` names no class with them"),
        Ignored("decoder.*", "words where `architectures` names no class with them"),
        Ignored("classifier.*", "a task's head; the encoder ends at its last hidden state"),
    ),
    start=_start,
    # How training computed its loss, how attention is compiled, heads of tasks, and what BERT's code alone reads.
    inert=frozenset({"classifier_dropout", "classifier_pooling", "cls_token_id", "deterministic_flash_attn"})
    | {"initializer_cutoff_factor", "reference_compile", "repad_logits_with_grad", "sparse_pred_ignore_index"}
    | {"sparse_prediction", "layer_norm_eps", "position_embedding_type"},
)
