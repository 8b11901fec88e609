"""The textbook's listings: scaled dot-product attention, and the multi-head layer that returns its weights."""

from __future__ import annotations

from functools import partial

import torch.nn.functional as F
from torch import Tensor

import regard
from golden_adapters.case import Case, Paths, Peer
from golden_adapters.layers import build, linears, run


def paths(case: Case) -> Paths | None:
    if case.has("input.q", "input.k", "input.v"):
        return {"function": single_head}
    if case.has("input.x", "weight.q_linear.weight"):
        return {"function": partial(multi_head, case), "layer": partial(layer, case)}
    return None


def may_attend(mask: Tensor | None) -> Tensor | None:
    """The listings' mask, where 0 is blocked, as a bool mask; with three axes it is one per batch row."""
    if mask is None:
        return None
    mask = mask != 0
    return mask[:, None] if mask.ndim == 3 else mask


def single_head(peer: Peer, wanted: frozenset[str]) -> dict[str, Tensor]:
    q, k, v = (peer[f"input.{name}"].unsqueeze(1) for name in "qkv")
    out, weights, _ = regard.attention_weights(q, k, v, mask=may_attend(peer.get("input.mask")))
    return {"out": out.squeeze(1), "weights": weights.squeeze(1)}


def linear(peer: Peer, name: str, x: Tensor) -> Tensor:
    return F.linear(x, peer[f"weight.{name}.weight"], peer.get(f"weight.{name}.bias"))


def multi_head(case: Case, peer: Peer, wanted: frozenset[str]) -> dict[str, Tensor]:
    x = peer["input.x"]
    context = peer.get("input.context", x)
    heads = int(case.config["heads"])
    q, k, v = (
        linear(peer, f"{name}_linear", source).unflatten(-1, (heads, -1)).transpose(1, 2)
        for name, source in (("q", x), ("k", context), ("v", context))
    )
    out, weights, _ = regard.attention_weights(q, k, v, mask=may_attend(peer.get("input.mask")))
    return {"out": linear(peer, "out_linear", out.transpose(1, 2).flatten(2)), "weights": weights}


def layer(case: Case, peer: Peer, wanted: frozenset[str]) -> dict[str, Tensor]:
    x = peer["input.x"]
    names = {f"{ours}_proj": f"{theirs}_linear" for ours, theirs in (("q", "q"), ("k", "k"), ("v", "v"), ("o", "out"))}
    module, state = build(linears(peer, names), x.shape[-1], int(case.config["heads"]))
    mask = may_attend(peer.get("input.mask"))
    return run(case, wanted, module, state, x, peer.get("input.context"), mask=mask)
