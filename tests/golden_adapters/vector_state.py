"""States of independent numbers: the RG-LRU block and its local attention, Mega's moving average, HGRN's recurrence."""

from __future__ import annotations

import re
from functools import partial

from torch import Tensor

import regard
from golden_adapters.case import Case, Paths, Peer
from golden_adapters.layers import build, keep_of, linears, positions_of, run
from golden_adapters.mega import average_state, config_of
from golden_adapters.modules import PROJECTIONS, Outputs, module_config
from golden_adapters.rotary_config import rotary_of, tables
from golden_adapters.ssm import run_layer
from regard.masks import Window
from regard.models.feedforward import activation
from regard.nn import DampedEMA, GriffinRecurrent


def first_position(case: Case, peer: Peer, x: Tensor) -> Tensor:
    """The peer's positions; where the case stores none, they count up from the number that its notes state."""
    if "input.position_ids" in peer:
        return positions_of(peer, x)
    said = [re.search(r"position ids start at (\d+)", note) for note in case.meta.get("notes", [])]
    starts = {int(found[1]) for found in said if found is not None}
    case.refuse_unless(len(starts) <= 1, f"positions that start at {sorted(starts)}")
    return positions_of(peer, x) + (starts.pop() if starts else 0)


def griffin(case: Case, peer: Peer, wanted: frozenset[str]) -> Outputs:
    config, x = module_config(case), peer["input.hidden"]
    state = linears(peer, {"x_proj": "linear_x", "y_proj": "linear_y", "o_proj": "linear_out"})
    state["conv.weight"] = peer["weight.conv_1d.weight"].squeeze(1)
    state["conv.bias"] = peer["weight.conv_1d.bias"]
    state["p"] = peer["weight.rg_lru.recurrent_param"]
    for ours, theirs in (("recurrence_gate", "recurrent_gate"), ("input_gate", "input_gate")):
        state |= {f"{ours}.{kind}": peer[f"weight.rg_lru.{theirs}_{kind}"] for kind in ("weight", "bias")}
    layer = GriffinRecurrent(
        int(config["hidden_size"]),
        int(config["num_attention_heads"]),
        width=int(config.get("lru_width") or config["hidden_size"]),
        conv_size=int(config["conv1d_width"]),
        activation=activation(config["hidden_activation"]),
    )
    return run_layer(case, wanted, layer, state, x, keep_of(case, peer), first_position(case, peer, x))


def local_attention(case: Case, peer: Peer, wanted: frozenset[str]) -> Outputs:
    config, x = module_config(case), peer["input.hidden"]
    heads = int(config["num_attention_heads"])
    state = linears(peer, PROJECTIONS)
    head_dim = state["q_proj.weight"].shape[0] // heads
    said = config.get("head_dim") or head_dim
    case.refuse_unless(said == head_dim, f"head_dim {said} for heads of {head_dim}")
    window = case.config.get("sliding_window", config["attention_window_size"])
    rope = case.config.get("rope_parameters") or config["rope_parameters"]
    positions = first_position(case, peer, x)
    rotary = rotary_of(case, rope, head_dim, positions, max_positions=1, partial=True)
    layer, state = build(
        state,
        int(config["hidden_size"]),
        heads,
        kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=head_dim,
        mask=Window(int(window)),
        rotary=rotary,
    )
    found = run(case, wanted, layer, state, x, keep=keep_of(case, peer), positions=positions)
    return found | tables(case, wanted, rotary, positions, x)


def mega_ema(case: Case, peer: Peer, wanted: frozenset[str]) -> Outputs:
    """Time first, (T, B, C)."""
    config, x = config_of(case), peer["input.x"].transpose(0, 1)
    both = bool(config["bidirectional"])
    state = average_state(peer)
    sizes = int(config["hidden_size"]), int(config["ema_projection_size"])
    layer = DampedEMA(*sizes, bidirectional=both, truncation=config.get("truncation"))
    masks = [name for name in ("input.attention_mask", "input.mask") if name in peer]
    keep = keep_of(case, peer, masks[0]) if masks else None
    found = run_layer(case, wanted, layer, state, x, keep)
    return {name: out.transpose(0, 1) for name, out in found.items()}


def hgrn(case: Case, peer: Peer, wanted: frozenset[str]) -> Outputs:
    y, last = regard.scan(peer["input.g"], peer["input.x"], state=peer.get("input.initial_state"))
    return {"out": y, "final_state": last}


def paths(case: Case) -> Paths | None:
    """By the tensors."""
    if case.has("weight.rg_lru.recurrent_param"):
        return {"layer": partial(griffin, case)}
    if case.has("weight.damping_factor", "input.x"):
        return {"layer": partial(mega_ema, case)}
    if case.has("input.g", "input.x"):
        return {"function": partial(hgrn, case)}
    if all(case.has(f"weight.{name}_proj.weight") for name in "qkvo"):
        return {"layer": partial(local_attention, case)}
    return None
