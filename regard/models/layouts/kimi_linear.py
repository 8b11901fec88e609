"""Kimi Linear: three layers of Kimi Delta Attention, one of latent attention without positions (arXiv:2510.26692)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from regard.mixers.parts import RMSNorm
from regard.models.config import Config
from regard.models.experts import Routing
from regard.models.layouts.base import Layout, Plan
from regard.models.layouts.latent import FOLLOWING, read_latent
from regard.models.layouts.stacks import (
    NUMBERED,
    Dense,
    Experts,
    Part,
    Stack,
    conv_rows,
    from_zero,
    kinds_of,
    layers_of,
    routing_of,
    silu_of,
)
from regard.models.tables import Row, Viewed, same
from regard.nn import KDAGates, KimiDeltaAttention

__all__ = [
    "KIMI_LINEAR",
    "KINDS",
    "SYNONYMS",
    "Delta",
    "experts_of",
    "feedforward_kinds",
    "kinds_from",
    "older_options",
]

KINDS = ("linear_attention", "full_attention")
SYNONYMS = {
    "max_position_embeddings": "model_max_length",
    "norm_topk_prob": "moe_renormalize",
    "n_group": "num_expert_group",
    "num_local_experts": "num_experts",
    "num_experts_per_token": "num_experts_per_tok",
    "n_shared_experts": "num_shared_experts",
}


@dataclass(frozen=True)
class Delta:
    """Kimi Delta Attention of `heads` heads, keys and values of one size."""

    dim: int
    heads: int
    head_dim: int
    conv_size: int
    gates: KDAGates

    def __call__(self) -> nn.Module:
        return KimiDeltaAttention(
            self.dim, self.heads, key_dim=self.head_dim, conv_size=self.conv_size, gates=self.gates
        )

    def rows(self, stored: str, out: str = "o_proj") -> list[Row]:
        """Its table but for ``A_log``, whose axes the families store differently."""
        names = {f"{name}.weight": f"{name}.weight" for name in ("q_proj", "k_proj", "v_proj", "b_proj")}
        names |= {f"{out}.weight": "o_proj.weight", "o_norm.weight": "norm.weight", "dt_bias": "dt_bias"}
        for theirs, ours, rank in (("f", "decay_proj", self.gates.decay_rank), ("g", "g_proj", self.gates.gate_rank)):
            whole = {f"{theirs}_proj.weight": f"{ours}.weight"}
            pair = {f"{theirs}_a_proj.weight": f"{ours}.0.weight", f"{theirs}_b_proj.weight": f"{ours}.1.weight"}
            names |= whole if rank is None else pair
        rows = same({f"{stored}.{theirs}": f"layers.{{i}}.mixer.{ours}" for theirs, ours in names.items()})
        return rows + conv_rows(stored, dict.fromkeys(("q_conv1d", "k_conv1d", "v_conv1d"), self.heads * self.head_dim))


def experts_of(c: Config, experts: int, *, factor: float, groups: int, open_groups: int) -> Routing:
    """Experts that corrected sigmoid scores choose, in this family's words, with a family's defaults."""
    return routing_of(
        c,
        "num_experts",
        experts,
        8,
        score="sigmoid",
        normalized=c.flag("moe_renormalize", True),
        factor=c.number("routed_scaling_factor", factor),
        corrected=True,
        groups={"num_expert_group": groups, "topk_group": open_groups},
    )


def feedforward_kinds(c: Config, layers: int, dense: int) -> list[str]:
    """``dense`` or ``sparse`` for every layer."""
    first = from_zero(c, "first_k_dense_replace", dense)
    return kinds_of(c, "mlp_layer_types", layers, ("dense", "sparse"), lambda i: "dense" if i < first else "sparse")


def older_options(c: Config, **further: str) -> Mapping[str, Any]:
    """The options of the linear layers, which the first checkpoints keep together in ``linear_attn_config``.

    They are read under their present names afterwards; `further` are such names of a family's own.
    """
    older = c.table("linear_attn_config")
    names = {"head_dim": "linear_head_dim", "num_heads": "linear_num_heads"} | further
    names["short_conv_kernel_size"] = "linear_conv_kernel_dim"
    unknown = set(older) - set(names) - {"full_attn_layers", "kda_layers"}
    if unknown:
        raise c.error("linear_attn_config", older, f"an object without {', '.join(sorted(unknown))}")
    for name, proper in names.items():
        if name in older:
            c.values[proper] = older[name]
    return older


def kinds_from(c: Config, older: Mapping[str, Any], layers: int) -> list[str]:
    """Each layer's kind, from ``layer_types`` or from the older lists of layers, which count from 1."""
    full, linear = older.get("full_attn_layers"), older.get("kda_layers")
    if c.get("layer_types") is None and full is not None and linear is not None:
        numbers = range(1, layers + 1)
        if sorted([*full, *linear]) != list(numbers):
            raise c.error(
                "linear_attn_config", older, f"full_attn_layers and kda_layers with each of 1 to {layers} once"
            )
        return ["full_attention" if i in full else "linear_attention" for i in numbers]
    return kinds_of(c, "layer_types", layers, KINDS, lambda i: KINDS[bool(i and i % 4 == 0)])


