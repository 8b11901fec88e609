"""Bloom: ALiBi, a norm behind the embedding, query/key/value fused head by head (BigScience 2022, arXiv:2211.05100)."""

from __future__ import annotations

from functools import partial

from torch import nn

from regard.biases import Alibi
from regard.mixers.parts import Projections
from regard.models.blocks import Embedding, NormedResidual, PreNorm
from regard.models.config import Config
from regard.models.feedforward import MLP, activation
from regard.models.layouts.base import Layout, Plan
from regard.models.layouts.shared.options import Sizes, read_eps
from regard.models.layouts.shared.parts import AttentionPart, Part, read_scores
from regard.models.layouts.shared.rows import BOTH, FF, MIXER, module_rows
from regard.models.layouts.shared.stacks import PRE_NORM, Layer, Names, Stack, Wiring
from regard.models.tables import FusedQKV, fused_rows

__all__ = ["BLOOM"]

LAYER = "transformer.h.{i}"
NAMES = Names(LAYER, "transformer.word_embeddings", "transformer.ln_f", norm_tensors=BOTH)


def _mlp(dim: int) -> nn.Module:
    return MLP(dim, 4 * dim, activation("gelu_new"))


def _embedding(norm: partial[nn.LayerNorm], table: nn.Embedding) -> Embedding:
    return Embedding(table, norm=norm())


def _bloom(c: Config) -> Plan:
    vocab, dim = c.count("vocab_size", 250880), c.count("hidden_size", 64)
    layers, heads = c.count("num_hidden_layers", 2), c.count("num_attention_heads", 8)
    if dim % heads:
        raise c.error("num_attention_heads", heads, f"a divisor of hidden_size={dim}")
    if c.flag("slow_but_exact", False) and c.count("pretraining_tp", 1) > 1:
        raise c.error("slow_but_exact", True, "false: with pretraining_tp above 1 it leaves out biases")
    sizes = Sizes(vocab, dim, layers, heads, heads, dim // heads)
    attention = AttentionPart(sizes, Projections(bias=True), read_scores(c), bias=Alibi(heads))
    per_head = FusedQKV(heads, heads, dim // heads, groups=heads)
    mixer_rows = fused_rows(f"{LAYER}.self_attention.query_key_value", f"{MIXER}.*_proj", BOTH, per_head)
    mixer_rows += module_rows({f"{LAYER}.self_attention.dense": f"{MIXER}.o_proj"}, BOTH)
    mlp = {f"{LAYER}.mlp.dense_h_to_4h": f"{FF}.up_proj", f"{LAYER}.mlp.dense_4h_to_h": f"{FF}.down_proj"}
    dropout = c.dropout("hidden_dropout")
    block = NormedResidual if c.flag("apply_residual_connection_post_layernorm", False) else PreNorm
    wiring = Wiring(partial(block, mixer_dropout=dropout, ff_dropout=dropout), PRE_NORM.norms)
    layer = Layer(Part(attention, mixer_rows), Part(partial(_mlp, dim), module_rows(mlp, BOTH)), wiring)
    norm = partial(nn.LayerNorm, dim, read_eps(c, 1e-5, "layer_norm_epsilon"))
    stack = Stack(
        vocab,
        dim,
        norm,
        [layer] * layers,
        NAMES,
        embedding=partial(_embedding, norm),
        embedding_rows=module_rows({"transformer.word_embeddings_layernorm": "embedding.norm"}, BOTH),
    )
    return stack.plan(tied=c.flag("tie_word_embeddings", True))


BLOOM = Layout(
    "bloom",
    "BloomForCausalLM",
    _bloom,
    prefix="transformer.",
    synonyms={"n_head": "num_attention_heads", "n_layer": "num_hidden_layers", "n_embed": "hidden_size"},
    # How training split its sums, fused its kernels and padded its data; the formulas are the same.
    inert=frozenset(
        {
            "attention_softmax_in_fp32",
            "bias_dropout_fusion",
            "masked_softmax_fusion",
            "n_inner",
            "offset_alibi",
            "seq_length",
            "skip_bias_add",
            "skip_bias_add_qkv",
        }
    ),
)
