"""DeBERTa's attention modules, which end before an output projection."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from golden_adapters.case import Case, Paths, Peer
from golden_adapters.layers import linears
from regard.mixers.parts import merge_heads
from regard.nn import DisentangledAttention, RelativeEmbeddings

Outputs = dict[str, Tensor]
TERMS = {"c2p": "content to position", "p2c": "position to content"}
V2 = {"q_proj": "query_proj", "k_proj": "key_proj", "v_proj": "value_proj"}


class _Answers(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, keep: Tensor | None) -> tuple[Tensor, Tensor]:
        return merge_heads(self.layer.mixed(x, keep=keep)), self.layer.mixing(x, keep=keep)[0]


def content(peer: Peer, heads: int) -> dict[str, Tensor]:
    """q, k and v: apart, or in one matrix whose rows are [q, k, v] for every head, without a bias for the keys."""
    if "weight.in_proj.weight" not in peer:
        return linears(peer, V2)
    fused = peer["weight.in_proj.weight"].unflatten(0, (heads, 3, -1)).unbind(1)
    state = {f"{name}_proj.weight": part.flatten(0, 1) for name, part in zip("qkv", fused, strict=True)}
    biases = peer["weight.q_bias"], torch.zeros_like(peer["weight.q_bias"]), peer["weight.v_bias"]
    return state | {f"{name}_proj.bias": bias for name, bias in zip("qkv", biases, strict=True)}


def layer(case: Case, peer: Peer, wanted: frozenset[str]) -> Outputs:
    config: dict[str, Any] = case.config["config"]
    x, heads, table = peer["input.hidden"], config["num_attention_heads"], peer["input.rel_embeddings"]
    terms = [TERMS[term] for term in config["pos_att_type"]] if config.get("relative_attention") else []
    share, buckets = bool(config.get("share_att_key")), config.get("position_buckets", -1)
    furthest = config.get("max_relative_positions", -1)
    furthest = config["max_position_embeddings"] if furthest < 1 else furthest
    span = buckets if buckets > 0 else furthest
    case.refuse_unless(table.shape[0] == 2 * span, f"{table.shape[0]} relative embeddings")
    relative = RelativeEmbeddings(x.shape[-1], span, max_distance=furthest if buckets > 0 else None)
    state = content(peer, heads) | {"relative.rows": table}
    names = {"place_k_proj": ("pos_key_proj", "pos_proj"), "place_q_proj": ("pos_query_proj", "pos_q_proj")}
    for (own, theirs), term in zip(names.items(), TERMS.values(), strict=True):
        if term in terms and not share:
            name = next(one for one in theirs if f"weight.{one}.weight" in peer)
            state |= linears(peer, {own: name})
            state.setdefault(f"{own}.bias", state["q_proj.bias"].new_zeros(x.shape[-1]))
    talking = bool(config.get("talking_head"))
    if talking:
        state |= linears(peer, {"logits_mix": "head_logits_proj", "weights_mix": "head_weights_proj"})
    made = DisentangledAttention(x.shape[-1], heads, relative, terms=terms, share=share, talking=talking).eval()
    unused = {f"layer.o_proj.{name}": tensor.detach() for name, tensor in made.o_proj.named_parameters()}
    own = {f"layer.{name}": tensor for name, tensor in state.items()}
    keep = peer["input.attention_mask"] > 0 if "input.attention_mask" in peer else None
    out, weights = torch.func.functional_call(_Answers(made), unused | own, (x, keep), strict=True)
    tokens = x.shape[1]
    places = made.relative.relative(tokens, tokens)[None]
    return {"out": out, "attn_weights": weights, "relative_pos": places}


def paths(case: Case) -> Paths | None:
    """One way."""
    if not case.has("input.rel_embeddings"):
        return None
    return {"layer": lambda peer, wanted: layer(case, peer, wanted)}
