"""The Hyena operator of its authors' code."""

from __future__ import annotations

import torch
from torch import Tensor

from golden_adapters.case import Case, Paths, Peer
from regard.nn import Hyena, HyenaFilter

Outputs = dict[str, Tensor]


def operator(case: Case, peer: Peer, wanted: frozenset[str]) -> Outputs:
    config, u = case.config, peer["input.u"]
    known = {"d_model", "l_max", "order", "filter_order", "emb_dim", "num_inner_mlps", "w"}
    case.refuse_unless(not set(config) - known, f"the options {sorted(set(config) - known)}")
    dim, length, order = config["d_model"], config["l_max"], config["order"]
    linears = sorted(
        (int(name.split(".")[3]), name.rsplit(".", 1)[0])
        for name in peer
        if "implicit_filter" in name and name.endswith(".weight")
    )
    *inner, (_, last) = linears
    case.refuse_unless(len(inner) == 3, f"a network of {len(linears)} maps")
    filters = HyenaFilter((order - 1) * dim, length, width=config["filter_order"], features=config["emb_dim"])
    state = {
        "in_proj.weight": peer["weight.in_proj.weight"],
        "in_proj.bias": peer["weight.in_proj.bias"],
        "out_proj.weight": peer["weight.out_proj.weight"],
        "out_proj.bias": peer["weight.out_proj.bias"],
        "short_filter": peer["weight.short_filter.weight"][:, 0],
        "short_bias": peer["weight.short_filter.bias"],
        "skip": peer["weight.filter_fn.bias"].flatten(),
        "filters.last.weight": peer[f"{last}.weight"],
        "filters.places": peer["weight.filter_fn.pos_emb.z"][0],
        "filters.times": peer["weight.filter_fn.pos_emb.t"].flatten(),
        "filters.rates": peer["weight.filter_fn.modulation.deltas"].flatten(),
    }
    frequencies = []
    for n, (place, name) in enumerate(inner):
        state |= {f"filters.maps.{n}.{kind}": peer[f"{name}.{kind}"] for kind in ("weight", "bias")}
        frequencies.append(peer[f"weight.filter_fn.implicit_filter.{place + 1}.freq"].flatten())
    if all(torch.equal(one, frequencies[0]) for one in frequencies):  # one module, used three times
        frequencies = [frequencies[0]] * len(frequencies)
    state["filters.frequencies"] = torch.stack(frequencies)
    layer = Hyena(dim, length, order=order, filters=filters)
    out = torch.func.functional_call(layer, state, (u,), strict=True)
    made = {name.removeprefix("filters."): tensor for name, tensor in state.items() if name.startswith("filters.")}
    table = torch.func.functional_call(filters, made, (u.shape[1],), strict=True).T
    return {"out": out, "filter": table}


def paths(case: Case) -> Paths | None:
    """One way."""
    return {"layer": lambda peer, wanted: operator(case, peer, wanted)} if "filter_order" in case.config else None
