"""DeepSeek-V2: latent attention, experts of which softmax scores choose (DeepSeek-AI 2024, arXiv:2405.04434)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from regard.mixers.parts import RMSNorm
from regard.models.config import Config
from regard.models.experts import Routing
from regard.models.feedforward import ACTIVATIONS
from regard.models.layouts.base import Layout, Plan
from regard.models.layouts.latent import FOLLOWING, Latent, interleaved, read_latent
from regard.models.layouts.llama import ROTARY_BUFFER
from regard.models.layouts.rotary import rotary_from_config
from regard.models.layouts.stacks import Dense, Experts, Layer, Stack, from_zero, routing_of

__all__ = ["DEEPSEEK_V2", "TRAINING", "deepseek_plan"]

TRAINING = frozenset({"aux_loss_alpha", "ep_size", "seq_aux"})
"""Options of the routers' training and of how experts lie on devices."""

METHODS = {"greedy": False, "group_limited_greedy": True}


def deepseek_plan(
    c: Config,
    latent: Latent,
    routing: Routing | None,
    *,
    vocab: int,
    layers: int,
    dense: int,
    shared: int,
    hidden: int,
    expert: int,
) -> Plan:
    """`dense` layers with a feed-forward part each, then layers with experts, of which `shared` always speak."""
    dim, act = latent.dim, c.name("hidden_act", "silu", ACTIVATIONS)
    count = layers if routing is None else min(from_zero(c, "first_k_dense_replace", dense), layers)
    c.only("moe_layer_freq", (1, None), "experts in every layer behind the dense ones")
    plain = Dense(dim, c.count("intermediate_size", hidden), act, c.flag("mlp_bias", False))
    if plain.bias and count < layers:
        raise c.error("mlp_bias", True, "false in a model with experts, which have none")
    parts = [Layer(latent, plain, latent.rows(ATTENTION) + plain.rows(MLP))] * count
    if routing is not None:
        width = c.count("moe_intermediate_size", expert)
        moe = Experts(dim, width, act, routing, width * from_zero(c, "n_shared_experts", shared))
        parts += [Layer(latent, moe, latent.rows(ATTENTION) + moe.rows(MLP))] * (layers - count)
    norm = partial(RMSNorm, dim, c.number("rms_norm_eps", 1e-6, least=0.0))
    stack = Stack(vocab, dim, norm, parts)
    return stack.plan(("input_layernorm", "post_attention_layernorm"), tied=c.flag("tie_word_embeddings", False))


ATTENTION, MLP = "model.layers.{i}.self_attn", "model.layers.{i}.mlp"


def _deepseek_v2(c: Config, has: Callable[[str], bool]) -> Plan:
    dim, heads = c.count("hidden_size", 4096), c.count("num_attention_heads", 32)
    rope = c.count("qk_rope_head_dim", 64)
    latent = read_latent(c, dim=dim, heads=heads, q_rank=1536, rotary=interleaved(rotary_from_config(c, rope)))
    c.only("scoring_func", ("softmax", None))
    c.only("norm_topk_prob", (False, None), "this family's experts keep their scores")
    grouped = METHODS[c.name("topk_method", "greedy", METHODS)]
    c.get("n_group"), c.get("topk_group")  # stated even where nothing is grouped
    factor, routing = c.number("routed_scaling_factor", 1.0), None
    if c.get("n_routed_experts", 64) is not None:
        groups = {"n_group": 1, "topk_group": 1} if grouped else None
        routing = routing_of(c, "n_routed_experts", 64, 0, groups=groups, factor=factor)
    sizes = {"vocab": c.count("vocab_size", 102400), "layers": c.count("num_hidden_layers", 32)}
    return deepseek_plan(c, latent, routing, **sizes, dense=0, shared=2, hidden=11008, expert=1407)


DEEPSEEK_V2 = Layout(
    "deepseek_v2",
    "DeepseekV2ForCausalLM",
    _deepseek_v2,
    prefix="model.",
    ignored=(ROTARY_BUFFER,),
    synonyms={"num_experts": "n_routed_experts"},
    inert=FOLLOWING | TRAINING,
)
