"""Attention of images: ViT, Swin, CoAtNet, DETR and deformable attention."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import regard
from golden_adapters.case import Case, Paths, Peer
from golden_adapters.compositions import ACTIVATIONS, heads_of, joined, linear
from golden_adapters.layers import build, linears, run
from regard.biases import Bias, Dense, RelativeTable
from regard.masks import KeyPadding
from regard.nn import GridAttention, LogPlaces, PlaceTable, ShiftedWindowAttention
from regard.ops.deformable import deformable_attention
from regard.positions import image_positions

Outputs = dict[str, Tensor]


def vit(case: Case, peer: Peer, wanted: frozenset[str]) -> Outputs:
    config = case.config["config"]
    state = linears(peer, {f"{name}_proj": f"{name}_proj" for name in "qkvo"})
    x = peer["input.hidden"]
    layer, state = build(state, x.shape[-1], config["num_attention_heads"])
    return run(case, wanted, layer, state, x)


# ---- Swin ------------------------------------------------------------------------------------------------------------


def called(layer: nn.Module, state: dict[str, Tensor], *arguments: Any) -> Tensor:
    found: Tensor = torch.func.functional_call(layer.eval(), state, arguments, strict=True)
    return found


def windows(case: Case, peer: Peer, wanted: frozenset[str]) -> Outputs:
    """Swin's attention of windows that are apart already."""
    config, x, side = case.config["config"], peer["input.hidden"], case.config["config"]["window_size"]
    heads = config["num_heads"]
    q, k, v = (linear(peer, f"{name}_proj", x) for name in "qkv")
    table = peer["weight.relative_position_bias.relative_position_bias_table"]
    heads = table.shape[1]
    q, k, v = (heads_of(y, heads) for y in (q, k, v))
    bias: Bias = RelativeTable(table, (side, side))
    found = {"bias": bias.dense(side * side, side * side, heads=heads)}
    if "input.attention_mask" in peer:
        bias = bias + Dense(
            peer["input.attention_mask"].repeat(x.shape[0] // len(peer["input.attention_mask"]), 1, 1)[:, None]
        )
    found["attn_weights"] = regard.attention_weights(q, k, v, bias=bias)[1]
    return found | {"out": linear(peer, "o_proj", joined(regard.attention(q, k, v, bias=bias)))}


def normed(peer: Peer, name: str, x: Tensor, eps: float) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], peer[f"weight.{name}.weight"], peer[f"weight.{name}.bias"], eps)


def swin(case: Case, peer: Peer, wanted: frozenset[str]) -> Outputs:
    """A whole layer, of the first or the second version."""
    options, config, x = case.config, case.config["config"], peer["input.hidden"]
    second = "weight.attention.self.logit_scale" in peer
    side, dim = config["window_size"], x.shape[-1]
    eps = config["layer_norm_eps"]
    if second:
        heads = peer["weight.attention.self.logit_scale"].shape[0]
        pretrained = options.get("pretrained_window_size") or None
        hidden = peer["weight.attention.self.continuous_position_bias_mlp.0.weight"].shape[0]
        places: Callable[[int], nn.Module] = partial(LogPlaces, pretrained=pretrained, hidden=hidden)
        names = {"q_proj": "self.query", "k_proj": "self.key", "v_proj": "self.value", "o_proj": "output.dense"}
        names |= {f"places.{own}": f"self.continuous_position_bias_mlp.{n}" for own, n in (("first", 0), ("second", 2))}
        state = linears(peer, {own: f"attention.{theirs}" for own, theirs in names.items()})
        state["logit_scale"] = peer["weight.attention.self.logit_scale"].flatten()
    else:
        table = peer["weight.attention.relative_position_bias.relative_position_bias_table"]
        heads = table.shape[1]
        places = partial(PlaceTable, size=(side, side))
        state = linears(peer, {f"{name}_proj": f"attention.{name}_proj" for name in "qkvo"}) | {"places.table": table}
    bias = "q_proj.bias" in state
    layer = ShiftedWindowAttention(
        dim, heads, side, shift=options["shift_size"], places=places, cosine=second, bias=bias
    )
    sides = options["height"], options["width"]

    def mixed(y: Tensor) -> Tensor:
        return called(layer, state, y.unflatten(1, sides)).flatten(1, 2)

    act = ACTIVATIONS[config["hidden_act"]]
    if second:
        attended = mixed(x)
        y = x + normed(peer, "layernorm_before", attended, eps)
        inner = linear(peer, "output.dense", act(linear(peer, "intermediate.dense", y)))
        return {"attn_map": attended, "out": y + normed(peer, "layernorm_after", inner, eps)}
    before = normed(peer, "layernorm_before", x, eps)
    attended = mixed(before)
    y = x + attended
    inner = act(linear(peer, "mlp.fc1", normed(peer, "layernorm_after", y, eps)))
    return {"normed": before, "attn_map": attended, "out": y + linear(peer, "mlp.fc2", inner)}


# ---- CoAtNet ---------------------------------------------------------------------------------------------------------


