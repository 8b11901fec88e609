"""MPT: ALiBi with slopes in an order of its own, norms without biases (MosaicML 2023, MPT-7B)."""

from __future__ import annotations

from functools import partial

from torch import nn

from regard.biases import Alibi, alibi_slopes
from regard.mixers.parts import Projections, Scores
from regard.models.blocks import Embedding, PreNorm
from regard.models.config import Config
from regard.models.feedforward import MLP, activation
from regard.models.layouts.base import Layout, Plan
from regard.models.layouts.shared.options import Sizes, read_eps
from regard.models.layouts.shared.parts import AttentionPart, Part
from regard.models.layouts.shared.rows import FF, module_rows
from regard.models.layouts.shared.stacks import Layer, Names, Stack, Wiring

__all__ = ["MPT"]

LAYER = "transformer.blocks.{i}"
NAMES = Names(LAYER, "transformer.wte", "transformer.norm_f")


def _mlp(dim: int) -> nn.Module:
    return MLP(dim, 4 * dim, activation("gelu"), bias=False)


def _attention(c: Config, sizes: Sizes) -> AttentionPart:
    """What ``attn_config`` says."""
    own = Config(c.table("attn_config"), f"{c.source}: attn_config")
    own.only("attn_type", ("multihead_attention", None), "one key and value head for each query head")
    own.only("alibi", (True, None), "positions by ALiBi")
    own.only("prefix_lm", (False, None), "a causal model")
    own.only("qk_ln", (False, None), "queries and keys as they are projected")
    own.only("alibi_bias_max", (8, None), "published code disagrees on what another number changes")
    attention = AttentionPart(
        sizes,
        Projections(clip=own.number("clip_qkv", 0.0, least=0.0) or None),
        Scores(scale=own.positive("softmax_scale", None), dropout=own.dropout("attn_pdrop")),
        bias=Alibi(alibi_slopes(sizes.heads, order="mpt")),
    )
    # Which kernel ran, and whether packed documents are kept apart, which `segments` says here.
    own.close({"attn_impl", "attn_uses_sequence_id", "chunk_size_feed_forward", "is_encoder_decoder"})
    return attention


def _mpt(c: Config) -> Plan:
    dim, heads = c.count("hidden_size", 2048), c.count("num_attention_heads", 16)
    if dim % heads:
        raise c.error("num_attention_heads", heads, f"a divisor of d_model={dim}")
    sizes = Sizes(c.count("vocab_size", 50368), dim, c.count("num_hidden_layers", 24), heads, heads, dim // heads)
    c.only("no_bias", (True, None), "linear maps and norms without biases")
    c.only("norm_type", ("low_precision_layernorm", "layernorm"), "layer norms")
    c.only("logit_scale", (None,), "logits as they are")
    dropout = c.dropout("resid_pdrop")
    mlp = {f"{LAYER}.ffn.{name}": f"{FF}.{name}" for name in ("up_proj", "down_proj")}
    layer = Layer(
        _attention(c, sizes).part(f"{LAYER}.attn", fused="Wqkv", out="out_proj"),
        Part(partial(_mlp, dim), module_rows(mlp)),
        Wiring(
            partial(PreNorm, mixer_dropout=dropout, ff_dropout=dropout), {"norm_1": "mixer_norm", "norm_2": "ff_norm"}
        ),
    )
    norm = partial(nn.LayerNorm, dim, read_eps(c, 1e-5, "layer_norm_epsilon"), bias=False)
    embedding = partial(Embedding, dropout=c.dropout("emb_pdrop"))
    stack = Stack(sizes.vocab, dim, norm, [layer] * sizes.layers, NAMES, embedding=embedding)
    return stack.plan(tied=c.flag("tie_word_embeddings", True))


MPT = Layout(
    "mpt",
    "MptForCausalLM",
    _mpt,
    prefix="transformer.",
    synonyms={"d_model": "hidden_size", "n_heads": "num_attention_heads", "n_layers": "num_hidden_layers"},
    # The width is four times d_model whatever expansion_ratio says, and ALiBi takes the place of learned positions: so
    # the released code computes. The rest is about training.
    inert=frozenset({"embedding_fraction", "expansion_ratio", "learned_pos_emb", "max_seq_len"})
    | {"init_config", "init_device", "tokenizer_name", "verbose"},
)
