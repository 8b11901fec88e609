"""Layers with a matrix state from transformers: (gated) DeltaNet, Kimi Delta Attention, lightning attention."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from golden_adapters.case import Case, Paths, Peer
from golden_adapters.layers import State, keep_of, linears, run
from golden_adapters.modules import adapter, decoder_adapter, module_config
from regard.mixers.recurrent import RecurrentLayer
from regard.nn import GatedDeltaNet, GatedRMSNorm, KDAGates, KimiDeltaAttention, LightningAttention

Outputs = dict[str, Tensor]


def answer(case: Case, peer: Peer, wanted: frozenset[str], layer: RecurrentLayer, state: State) -> Outputs:
    """The layer with this state, on the case's tokens."""
    layer = layer.to(state["q_proj.weight"].dtype).eval()
    layer.load_state_dict({name: tensor.detach() for name, tensor in state.items()}, strict=True)
    return run(case, wanted, layer, state, peer["input.hidden"], keep=keep_of(case, peer))


def convolved(case: Case, peer: Peer, config: dict[str, Any]) -> tuple[State, int]:
    """(the convolution over [q, k, v], its taps)."""
    case.refuse_unless(config.get("hidden_act", "silu") == "silu", f"hidden_act {config.get('hidden_act')!r}")
    weight = peer["weight.conv1d.weight"].squeeze(1)
    case.refuse_unless(weight.shape[1] == int(config["linear_conv_kernel_dim"]), f"{weight.shape[1]} taps")
    return {"conv.weight": weight}, weight.shape[1]


# ---- Gated DeltaNet --------------------------------------------------------------------------------------------------


