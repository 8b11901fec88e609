"""torch's scaled_dot_product_attention and MultiheadAttention, and plain formulas of softmax attention."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import regard
from golden_adapters.case import Case, Paths, Peer
from golden_adapters.layers import build, linears, run
from regard.biases import Dense
from regard.masks import Causal, Mask, Window, as_mask


def paths(case: Case) -> Paths | None:
    if case.has("input.query", "weight.out_proj.weight"):
        found: Paths = {"function": partial(multi_head, case)}
        if "value" not in case.names("input") and not (
            case.config.get("add_bias_kv") or case.config.get("add_zero_attn")
        ):
            found["layer"] = partial(layer, case)
        return found
    if case.has("input.q", "input.k", "input.v"):
        return {"function": partial(single_call, case)}
    return None


def both(first: Mask | None, second: Mask | None) -> Mask | None:
    return second if first is None else first if second is None else first & second


def split_mask(mask: Tensor | None) -> tuple[Mask | None, Tensor | None]:
    """(bool mask, bias) from an argument that may be either."""
    if mask is None or mask.dtype == torch.bool:
        return as_mask(mask), None
    return None, mask


# ---- functions of q, k, v --------------------------------------------------------------------------------------------


def single_call(case: Case, peer: Peer, wanted: frozenset[str]) -> dict[str, Tensor]:
    config = case.config
    known = {"is_causal", "scale", "enable_gqa", "dropout_p", "softcap", "sink", "causal", "window"}
    case.refuse_unless(set(config) <= known, f"options {sorted(set(config) - known)}")
    case.refuse_unless(not config.get("dropout_p"), "dropout")
    q, k, v = (peer[f"input.{name}"] for name in "qkv")
    headless = q.ndim == 3
    if headless:
        q, k, v = (x.unsqueeze(1) for x in (q, k, v))
    mask, bias = None, None
    for name in ("attn_mask", "mask", "bias"):
        given = peer.get(f"input.{name}")
        if given is None:
            continue
        if given.ndim == 3:  # torch broadcasts from the right: one per head, or per row of a call without heads
            given = given[:, None] if headless else given[None]
        one_mask, one_bias = split_mask(given)
        mask, bias = both(mask, one_mask), one_bias if bias is None else bias if one_bias is None else bias + one_bias
    q_start = None
    if config.get("is_causal"):
        mask, q_start = both(mask, Causal()), 0  # torch's is_causal is aligned top-left: query 0 stands at key 0
    causal = config.get("causal")
    case.refuse_unless(
        causal in (None, False, True, "none", "bottom-right aligned", "top-left aligned"), f"causal: {causal!r}"
    )
    window = config.get("window")
    case.refuse_unless(window is None or bool(causal), "a window that is not causal")
    if causal and causal != "none":
        own = Causal() if window is None else Window(int(window))
        mask, q_start = both(mask, own), 0 if causal == "top-left aligned" else None
    sink = peer.get("input.sink", peer.get("input.sinks"))
    case.refuse_unless(bool(config.get("sink")) == (sink is not None), "sink without its tensor")
    options = {"softcap": config.get("softcap"), "sink": sink, "scale": config.get("scale")}
    options |= {"mask": mask, "bias": bias, "q_start": q_start}
    found: dict[str, Tensor] = {}
    if "lse" in wanted:
        found["out"], found["lse"] = regard.attention(q, k, v, return_lse=True, **options)
    else:
        found["out"] = regard.attention(q, k, v, **options)
    for name in wanted & {"weights", "attn_weights"}:
        found[name] = regard.attention_weights(q, k, v, **options)[1]
    return {name: x.squeeze(1) for name, x in found.items()} if headless else found


# ---- torch.nn.MultiheadAttention -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MultiHead:
    """What a case asks of torch's module, batch first."""

    query: Tensor
    key: Tensor
    value: Tensor
    heads: int
    mask: Tensor | None
    bias: Tensor | None
    batched: bool
    batch_first: bool
    average: bool

    def outputs(self, out: Tensor, weights: Tensor | None) -> dict[str, Tensor]:
        """In the layout of the case."""
        found = {"out": out[0] if not self.batched else out if self.batch_first else out.transpose(0, 1)}
        if weights is not None:
            weights = weights.mean(1) if self.average else weights
            found["attn_weights"] = weights if self.batched else weights[0]
        return found


