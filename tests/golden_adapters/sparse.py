"""The sparse attention modules of transformers: Longformer's and BigBird's, which end before an output projection."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from golden_adapters.case import Case, Paths, Peer
from golden_adapters.layers import linears
from regard.mixers.parts import merge_heads
from regard.nn import BigBird, BlockPlan, Longformer

Outputs = dict[str, Tensor]


class _Mixed(nn.Module):
    """A layer that answers with what it mixes, heads side by side."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, **arguments: Any) -> Tensor:
        return merge_heads(self.layer.mixed(x, **arguments))


def mixed(layer: nn.Module, state: dict[str, Tensor], x: Tensor, **arguments: Any) -> Tensor:
    """With the peer's weights; the output projection that the peer does not have is unused."""
    own = {f"layer.{name}": tensor for name, tensor in state.items()}
    unused = {f"layer.o_proj.{name}": tensor.detach() for name, tensor in layer.o_proj.named_parameters()}
    found: Tensor = torch.func.functional_call(_Mixed(layer.eval()), unused | own, (x,), arguments, strict=True)
    return found


def longformer(case: Case, peer: Peer, wanted: frozenset[str]) -> Outputs:
    config = case.config.get("config") or case.config
    window = case.config.get("attention_window", config.get("attention_window"))
    if isinstance(window, list):
        window = window[case.config.get("layer_id", case.config.get("layer_idx", 0))]
    case.refuse_unless(window % 2 == 0, f"attention_window {window}")
    x = peer["input.hidden"]
    state = linears(peer, {f"{n[0]}_proj": n for n in ("query", "key", "value")})
    state |= linears(peer, {f"{n[0]}_global_proj": f"{n}_global" for n in ("query", "key", "value")})
    layer = Longformer(x.shape[-1], config["num_attention_heads"], window // 2, bias="q_proj.bias" in state)
    given = {"keep": peer["input.attention_mask"] > 0} if "input.attention_mask" in peer else {}
    if "input.global_attention_mask" in peer:
        given["global_tokens"] = peer["input.global_attention_mask"] > 0
    out = mixed(layer, state, x, **given)
    return {"out": out}


def bigbird(case: Case, peer: Peer, wanted: frozenset[str]) -> Outputs:
    """What the peer drew is part of the case; in evaluation its tables are zeros, or not there."""
    config = case.config.get("config") or case.config
    kind = config.get("attention_type", "block_sparse")
    case.refuse_unless(kind in ("block_sparse", "original_full"), f"attention_type {kind}")
    x, heads = peer["input.hidden"], config["num_attention_heads"]
    drawn = case.tensors.get("output.rand_attn")
    if drawn is not None:
        peer.outside("rand_attn")
    again = drawn is None or not drawn.any()
    case.refuse_unless(again or case.config.get("mode", "train") == "train", "random blocks in evaluation")
    plan = BlockPlan(
        config["block_size"],
        config["num_random_blocks"],
        count="slots",
        full_until=x.shape[1] if kind == "original_full" else 0,
        first_again=again,
        chosen=None if again else drawn,
    )
    state = linears(peer, {f"{n[0]}_proj": n for n in ("query", "key", "value")})
    layer = BigBird(x.shape[-1], heads, plan, bias="q_proj.bias" in state)
    given = {"keep": peer["input.attention_mask"] > 0} if "input.attention_mask" in peer else {}
    return {"out": mixed(layer, state, x, **given)}


def paths(case: Case) -> Paths | None:
    """One way for either."""
    config = case.config.get("config") or case.config
    blocks = case.has("output.rand_attn") or (isinstance(config, dict) and "num_random_blocks" in config)
    way = longformer if case.has("weight.query_global.weight") else bigbird if blocks else None
    return None if way is None else {"layer": lambda peer, wanted: way(case, peer, wanted)}
