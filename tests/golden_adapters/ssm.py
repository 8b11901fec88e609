"""State spaces: the scans of Mamba and Mamba-2 as functions, and their mixers in transformers as layers."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call

import regard
from golden_adapters.case import Case, Paths, Peer
from golden_adapters.layers import State, keep_of, linears
from golden_adapters.modules import Outputs, first_of, module_config
from regard.mixers.recurrent import RecurrentLayer
from regard.nn import Mamba, Mamba2, MambaConfig, RMSNorm

# ---- layers with a state ---------------------------------------------------------------------------------------------


def run_layer(
    case: Case,
    wanted: frozenset[str],
    layer: RecurrentLayer,
    state: State,
    x: Tensor,
    keep: Tensor | None = None,
    positions: Tensor | None = None,
) -> Outputs:
    """The layer with the peer's weights: whole, and in the pieces of `cache_splits` through its own cache."""
    layer = layer.to(x.dtype).eval()
    layer.load_state_dict({name: tensor.detach() for name, tensor in state.items()}, strict=True)
    options = {"keep": keep, "positions": positions}
    found = {"out": functional_call(layer, state, (x,), options, strict=True)}
    with torch.no_grad():
        for name in wanted & {"out_by_cache_steps", "out_by_steps"}:
            splits = case.config.get("cache_splits") or case.config.get("splits")
            case.refuse_unless(bool(splits) and sum(splits) == x.shape[1], f"cache_splits: {splits}")
            cache, outs, start = layer.init_cache(x.shape[0], 0), [], 0
            for length in splits:
                part = slice(start, start + length)
                own = {key: None if value is None else value[:, part] for key, value in options.items()}
                outs.append(layer(x[:, part], cache=cache, **own))
                start += length
            found[name] = torch.cat(outs, 1)
    return found


def shared_weights(peer: Peer) -> State:
    """What the mixers of both generations store alike."""
    state = linears(peer, {"in_proj": "in_proj", "out_proj": "out_proj"})
    state |= {"conv.weight": peer["weight.conv1d.weight"].squeeze(1)}
    if "weight.conv1d.bias" in peer:
        state["conv.bias"] = peer["weight.conv1d.bias"]
    return state | {name: peer[f"weight.{name}"] for name in ("A_log", "D")}


def shell_of(case: Case, state: State, config: dict[str, Any], eps: float = 1e-5) -> MambaConfig:
    taps = state["conv.weight"].shape[1]
    said = first_of(config, "conv_kernel", "mamba_d_conv")
    case.refuse_unless(said == taps, f"{said} taps for a kernel of {taps}")
    act = first_of(config, "mamba_hidden_act", "hidden_act")
    case.refuse_unless(act in ("silu", "swish"), f"hidden_act {act!r}")
    case.refuse_unless(("in_proj.bias" in state) == ("out_proj.bias" in state), "a bias in one projection only")
    return MambaConfig(conv_size=taps, conv_bias="conv.bias" in state, bias="in_proj.bias" in state, eps=eps)


def mamba2_mixer(case: Case, peer: Peer, wanted: frozenset[str]) -> Outputs:
    config, x = module_config(case), peer["input.hidden"]
    state = shared_weights(peer) | {
        "dt_bias": peer["weight.dt_bias"],
        "norm.weight": peer["weight.norm.weight"],
    }
    limits = tuple(float(number) for number in config.get("time_step_limit") or (0.0, math.inf))
    layer = Mamba2(
        int(config["hidden_size"]),
        int(first_of(config, "mamba_num_heads", "mamba_n_heads", "num_heads")),
        head_dim=int(first_of(config, "mamba_head_dim", "mamba_d_head", "head_dim")),
        state_dim=int(first_of(config, "ssm_state_size", "mamba_d_state", "state_size")),
        groups=int(first_of(config, "mamba_n_groups", "n_groups")),
        limits=limits,  # type: ignore[arg-type]
        shell=shell_of(case, state, config, float(first_of(config, "layer_norm_epsilon", "rms_norm_eps"))),
    )
    return run_layer(case, wanted, layer, state, x, keep_of(case, peer))


