"""Kimi Linear: three layers of Kimi Delta Attention, one of latent attention without positions (arXiv:2510.26692)."""

from __future__ import annotations

from functools import partial

from regard.mixers.parts import RMSNorm
from regard.models.config import Config
from regard.models.layouts.base import Layout, Plan
from regard.models.layouts.shared.kimi import (
    SYNONYMS,
    KimiDeltaPart,
    feedforward_kinds,
    kinds_from,
    older_options,
    read_kimi_routing,
)
from regard.models.layouts.shared.latent import FOLLOWING, read_latent
from regard.models.layouts.shared.options import from_zero, read_eps, silu_only
from regard.models.layouts.shared.parts import NUMBERED, ExpertsPart, GatedPart
from regard.models.layouts.shared.stacks import Stack, layers_of
from regard.models.tables import Viewed
from regard.nn import KDAGates

__all__ = ["KIMI_LINEAR"]


def _kimi_linear(c: Config) -> Plan:
    dim, heads, layers = (
        c.count("hidden_size", 2304),
        c.count("num_attention_heads", 32),
        c.count("num_hidden_layers", 27),
    )
    c.only("tie_word_embeddings", (False, None))
    c.only("mla_use_nope", (True, None), "nothing rotates")
    c.only("moe_router_activation_func", ("sigmoid", None))
    c.only("moe_layer_freq", (1, None))
    act, eps = silu_only(c), read_eps(c, 1e-5)
    older = older_options(c)
    size = c.count("linear_head_dim", 128)
    delta = KimiDeltaPart(
        dim,
        c.count("linear_num_heads", 32),
        size,
        c.count("linear_conv_kernel_dim", 4),
        KDAGates(decay_rank=size, gate_rank=size, eps=eps),
    )
    latent = read_latent(c, dim=dim, heads=heads, rotary=None)
    attention, moe = "model.layers.{i}.self_attn", "model.layers.{i}.block_sparse_moe"
    mixers = {
        "linear_attention": delta.part(attention, rate=Viewed((1, 1, delta.heads, 1))),
        "full_attention": latent.part(attention),
    }
    dense = GatedPart(dim, c.count("intermediate_size", 9216), act)
    width = c.count("moe_intermediate_size", 1024)
    routing = read_kimi_routing(c, 256, factor=2.446, groups=1, open_groups=1)
    experts = ExpertsPart(dim, width, act, routing, width * from_zero(c, "num_shared_experts", 1))
    ffs = {"dense": dense.part(moe), "sparse": experts.part(moe, names=NUMBERED)}
    parts = layers_of(mixers, kinds_from(c, older, layers), ffs, feedforward_kinds(c, layers, 1))
    return Stack(c.count("vocab_size", 163840), dim, partial(RMSNorm, dim, eps), parts).plan(tied=False)


KIMI_LINEAR = Layout(
    "kimi_linear",
    "KimiLinearForCausalLM",
    _kimi_linear,
    prefix="model.",
    # the first checkpoints call a dense layer's part otherwise than one with experts
    spellings={f"mlp.{p}_proj.weight": f"block_sparse_moe.{p}_proj.weight" for p in ("gate", "up", "down")},
    synonyms=SYNONYMS,
    inert=FOLLOWING | {"model_max_length", "num_nextn_predict_layers", "rope_theta", "use_grouped_topk"},
)
