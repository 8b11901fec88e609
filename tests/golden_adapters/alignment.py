"""Attention of recurrent translators: Bahdanau's, Luong's, OpenNMT's and Keras's layers, and the papers' formulas."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from golden_adapters.case import Case, Paths, Peer
from regard.masks import Causal, KeyPadding, Mask
from regard.nn import AdditiveAttention, LocalAlignment, LuongAttention
from regard.ops.additive import additive_scores, attend_by_scores, weights_of_scores

Outputs = dict[str, Tensor]
State = dict[str, Tensor]


def real(lengths: Tensor, memory: Tensor) -> Tensor:
    return torch.arange(memory.shape[1]) < lengths[:, None]


class _Answers(nn.Module):
    """A layer that answers with its output, its alignment (B, T, Tk) and, where it predicts them, its places."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, memory: Tensor, keep: Tensor | None) -> tuple[Tensor, Tensor, Any]:
        out = self.layer(x, memory, keep=keep)
        view = self.layer._read(x, memory, keep=keep)[1]
        places = self.layer.places(x, view) if getattr(self.layer, "place_proj", None) is not None else None
        return out, self.layer.mixing(x, memory, keep=keep)[0][:, 0], places


def run(layer: nn.Module, state: State, *arguments: Any) -> tuple[Tensor, Tensor, Any]:
    renamed = {f"layer.{name}": tensor for name, tensor in state.items()}
    found: tuple[Tensor, Tensor, Any] = torch.func.functional_call(_Answers(layer), renamed, arguments, strict=True)
    return found


def content_based(case: Case, peer: Peer, wanted: frozenset[str]) -> Outputs:
    """One decoder state that asks."""
    memory, states = peer["input.enc_states"], peer["input.dec_states"]
    names = {"mlp_dec": "q_proj", "mlp_enc": "k_proj", "mlp_out": "o_proj"}
    state = {
        f"{own}.{kind}": peer[f"weight.{name}.{kind}"] for name, own in names.items() for kind in ("weight", "bias")
    }
    scale = float(case.config.get("scaling", case.config.get("scaling_factor", 1.0)) or 1.0)
    state["score"] = peer["weight.mlp_attn.weight"][0] * scale
    hidden, out_dim = state["q_proj.weight"].shape[0], state["o_proj.weight"].shape[0]
    layer = AdditiveAttention(states.shape[-1], context_dim=memory.shape[-1], hidden=hidden, bias=True, out_dim=out_dim)
    keep = real(peer["input.enc_len"], memory) if "input.enc_len" in peer else None
    out, weights, _ = run(layer, state, states[:, None], memory, keep)
    return {"out": out[:, 0], "attn_weights": weights[:, 0]}


def formula(case: Case, peer: Peer, wanted: frozenset[str]) -> Outputs:
    """w . tanh(W_q q + W_k k + b), with values of their own."""
    q = F.linear(peer["input.query"], peer["input.Wq"], peer.get("input.b"))[:, None]
    k, v = F.linear(peer["input.key"], peer["input.Wk"])[:, None], peer["input.value"][:, None]
    scores = additive_scores(q, k, peer["input.w"])
    return by_scores(scores, v, KeyPadding(peer["input.key_mask"]) if "input.key_mask" in peer else None)


def by_scores(scores: Tensor, v: Tensor, mask: Mask | None, **options: Any) -> Outputs:
    out = attend_by_scores(scores, v, mask=mask, **options)[:, 0]
    return {"out": out, "attn_weights": weights_of_scores(scores, v, mask=mask, **options)[:, 0]}


def keras(case: Case, peer: Peer, wanted: frozenset[str]) -> Outputs:
    """call([query, value, key]); padded queries give 0."""
    config, q, v = case.config, peer["input.query"], peer["input.value"]
    k = peer.get("input.key", v)
    kind = config.get("score_mode", config["score"]) if config["score"] != "additive" else "additive"
    case.refuse_unless(not config.get("dropout") and kind in ("additive", "dot", "concat"), f"{config}")
    one = q.new_ones(q.shape[-1])
    scale = peer.get("weight.scale", 1.0)
    if kind == "additive":
        scores = additive_scores(q[:, None], k[:, None], one * scale)
    elif kind == "concat":
        scores = additive_scores(q[:, None] * scale, k[:, None] * scale, one * peer["weight.concat_score_weight"])
    else:
        scores = (q @ k.mT)[:, None] * scale
    mask: Mask | None = KeyPadding(peer["input.value_mask"]) if "input.value_mask" in peer else None
    if config.get("causal"):
        mask = Causal() if mask is None else mask & Causal()
    found = by_scores(scores, v[:, None], mask, q_start=0)
    if "input.query_mask" in peer:
        found["out"] = found["out"] * peer["input.query_mask"].unsqueeze(-1)
    return found