def _kimi_linear(c: Config, has: Callable[[str], bool]) -> Plan:
    dim, heads, layers = (
        c.count("hidden_size", 2304),
        c.count("num_attention_heads", 32),
        c.count("num_hidden_layers", 27),
    )
    c.only("tie_word_embeddings", (False, None))
    c.only("mla_use_nope", (True, None), "nothing rotates")
    c.only("moe_router_activation_func", ("sigmoid", None))
    c.only("moe_layer_freq", (1, None))
    act, eps = silu_of(c), c.number("rms_norm_eps", 1e-5, least=0.0)
    older = older_options(c)
    size = c.count("linear_head_dim", 128)
    delta = Delta(
        dim,
        c.count("linear_num_heads", 32),
        size,
        c.count("linear_conv_kernel_dim", 4),
        KDAGates(decay_rank=size, gate_rank=size, eps=eps),
    )
    latent = read_latent(c, dim=dim, heads=heads, rotary=None)
    attention, moe = "model.layers.{i}.self_attn", "model.layers.{i}.block_sparse_moe"
    rate = Row(f"{attention}.A_log", ("layers.{i}.mixer.A_log",), Viewed((1, 1, delta.heads, 1)))
    mixers: dict[str, Part] = {
        "linear_attention": (delta, [*delta.rows(attention), rate]),
        "full_attention": (latent, latent.rows(attention)),
    }
    dense = Dense(dim, c.count("intermediate_size", 9216), act)
    width = c.count("moe_intermediate_size", 1024)
    routing = experts_of(c, 256, factor=2.446, groups=1, open_groups=1)
    experts = Experts(dim, width, act, routing, width * from_zero(c, "num_shared_experts", 1))
    ffs: dict[str, Part] = {
        "dense": (dense, dense.rows(moe)),
        "sparse": (experts, experts.rows(moe, names=NUMBERED)),
    }
    parts = layers_of(mixers, kinds_from(c, older, layers), ffs, feedforward_kinds(c, layers, 1))
    stack = Stack(c.count("vocab_size", 163840), dim, partial(RMSNorm, dim, eps), parts)
    return stack.plan(("input_layernorm", "post_attention_layernorm"))


KIMI_LINEAR = Layout(
    "kimi_linear",
    "KimiLinearForCausalLM",
    _kimi_linear,
    prefix="model.",
    # the first checkpoints call a dense layer's part otherwise than one with experts
    spellings={f"mlp.{p}_proj.weight": f"block_sparse_moe.{p}_proj.weight" for p in ("gate", "up", "down")},
    synonyms=SYNONYMS,
    inert=FOLLOWING | {"model_max_length", "num_nextn_predict_layers", "rope_theta", "use_grouped_topk"},
)
