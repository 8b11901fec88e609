"""Llama and Mistral (Touvron et al. 2023, arXiv:2302.13971; Jiang et al. 2023, arXiv:2310.06825)."""

from __future__ import annotations

from dataclasses import replace

from regard.mixers.parts import Projections
from regard.models.config import Config
from regard.models.layouts.base import Layout, Plan
from regard.models.layouts.shared.options import like_layers, read_eps, read_sizes, read_window, window_mask
from regard.models.layouts.shared.parts import AttentionPart, read_gated, read_scores
from regard.models.layouts.shared.rotary import rotary_from_config
from regard.models.layouts.shared.rows import ROTARY_BUFFER
from regard.models.layouts.shared.stacks import Layer, rms_decoder

__all__ = ["LLAMA", "MISTRAL"]


def _llama(c: Config) -> Plan:
    sizes = read_sizes(c, vocab=32000, dim=4096, layers=32, heads=32)
    like_layers(c, sizes.layers)
    bias = Projections(bias=c.flag("attention_bias", False))
    attention = AttentionPart(sizes, bias, read_scores(c), rotary=rotary_from_config(c, sizes.head_dim))
    ff = replace(read_gated(c, sizes.dim, 11008), bias=c.flag("mlp_bias", False))
    return rms_decoder(c, sizes, read_eps(c), [Layer(attention.part(), ff.part())] * sizes.layers)


def _mistral(c: Config) -> Plan:
    sizes = read_sizes(c, vocab=32000, dim=4096, layers=32, heads=32, kv_heads=8)
    window = read_window(c, 4096)
    like_layers(c, sizes.layers, window)
    attention = AttentionPart(
        sizes, scores=read_scores(c), mask=window_mask(window), rotary=rotary_from_config(c, sizes.head_dim)
    )
    ff = read_gated(c, sizes.dim, 14336)
    return rms_decoder(c, sizes, read_eps(c), [Layer(attention.part(), ff.part())] * sizes.layers)


LLAMA = Layout(
    "llama",
    "LlamaForCausalLM",
    _llama,
    prefix="model.",
    ignored=(ROTARY_BUFFER,),
    inert=frozenset({"is_llama_config"}),
)
MISTRAL = Layout("mistral", "MistralForCausalLM", _mistral, prefix="model.", ignored=(ROTARY_BUFFER,))
