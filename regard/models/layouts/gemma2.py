"""Gemma 2: norms round both parts, soft caps, windows in every other layer (Gemma Team 2024, arXiv:2408.00118)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import nn

from regard.masks import Mask
from regard.mixers.parts import Projections, RMSNorm, Scores
from regard.models.blocks import Embedding, Sandwich, Softcap
from regard.models.config import Config
from regard.models.decoder import Decoder
from regard.models.feedforward import ACTIVATIONS, GatedMLP, activation
from regard.models.layouts.base import Layout, Plan
from regard.models.layouts.llama import (
    ROTARY_BUFFER,
    TIED,
    Shape,
    attention_rows,
    gated_rows,
    layer_windows,
    norm_rows,
    outer_rows,
    read_shape,
)
from regard.models.layouts.rotary import rotary_from_config
from regard.nn import MultiHeadAttention
from regard.positions import Rotary

__all__ = ["GEMMA2"]


@dataclass(frozen=True)
class _Parts:
    shape: Shape
    hidden: int
    act: str
    eps: float
    projections: Projections
    scores: Scores
    rotary: Rotary

    def norm(self) -> RMSNorm:
        return RMSNorm(self.shape.dim, self.eps, unit_offset=True)

    def layer(self, mask: Mask, i: int) -> nn.Module:
        s = self.shape
        mixer = MultiHeadAttention(
            s.dim,
            s.heads,
            kv_heads=s.kv_heads,
            head_dim=s.head_dim,
            projections=self.projections,
            scores=self.scores,
            mask=mask,
            rotary=self.rotary,
        )
        ff = GatedMLP(s.dim, self.hidden, activation(self.act))
        return Sandwich(mixer, ff, (self.norm(), self.norm()), (self.norm(), self.norm()))

    def decoder(self, masks: list[Mask], tied: bool, cap: float | None) -> Decoder:
        s = self.shape
        return Decoder(
            Embedding(nn.Embedding(s.vocab, s.dim), scale=s.dim**0.5),
            [partial(self.layer, mask) for mask in masks],
            self.norm(),
            None if tied else nn.Linear(s.dim, s.vocab, bias=False),
            finish=None if cap is None else Softcap(cap),
        )


def _gemma2(c: Config, has: Callable[[str], bool]) -> Plan:
    s = read_shape(c, vocab=256000, dim=2304, layers=26, heads=8, kv_heads=4, head_dim=256)
    c.only("use_bidirectional_attention", (None, False), "the causal model")
    bias = c.flag("attention_bias", False)
    tied = c.flag("tie_word_embeddings", True)
    window = None if c.get("sliding_window", 4096) is None else c.count("sliding_window", 4096)
    masks = layer_windows(c, s.layers, window, lambda i: "full_attention" if i % 2 else "sliding_attention")
    c.only("sliding_window_size", (None, window), "the same as sliding_window")
    c.only("sliding_window_pattern", (None, 2), "layer_types says it otherwise")
    scores = Scores(
        scale=c.amount("query_pre_attn_scalar", 256.0) ** -0.5,
        softcap=c.positive("attn_logit_softcapping", 50.0),
        dropout=c.dropout("attention_dropout"),
    )
    parts = _Parts(
        shape=s,
        hidden=c.count("intermediate_size", 9216),
        act=c.name("hidden_activation", "gelu_pytorch_tanh", ACTIVATIONS),
        eps=c.number("rms_norm_eps", 1e-6, least=0.0),
        projections=Projections(bias=bias),
        scores=scores,
        rotary=rotary_from_config(c, s.head_dim),
    )
    per_layer = attention_rows(bias=bias) + gated_rows(("weight",))
    per_layer += norm_rows(
        input_layernorm="mixer_norm",
        post_attention_layernorm="mixer_post_norm",
        pre_feedforward_layernorm="ff_norm",
        post_feedforward_layernorm="ff_post_norm",
    )
    make = partial(parts.decoder, masks, tied, c.positive("final_logit_softcapping", 30.0))
    return Plan(make, outer_rows(per_layer, s.layers, tied=tied), TIED if tied else ())


GEMMA2 = Layout(
    "gemma2",
    "Gemma2ForCausalLM",
    _gemma2,
    prefix="model.",
    ignored=(ROTARY_BUFFER,),
    # The family reads hidden_activation; files carry an older hidden_act beside it.
    inert=frozenset({"hidden_act"}),
)