def gated_deltanet(case: Case, peer: Peer, wanted: frozenset[str]) -> Outputs:
    config = module_config(case)
    key_heads, heads = int(config["linear_num_key_heads"]), int(config["linear_num_value_heads"])
    key_dim, value_dim = int(config["linear_key_head_dim"]), int(config["linear_value_head_dim"])
    conv, taps = convolved(case, peer, config)
    state = conv | {"A_log": peer["weight.A_log"], "dt_bias": peer["weight.dt_bias"]}
    eps, gate = float(config["rms_norm_eps"]), config.get("output_gate_type") or "silu"
    if "weight.q_proj.weight" in peer:
        names = ("q_proj", "k_proj", "v_proj", "g_proj", "a_proj", "b_proj", "o_proj")
        state |= linears(peer, {**{name: name for name in names}, "norm": "o_norm"})
        eps = 1e-5  # whatever the configuration says
    else:
        state |= linears(peer, {"o_proj": "out_proj", "norm": "norm"})
        if "weight.in_proj_qkvz.weight" in peer:
            state |= unpacked(peer, key_heads, heads // key_heads, key_dim, value_dim)
        else:
            qkv = peer["weight.in_proj_qkv.weight"].split([key_heads * key_dim] * 2 + [heads * value_dim])
            state |= {f"{name}_proj.weight": rows for name, rows in zip("qkv", qkv, strict=True)}
            state |= linears(peer, {"g_proj": "in_proj_z", "b_proj": "in_proj_b", "a_proj": "in_proj_a"})
    layer = GatedDeltaNet(
        int(config["hidden_size"]),
        heads,
        key_heads=key_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        conv_size=taps,
        beta_max=2.0 if config.get("linear_allow_neg_eigval") else 1.0,
        norm=partial(GatedRMSNorm, eps=eps, gate=gate),
    )
    return answer(case, peer, wanted, layer, state)


def unpacked(peer: Peer, key_heads: int, group: int, key_dim: int, value_dim: int) -> State:
    """in_proj_qkvz and in_proj_ba, whose rows are [q, k, v .. v, z .. z] and [b .. b, a .. a] for every key head."""
    sizes = {"q_proj": key_dim, "k_proj": key_dim, "v_proj": group * value_dim, "g_proj": group * value_dim}
    state = {}
    for fused, parts in (("qkvz", sizes), ("ba", {"b_proj": group, "a_proj": group})):
        rows = peer[f"weight.in_proj_{fused}.weight"].unflatten(0, (key_heads, -1))
        for name, part in zip(parts, rows.split(list(parts.values()), 1), strict=True):
            state[f"{name}.weight"] = part.flatten(0, 1)
    return state


# ---- Kimi Delta Attention --------------------------------------------------------------------------------------------


def kda(case: Case, peer: Peer, wanted: frozenset[str]) -> Outputs:
    config = module_config(case)
    heads, head_dim = int(config["linear_num_heads"]), int(config["linear_head_dim"])
    low = config.get("linear_lower_bound")
    if "kda_safe_gate" in config:
        low = config["kda_lower_bound"] if config["kda_safe_gate"] else None
    state, taps = convolved(case, peer, config)
    state |= linears(peer, {name: name for name in ("q_proj", "k_proj", "v_proj", "b_proj", "o_proj")})
    state |= linears(peer, {"norm": "o_norm"})
    ranks = []
    for ours, theirs in (("decay_proj", "forget_gate.f"), ("g_proj", "g")):
        whole = f"weight.{theirs}_proj.weight" in peer
        names = (
            {ours: f"{theirs}_proj"} if whole else {f"{ours}.0": f"{theirs}_a_proj", f"{ours}.1": f"{theirs}_b_proj"}
        )
        state |= linears(peer, names)
        ranks.append(None if whole else state[f"{ours}.0.weight"].shape[0])
    state["A_log"], state["dt_bias"] = peer["weight.forget_gate.A_log"].flatten(), peer["weight.forget_gate.dt_bias"]
    bias = any(name in state for name in ("g_proj.bias", "g_proj.1.bias"))
    layer = KimiDeltaAttention(
        int(config["hidden_size"]),
        heads,
        key_dim=head_dim,
        conv_size=taps,
        beta_max=2.0 if config.get("linear_allow_neg_eigval") else 1.0,
        gates=KDAGates(low, *ranks, gate_bias=bias, eps=float(config["rms_norm_eps"])),
    )
    return answer(case, peer, wanted, layer, state)


# ---- lightning attention ---------------------------------------------------------------------------------------------


def lightning(case: Case, peer: Peer, wanted: frozenset[str]) -> Outputs:
    config = module_config(case)
    case.refuse_unless(config.get("hidden_act", "silu") == "silu", f"hidden_act {config.get('hidden_act')!r}")
    heads, width = int(config["num_attention_heads"]), int(config["hidden_size"])
    head_dim = int(config.get("head_dim") or width // heads)
    state = linears(peer, {"g_proj": "output_gate", "o_proj": "out_proj", "norm": "norm"})
    for name, rows in zip(
        "qkv", peer["weight.qkv_proj.weight"].unflatten(0, (heads, 3, head_dim)).unbind(1), strict=True
    ):
        state[f"{name}_proj.weight"] = rows.flatten(0, 1)
    peer.without_effect(*(f"weight.{name}" for name in ("query_decay", "key_decay", "diagonal_decay")))  # of slope_rate
    slopes = peer["weight.slope_rate"].detach().flatten()
    return answer(case, peer, wanted, LightningAttention(width, heads, head_dim=head_dim, slopes=slopes), state)


def minimax(case: Case) -> Paths | None:
    return adapter(lightning, "qkv_proj.weight", "slope_rate")(case) or decoder_adapter()(case)


GATED_DELTANET = adapter(gated_deltanet, "conv1d.weight", "A_log", "dt_bias")
KDA = adapter(kda, "conv1d.weight", "forget_gate.A_log", "q_proj.weight")

ADAPTERS: dict[str, Callable[[Case], Paths | None]] = {
    "qwen3_next_gated_deltanet": GATED_DELTANET,
    "olmo_hybrid_gated_deltanet": GATED_DELTANET,
    "gated_deltanet_variants": GATED_DELTANET,
    "kimi_linear_kda": KDA,
    "kda_layer_variants": KDA,
    "minimax_lightning": minimax,
}