def mamba_mixer(case: Case, peer: Peer, wanted: frozenset[str]) -> Outputs:
    config, x = module_config(case), peer["input.hidden"]
    state = shared_weights(peer) | linears(peer, {"x_proj": "x_proj", "dt_proj": "dt_proj"})
    case.refuse_unless("dt_proj.bias" in state, "steps without a bias")
    case.refuse_unless("x_proj.bias" not in state, "a bias of x_proj")
    rank, states = state["dt_proj.weight"].shape[1], state["A_log"].shape[1]
    said = first_of(config, "mamba_d_state", "state_size")
    case.refuse_unless(said == states, f"{said} states for A_log of {states}")
    norm, names = None, {"dt_norm": "dt_layernorm", "B_norm": "b_layernorm", "C_norm": "c_layernorm"}
    if "weight.dt_layernorm.weight" in peer:
        norm = partial(RMSNorm, eps=float(config["rms_norm_eps"]))
        state |= {f"{ours}.weight": peer[f"weight.{theirs}.weight"] for ours, theirs in names.items()}
    elif "mixer_rms_eps" in config:  # norms without weights
        norm = partial(RMSNorm, eps=float(config["mixer_rms_eps"]))
        state |= {f"{ours}.weight": x.new_ones(rank if ours == "dt_norm" else states) for ours in names}
    layer = Mamba(
        int(config["hidden_size"]),
        width=state["D"].shape[0],
        state_dim=states,
        rank=rank,
        norm=norm,
        shell=shell_of(case, state, config),
    )
    return run_layer(case, wanted, layer, state, x, keep_of(case, peer))


# ---- functions -------------------------------------------------------------------------------------------------------


def selective_scan(case: Case, peer: Peer, wanted: frozenset[str]) -> Outputs:
    """Time last, (B, d, T); B and C (d, N), (B, N, T) or in groups of channels (B, G, N, T)."""
    u, delta, A = (peer[f"input.{name}"] for name in ("u", "delta", "A"))
    case.refuse_unless(not A.is_complex(), "a complex A")
    if "input.delta_bias" in peer:
        delta = delta + peer["input.delta_bias"][:, None]
    if case.config.get("delta_softplus"):
        delta = F.softplus(delta)
    shared = []
    for name in ("B", "C"):
        given = peer[f"input.{name}"]
        case.refuse_unless(given.ndim in (3, 4), f"{name} of {given.ndim} axes")
        shared.append((given[:, None] if given.ndim == 3 else given).transpose(2, 3))
    groups = math.lcm(*(each.shape[1] for each in shared))
    D, first = peer.get("input.D"), peer.get("input.initial_state")
    outs, ends = [], []
    size = u.shape[1] // groups
    for g in range(groups):
        part = slice(g * size, (g + 1) * size)
        out, end = regard.selective_scan(
            u[:, part].transpose(1, 2),
            delta[:, part].transpose(1, 2),
            A[part],
            *(each[:, g * each.shape[1] // groups] for each in shared),
            None if D is None else D[part],
            state=None if first is None else first[:, part],
        )
        outs.append(out.transpose(1, 2))
        ends.append(end)
    out = torch.cat(outs, 1)
    if "input.z" in peer:
        out = out * F.silu(peer["input.z"])
    return {"out": out, "final_state": torch.cat(ends, 1)}


def ssd(case: Case, peer: Peer, wanted: frozenset[str]) -> Outputs:
    """States are (B, H, P, N) there. Either dt is separate and A is a number per head, or X and A contain it."""
    listing = "input.X" in peer
    chunk = int(case.config["block_len" if listing else "chunk_size"])
    if listing:
        x, log_decay = peer["input.X"], peer["input.A"]
        b, c = peer["input.B"], peer["input.C"]
        first = peer.get("input.initial_states")
        first = None if first is None else first[:, 0]
        v = x
    else:
        x, dt, first = peer["input.x"], peer["input.dt"], peer.get("input.initial_state")
        b, c = peer["input.Bmat"], peer["input.Cmat"]
        dt = dt if "input.dt_bias" not in peer else dt + peer["input.dt_bias"]
        dt = F.softplus(dt) if case.config["dt_softplus"] else dt
        dt = dt.clamp(*(float(number) for number in case.config.get("dt_limit") or (0.0, math.inf)))
        v, log_decay = dt[..., None] * x, dt * peer["input.A"]
    out, end = regard.recurrence(
        *(each.transpose(1, 2) for each in (c, b, v)),
        regard.Decay(log_decay.transpose(1, 2)),
        state=None if first is None else first.transpose(2, 3),
        scale=1.0,
        chunk_size=chunk,
    )
    out = out.transpose(1, 2)
    if not listing and "input.D" in peer:
        D = peer["input.D"]
        out = out + (D if D.ndim == 2 else D[:, None]) * x
    if not listing and "input.z" in peer:
        out = out * F.silu(peer["input.z"])
    return {"out": out, "final_state": end.transpose(2, 3)}


# ---- families --------------------------------------------------------------------------------------------------------


def paths(case: Case) -> Paths | None:
    """By the tensors: a mixer of either generation, or a scan."""
    if case.has("weight.in_proj.weight", "weight.x_proj.weight"):
        return {"layer": partial(mamba_mixer, case)}
    if case.has("weight.in_proj.weight", "weight.dt_bias"):
        return {"layer": partial(mamba2_mixer, case)}
    if case.has("input.u", "input.delta"):
        return {"function": partial(selective_scan, case)}
    if case.has("input.X", "input.A") or case.has("input.x", "input.dt"):
        return {"function": partial(ssd, case)}
    return None
