"""Kernel attention as functions of q, k and v: the elements of `regard.mixers.kernel_linear`, and its layers.

The layers get q, k and v as channels of their tokens, and projections that pick them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

import regard
from golden_adapters.case import Case, Paths, Peer
from regard.feature_maps import EluPlusOne, FeatureMap, Quadratic, Taylor, positive_features
from regard.mixers.kernel_sums import divided, read, with_ones, written
from regard.nn import LinearAttention, LinearCrossAttention

Outputs = dict[str, Tensor]


def merged(x: Tensor) -> Tensor:
    """(B, H, T, D) as tokens."""
    return x.transpose(1, 2).flatten(2)


def picking(layer: torch.nn.Module, **starts: int) -> None:
    """Projections that read their channels from `start` on, and an output projection that changes nothing."""
    with torch.no_grad():
        for name, start in (starts | {"o": 0}).items():
            weight = getattr(layer, f"{name}_proj").weight
            weight.copy_(F.pad(torch.eye(weight.shape[0], weight.shape[1] - start), (start, 0)))


def by_layer(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    feature_map: Callable[[int, int], FeatureMap],
    eps: float | None,
    *,
    bidirectional: bool = False,
) -> Tensor:
    """What a layer mixes (B, H, T, M)."""
    heads, keys, values = q.shape[1], q.shape[3], v.shape[3]
    dim, sizes = heads * (2 * keys + values), {"key_dim": keys, "value_dim": values}
    layer = LinearAttention(dim, heads, **sizes, feature_map=feature_map, eps=eps, bidirectional=bidirectional).to(
        q.dtype
    )
    picking(layer, q=0, k=heads * keys, v=2 * heads * keys)
    return layer.mixed(torch.cat([merged(x) for x in (q, k, v)], -1))


def by_cross_layer(q: Tensor, k: Tensor, v: Tensor, keep: Tensor, eps: float) -> Tensor:
    """What a layer over a context mixes (B, H, T, M)."""
    heads, keys, values = q.shape[1], q.shape[3], v.shape[3]
    dim = heads * max(keys, values)
    layer = LinearCrossAttention(
        dim, heads, key_dim=keys, value_dim=values, context_dim=heads * (keys + values), eps=eps
    ).to(q.dtype)
    picking(layer, q=0, k=0, v=heads * keys)
    x = F.pad(merged(q), (0, dim - heads * keys))
    out = layer(x, torch.cat((merged(k), merged(v)), -1), keep=keep)[..., : heads * values]
    return out.unflatten(-1, (heads, values)).transpose(1, 2)


# ---- Katharopoulos et al.'s package ----------------------------------------------------------------------------------


def is_causal(case: Case) -> bool:
    said = case.config.get("causal", "causal=True" in str(case.meta.get("covers")))
    return bool(said) or "out_recurrent" in case.names("output")


def katharopoulos(case: Case) -> Paths | None:
    if not case.has("input.q", "input.k", "input.v"):
        return None
    ways = {"function": partial(function, case)}
    lengths = case.tensors.get("input.key_lengths")
    real = lengths is None or bool((lengths == case.tensors["input.k"].shape[1]).all())
    if not case.config.get("favor") and (not is_causal(case) or real):
        ways["layer"] = partial(layer, case)
    return ways


def given(case: Case, peer: Peer) -> tuple[Tensor, Tensor, Tensor, Tensor, float]:
    """q, k, v with heads first, which keys are real (B, S), and what is added to the sums of the weights."""
    unknown = set(case.config) - {"favor", "eps", "causal"}
    case.refuse_unless(not unknown, f"options {sorted(unknown)}")
    q, k, v = (peer[f"input.{name}"].transpose(1, 2) for name in "qkv")
    lengths = peer.get("input.key_lengths", torch.full((k.shape[0],), k.shape[2]))
    return q, k, v, torch.arange(k.shape[2]) < lengths[:, None], float(case.config["eps"])


def function(case: Case, peer: Peer, wanted: frozenset[str]) -> Outputs:
    q, k, v, keep, eps = given(case, peer)
    phi = features(case, peer, q)
    q, k, v = phi(q), phi(k) * keep[:, None, :, None], with_ones(v)
    if not is_causal(case):
        return {"out": divided(read(q, written(k, v)), eps).transpose(1, 2)}
    k, v = (F.pad(x, (0, 0, 0, q.shape[2] - x.shape[2])) for x in (k, v))  # query t reads the keys up to t
    sums, _ = regard.recurrence(q, k, v, regard.Decay(), scale=1.0)
    found, state, steps = {"out": divided(sums, eps).transpose(1, 2)}, None, []
    for t in range(q.shape[2] if "out_recurrent" in wanted else 0):
        step, state = regard.recurrence(
            *(x[:, :, t : t + 1] for x in (q, k, v)), regard.Decay(), state=state, scale=1.0
        )
        steps.append(step)
    if steps:
        found["out_recurrent"] = divided(torch.cat(steps, 2), eps).transpose(1, 2)
    return found


def features(case: Case, peer: Peer, q: Tensor) -> Callable[[Tensor], Tensor]:
    favor = case.config.get("favor")
    if not favor:
        return EluPlusOne(q.shape[1], q.shape[3])
    projection = peer["weight.feature_map.omega"].transpose(0, 1)
    unknown = set(favor) - {"n_dims", "stabilize"}
    case.refuse_unless(not unknown and favor["n_dims"] == 2 * len(projection), f"favor {favor}")

    def phi(x: Tensor) -> Tensor:
        found = positive_features(x, projection, hyperbolic=True)
        if favor.get("stabilize"):
            largest = (x.square().sum(-1, keepdim=True) * x.shape[-1] ** -0.5).amax(2, keepdim=True)
            found = found * torch.exp(-largest)
        return found

    return phi


def layer(case: Case, peer: Peer, wanted: frozenset[str]) -> Outputs:
    q, k, v, keep, eps = given(case, peer)
    if not is_causal(case):
        return {"out": by_cross_layer(q, k, v, keep, eps).transpose(1, 2)}
    out = by_layer(q, k, v, EluPlusOne, eps).transpose(1, 2)
    return {"out": out, "out_recurrent": out}


# ---- polynomial kernels ----------------------------------------------------------------------------------------------


def polynomial(case: Case) -> Paths | None:
    return {"layer": partial(polynomial_layer, case)} if case.has("input.q", "input.k", "input.v") else None


def polynomial_layer(case: Case, peer: Peer, wanted: frozenset[str]) -> Outputs:
    unknown = set(case.config) - {"use_norm", "use_scale", "scale", "eps"}
    case.refuse_unless(not unknown, f"options {sorted(unknown)}")
    names = f"{case.meta.get('case')} {case.meta.get('covers')}"  # nothing else says which kernel it is
    case.refuse_unless("based" in names, f"the kernel of {names!r}")
    scale = case.config.get("scale") if case.config.get("use_scale", True) else 1.0
    feature_map = partial(Quadratic if "rebased" in names else Taylor, scale=scale)
    eps = float(case.config.get("eps", 1e-6)) if case.config.get("use_norm", True) else None
    return {"out": by_layer(*(peer[f"input.{name}"] for name in "qkv"), feature_map, eps)}


ADAPTERS: dict[str, Callable[[Case], Paths | None]] = {
    "linear_attention_katharopoulos": katharopoulos,
    "linear_attn_variants": polynomial,
}
