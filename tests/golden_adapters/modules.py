"""The attention modules of transformers: every family gives names and parts; one shared function runs them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from golden_adapters.case import Case, Paths, Peer
from golden_adapters.layers import State, build, keep_of, linears, positions_of, run, unfuse
from golden_adapters.rotary_config import rotary_of, tables
from regard.biases import Alibi, Bias, Dense, RelativeBuckets, alibi_slopes
from regard.masks import Band, Causal, Window
from regard.nn import RMSNorm, Scores

Outputs = dict[str, Tensor]
PROJECTIONS = {"q_proj": "q_proj", "k_proj": "k_proj", "v_proj": "v_proj", "o_proj": "o_proj"}


def module_config(case: Case) -> dict[str, Any]:
    found: dict[str, Any] = case.config["config"]
    return found


def first_of(config: dict[str, Any], *names: str) -> Any:
    """The first of these options that is there."""
    return next(config[name] for name in names if name in config)


# ---- decoders with separate projections and rotary positions ---------------------------------------------------------


@dataclass(frozen=True)
class Decoder:
    """What a family's code does that its configuration does not say."""

    partial: bool = False  # reads partial_rotary_factor
    gated: bool = False  # q_proj makes [query, gate] for every head
    unit_offset: bool = False  # q/k norms multiply by 1 + weight
    norm_over: str = "head"


