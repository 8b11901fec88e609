"""The attention module of the multi-token attention paper's code."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from golden_adapters.case import Case, Paths, Peer
from regard.nn import MultiTokenAttention, TokenKernels
from regard.positions import Rotary

Outputs = dict[str, Tensor]
KNOWN = {
    *("query_kernel_size", "key_kernel_size", "after_sm_query_kernel_size", "after_sm_key_kernel_size"),
    *("head_kernel_size", "pre_sm_linear_head", "post_sm_linear_head", "pad_key", "group_norm"),
    *("layer_norm_rescale", "add_gating", "use_mta", "init_random"),
}


def size(options: dict[str, Any], prefix: str = "") -> tuple[int, int] | None:
    found = options.get(f"{prefix}query_kernel_size"), options.get(f"{prefix}key_kernel_size")
    return None if found == (None, None) else (found[0] or 1, found[1] or 1)


def square(case: Case, peer: Peer, heads: int, kind: str) -> Tensor:
    """The linear map over heads, whatever the peer calls it: of two, the first is before the softmax."""
    shape = (heads, heads)
    names = sorted(name for name in peer if name.startswith("weight.w") and case.tensors[name].shape == shape)
    chosen = [name for name in names if kind in name] or names
    return peer[chosen[0]]


def layer(case: Case, peer: Peer, wanted: frozenset[str]) -> Outputs:
    config, options = case.config, case.config["mta"]
    case.refuse_unless(not set(options) - KNOWN, f"the options {sorted(set(options) - KNOWN)}")
    heads, dim, x = config["n_heads"], config["dim"], peer["input.x"]
    case.refuse_unless(config.get("head_dim") in (None, dim // heads), f"head_dim {config.get('head_dim')}")
    linear = bool(options.get("post_sm_linear_head"))
    kernels = TokenKernels(
        before=size(options),
        after=size(options, "after_sm_"),
        mix_before=bool(options.get("pre_sm_linear_head")),
        mix_after="all" if linear else options.get("head_kernel_size"),
        pad=options.get("pad_key") or "both",
    )
    made = MultiTokenAttention(
        dim,
        heads,
        kernels,
        kv_heads=config.get("n_kv_heads") or heads,
        rotary=Rotary(dim // heads, base=config.get("rope_theta", 10000.0), style="interleaved"),
        norm=bool(options.get("group_norm")),
        depth=config["layer_id"] if options.get("layer_norm_rescale") else None,
        gate=bool(options.get("add_gating")),
    ).eval()
    state = {f"{own}_proj.weight": peer[f"weight.w{own}.weight"] for own in "qkvo"}
    if kernels.before:
        state["conv_before"] = peer["weight.mta_kernel"][:, 0]
    if kernels.after:
        state["conv_after"] = peer["weight.mta_kernel_after_sm"][:, 0]
    if kernels.mix_before:
        state["heads_before"] = square(case, peer, heads, "pre")
    if linear:
        state["heads_after"] = square(case, peer, heads, "post").T[None]
    elif kernels.mix_after:
        state["heads_after"] = peer["weight.head_kernel"]
    if made.norm is not None:
        state["norm.weight"] = peer["weight.subln.weight"]
    if made.gate_proj is not None:
        state |= {f"gate_proj.{kind}": peer[f"weight.gate.{kind}"] for kind in ("weight", "bias")}
    return {"out": torch.func.functional_call(made, state, (x,), strict=True)}


def paths(case: Case) -> Paths | None:
    """One way."""
    return {"layer": lambda peer, wanted: layer(case, peer, wanted)} if "mta" in case.config else None
