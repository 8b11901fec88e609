"""The gated attention of transformers' Mega; its tensors have time first, (T, B, C)."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from golden_adapters.case import Case, Paths, Peer
from golden_adapters.layers import State, in_pieces, keep_of, linears, run
from golden_adapters.modules import Outputs
from regard.mixers.mega import MegaAttention, MegaPlaces, MegaSizes
from regard.nn import RMSNorm

AVERAGE = {
    "delta": "damping_factor",
    "alpha": "decay_factor",
    "beta": "ema_expansion_matrix",
    "gamma": "kernel_projection_matrix",
}
NORMS = {"layernorm": torch.nn.LayerNorm, "rmsnorm": partial(RMSNorm, eps=1e-6)}


def config_of(case: Case) -> dict[str, Any]:
    """The options, wherever the case keeps them."""
    found: dict[str, Any] = case.config.get("config") or case.config
    return found


def average_state(peer: Peer, under: str = "") -> State:
    """The parameters of the damped moving average."""
    state = {ours: peer[f"weight.{under}{theirs}"].flatten(1) for ours, theirs in AVERAGE.items()}
    return state | {"omega": peer[f"weight.{under}residual_weight"]}


def gated(case: Case, peer: Peer, wanted: frozenset[str]) -> Outputs:
    config, x = config_of(case), peer["input.x"].transpose(0, 1)
    kind = config["normalization_type"]
    case.refuse_unless(kind in NORMS and config["norm_affine"], f"normalization_type {kind}")
    case.refuse_unless(config["activation"] == "silu", f"activation {config['activation']}")
    rotary = config["relative_positional_bias"] == "rotary"
    chunk = config["chunk_size"] if config["use_chunking"] else None
    state = linears(peer, {"v_proj": "v_proj", "mx_proj": "mx_proj", "h_proj": "h_proj"})
    state |= {f"ema.{name}": tensor for name, tensor in average_state(peer, "ema_gate.").items()}
    state |= {name: peer[f"weight.{name}"] for name in ("qk_weight", "qk_bias")}
    for name in ("weight", "bias"):
        if f"weight.norm.norm.{name}" in peer:
            state[f"norm.{name}"] = peer[f"weight.norm.norm.{name}"]
    if rotary:
        state["places.first"] = peer["weight.rel_pos_bias.alpha"].flatten()
        state["places.second"] = peer["weight.rel_pos_bias.b_param"].flatten()
        peer.without_effect("weight.rel_pos_bias._float_tensor")
    else:
        state["places.table"] = peer["weight.rel_pos_bias.rel_pos_bias"]
    sizes = MegaSizes(
        config["ema_projection_size"],
        config["shared_representation_size"],
        config["intermediate_size"],
        chunk,
        config.get("truncation"),
    )
    length = max(x.shape[1], 1) if rotary else (len(state["places.table"]) + 1) // 2
    layer = MegaAttention(
        config["hidden_size"],
        sizes,
        places=MegaPlaces(length, "rotary" if rotary else "simple", config["shared_representation_size"]),
        weights=config["attention_activation"],
        bidirectional=config["bidirectional"],
        norm=NORMS[kind],
        norm_first=config["normalize_before_mega"],
    )
    masks = [name for name in ("input.padding_mask", "input.attention_mask") if name in peer]
    keep = keep_of(case, peer, masks[0]) if masks else None
    layer = layer.to(x.dtype).eval()
    layer.load_state_dict({name: tensor.detach() for name, tensor in state.items()})
    found = run(case, wanted - {"out_by_cache_steps"}, layer, state, x, keep=keep)
    if "out_by_cache_steps" in wanted:
        with torch.no_grad():  # the peer's pieces are not stored, and any give the same
            found["out_by_cache_steps"] = in_pieces(layer, [1] * x.shape[1], x, None, keep, None)
    if "attn_weights" in found:
        found["attn_weights"] = chunked(found["attn_weights"], chunk or x.shape[1])
    outs = {name for name in found if name != "attn_weights"}
    if keep is not None:  # the peer answers padding too, from what its average left there
        peer.only_rows("attn_weights", keep)
        for name in outs:
            peer.only_rows(name, keep.T)
    return {name: out.transpose(0, 1) if name in outs else out for name, out in found.items()}


def chunked(weights: Tensor, chunk: int) -> Tensor:
    """(B, 1, T, T) as the squares of the chunks on its diagonal (B, T / C, C, C)."""
    squares = weights[:, 0].unfold(1, chunk, chunk).unfold(2, chunk, chunk)
    return squares.diagonal(dim1=1, dim2=2).permute(0, 3, 1, 2)


def paths(case: Case) -> Paths | None:
    """By the tensors."""
    return {"layer": partial(gated, case)} if case.has("weight.qk_weight", "input.x") else None
