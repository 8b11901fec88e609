"""Graph attention of PyTorch Geometric and Graphormer."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import regard
from golden_adapters.case import Case, Paths, Peer
from regard.biases import Dense
from regard.masks import KeyPadding, Segments
from regard.mixers.graph_attention import GraphAttention, GraphAttentionV2
from regard.mixers.graph_layer import GraphOptions
from regard.mixers.graph_transformer import GraphTransformer

Outputs = dict[str, Tensor]
KINDS = {"GATConv": GraphAttention, "GATv2Conv": GraphAttentionV2, "TransformerConv": GraphTransformer}
SCORES = {"att_src": "source_score", "att_dst": "target_score", "att_edge": "edge_score"}
PROJECTIONS = {"lin": "proj", "lin_src": "proj", "lin_dst": "target_proj", "lin_edge": "edge_proj"}
QUERIES = {"lin_query": "q_proj", "lin_key": "k_proj", "lin_value": "v_proj", "lin_edge": "edge_proj"}
NAMES = {
    "GATConv": SCORES | PROJECTIONS,
    "GATv2Conv": {"att": "score", "lin_l": "proj", "lin_r": "target_proj", "lin_edge": "edge_proj"},
    "TransformerConv": QUERIES | {"lin_skip": "skip_proj", "lin_beta": "gate_proj"},
}
KNOWN = {
    *("layer", "concat", "negative_slope", "add_self_loops", "fill_value", "bias", "residual", "in_channels"),
    *("out_channels", "heads", "edge_dim", "nodes", "target_nodes", "share_weights", "beta", "root_weight", "dropout"),
}


def layer_of(case: Case, config: dict[str, Any]) -> nn.Module:
    """The layer that a configuration of PyTorch Geometric means."""
    unknown = set(config) - KNOWN
    case.refuse_unless(not unknown, f"the options {sorted(unknown)}")
    kind = config["layer"]
    options = GraphOptions(
        out="concat" if config.get("concat", True) else "mean",
        bias=config.get("bias", True),
        self_loops=config.get("add_self_loops", kind != "TransformerConv"),
        fill=config.get("fill_value") or "mean",
        residual=config.get("residual", False),
        slope=config.get("negative_slope", 0.2),
    )
    dim = config["in_channels"]
    dim = tuple(dim) if isinstance(dim, list) else dim
    further: dict[str, Any] = {}
    if kind == "GATv2Conv":
        further["shared"] = config.get("share_weights", False)
    if kind == "TransformerConv":
        rooted = config.get("root_weight", True)
        further["skip"] = None if not rooted else "gate" if config.get("beta") else "add"
    edge_dim = config.get("edge_dim")
    return KINDS[kind](
        dim, config["out_channels"], config.get("heads", 1), edge_dim=edge_dim, options=options, **further
    )


def state_of(kind: str, peer: Peer, prefix: str = "weight.") -> dict[str, Tensor]:
    """The peer's weights under the layer's names."""
    state = {}
    for name in [name for name in peer if name.startswith(prefix)]:
        first, _, rest = name[len(prefix) :].partition(".")
        own = {"bias": "bias", "res": "residual_proj"}.get(first) or NAMES[kind][first]
        tensor = peer[name]
        state[f"{own}.{rest}" if rest else own] = tensor[0] if first.startswith("att") else tensor
    return state


def edge_layer(case: Case, peer: Peer, wanted: frozenset[str]) -> Outputs:
    config = case.config
    layer, state = layer_of(case, config), state_of(config["layer"], peer)
    own = set(layer.state_dict())
    unused = sum(tensor.sum() for name, tensor in state.items() if name not in own)  # the peer has it, and leaves it
    state = {name: tensor for name, tensor in state.items() if name in own}
    x = (peer["input.x_src"], peer["input.x_dst"]) if "input.x_src" in peer else peer["input.x"]
    arguments = (x, peer["input.edge_index"], peer.get("input.edge_attr"))
    found = {"out": torch.func.functional_call(layer, state, arguments, strict=True) + 0 * unused}
    if "alpha" in wanted:
        edges, weights = torch.func.functional_call(
            Weights(layer), {f"layer.{n}": t for n, t in state.items()}, arguments
        )
        found |= {"alpha": weights, "alpha_edge_index": edges}
    return found


class Weights(nn.Module):
    """A layer that answers with the weights of its edges."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *arguments: Any) -> Any:
        return self.layer.edge_weights(*arguments)


