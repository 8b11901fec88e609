"""gpt-oss: sinks, windows in every other layer, a mixture of clamped experts (OpenAI 2025, arXiv:2508.10925)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import nn

from regard.masks import Mask
from regard.mixers.parts import Projections, RMSNorm, Scores
from regard.models.blocks import Embedding, PreNorm
from regard.models.config import Config
from regard.models.decoder import Decoder
from regard.models.experts import ClampedSwiGLU, MixtureOfExperts, Router, Routing, StackedExperts
from regard.models.layouts.base import Layout, Plan
from regard.models.layouts.llama import (
    ROTARY_BUFFER,
    TIED,
    Shape,
    attention_rows,
    layer_windows,
    norm_rows,
    outer_rows,
    read_shape,
)
from regard.models.layouts.rotary import rotary_from_config
from regard.models.tables import same
from regard.nn import MultiHeadAttention
from regard.positions import Rotary

__all__ = ["GPT_OSS"]

YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


@dataclass(frozen=True)
class _Parts:
    shape: Shape
    hidden: int
    experts: int
    chosen: int
    eps: float
    projections: Projections
    scores: Scores
    rotary: Rotary
    gate: ClampedSwiGLU

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
        ff = MixtureOfExperts(
            Router(s.dim, Routing(self.experts, self.chosen, normalized=True), bias=True),
            StackedExperts(s.dim, self.hidden, self.experts, self.gate),
        )
        return PreNorm(mixer, ff, RMSNorm(s.dim, self.eps), RMSNorm(s.dim, self.eps))

    def decoder(self, masks: list[Mask], tied: bool) -> Decoder:
        s = self.shape
        return Decoder(
            Embedding(nn.Embedding(s.vocab, s.dim)),
            [partial(self.layer, mask) for mask in masks],
            RMSNorm(s.dim, self.eps),
            None if tied else nn.Linear(s.dim, s.vocab, bias=False),
        )


def _gpt_oss(c: Config, has: Callable[[str], bool]) -> Plan:
    s = read_shape(c, vocab=201088, dim=2880, layers=36, heads=64, kv_heads=8, head_dim=64)
    c.only("hidden_act", ("silu",), "the experts' gate is fixed")
    if c.get("quantization_config") is not None:
        raise c.error("quantization_config", c.get("quantization_config"), "none: dequantised experts, stacked")
    bias = c.flag("attention_bias", True)
    tied = c.flag("tie_word_embeddings", False)
    window = None if c.get("sliding_window", 128) is None else c.count("sliding_window", 128)
    masks = layer_windows(c, s.layers, window, lambda i: "full_attention" if i % 2 else "sliding_attention")
    if c.get("rope_parameters") is None and c.get("rope_scaling") is None:
        c.values["rope_parameters"] = dict(YARN)
    experts, chosen = c.count("num_local_experts", 128), c.count("num_experts_per_tok", 4)
    if chosen > experts:
        raise c.error("num_experts_per_tok", chosen, f"at most num_local_experts={experts}")
    parts = _Parts(
        shape=s,
        hidden=c.count("intermediate_size", 2880),
        experts=experts,
        chosen=chosen,
        eps=c.number("rms_norm_eps", 1e-5, least=0.0),
        projections=Projections(bias=bias),
        scores=Scores(sink=True, dropout=c.dropout("attention_dropout")),
        rotary=rotary_from_config(c, s.head_dim, base=150000.0),
        gate=ClampedSwiGLU(c.number("swiglu_alpha", 1.702), c.amount("swiglu_limit", 7.0)),
    )
    mlp = {f"model.layers.{{i}}.mlp.router.{k}": f"layers.{{i}}.ff.router.{k}" for k in ("weight", "bias")}
    for name in ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias"):
        mlp[f"model.layers.{{i}}.mlp.experts.{name}"] = f"layers.{{i}}.ff.experts.{name}"
    per_layer = attention_rows(bias=bias, sink=True) + same(mlp)
    per_layer += norm_rows(input_layernorm="mixer_norm", post_attention_layernorm="ff_norm")
    make = partial(parts.decoder, masks, tied)
    return Plan(make, outer_rows(per_layer, s.layers, tied=tied), TIED if tied else ())


GPT_OSS = Layout(
    "gpt_oss",
    "GptOssForCausalLM",
    _gpt_oss,
    prefix="model.",
    ignored=(ROTARY_BUFFER,),
    synonyms={"num_experts": "num_local_experts", "experts_per_token": "num_experts_per_tok"},
    inert=frozenset({"initial_context_length"}),
    wide_in_float16=("*norm.weight",),
)
