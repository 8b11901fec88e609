"""Differential attention's module, and plain formulas of forgetting and stick-breaking attention."""

from __future__ import annotations

from typing import Any

from torch import Tensor

import regard
from golden_adapters.case import Case, Paths, Peer
from golden_adapters.layers import keep_of, linears, positions_of, run
from golden_adapters.rotary_config import rotary_of, tables
from regard.biases import Dense
from regard.masks import Causal, Window
from regard.nn import DifferentialAttention
from regard.ops.stick_breaking import stick_breaking

Outputs = dict[str, Tensor]


def sticks(case: Case, peer: Peer, wanted: frozenset[str]) -> Outputs:
    case.refuse_unless(set(case.config) <= {"attend_current", "scale"}, str(case.config))
    q, k, v = (peer[f"input.{name}"].transpose(1, 2) for name in "qkv")
    options = {"attend_current": bool(case.config.get("attend_current")), "scale": case.config.get("scale")}
    out, rest = stick_breaking(q, k, v, **options)
    return {"out": out.transpose(1, 2), "remainder": rest.transpose(1, 2)}


def forgetting(case: Case, peer: Peer, wanted: frozenset[str]) -> Outputs:
    case.refuse_unless(set(case.config) <= {"window_size", "scale"}, str(case.config))
    q, k, v = (peer[f"input.{name}"].transpose(1, 2) for name in "qkv")
    gates = peer["input.g"].transpose(1, 2)  # (B, H, T)
    later = gates.flip(2).cumsum(2).flip(2) - gates
    window = case.config.get("window_size")
    mask = Causal() if window is None else Window(window)
    out = regard.attention(q, k, v, mask=mask, bias=Dense(later[:, :, None]), scale=case.config.get("scale"))
    return {"out": out.transpose(1, 2)}


def differential(case: Case, peer: Peer, wanted: frozenset[str]) -> Outputs:
    config: dict[str, Any] = case.config["config"]
    x, heads = peer["input.hidden"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    rope = case.config.get("rope_parameters") or config.get("rope_parameters")
    positions = positions_of(peer, x)
    most = int(config.get("max_position_embeddings", 0))
    rotary = rotary_of(case, rope, head_dim, positions, max_positions=most, partial=False)
    state = linears(peer, {f"{name}_proj": f"{name}_proj" for name in "qkvo"})
    case.refuse_unless("q_proj.bias" not in state, "attention_bias")
    state |= {name: peer[f"weight.{name}"] for name in ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2")}
    layer = DifferentialAttention(
        config["hidden_size"],
        heads,
        depth=case.config["layer_idx"],
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=head_dim,
        rotary=rotary,
        window=config["sliding_window"] if case.config.get("sliding_mask") else None,
        eps=config["rms_norm_eps"],
    ).to(x.dtype)
    found = run(case, wanted, layer.eval(), state, x, keep=keep_of(case, peer), positions=positions)
    if "out_by_cache_steps" in wanted:  # a cache is fed by the layer's own weights
        layer.load_state_dict({name: tensor.detach() for name, tensor in state.items()}, strict=True)
        found = run(case, wanted, layer, state, x, keep=keep_of(case, peer), positions=positions)
    return found | tables(case, wanted, rotary, positions, x)


def paths(case: Case) -> Paths | None:
    """One way for each of these."""
    if case.has("weight.lambda_q1"):
        way = differential
    elif case.has("input.q", "input.g"):
        way = forgetting
    elif case.has("input.q", "output.remainder"):
        way = sticks
    else:
        return None
    return {"layer": lambda peer, wanted: way(case, peer, wanted)}