def gps(case: Case, peer: Peer, wanted: frozenset[str]) -> Outputs:
    """A graph layer beside softmax attention within each graph."""
    config = case.config
    x, channels, heads = peer["input.x"], config["channels"], config["heads"]
    case.refuse_unless(config.get("norm") is None and config.get("attn_type") == "multihead", "norm or attn_type")
    act = {"relu": F.relu, "gelu": F.gelu, "silu": F.silu}[config.get("act", "relu")]
    sums = []
    if any(name.startswith("weight.conv.") for name in peer):
        kind = str(config["conv"]).partition("(")[0]
        case.refuse_unless(kind in KINDS, f"the layer {config['conv']!r}")
        inner = {"layer": kind, "in_channels": channels, "out_channels": channels // heads, "heads": heads}
        features = peer.get("input.edge_attr")
        layer = layer_of(case, inner | {"edge_dim": None if features is None else features.shape[1]})
        state = state_of(kind, peer, "weight.conv.")
        sums.append(torch.func.functional_call(layer, state, (x, peer["input.edge_index"], features), strict=True) + x)
    else:
        peer.without_effect("input.edge_index", "input.edge_attr")
    packed = F.linear(x, peer["weight.attn.in_proj_weight"], peer["weight.attn.in_proj_bias"])
    q, k, v = (part.view(len(x), heads, -1).transpose(0, 1)[None] for part in packed.chunk(3, -1))
    mixed = regard.attention(q, k, v, mask=Segments(peer["input.batch"]))[0].transpose(0, 1).flatten(1)
    sums.append(F.linear(mixed, peer["weight.attn.out_proj.weight"], peer["weight.attn.out_proj.bias"]) + x)
    out = torch.stack(sums).sum(0)
    hidden = act(F.linear(out, peer["weight.mlp.0.weight"], peer["weight.mlp.0.bias"]))
    return {"out": out + F.linear(hidden, peer["weight.mlp.3.weight"], peer["weight.mlp.3.bias"])}


def graphormer(case: Case, peer: Peer, wanted: frozenset[str]) -> Outputs:
    """Softmax attention with biases by distance and by the edges of shortest paths."""
    config, heads = case.config, case.config["num_attention_heads"]
    x, spatial = peer["input.x"].transpose(0, 1), peer["input.spatial_pos"]
    peer.without_effect(
        "input.nodes", "input.attn_edge_type", "input.input_edges", "weight.bias.edge_dis_encoder.weight"
    )
    table = peer["weight.bias.edge_encoder.weight"]
    if config["edge_type"] == "multi_hop":
        steps = config["multi_hop_max_dist"]
        lengths = spatial.clone().masked_fill_(spatial == 0, 1)
        lengths = torch.where(lengths > 1, lengths - 1, lengths).clamp(0, steps)
        along = F.embedding(peer["input.input_edges"][..., :steps, :], table, padding_idx=0).mean(
            -2
        )  # (B, N, N, steps, H)
        turns = peer["weight.bias.edge_dis_encoder.weight"].view(-1, heads, heads)
        edge = torch.einsum("bijsh,shk->bijk", along, turns[: along.shape[3]]) / lengths.unsqueeze(-1)
    else:
        edge = F.embedding(peer["input.attn_edge_type"], table, padding_idx=0).mean(-2)
    nodes = (F.embedding(spatial, peer["weight.bias.spatial_pos_encoder.weight"], padding_idx=0) + edge).permute(
        0, 3, 1, 2
    )
    token = peer["weight.bias.graph_token_virtual_distance.weight"].view(1, heads, 1)
    bias = 2 * peer["input.attn_bias"].unsqueeze(1) + F.pad(nodes, (1, 0, 1, 0))
    row = F.pad(token, (0, x.shape[1] - 1), mode="replicate").unsqueeze(2)
    bias = bias + F.pad(row, (0, 0, 0, x.shape[1] - 1)) + F.pad(row[..., 1:].mT, (0, x.shape[1] - 1, 1, 0))

    def projected(name: str) -> Tensor:
        y = F.linear(x, peer[f"weight.attn.{name}_proj.weight"], peer[f"weight.attn.{name}_proj.bias"])
        return y.unflatten(-1, (heads, -1)).transpose(1, 2)

    q, k, v = map(projected, "qkv")
    options: dict[str, Any] = {"bias": Dense(bias), "mask": KeyPadding(~peer["input.key_padding_mask"])}
    out = regard.attention(q, k, v, **options).transpose(1, 2).flatten(2).transpose(0, 1)
    found = {"out": F.linear(out, peer["weight.attn.out_proj.weight"], peer["weight.attn.out_proj.bias"]), "bias": bias}
    if "attn_weights" in wanted:
        found["attn_weights"] = regard.attention_weights(q, k, v, **options)[1].transpose(0, 1)
    return found


LAYERS = {**dict.fromkeys(KINDS, edge_layer), "GPSConv": gps, "Graphormer": graphormer}


def paths(case: Case) -> Paths | None:
    """One way for each of these layers."""
    layer = LAYERS.get(case.config.get("layer", ""))
    return None if layer is None else {"layer": lambda peer, wanted: layer(case, peer, wanted)}
