"""Attention in linear time: Linformer's layer, and the Performer's operation with its published stabiliser."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import torch
from torch import Tensor

import regard
from golden_adapters.case import Case, Paths, Peer
from golden_adapters.kernel_linear import by_layer
from regard.mixers.kernel_sums import read, with_ones, written
from regard.nn import LengthProjection, Linformer
from regard.random_features import PublishedPositiveFeatures, RandomFeatures, ReluFeatures
from regard.transitions import Decay

Outputs = dict[str, Tensor]


def linformer(case: Case, peer: Peer, wanted: frozenset[str]) -> Outputs:
    config = case.config
    known = {"dim", "seq_len", "k", "heads", "dim_head", "share_kv", "one_kv_head", "dropout"}
    case.refuse_unless(not set(config) - known, f"the options {sorted(set(config) - known)}")
    x, dim, heads = peer["input.x"], config["dim"], config["heads"]
    shared = bool(config.get("share_kv"))
    sharing = "keys and values" if shared else "heads"
    kv_heads = 1 if config.get("one_kv_head") else heads
    maps = LengthProjection(config["seq_len"], config["k"], kv_heads, sharing=sharing)
    source = peer.get("input.context")
    state = {
        "q_proj.weight": peer["weight.to_q.weight"],
        "k_proj.weight": peer["weight.to_k.weight"],
        "v_proj.weight": peer["weight.to_k.weight" if shared else "weight.to_v.weight"],
        "o_proj.weight": peer["weight.to_out.weight"],
        "o_proj.bias": peer["weight.to_out.bias"],
        "projection.keys": peer["weight.proj_k"].T[None],
    }
    if not shared:
        state["projection.values"] = peer["weight.proj_v"].T[None]
    context_dim = None if source is None else source.shape[-1]
    layer = Linformer(
        dim, heads, maps, kv_heads=kv_heads, head_dim=config.get("dim_head"), context_dim=context_dim, bias=True
    )
    return {"out": torch.func.functional_call(layer, state, (x, source), strict=True)}


def projected(case: Case, peer: Peer) -> RandomFeatures:
    """The peer's random features, over the projection it drew."""
    config = case.config
    kernel = str(config.get("kernel_fn") or "relu")
    kind: type[RandomFeatures] = PublishedPositiveFeatures
    if config.get("generalized_attention"):
        case.refuse_unless(re.fullmatch(r"(\w+\.)*relu(\(\))?", kernel.lower()) is not None, f"kernel_fn {kernel}")
        kind = ReluFeatures
    rows, q = peer["weight.projection_matrix"], peer["input.q"]
    made = kind(q.shape[1], q.shape[3], features=rows.shape[0])
    made.projection = rows
    return made


def performer(case: Case, peer: Peer, wanted: frozenset[str]) -> Outputs:
    """Features of all keys together, as the peer makes them; the sums are the library's recurrence or two products."""
    config = case.config
    q, k, v = (peer[f"input.{name}"] for name in "qkv")
    if config.get("no_projection"):  # softmax over channels and, for keys, over the tokens: their sums are 1
        peer.without_effect("weight.projection_matrix")
        q, k = q.softmax(-1), k.exp() if config.get("causal") else k.softmax(-2)
    else:
        made = projected(case, peer)
        q, k = made.queries(q), made.keys(k)
    if config.get("causal"):
        sums: Any = regard.recurrence(q, k, with_ones(v), Decay(), scale=1.0)[0]
        weight = sums[..., -1:] + 1e-6 * q.sum(-1, keepdim=True)
    else:
        sums = read(q, written(k, with_ones(v)))
        weight = sums[..., -1:]
    return {"out": sums[..., :-1] / weight}


def performer_layer(case: Case, peer: Peer, wanted: frozenset[str]) -> Outputs:
    """The bidirectional layer, whose projections pick the peer's queries, keys and values out of its tokens."""
    q, k, v = (peer[f"input.{name}"] for name in "qkv")
    made = projected(case, peer)
    return {"out": by_layer(q, k, v, lambda heads, dim: made, 1e-20, bidirectional=True)}


def performer_ways(case: Case) -> Paths:
    config = case.config
    known = {
        "dim_heads", "nb_features", "ortho_scaling", "causal", "generalized_attention", "kernel_fn", "no_projection",
    }  # fmt: skip
    case.refuse_unless(not set(config) - known, f"the options {sorted(set(config) - known)}")
    ways: Paths = {"function": partial(performer, case)}
    tokens = {case.tensors[f"input.{name}"].shape[2] for name in "qkv"}
    # the causal peer adds its 1e-6 to sums of features, the layer to sums of weights
    if not config.get("causal") and not config.get("no_projection") and len(tokens) == 1:
        ways["layer"] = partial(performer_layer, case)
    return ways


def paths(case: Case) -> Paths | None:
    """Linformer's cases hold its projections, the Performer's queries, keys and values."""
    if case.has("weight.proj_k"):
        return {"layer": partial(linformer, case)}
    return performer_ways(case) if case.has("input.q", "input.k", "input.v") else None
