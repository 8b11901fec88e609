"""Gemma 2: norms round both parts, soft caps, windows in every other layer (Gemma Team 2024, arXiv:2408.00118)."""

from __future__ import annotations

from functools import partial

from regard.mixers.parts import Projections, RMSNorm
from regard.models.blocks import Embedding, Softcap
from regard.models.config import Config
from regard.models.layouts.base import Layout, Plan
from regard.models.layouts.shared.options import layer_masks, read_eps, read_sizes, read_window
from regard.models.layouts.shared.parts import AttentionPart, read_gated, read_scores
from regard.models.layouts.shared.rotary import rotary_from_config
from regard.models.layouts.shared.rows import ROTARY_BUFFER
from regard.models.layouts.shared.stacks import SANDWICH, Layer, Stack

__all__ = ["GEMMA2"]


def _gemma2(c: Config) -> Plan:
    sizes = read_sizes(c, vocab=256000, dim=2304, layers=26, heads=8, kv_heads=4, head_dim=256)
    c.only("use_bidirectional_attention", (None, False), "the causal model")
    window = read_window(c, 4096)
    masks = layer_masks(c, sizes.layers, window, lambda i: "full_attention" if i % 2 else "sliding_attention")
    c.only("sliding_window_size", (None, window), "the same as sliding_window")
    c.only("sliding_window_pattern", (None, 2), "layer_types says it otherwise")
    scale = c.amount("query_pre_attn_scalar", 256.0) ** -0.5
    attention = AttentionPart(
        sizes,
        Projections(bias=c.flag("attention_bias", False)),
        read_scores(c, scale=scale, softcap=c.positive("attn_logit_softcapping", 50.0)),
        rotary=rotary_from_config(c, sizes.head_dim),
    )
    ff = read_gated(c, sizes.dim, 9216, act="hidden_activation", default="gelu_pytorch_tanh").part()
    cap = c.positive("final_logit_softcapping", 30.0)
    stack = Stack(
        sizes.vocab,
        sizes.dim,
        partial(RMSNorm, sizes.dim, read_eps(c), unit_offset=True),
        [Layer(attention.under(mask).part(), ff, SANDWICH) for mask in masks],
        embedding=partial(Embedding, scale=sizes.dim**0.5),
        finish=None if cap is None else partial(Softcap, cap),
    )
    return stack.plan(tied=c.flag("tie_word_embeddings", True))


GEMMA2 = Layout(
    "gemma2",
    "Gemma2ForCausalLM",
    _gemma2,
    prefix="model.",
    ignored=(ROTARY_BUFFER,),
    # The family reads hidden_activation; files carry an older hidden_act beside it.
    inert=frozenset({"hidden_act"}),
)