def onmt(case: Case, peer: Peer, wanted: frozenset[str]) -> Outputs:
    """OpenNMT's global attention, with what it does after it."""
    config, memory, q = case.config, peer["input.memory"], peer["input.query"]
    case.refuse_unless(config.get("attn_func", "softmax") == "softmax", str(config.get("attn_func")))
    steps = q if q.ndim == 3 else q[:, None]
    if "input.coverage" in peer:
        seen = peer["input.coverage"].reshape(memory.shape[0], -1, 1)
        memory = torch.tanh(memory + seen * peer["weight.linear_cover.weight"].view(-1))
    kind = {"dot": "dot", "general": "general", "mlp": "concat"}[config["attn_type"]]
    state: State = {}
    if kind == "general":
        state["q_proj.weight"] = peer["weight.linear_in.weight"]
    if kind == "concat":
        state = {
            "q_proj.weight": peer["weight.linear_query.weight"],
            "q_proj.bias": peer["weight.linear_query.bias"],
            "k_proj.weight": peer["weight.linear_context.weight"],
            "score_vector": peer["weight.v.weight"][0],
        }
    layer = LuongAttention(steps.shape[-1], score=kind, bias=kind == "concat", state=False)
    keep = real(peer["input.src_len"], memory) if "input.src_len" in peer else None
    mixed, weights, _ = run(layer, state, steps, memory, keep)
    joined = torch.cat([mixed, steps], -1)
    out = F.linear(joined, peer["weight.linear_out.weight"], peer.get("weight.linear_out.bias"))
    out = out if kind == "concat" else torch.tanh(out)
    return {"out": out, "attn_weights": weights} if q.ndim == 3 else {"out": out[:, 0], "attn_weights": weights[:, 0]}


def local(case: Case, peer: Peer, wanted: frozenset[str]) -> Outputs:
    """The paper's local attention."""
    config, q, memory = case.config, peer["input.query"], peer["input.memory"]
    kind, reach = config["score"], config["D"]
    predicts = config["local"] == "p"
    case.refuse_unless(config.get("sigma") in (None, reach / 2), f"sigma {config.get('sigma')}")
    state: State = {}
    if kind == "general":
        state["q_proj.weight"] = peer["input.W_a"].T
    if kind == "concat":
        state = {
            "q_proj.weight": peer["input.W_a"][:, : q.shape[-1]],
            "k_proj.weight": peer["input.W_a"][:, q.shape[-1] :],
            "score_vector": peer["input.v_a"],
        }
    alignment = LocalAlignment(reach, "predictive" if predicts else "monotonic")
    layer = LuongAttention(q.shape[-1], context_dim=memory.shape[-1], score=kind, local=alignment, state=False)
    if predicts:
        state |= {"place_proj.weight": peer["input.W_p"], "place_vector": peer["input.v_p"]}
    for name, own in {"k_proj.weight": "k_proj", "place_proj.weight": "place_proj"}.items():
        if name in state:  # the width under the tanh is the case's
            setattr(layer, own, nn.Linear(*reversed(state[name].shape), bias=False))
    keep = real(peer["input.src_len"], memory) if "input.src_len" in peer else None
    out, weights, places = run(layer, state, q, memory, keep)
    return {"out": out, "attn_weights": weights} | ({"p": places} if places is not None else {})


def paths(case: Case) -> Paths | None:
    """One way for each of these layers."""
    if case.has("weight.mlp_attn.weight"):
        way = content_based
    elif case.has("input.Wq", "input.w"):
        way = formula
    elif "attn_type" in case.config:
        way = onmt
    elif "local" in case.config:
        way = local
    elif "score" in case.config:
        way = keras
    else:
        return None
    return {"layer": lambda peer, wanted: way(case, peer, wanted)}