class _MlpPlaces(nn.Module):
    """timm's bias of log-spaced offsets by a small network."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(2, hidden), nn.Linear(hidden, heads)

    def forward(self, size: tuple[int, int]) -> Bias:
        rows, columns = (torch.arange(1 - n, n, dtype=self.fc1.weight.dtype) for n in size)
        grid = torch.stack(torch.meshgrid(rows, columns, indexing="ij"), -1)
        spaced = torch.sign(grid) * torch.log(1.0 + grid.abs())
        return RelativeTable(self.fc2(torch.relu(self.fc1(spaced.flatten(0, 1)))), size)


def coatnet(case: Case, peer: Peer, wanted: frozenset[str]) -> Outputs:
    config, x = case.config, peer["input.x"]
    size, heads = tuple(config["window_size"]), config["dim"] // config["dim_head"]
    state = {}
    for kind in ("weight", "bias"):
        fused = peer[f"weight.qkv.{kind}"]
        fused = fused.flatten(1) if kind == "weight" else fused
        if config["head_first"]:
            parts = [part.flatten(0, 1) for part in fused.unflatten(0, (heads, 3, -1)).unbind(1)]
        else:
            parts = list(fused.chunk(3))
        state |= {f"{name}_proj.{kind}": part for name, part in zip("qkv", parts, strict=True)}
    state |= {"o_proj.weight": peer["weight.proj.weight"].flatten(1), "o_proj.bias": peer["weight.proj.bias"]}
    if config["rel_pos"] == "mlp":
        hidden = peer["weight.rel_pos.mlp.fc1.weight"].shape[0]
        layer = GridAttention(config["dim"], heads, size, places=lambda heads: _MlpPlaces(hidden, heads))
        state |= {
            f"places.{name}.{kind}": peer[f"weight.rel_pos.mlp.{name}.{kind}"]
            for name in ("fc1", "fc2")
            for kind in ("weight", "bias")
        }
    else:
        layer = GridAttention(config["dim"], heads, size)
        state["places.table"] = peer["weight.rel_pos.relative_position_bias_table"]
    out = called(layer, state, x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
    inner = {name.removeprefix("places."): tensor for name, tensor in state.items() if name.startswith("places.")}
    bias = torch.func.functional_call(layer.places, inner, (size,))
    return {"out": out, "bias": bias.dense(math.prod(size), math.prod(size), heads=heads)}


# ---- DETR ------------------------------------------------------------------------------------------------------------


def detr(case: Case, peer: Peer, wanted: frozenset[str]) -> Outputs:
    """Places are added to what asks and answers, never to the values."""
    config, features = case.config, peer["input.features"]
    real = peer["input.pixel_mask"] > 0
    case.refuse_unless(config["normalize"] and math.isclose(config["scale"], 2 * math.pi), "normalize")
    places = image_positions(real, config["num_position_features"], base=config["temperature"], dtype=features.dtype)
    places, heads = places.flatten(1, 2), config["num_attention_heads"]
    asks = peer["input.queries"] + peer["input.query_pos"] if "input.queries" in peer else features + places
    q, k, v = linear(peer, "q_proj", asks), linear(peer, "k_proj", features + places), linear(peer, "v_proj", features)
    q, k, v = (heads_of(y, heads) for y in (q, k, v))
    out = regard.attention(q, k, v, mask=KeyPadding(real.flatten(1)))
    return {"out": linear(peer, "o_proj", joined(out)), "sine_position": places}


def deformable(case: Case, peer: Peer, wanted: frozenset[str]) -> Outputs:
    config, memory = case.config, peer["input.memory"]
    heads, levels, points = config["num_heads"], config["n_levels"], config["n_points"]
    sizes = [tuple(size) for size in peer["input.spatial_shapes"].tolist()]
    peer.without_effect("input.level_start_index")
    asks = peer["input.query"]
    asks = asks + peer["input.position_embeddings"] if "input.position_embeddings" in peer else asks
    values = linear(peer, "value_proj", memory)
    if "input.attention_mask" in peer:
        values = values * (peer["input.attention_mask"] > 0).unsqueeze(-1)
    offset = linear(peer, "sampling_offsets", asks).unflatten(-1, (heads, levels, points, 2))
    weights = linear(peer, "attention_weights", asks).unflatten(-1, (heads, levels * points)).softmax(-1)
    weights = weights.unflatten(-1, (levels, points))
    reference = peer["input.reference_points"][:, :, None, :, None]
    if reference.shape[-1] == 2:
        scale = torch.tensor([[width, height] for height, width in sizes])[:, None].to(memory.dtype)
        places = reference + offset / scale
    else:
        places = reference[..., :2] + offset / points * reference[..., 2:] * 0.5
    out = deformable_attention(values.unflatten(-1, (heads, -1)), sizes, places, weights)
    return {"out": linear(peer, "output_proj", out.flatten(2)), "attn_weights": weights}


def paths(case: Case) -> Paths | None:
    """One way for each of these."""
    if case.family == "vit":
        way = vit
    elif case.has("weight.relative_position_bias.relative_position_bias_table"):
        way = windows
    elif case.has("output.attn_map"):
        way = swin
    elif "dim_head" in case.config:
        way = coatnet
    elif case.has("input.pixel_mask"):
        way = detr
    elif case.has("weight.sampling_offsets.weight"):
        way = deformable
    else:
        return None
    return {"layer": lambda peer, wanted: way(case, peer, wanted)}
