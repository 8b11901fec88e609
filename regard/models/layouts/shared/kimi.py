"""What the families with Kimi Delta Attention share: its part, and how their options are spelled (arXiv:2510.26692)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from regard.models.config import Config
from regard.models.experts import Routing
from regard.models.layouts.shared.options import from_zero, kinds_of, read_routing
from regard.models.layouts.shared.parts import Part
from regard.models.layouts.shared.rows import MIXER, conv_rows
from regard.models.tables import Reshape, Row, Same, one_to_one
from regard.nn import KDAGates, KimiDeltaAttention

__all__ = [
    "KINDS",
    "SYNONYMS",
    "KimiDeltaPart",
    "feedforward_kinds",
    "kinds_from",
    "older_options",
    "read_kimi_routing",
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
class KimiDeltaPart:
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

    def part(self, stored: str, *, out: str = "o_proj", rate: Reshape | None = None) -> Part:
        """With its table; `rate` is how the family stores ``A_log``, whose axes differ."""
        names = {f"{name}.weight": f"{name}.weight" for name in ("q_proj", "k_proj", "v_proj", "b_proj")}
        names |= {f"{out}.weight": "o_proj.weight", "o_norm.weight": "norm.weight", "dt_bias": "dt_bias"}
        for theirs, ours, rank in (("f", "decay_proj", self.gates.decay_rank), ("g", "g_proj", self.gates.gate_rank)):
            whole = {f"{theirs}_proj.weight": f"{ours}.weight"}
            pair = {f"{theirs}_a_proj.weight": f"{ours}.0.weight", f"{theirs}_b_proj.weight": f"{ours}.1.weight"}
            names |= whole if rank is None else pair
        rows = one_to_one({f"{stored}.{theirs}": f"{MIXER}.{ours}" for theirs, ours in names.items()})
        rows += conv_rows(stored, dict.fromkeys(("q_conv1d", "k_conv1d", "v_conv1d"), self.heads * self.head_dim))
        return Part(self, [*rows, Row(f"{stored}.A_log", (f"{MIXER}.A_log",), rate or Same())])


def read_kimi_routing(c: Config, experts: int, *, factor: float, groups: int, open_groups: int) -> Routing:
    """Experts that corrected sigmoid scores choose, in this family's words, with a family's defaults."""
    return read_routing(
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
