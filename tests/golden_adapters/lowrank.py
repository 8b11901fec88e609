"""Attention in linear time: Linformer's layer, and the Performer's operation with its published stabiliser."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import regard
from golden_adapters.case import Case, Paths, Peer
from regard.mixers.kernel_sums import with_ones
from regard.nn import LengthProjection, Linformer
from regard.random_features import PublishedPositiveFeatures, RandomFeatures, ReluFeatures
from regard.transitions import Decay

Outputs = dict[str, Tensor]


def linformer(case: Case, peer: Peer, wanted: frozenset[str]) -> Outputs:
    config = case.config
    known = {"dim", "seq_len", "k", "heads", "dim_head", "share_kv", "one_kv_head", "dropout"}
    case.refuse_unless(not set(config) - known, f"the options {sorted(set(config) - known)}")
    x, dim, heads = peer["input.x"], config["dim"], config["heads"]
    case.refuse_unless(config.get("dim_head") in (None, dim // heads), f"dim_head {config.get('dim_head')}")
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
    layer = Linformer(dim, heads, maps, kv_heads=kv_heads, context_dim=context_dim, bias=True)
    return {"out": torch.func.functional_call(layer, state, (x, source), strict=True)}


def performer(case: Case, peer: Peer, wanted: frozenset[str]) -> Outputs:
    """Features of all keys together, as the peer makes them; the sums are the library's recurrence or two products."""
    config = case.config
    known = {"dim_heads", "nb_features", "ortho_scaling", "causal", "generalized_attention", "no_projection"}
    case.refuse_unless(not set(config) - known, f"the options {sorted(set(config) - known)}")
    case.refuse_unless(not config.get("no_projection"), "no_projection")
    q, k, v = (peer[f"input.{name}"] for name in "qkv")
    kind: type[RandomFeatures] = ReluFeatures if config.get("generalized_attention") else PublishedPositiveFeatures
    projection = peer["weight.projection_matrix"]
    made = kind(q.shape[1], q.shape[3], features=projection.shape[0])
    made.projection = projection
    q, k = made.queries(q), made.keys(k)
    if config.get("causal"):
        sums: Any = regard.recurrence(q, k, with_ones(v), Decay(), scale=1.0)[0]
        weight = sums[..., -1:] + 1e-6 * q.sum(-1, keepdim=True)
    else:
        sums = q @ (k.mT @ with_ones(v))
        weight = sums[..., -1:]
    return {"out": sums[..., :-1] / weight}


def paths(case: Case) -> Paths | None:
    """One way for either."""
    way = linformer if case.has("weight.proj_k") else performer if case.has("weight.projection_matrix") else None
    return None if way is None else {"layer": lambda peer, wanted: way(case, peer, wanted)}