def read(case: Case, peer: Peer) -> MultiHead:
    config = case.config
    call = dict(config.get("call") or {})
    average = bool(call.pop("average_attn_weights", True))
    call.pop("need_weights", None)
    hint = bool(call.pop("is_causal", False))  # only a hint: torch demands the mask beside it
    case.refuse_unless(not call and not (hint and "input.attn_mask" not in peer), f"call options {call}")
    query = peer["input.query"]
    key = peer.get("input.key", query)
    value = peer.get("input.value", key)
    batched, batch_first = query.ndim == 3, bool(config.get("batch_first"))
    if not batched:
        query, key, value = (x[None] for x in (query, key, value))
    elif not batch_first:
        query, key, value = (x.transpose(0, 1) for x in (query, key, value))
    heads = int(config["num_heads"])
    mask, bias = mha_masks(peer, query.shape[0], heads)
    return MultiHead(query, key, value, heads, mask, bias, batched, batch_first, average)


def multi_head(case: Case, peer: Peer, wanted: frozenset[str]) -> dict[str, Tensor]:
    asked = read(case, peer)
    mask, bias = asked.mask, asked.bias
    pairs = projections(peer, int(case.config["embed_dim"]))
    q, k, v = (
        F.linear(x, weight, row).unflatten(-1, (asked.heads, -1)).transpose(1, 2)
        for x, (weight, row) in zip((asked.query, asked.key, asked.value), pairs, strict=True)
    )
    for extra in extra_columns(case.config, peer, k, v, asked.heads):
        k, v = (torch.cat((x, one), 2) for x, one in zip((k, v), extra, strict=True))
    more = k.shape[2] - asked.key.shape[1]
    if more:  # torch widens both masks so that the appended columns are always read
        mask = None if mask is None else F.pad(mask, (0, more), value=True)
        bias = None if bias is None else F.pad(bias, (0, more))
    out = regard.attention(q, k, v, mask=mask, bias=bias).transpose(1, 2).flatten(2)
    out = F.linear(out, peer["weight.out_proj.weight"], peer.get("weight.out_proj.bias"))
    return asked.outputs(out, regard.attention_weights(q, k, v, mask=mask, bias=bias)[1])


def layer(case: Case, peer: Peer, wanted: frozenset[str]) -> dict[str, Tensor]:
    asked = read(case, peer)
    width = int(case.config["embed_dim"])
    state = linears(peer, {"o_proj": "out_proj"})
    for name, (weight, bias) in zip("qkv", projections(peer, width), strict=True):
        state |= {f"{name}_proj.weight": weight} | ({} if bias is None else {f"{name}_proj.bias": bias})
    module, state = build(state, width, asked.heads, bias=None if asked.bias is None else Dense(asked.bias))
    context = asked.key if "input.key" in peer else None
    found = run(case, wanted, module, state, asked.query, context, mask=asked.mask)
    return asked.outputs(found["out"], found.get("attn_weights"))


def projections(peer: Peer, width: int) -> list[tuple[Tensor, Tensor | None]]:
    """(weight, bias) of q, k, v: three blocks of rows of one tensor, or three tensors where the widths differ."""
    if "weight.in_proj_weight" in peer:
        weights = list(peer["weight.in_proj_weight"].split(width))
    else:
        weights = [peer[f"weight.{name}_proj_weight"] for name in "qkv"]
    bias = peer.get("weight.in_proj_bias")
    return list(zip(weights, (None, None, None) if bias is None else bias.split(width), strict=True))


def mha_masks(peer: Peer, batch: int, heads: int) -> tuple[Tensor | None, Tensor | None]:
    """(bool mask, True = may attend; bias) from torch's two arguments, where True = may not, and floats are added."""
    mask: Tensor | None = None
    bias: Tensor | None = None
    for name in ("attn_mask", "key_padding_mask"):
        given = peer.get(f"input.{name}")
        if given is None:
            continue
        if name == "key_padding_mask":
            given = given.reshape(-1, 1, 1, given.shape[-1])
        elif given.ndim == 3:
            given = given.unflatten(0, (batch, heads))
        if given.dtype == torch.bool:
            mask = ~given if mask is None else mask & ~given
        else:
            bias = given if bias is None else bias + given
    return mask, bias


def extra_columns(config: dict[str, Any], peer: Peer, k: Tensor, v: Tensor, heads: int) -> list[tuple[Tensor, Tensor]]:
    """The keys and values that torch appends after projection: the learned pair, then zeros."""
    shape = (k.shape[0], heads, 1)
    found = []
    if config.get("add_bias_kv"):
        pair = [peer[f"weight.bias_{name}"].view(1, 1, heads, -1).transpose(1, 2) for name in "kv"]
        found.append(tuple(x.expand(*shape, x.shape[-1]) for x in pair))
    if config.get("add_zero_attn"):
        found.append((k.new_zeros(*shape, k.shape[-1]), v.new_zeros(*shape, v.shape[-1])))
    return found
