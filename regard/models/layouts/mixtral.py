"""Mixtral: Mistral's attention, a few of several experts for every token (Jiang et al. 2024, arXiv:2401.04088)."""

from __future__ import annotations

from regard.models.config import Config
from regard.models.feedforward import ACTIVATIONS
from regard.models.layouts.base import Layout, Plan
from regard.models.layouts.shared.options import (
    like_layers,
    read_eps,
    read_routing,
    read_sizes,
    read_window,
    window_mask,
)
from regard.models.layouts.shared.parts import NUMBERED, AttentionPart, ExpertsPart, read_scores
from regard.models.layouts.shared.rotary import rotary_from_config
from regard.models.layouts.shared.rows import ROTARY_BUFFER
from regard.models.layouts.shared.stacks import Layer, rms_decoder

__all__ = ["MIXTRAL"]


def _mixtral(c: Config) -> Plan:
    sizes = read_sizes(c, vocab=32000, dim=4096, layers=32, heads=32, kv_heads=8)
    window = read_window(c)
    like_layers(c, sizes.layers, window)
    attention = AttentionPart(
        sizes,
        scores=read_scores(c),
        mask=window_mask(window),
        rotary=rotary_from_config(c, sizes.head_dim, base=1e6),
    )
    act = c.name("hidden_act", "silu", ACTIVATIONS)
    routing = read_routing(c, "num_local_experts", 8, 2, normalized=True)
    experts = ExpertsPart(sizes.dim, c.count("intermediate_size", 14336), act, routing)
    ff = experts.part("model.layers.{i}.block_sparse_moe", names=NUMBERED)
    return rms_decoder(c, sizes, read_eps(c, 1e-5), [Layer(attention.part(), ff)] * sizes.layers)


MIXTRAL = Layout(
    "mixtral",
    "MixtralForCausalLM",
    _mixtral,
    prefix="model.",
    ignored=(ROTARY_BUFFER,),
    synonyms={"num_experts": "num_local_experts"},
    inert=frozenset({"router_jitter_noise"}),  # noise in training
)
