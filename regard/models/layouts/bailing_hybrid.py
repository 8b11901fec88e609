"""Ling 3.0 (Bailing hybrid): Kimi Delta Attention with a bounded decay, and latent attention with a gate per head.

Options, names and wiring are those of the release in transformers; the mechanisms: arXiv:2510.26692, arXiv:2405.04434.
"""

from __future__ import annotations

from functools import partial

from regard.mixers.parts import RMSNorm
from regard.models.config import Config
from regard.models.layouts.base import Layout, Plan
from regard.models.layouts.shared.kimi import KINDS, SYNONYMS, KimiDeltaPart, feedforward_kinds, read_kimi_routing
from regard.models.layouts.shared.latent import interleaved, read_latent
from regard.models.layouts.shared.options import from_zero, kinds_of, read_eps, silu_only
from regard.models.layouts.shared.parts import ExpertsPart, GatedPart
from regard.models.layouts.shared.rotary import rotary_from_config
from regard.models.layouts.shared.rows import SEVERAL_AHEAD
from regard.models.layouts.shared.stacks import Names, Stack, layers_of
from regard.models.tables import Ignored
from regard.nn import KDAGates

__all__ = ["BAILING_HYBRID"]


def _bailing_hybrid(c: Config) -> Plan:
    dim, heads, layers = (
        c.count("hidden_size", 2560),
        c.count("num_attention_heads", 32),
        c.count("num_hidden_layers", 42),
    )
    c.only("tie_word_embeddings", (False, None))
    act, eps = silu_only(c), read_eps(c)
    low, bounded = c.number("kda_lower_bound", -5.0), c.flag("kda_safe_gate", True)
    if bounded and low >= 0:
        raise c.error("kda_lower_bound", low, "a number below 0 (nats per token) with kda_safe_gate")
    delta = KimiDeltaPart(
        dim,
        c.count("linear_num_heads", heads),
        c.count("linear_head_dim", c.count("head_dim", 128)),
        c.count("linear_conv_kernel_dim", c.count("short_conv_kernel_size", 4)),
        KDAGates(low=low if bounded else None, eps=eps),
    )
    rotary = interleaved(rotary_from_config(c, c.count("qk_rope_head_dim", 64), base=6e6))
    latent = read_latent(c, dim=dim, heads=heads, gate="head", rotary=rotary)
    if latent.sizes.q_rank is not None:
        raise c.error("q_lora_rank", latent.sizes.q_rank, "null: this family's queries are not compressed")
    attention = "model.layers.{i}.attention"
    mixers = {
        "linear_attention": delta.part(attention, out="dense"),
        "full_attention": latent.part(attention, out="dense"),
    }
    dense = GatedPart(dim, c.count("intermediate_size", 6144), act)
    width = c.count("moe_intermediate_size", 768)
    routing = read_kimi_routing(c, 512, factor=2.5, groups=8, open_groups=4)
    experts = ExpertsPart(dim, width, act, routing, width * from_zero(c, "num_shared_experts", 1))
    ffs = {"dense": dense.part(), "sparse": experts.part(correction="gate.expert_bias")}
    size = c.count("layer_group_size", 6)
    types = kinds_of(c, "layer_types", layers, KINDS, lambda i: KINDS[(i + 1) % size == 0])
    parts = layers_of(mixers, types, ffs, feedforward_kinds(c, layers, 2))
    names = Names(tokens="model.word_embeddings")
    return Stack(c.count("vocab_size", 157184), dim, partial(RMSNorm, dim, eps), parts, names).plan(tied=False)


BAILING_HYBRID = Layout(
    "bailing_hybrid",
    "BailingHybridForCausalLM",
    _bailing_hybrid,
    prefix="model.",
    ignored=(Ignored("model.layers.42.*", SEVERAL_AHEAD),),
    synonyms=SYNONYMS | {"num_mtp_layers": "num_nextn_predict_layers"},
    inert=frozenset({"model_max_length", "mtp_loss_scaling_factor", "num_nextn_predict_layers", "qk_head_dim"}),
    wide=("*.mixer.A_log", "*.mixer.dt_bias", "*.mixer.conv.weight"),
)
