"""Modules of other projects that are `regard.attention` under a mask or a bias, between maps of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import regard
from golden_adapters.case import Case, Paths, Peer
from regard.biases import Dense
from regard.masks import Band, Blocks, Causal, KeyPadding, Mask
from regard.ops.relative import relative_scores

Outputs = dict[str, Tensor]
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"gelu": F.gelu, "relu": F.relu, "silu": F.silu}


def linear(peer: Peer, name: str, x: Tensor) -> Tensor:
    return F.linear(x, peer[f"weight.{name}.weight"], peer.get(f"weight.{name}.bias"))


def heads_of(x: Tensor, heads: int) -> Tensor:
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def joined(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, eps)


def attend(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Outputs:
    weights = regard.attention_weights(q, k, v, **options)[1]
    return {"out": regard.attention(q, k, v, **options), "attn_weights": weights}


# ---- windows by blocks -----------------------------------------------------------------------------------------------


def block_mask(tokens: int, size: int, before: int, after: int, wraps: bool = False) -> Mask:
    """Blocks that see so many before and after them; `wraps`: the first is beside the last."""
    count = -(-tokens // size)
    distance = torch.arange(count)[:, None] - torch.arange(count)
    seen = (distance <= before) & (distance >= -after)
    for turn in (-count, count) if wraps else ():
        seen |= (distance + turn <= before) & (distance + turn >= -after)
    return Blocks(seen, size)


def local(case: Case, peer: Peer, wanted: frozenset[str]) -> Outputs:
    config, size = case.config, case.config["window_size"]
    known = {"window_size", "causal", "look_backward", "look_forward", "exact_windowsize", "autopad"}
    known |= {"use_rotary_pos_emb", "scale", "dropout"}
    case.refuse_unless(not set(config) - known, f"the options {sorted(set(config) - known)}")
    case.refuse_unless(not config.get("use_rotary_pos_emb"), "use_rotary_pos_emb")
    q, k, v = (peer[f"input.{name}"] for name in "qkv")
    causal, before = bool(config.get("causal")), config.get("look_backward", 1)
    after = config.get("look_forward", 0 if causal else 1) or 0
    mask = block_mask(q.shape[2], size, before, after)
    if causal:
        mask = mask & Causal()
    if config.get("exact_windowsize"):
        reach = size * before
        mask = mask & (Band(reach, 0) if causal else Band(reach, reach))
    if "input.mask" in peer:
        mask = mask & KeyPadding(peer["input.mask"])
    return {"out": regard.attention(q, k, v, mask=mask, scale=config.get("scale"))}


def reformer_local(case: Case, peer: Peer, wanted: frozenset[str]) -> Outputs:
    config, x = case.config["config"], peer["input.hidden"]
    q, k, v = (heads_of(linear(peer, n, x), config["num_attention_heads"]) for n in ("query", "key", "value"))
    size, tokens = config["local_attn_chunk_length"], x.shape[1]
    sides = config["local_num_chunks_before"], config["local_num_chunks_after"]
    mask: Mask | None = None if tokens <= size else block_mask(tokens, size, *sides, wraps=True)
    if config["is_decoder"]:
        mask = Causal() if mask is None else mask & Causal()
    if "input.attention_mask" in peer:
        keep = KeyPadding(peer["input.attention_mask"] > 0)
        mask = keep if mask is None else mask & keep
    return {"out": joined(regard.attention(q, k, v, mask=mask))}


def selected(case: Case, peer: Peer, wanted: frozenset[str]) -> Outputs:
    """Native sparse attention's selected branch: key blocks chosen for every query and key head."""
    q, k, v = (peer[f"input.{name}"].transpose(1, 2) for name in "qkv")
    chosen = peer["input.block_indices"].transpose(1, 2)  # (B, Hkv, T, S)
    case.refuse_unless(set(case.config) <= {"block_size", "S", "scale"}, str(case.config))
    block = torch.arange(k.shape[2]) // case.config["block_size"]
    seen = (chosen.unsqueeze(-1) == block).any(-2).repeat_interleave(q.shape[1] // k.shape[1], 1)
    mask = Causal() & regard.masks.Dense(seen)
    return {"out": regard.attention(q, k, v, mask=mask, scale=case.config.get("scale")).transpose(1, 2)}


# ---- contexts of another kind ----------------------------------------------------------------------------------------


def perceiver(case: Case, peer: Peer, wanted: frozenset[str]) -> Outputs:
    """An array of latents that reads inputs, or itself."""
    config, x, heads = case.config, peer["input.latents"], case.config["num_heads"]
    cross = config["is_cross_attention"]
    eps = config.get("layer_norm_eps", 1e-5)

    def norm(name: str, y: Tensor) -> Tensor:
        return F.layer_norm(y, y.shape[-1:], peer[f"weight.{name}.weight"], peer[f"weight.{name}.bias"], eps)

    asks = norm("attention.self.layernorm1", x)
    source = norm("attention.self.layernorm2", peer["input.inputs"]) if cross else asks
    q = heads_of(linear(peer, "attention.self.query", asks), heads)
    k, v = (heads_of(linear(peer, f"attention.self.{name}", source), heads) for name in ("key", "value"))
    mask = KeyPadding(peer["input.mask"] > 0) if "input.mask" in peer else None
    found = attend(q, k, v, mask=mask)
    y = linear(peer, "attention.output.dense", joined(found["out"]))
    y = x + y if config["use_query_residual"] else y
    hidden = ACTIVATIONS[config["hidden_act"]](linear(peer, "mlp.dense1", norm("layernorm", y)))
    return found | {"out": y + linear(peer, "mlp.dense2", hidden)}


def gated_cross(case: Case, peer: Peer, wanted: frozenset[str]) -> Outputs:
    """A decoder's layer that reads images, behind gates that start at 0 (Idefics, Mllama)."""
    config, x, states = case.config, peer["input.hidden"], peer["input.image_states"]
    heads, eps = config["num_attention_heads"], config["rms_norm_eps"]
    kv_heads = config.get("num_key_value_heads") or heads
    normed = rms(x, peer["weight.input_layernorm.weight"], eps)
    q = heads_of(linear(peer, "cross_attn.q_proj", normed), heads)
    k, v = (heads_of(linear(peer, f"cross_attn.{name}_proj", states), kv_heads) for name in "kv")
    for names in (("q_norm", "k_norm"), ("q_layer_norm", "k_layer_norm")):
        if f"weight.cross_attn.{names[0]}.weight" in peer:
            q, k = (rms(y, peer[f"weight.cross_attn.{n}.weight"], eps) for n, y in zip(names, (q, k), strict=True))
    seen = torch.ones(x.shape[0], x.shape[1], states.shape[1], dtype=torch.bool)
    row = None
    if "input.cross_mask" in peer:  # a row that may look at no image looks at all of them, behind a gate of its own
        seen = (peer["input.cross_mask"] > 0).repeat_interleave(config["vision_tokens"], -1)
        row = seen.any(-1, keepdim=True)
        seen = seen | ~row
    if "input.image_attention_mask" in peer:
        seen = peer["input.image_attention_mask"][:, 0] == 0
    out = linear(peer, "cross_attn.o_proj", joined(regard.attention(q, k, v, mask=seen[:, None])))
    found = {"attn_branch": out}
    if row is not None:
        found["full_row"] = row[..., 0].to(x.dtype)
    if "input.cross_attention_gate" in peer:
        out = out * (peer["input.cross_attention_gate"] != 0).unsqueeze(-1)
    first, second = (
        ("alpha_cross_attn", "alpha_dense")
        if "weight.alpha_cross_attn" in peer
        else ("cross_attn_attn_gate", "cross_attn_mlp_gate")
    )
    y = x + torch.tanh(peer[f"weight.{first}"]) * out
    normed = rms(y, peer["weight.post_attention_layernorm.weight"], eps)
    hidden = ACTIVATIONS[config["hidden_act"]](linear(peer, "mlp.gate_proj", normed)) * linear(
        peer, "mlp.up_proj", normed
    )
    branch = linear(peer, "mlp.down_proj", hidden)
    branch = branch if row is None else branch * row
    return found | {"out": y + torch.tanh(peer[f"weight.{second}"]) * branch}


# ---- relative places -------------------------------------------------------------------------------------------------


def distances(tokens: int) -> Tensor:
    return torch.arange(tokens)[:, None] - torch.arange(tokens)


def shaw(case: Case, peer: Peer, wanted: frozenset[str]) -> Outputs:
    """Relative keys, clipped (Wav2Vec2-BERT), or relative keys and queries, not clipped (BERT)."""
    config, x, heads = case.config, peer["input.hidden"], case.config["num_attention_heads"]
    kind = config.get("position_embeddings_type", config.get("position_embedding_type"))
    names = ("linear_q", "linear_k", "linear_v") if "weight.linear_q.weight" in peer else ("query", "key", "value")
    q, k, v = (heads_of(linear(peer, name, x), heads) for name in names)
    table, tokens = peer["weight.distance_embedding.weight"], x.shape[1]
    if "left_max_position_embeddings" in config:
        left, right = config["left_max_position_embeddings"], config["right_max_position_embeddings"]
        index = (-distances(tokens)).clamp(-left, right) + left
    else:
        index = distances(tokens) + config["max_position_embeddings"] - 1
    scale = q.shape[-1] ** -0.5
    bias = relative_scores(q * scale, table, index)
    if kind == "relative_key_query":
        bias = bias + relative_scores(k * scale, table, index.T.contiguous()).mT
    mask = KeyPadding(peer["input.mask"] > 0) if "input.mask" in peer else None
    found = attend(q, k, v, bias=Dense(bias), mask=mask)
    out = joined(found["out"])
    return found | {"out": linear(peer, "linear_out", out) if "weight.linear_out.weight" in peer else out}


def transformer_xl(case: Case, peer: Peer, wanted: frozenset[str]) -> Outputs:
    config, heads, size = case.config, case.config["n_head"], case.config["d_head"]
    h, eps = peer["input.h"].transpose(0, 1), config["layer_norm_epsilon"]
    seen = torch.cat([peer["input.mems"].transpose(0, 1), h], 1) if "input.mems" in peer else h
    norm = peer["weight.layer_norm.weight"], peer["weight.layer_norm.bias"]
    source = F.layer_norm(seen, seen.shape[-1:], *norm, eps) if config["pre_lnorm"] else seen
    q, k, v = (heads_of(part, heads) for part in linear(peer, "qkv_net", source).chunk(3, -1))
    q = q[:, :, -h.shape[1] :]
    places = linear(peer, "r_net", peer["input.r"][:, 0]).unflatten(-1, (heads, size)).transpose(0, 1)  # K-1 ... 0
    rows, columns = h.shape[1], seen.shape[1]
    distance = torch.arange(columns - rows, columns)[:, None] - torch.arange(columns)
    index = (columns - 1 - distance).clamp(0, columns - 1)
    scale = size**-0.5
    bias = relative_scores((q + peer["weight.r_r_bias"][:, None]) * scale, places, index)
    options: dict[str, Any] = {"bias": Dense(bias)}
    if "input.attn_mask" in peer:
        options["mask"] = (peer["input.attn_mask"].squeeze(-1) == 0)[None, None]
    found = attend(q + peer["weight.r_w_bias"][:, None], k, v, **options)
    y = h + linear(peer, "o_net", joined(found["out"]))
    y = y if config["pre_lnorm"] else F.layer_norm(y, y.shape[-1:], *norm, eps)
    return {"out": y.transpose(0, 1), "attn_weights": found["attn_weights"].permute(2, 3, 0, 1)}


def xlnet(case: Case, peer: Peer, wanted: frozenset[str]) -> Outputs:
    config, h = case.config, peer["input.h"].transpose(0, 1)
    case.refuse_unless(config.get("target_positions") is None or "input.target_mapping" in peer, "target_positions")
    memory = peer["input.mems"].transpose(0, 1) if "input.mems" in peer else h[:, :0]
    seen = torch.cat([memory, h], 1)
    rows, columns, scale = h.shape[1], seen.shape[1], config["d_head"] ** -0.5

    def made(name: str, x: Tensor) -> Tensor:
        return torch.einsum("btc,chd->bhtd", x, peer[f"weight.{name}"])

    k, v = made("k", seen), made("v", seen)
    places = made("r", peer["input.r"].transpose(0, 1))  # of distances columns, columns - 1, ..., in that order
    distance = torch.arange(columns - rows, columns)[:, None] - torch.arange(columns)
    index = columns - distance

    def stream(x: Tensor, kind: str) -> Outputs:
        q = made("q", x)
        asks = (q + peer["weight.r_r_bias"][:, None]) * scale
        bias = torch.cat([relative_scores(a[None], r, index) for a, r in zip(asks, places, strict=True)])
        if "input.seg_mat" in peer:
            kinds = torch.einsum(
                "bhid,shd->bhis", (q + peer["weight.r_s_bias"][:, None]) * scale, peer["weight.seg_embed"]
            )
            bias = bias + torch.einsum("bhis,ijbs->bhij", kinds, peer["input.seg_mat"])
        else:
            bias = bias + 0 * (peer["weight.r_s_bias"].sum() + peer["weight.seg_embed"].sum())  # there, and left out
        options: dict[str, Any] = {"bias": Dense(bias)}
        if f"input.attn_mask_{kind}" in peer:
            options["mask"] = (peer[f"input.attn_mask_{kind}"].squeeze(-1) == 0).permute(2, 0, 1)[:, None]
        found = attend(q + peer["weight.r_w_bias"][:, None], k, v, **options)
        y = torch.einsum("bhtd,chd->btc", found["out"], peer["weight.o"]) + x
        norm = peer["weight.layer_norm.weight"], peer["weight.layer_norm.bias"]
        y = F.layer_norm(y, y.shape[-1:], *norm, config["layer_norm_eps"])
        weights = found["attn_weights"].permute(2, 3, 0, 1)
        return {f"out_{kind}": y.transpose(0, 1), f"attn_weights_{kind}": weights}

    found = stream(h, "h")
    if not config["two_stream"]:
        return found | {"out": found["out_h"]}
    found |= stream(peer["input.g"].transpose(0, 1), "g")
    return found | {"out": torch.cat([found["out_h"].flatten(), found["out_g"].flatten()])}


def relative(case: Case) -> Callable[..., Outputs] | None:
    kinds = {
        "weight.qkv_net.weight": transformer_xl,
        "weight.seg_embed": xlnet,
        "weight.distance_embedding.weight": shaw,
    }
    return next((way for name, way in kinds.items() if case.has(name)), None)


WAYS: dict[str, Callable[[Case], Callable[..., Outputs] | None]] = {
    "local_attention_lucidrains": lambda case: local if "window_size" in case.config else None,
    "reformer_local": lambda case: reformer_local,
    "nsa_selection": lambda case: selected if case.has("input.block_indices") else None,
    "perceiver": lambda case: perceiver if case.has("input.latents") else None,
    "cross_modal": lambda case: gated_cross if case.has("input.image_states") else None,
    "relative_position": relative,
}


def paths(case: Case) -> Paths | None:
    """One way for each of these."""
    way = WAYS[case.family](case)
    return None if way is None else {"function": lambda peer, wanted: way(case, peer, wanted)}