def decoder(family: Decoder, case: Case, peer: Peer, wanted: frozenset[str]) -> Outputs:
    config = module_config(case)
    case.refuse_unless(not config.get("use_bidirectional_attention"), "use_bidirectional_attention")
    x = peer["input.hidden"]
    heads = int(config["num_attention_heads"])
    kv_heads = int(config.get("num_key_value_heads") or heads)
    head_dim = int(config.get("head_dim") or config["hidden_size"] // heads)
    state = linears(peer, {**PROJECTIONS, "q_norm": "q_norm", "k_norm": "k_norm"})
    if family.gated:
        state |= gate_apart(state, heads)
    if "weight.sinks" in peer:
        state["sink"] = peer["weight.sinks"]
    positions = positions_of(peer, x)
    rope = case.config["rope_parameters"] if "rope_parameters" in case.config else config.get("rope_parameters")
    rotary = rotary_of(
        case,
        rope,
        head_dim,
        positions,
        max_positions=int(config.get("max_position_embeddings", 0)),
        partial=family.partial,
    )
    scalar = config.get("query_pre_attn_scalar")
    window = config["sliding_window"] if case.config.get("sliding_mask") else None
    layer, state = build(
        state,
        int(config["hidden_size"]),
        heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        norm=norm_of(family, config) if "q_norm.weight" in state else None,
        norm_over=family.norm_over,
        scores=Scores(
            scale=None if scalar is None else scalar**-0.5,
            softcap=config.get("attn_logit_softcapping"),
            sink="sink" in state,
        ),
        mask=Causal() if window is None else Window(int(window)),
        rotary=rotary,
    )
    found = run(case, wanted, layer, state, x, keep=keep_of(case, peer), positions=positions)
    return found | tables(case, wanted, rotary, positions, x)


def gate_apart(state: State, heads: int) -> State:
    """q_proj's rows, [query, gate] for every head, as q_proj and gate_proj."""
    parts = {}
    for kind in ("weight", "bias"):
        if f"q_proj.{kind}" in state:
            query, gate = state[f"q_proj.{kind}"].unflatten(0, (heads, 2, -1)).unbind(1)
            parts |= {f"q_proj.{kind}": query.flatten(0, 1), f"gate_proj.{kind}": gate.flatten(0, 1)}
    return parts


def norm_of(family: Decoder, config: dict[str, Any]) -> Callable[[int], RMSNorm]:
    return partial(RMSNorm, eps=float(config["rms_norm_eps"]), unit_offset=family.unit_offset)


# ---- fused projections -----------------------------------------------------------------------------------------------


def falcon(case: Case, peer: Peer, wanted: frozenset[str]) -> Outputs:
    config = module_config(case)
    whole_model = "attn_out" in case.names("output")  # what goes into the attention of layer 0 and comes out of it
    prefix = "h.0.self_attention." if whole_model else ""
    if whole_model:
        peer.without_effect("input.inputs_embeds", *(name for name in peer if f"weight.{prefix}" not in name))
        x = case.tensors["output64.attn_in" if peer["input.inputs_embeds"].dtype == torch.float64 else "output.attn_in"]
    else:
        x = peer["input.hidden"]
    heads = int(config["num_attention_heads"])
    head_dim = int(config["hidden_size"]) // heads
    new, shared = bool(config.get("new_decoder_architecture")), bool(config.get("multi_query"))
    kv_heads = int(config.get("num_kv_heads") or heads) if new else 1 if shared else heads
    state = linears(peer, {"qkv": f"{prefix}query_key_value", "o_proj": f"{prefix}dense"})
    keep, positions = keep_of(case, peer), positions_of(peer, x)
    alibi = bool(config.get("alibi"))
    rotary = rotary_of(
        case,
        None if alibi else config["rope_parameters"],
        head_dim,
        positions,
        max_positions=int(config["max_position_embeddings"]),
        partial=False,
    )
    layer, state = build(
        unfuse(state, heads, kv_heads, head_dim, grouped=True),
        int(config["hidden_size"]),
        heads,
        kv_heads=kv_heads,
        mask=Causal(),
        bias=falcon_alibi(heads, head_dim, keep, x) if alibi else None,
        rotary=rotary,
    )
    found = run(case, wanted, layer, state, x, keep=keep, positions=positions)
    if whole_model:
        found["attn_out"] = found["out"]
        peer.outside("attn_in", "model_out")
    return found | tables(case, wanted, rotary, positions, x)


def falcon_alibi(heads: int, head_dim: int, keep: Tensor | None, x: Tensor) -> Bias:
    """Slope times position in bfloat16, divided like the scores; as slopes where no product loses bits to that."""
    slopes = alibi_slopes(heads).bfloat16()
    places = running_count(keep, x)
    rounded = (slopes[:, None] * places[:, None]).double()
    if torch.equal(rounded, slopes.double()[:, None] * places[:, None]) and contiguous(keep):
        return Alibi(slopes.double() / math.sqrt(head_dim))
    return Dense(rounded[:, :, None] / math.sqrt(head_dim))


def running_count(keep: Tensor | None, x: Tensor) -> Tensor:
    """How many real tokens stand before each real token (B, T); 0 at padding."""
    if keep is None:
        return torch.arange(x.shape[1]).expand(x.shape[0], -1)
    return (keep.cumsum(1) - 1) * keep


def contiguous(keep: Tensor | None) -> bool:
    """Whether the real tokens of every row stand side by side: then slots and real tokens count the same distances."""
    return keep is None or bool(((keep[:, 1:].int() - keep[:, :-1].int()) == 1).sum(1).le(1 - keep[:, 0].int()).all())


def bloom(case: Case, peer: Peer, wanted: frozenset[str]) -> Outputs:
    config = module_config(case)
    x, heads = peer["input.hidden"], int(first_of(config, "n_head", "num_attention_heads"))
    width = int(first_of(config, "hidden_size", "n_embed"))
    keep = keep_of(case, peer)
    slopes, places = alibi_slopes(heads), running_count(keep, x)
    # the peer counts real tokens, the library slots: the same distances, unless padding stands between real tokens
    bias = Alibi(slopes) if contiguous(keep) else Dense(slopes[:, None, None] * places[:, None, None])
    state = linears(peer, {"qkv": "query_key_value", "o_proj": "dense"})
    state = unfuse(state, heads, heads, width // heads, grouped=True)
    layer, state = build(state, width, heads, mask=Causal(), bias=bias)
    found = run(case, wanted, layer, state, x, keep=keep)
    for name in wanted & {"alibi"}:  # the peer's rows are shifted to 0 at the first real token
        last = bias.dense(1, x.shape[1], batch=x.shape[0], heads=heads).expand(x.shape[0], -1, -1, -1)[:, :, 0]
        first = torch.zeros(x.shape[0], dtype=torch.long) if keep is None else keep.int().argmax(1)
        shifted = last - last.gather(2, first[:, None, None].expand(-1, heads, 1))
        found[name] = (shifted if keep is None else shifted * keep[:, None]).flatten(0, 1)[:, None].to(x.dtype)
    return found


def mpt(case: Case, peer: Peer, wanted: frozenset[str]) -> Outputs:
    config = module_config(case)
    inner = config.get("attn_config") or {}
    kind = inner.get("attn_type", "multihead_attention")
    case.refuse_unless(kind == "multihead_attention", f"attn_type {kind!r}")
    case.refuse_unless(not inner.get("prefix_lm") and not inner.get("qk_ln"), "prefix_lm or qk_ln")
    x, heads, width = peer["input.hidden"], int(config["n_heads"]), int(config["d_model"])
    bias = None
    if inner.get("alibi", True):
        bias = Alibi(alibi_slopes(heads, order="mpt", max_bias=float(inner.get("alibi_bias_max", 8))))
    state = linears(peer, {"qkv": "Wqkv", "o_proj": "out_proj"})
    layer, state = build(
        unfuse(state, heads, heads, width // heads, grouped=False),
        width,
        heads,
        clip=inner.get("clip_qkv"),
        scores=Scores(scale=inner.get("softmax_scale")),
        mask=Causal(),
        bias=bias,
    )
    found = run(case, wanted, layer, state, x, keep=keep_of(case, peer))
    for name in wanted & {"alibi_bias", "alibi"}:
        case.refuse_unless(bias is not None, f"{name} without alibi")
        found[name] = bias.dense(1, x.shape[1])[0].to(x.dtype)
    return found


def gpt2(case: Case, peer: Peer, wanted: frozenset[str]) -> Outputs:
    config = module_config(case)
    heads, width = (
        int(first_of(config, *names)) for names in (("n_head", "num_attention_heads"), ("n_embd", "hidden_size"))
    )
    scale = (width // heads) ** -0.5 if config.get("scale_attn_weights", True) else 1.0
    if config.get("scale_attn_by_inverse_layer_idx"):
        scale /= int(case.config["layer_idx"]) + 1
    x, context = peer["input.hidden"], peer.get("input.encoder_hidden_states")
    crossing = context is not None
    state = linears(peer, {"qkv": "c_attn", "q_proj": "q_attn", "o_proj": "c_proj"}, transposed=True)
    if crossing:  # c_attn holds keys and values then
        for kind in ("weight", "bias"):
            state[f"k_proj.{kind}"], state[f"v_proj.{kind}"] = state.pop(f"qkv.{kind}").chunk(2)
    else:
        state = unfuse(state, heads, heads, width // heads, grouped=False)
    layer, state = build(state, width, heads, scores=Scores(scale=scale), mask=None if crossing else Causal())
    keep = keep_of(case, peer, "input.encoder_attention_mask" if crossing else "input.attention_mask")
    return run(case, wanted, layer, state, x, context, keep=keep)


# ---- encoders --------------------------------------------------------------------------------------------------------


def bert(case: Case, peer: Peer, wanted: frozenset[str]) -> Outputs:
    config = module_config(case)
    kind = config.get("position_embedding_type", "absolute")
    case.refuse_unless(kind == "absolute", f"position_embedding_type {kind!r}")
    state = linears(peer, {"q_proj": "query", "k_proj": "key", "v_proj": "value"})
    layer, state = build(
        state,
        int(config["hidden_size"]),
        int(config["num_attention_heads"]),
        mask=Causal() if config.get("is_decoder") else None,
    )
    return run(case, wanted, layer, state, peer["input.hidden"], keep=keep_of(case, peer))


def modernbert(case: Case, peer: Peer, wanted: frozenset[str]) -> Outputs:
    config = module_config(case)
    kind = case.config["layer_type"]
    case.refuse_unless(kind in ("full_attention", "sliding_attention"), f"layer_type {kind!r}")
    x = peer["input.hidden"]
    heads, width = int(config["num_attention_heads"]), int(config["hidden_size"])
    positions = positions_of(peer, x)
    rope = config["rope_parameters"]
    rotary = rotary_of(
        case,
        rope.get(kind, rope),
        width // heads,
        positions,
        max_positions=int(config["max_position_embeddings"]),
        partial=False,
    )
    band = None
    if kind == "sliding_attention":  # local_attention counts both sides
        side = int(config["local_attention"]) // 2 if "local_attention" in config else int(config["sliding_window"])
        band = Band(side, side)
    state = unfuse(linears(peer, {"qkv": "Wqkv", "o_proj": "Wo"}), heads, heads, width // heads, grouped=False)
    layer, state = build(state, width, heads, mask=band, rotary=rotary)
    found = run(case, wanted, layer, state, x, keep=keep_of(case, peer), positions=positions)
    return found | tables(case, wanted, rotary, positions, x)


def t5(case: Case, peer: Peer, wanted: frozenset[str]) -> Outputs:
    config = module_config(case)
    x, context = peer["input.hidden"], peer.get("input.key_value_states")
    heads = int(config["num_heads"])
    state = linears(peer, {"q_proj": "q", "k_proj": "k", "v_proj": "v", "o_proj": "o"})
    table = peer.get("weight.relative_attention_bias.weight")
    bias = None
    if table is not None:
        buckets = config.get("relative_attention_num_buckets", table.shape[0])
        case.refuse_unless(buckets == table.shape[0], f"{buckets} buckets for a table of {table.shape[0]}")
        bias = RelativeBuckets(
            table,
            bidirectional=not config.get("is_decoder"),
            max_distance=int(config["relative_attention_max_distance"]),
        )
    layer, state = build(
        state,
        int(config["d_model"]),
        heads,
        head_dim=int(config["d_kv"]),
        scores=Scores(scale=1.0),
        mask=Causal() if case.config.get("causal") else None,
        bias=bias,
    )
    found = run(case, wanted, layer, state, x, context, keep=keep_of(case, peer))
    for name in wanted & {"position_bias"}:
        sizes = (x.shape[1], (x if context is None else context).shape[1])
        zeros = torch.zeros(1, heads, *sizes)
        found[name] = (zeros if bias is None else bias.dense(*sizes, q_start=0)).to(x.dtype)
    return found


# ---- families --------------------------------------------------------------------------------------------------------

Module = Callable[[Case, Peer, frozenset[str]], Outputs]


def adapter(module: Module, *needed: str) -> Callable[[Case], Paths | None]:
    """An adapter for the cases of a family that have these weights; the others are another kind of module."""

    def way(case: Case, peer: Peer, wanted: frozenset[str]) -> Outputs:
        peer.without_effect("input.position_ids")  # modules without rotary positions are given them all the same
        return module(case, peer, wanted)

    def paths(case: Case) -> Paths | None:
        have = case.names("weight")
        covered = all(any(name.endswith(suffix) for name in have) for suffix in needed)
        return {"layer": partial(way, case)} if covered else None

    return paths


def decoder_adapter(**family: Any) -> Callable[[Case], Paths | None]:
    return adapter(partial(decoder, Decoder(**family)), "q_proj.weight", "k_proj.weight", "v_proj.weight")


ADAPTERS: dict[str, Callable[[Case], Paths | None]] = {
    "llama_gqa_rope": decoder_adapter(),
    "mistral_sliding": decoder_adapter(),
    "gemma2_softcap": decoder_adapter(),
    "gpt_oss_sinks": decoder_adapter(),
    "olmo_hybrid_attention": decoder_adapter(norm_over="all"),
    "qwen3_next_gated_attention": decoder_adapter(partial=True, gated=True, unit_offset=True),
    "jamba": decoder_adapter(),
    "bamba": decoder_adapter(partial=True),
    "falcon": adapter(falcon, "query_key_value.weight"),
    "bloom_alibi": adapter(bloom, "query_key_value.weight"),
    "mpt_alibi": adapter(mpt, "Wqkv.weight"),
    "gpt2": adapter(gpt2, "c_attn.weight"),
    "bert_encoder": adapter(bert, "query.weight"),
    "modernbert_sliding_bidirectional": adapter(modernbert, "Wqkv.weight"),
    "t5_relative_bias": adapter(t5, "q.weight"),
}
