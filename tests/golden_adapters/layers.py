"""What the adapters of modules share: the layer built from the peer's weights, run whole, in pieces, and looked at."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from golden_adapters.case import Case, Peer
from regard.biases import Dense
from regard.nn import MultiHeadAttention, Projections

State = dict[str, Tensor]  # the layer's parameters, made differentiably from the peer's


def linears(peer: Peer, names: dict[str, str], *, transposed: bool = False) -> State:
    """`<ours>.weight` and `<ours>.bias` from the peer's, for every {ours: theirs}; what is absent stays absent."""
    state = {}
    for ours, theirs in names.items():
        for kind in ("weight", "bias"):
            if f"weight.{theirs}.{kind}" in peer:
                tensor = peer[f"weight.{theirs}.{kind}"]
                state[f"{ours}.{kind}"] = tensor.t() if transposed and kind == "weight" else tensor
    return state


def unfuse(state: State, heads: int, kv_heads: int, head_dim: int, *, grouped: bool) -> State:
    """`qkv.*` split in q_proj, k_proj, v_proj: in three blocks of rows, or [q .. q, k, v] for every key head."""
    split = dict(state)
    for kind in ("weight", "bias"):
        fused = split.pop(f"qkv.{kind}", None)
        if fused is None:
            continue
        if grouped:
            rows = fused.unflatten(0, (kv_heads, heads // kv_heads + 2, head_dim))
            parts = [rows[:, :-2].flatten(0, 2), rows[:, -2].flatten(0, 1), rows[:, -1].flatten(0, 1)]
        else:
            parts = list(fused.split([heads * head_dim, kv_heads * head_dim, kv_heads * head_dim]))
        split |= {f"{name}_proj.{kind}": part for name, part in zip("qkv", parts, strict=True)}
    return split


def build(
    state: State,
    dim: int,
    heads: int,
    *,
    clip: float | None = None,
    norm: Callable[[int], nn.Module] | None = None,
    norm_over: str = "head",
    **parts: Any,
) -> tuple[MultiHeadAttention, State]:
    """(the layer, its complete state): which projections and biases it has is read off `state`."""
    made = [name for name in ("q_proj", "k_proj", "v_proj", "gate_proj") if f"{name}.weight" in state]
    state = dict(state)
    if any(f"{name}.bias" in state for name in made):  # the layer has all of these biases or none
        for name in made:
            weight = state[f"{name}.weight"]
            state.setdefault(f"{name}.bias", weight.new_zeros(weight.shape[0]))
    source = state["k_proj.weight"].shape[1]
    projections = Projections(
        bias="q_proj.bias" in state,
        out_bias="o_proj.bias" in state,
        out="o_proj.weight" in state,
        context_dim=None if source == dim else source,
        gate="gate_proj.weight" in state,
        norm=norm,
        norm_over=norm_over,
        clip=clip,
    )
    layer = MultiHeadAttention(dim, heads, projections=projections, **parts).to(state["q_proj.weight"].dtype).eval()
    layer.load_state_dict({name: tensor.detach() for name, tensor in state.items()}, strict=True)
    return layer, state


def run(
    case: Case,
    wanted: frozenset[str],
    layer: Any,
    state: State,
    x: Tensor,
    context: Tensor | None = None,
    *,
    keep: Tensor | None = None,
    positions: Tensor | None = None,
    mask: Tensor | None = None,
) -> dict[str, Tensor]:
    """The outputs that every module's case may store: whole, in the pieces of `cache_splits`, and the weights."""
    options = {"keep": keep, "positions": positions, "mask": mask}
    found = {"out": functional_call(layer, state, (x, context), options, strict=True)}
    with torch.no_grad():
        for name in wanted & {"attn_weights", "weights"}:
            found[name] = layer.mixing(x, context, **options)[0]
        for name in wanted & {"out_by_cache_steps", "out_by_steps"}:
            splits = case.config.get("cache_splits") or case.config.get("splits")
            case.refuse_unless(bool(splits) and sum(splits) == x.shape[1], f"cache_splits: {splits}")
            found[name] = in_pieces(layer, splits, x, context, keep, positions)
    return found


def in_pieces(
    layer: Any,
    splits: list[int],
    x: Tensor,
    context: Tensor | None,
    keep: Tensor | None,
    positions: Tensor | None,
) -> Tensor:
    """The same input in pieces, through the layer's own cache; a context is given to the first call only."""
    cache = layer.init_cache(x.shape[0], x.shape[1] if context is None else context.shape[1])
    bias = getattr(layer, "bias", None)
    dense = bias.tensor if isinstance(bias, Dense) else None
    outs, start = [], 0
    for length in splits:
        piece = slice(start, start + length)
        if dense is not None:  # it spans the keys seen so far
            layer.bias = Dense(dense[..., : start + length])
        if context is None:
            own = {"keep": None if keep is None else keep[:, piece]}
            own["positions"] = None if positions is None else positions[:, piece]
            outs.append(layer(x[:, piece], cache=cache, **own))
        elif start == 0:
            outs.append(layer(x[:, piece], context, keep=keep, cache=cache))
        else:
            outs.append(layer(x[:, piece], cache=cache))
        start += length
    return torch.cat(outs, 1)


def keep_of(case: Case, peer: Peer, name: str = "input.attention_mask") -> Tensor | None:
    """Which tokens are real, from a 2-D mask of 1 and 0."""
    given = peer.get(name)
    if given is None:
        return None
    case.refuse_unless(given.ndim == 2 and not given.is_floating_point(), f"{name} of {given.ndim} axes, {given.dtype}")
    return given != 0


def positions_of(peer: Peer, x: Tensor) -> Tensor:
    """The peer's position ids (B, T), or 0, 1, 2, ..."""
    given = peer.get("input.position_ids")
    return (torch.arange(x.shape[1])[None] if given is None else given).expand(x.shape[0], -1)
