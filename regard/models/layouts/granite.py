"""Granite 3: Llama with four factors, on embedding, scores, residual branches and logits (Granite team 2024)."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from torch import nn

from regard.mixers.parts import Projections
from regard.models.blocks import Embedding, Sandwich, Scaled
from regard.models.config import Config
from regard.models.layouts.base import Layout, Plan
from regard.models.layouts.shared.options import like_layers, read_eps, read_sizes
from regard.models.layouts.shared.parts import AttentionPart, read_gated, read_scores
from regard.models.layouts.shared.rotary import rotary_from_config
from regard.models.layouts.shared.rows import ROTARY_BUFFER
from regard.models.layouts.shared.stacks import PRE_NORM, Layer, Wiring, rms_decoder

__all__ = ["GRANITE"]


def _block(factor: float, mixer: nn.Module, ff: nn.Module, mixer_norm: nn.Module, ff_norm: nn.Module) -> Sandwich:
    return Sandwich(mixer, ff, (mixer_norm, Scaled(factor)), (ff_norm, Scaled(factor)))


def _granite(c: Config) -> Plan:
    sizes = read_sizes(c, vocab=32000, dim=4096, layers=32, heads=32)
    like_layers(c, sizes.layers)
    attention = AttentionPart(
        sizes,
        Projections(bias=c.flag("attention_bias", False)),
        read_scores(c, scale=c.amount("attention_multiplier", 1.0)),
        rotary=rotary_from_config(c, sizes.head_dim),
    )
    ff = replace(read_gated(c, sizes.dim, 11008), bias=c.flag("mlp_bias", False))
    wiring = Wiring(partial(_block, c.amount("residual_multiplier", 1.0)), PRE_NORM.norms)
    return rms_decoder(
        c,
        sizes,
        read_eps(c),
        [Layer(attention.part(), ff.part(), wiring)] * sizes.layers,
        embedding=partial(Embedding, scale=c.amount("embedding_multiplier", 1.0)),
        finish=partial(Scaled, 1.0 / c.amount("logits_scaling", 1.0)),
    )


GRANITE = Layout("granite", "GraniteForCausalLM", _granite, prefix="model.", ignored=(ROTARY_BUFFER,))
