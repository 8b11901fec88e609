"""Parts of layers that many families share: each knows how to make its module, and its table.

``stored`` is the file's name of a part, with ``{i}`` for the layer's number.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import nn

from regard.biases import Bias
from regard.masks import Causal, Mask
from regard.mixers.parts import Projections, Scores
from regard.models.config import Config
from regard.models.experts import GatedExperts, MixtureOfExperts, Router, Routing
from regard.models.feedforward import ACTIVATIONS, GatedMLP, activation
from regard.models.layouts.shared.options import Sizes
from regard.models.layouts.shared.rows import FF, MIXER, kinds, module_rows
from regard.models.tables import Bundles, FusedQKV, Row, fused_rows, one_to_one
from regard.nn import MultiHeadAttention
from regard.positions import Rotary

__all__ = ["NUMBERED", "AttentionPart", "ExpertsPart", "GatedPart", "Make", "Part", "read_gated", "read_scores"]

Make = Callable[[], nn.Module]
PROJECTIONS = {name: name for name in ("gate_proj", "up_proj", "down_proj")}
NUMBERED = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
"""Mixtral's names of an expert's matrices."""


class Part(NamedTuple):
    """How to make a part of a layer, and its table."""

    make: Make
    rows: list[Row]


@dataclass(frozen=True)
class AttentionPart:
    """Softmax attention with grouped heads, causal unless another mask is given."""

    sizes: Sizes
    projections: Projections = field(default_factory=Projections)
    scores: Scores = field(default_factory=Scores)
    mask: Mask = field(default_factory=Causal)
    bias: Bias | None = None
    rotary: Rotary | None = None

    def __call__(self) -> nn.Module:
        s = self.sizes
        return MultiHeadAttention(
            s.dim,
            s.heads,
            kv_heads=s.kv_heads,
            head_dim=s.head_dim,
            projections=self.projections,
            scores=self.scores,
            mask=self.mask,
            bias=self.bias,
            rotary=self.rotary,
        )

    def under(self, mask: Mask) -> AttentionPart:
        """The same with another mask."""
        return dataclasses.replace(self, mask=mask)

    def part(self, stored: str = "model.layers.{i}.self_attn", *, fused: str = "", out: str = "o_proj") -> Part:
        """With its table: separate projections, or one named `fused`, of rows [all q | all k | all v]."""
        p, s = self.projections, self.sizes
        if fused:
            whole = FusedQKV(s.heads, s.kv_heads, s.head_dim, groups=1)
            rows = fused_rows(f"{stored}.{fused}", f"{MIXER}.*_proj", kinds(p.bias), whole)
        else:
            rows = module_rows({f"{stored}.{name}_proj": f"{MIXER}.{name}_proj" for name in "qkv"}, kinds(p.bias))
        rows += module_rows({f"{stored}.{out}": f"{MIXER}.o_proj"}, kinds(p.bias if p.out_bias is None else p.out_bias))
        if p.norm is not None:
            rows += module_rows({f"{stored}.{name}_norm": f"{MIXER}.{name}_norm" for name in "qk"})
        if self.scores.sink:
            rows += one_to_one({f"{stored}.sinks": f"{MIXER}.sink"})
        return Part(self, rows)


@dataclass(frozen=True)
class GatedPart:
    """A gated feed-forward part for every token."""

    dim: int
    hidden: int
    act: str
    bias: bool = False

    def __call__(self) -> nn.Module:
        return GatedMLP(self.dim, self.hidden, activation(self.act), bias=self.bias)

    def part(self, stored: str = "model.layers.{i}.mlp", *, fused: str = "") -> Part:
        """With its table: separate matrices, or gate and up in one named `fused`, of rows [gate | up]."""
        if not fused:
            return Part(self, module_rows({f"{stored}.{p}": f"{FF}.{p}" for p in PROJECTIONS}, kinds(self.bias)))
        both = Bundles((self.hidden, self.hidden), groups=1)
        rows = [
            Row(f"{stored}.{fused}.{kind}", (f"{FF}.gate_proj.{kind}", f"{FF}.up_proj.{kind}"), both)
            for kind in kinds(self.bias)
        ]
        return Part(self, rows + module_rows({f"{stored}.down_proj": f"{FF}.down_proj"}, kinds(self.bias)))


def read_scores(c: Config, **further: Any) -> Scores:
    """Scores with the dropout that ``attention_dropout`` states; `further` is what else the family does to them."""
    return Scores(dropout=c.dropout("attention_dropout"), **further)


def read_gated(c: Config, dim: int, hidden: int, *, act: str = "hidden_act", default: str = "silu") -> GatedPart:
    """The gated part without biases that the options state.

    Args:
        hidden, default: the family's own size and activation.
        act: the option that names the activation.
    """
    return GatedPart(dim, c.count("intermediate_size", hidden), c.name(act, default, ACTIVATIONS))


@dataclass(frozen=True)
class ExpertsPart:
    """A mixture of gated experts; `shared` is the width of the part that every token goes through, 0 for none."""

    dim: int
    hidden: int
    act: str
    routing: Routing
    shared: int = 0
    shared_gate: bool = False

    def __call__(self) -> nn.Module:
        dim, act = self.dim, activation(self.act)
        return MixtureOfExperts(
            Router(dim, self.routing),
            GatedExperts(dim, self.hidden, self.routing.experts, act),
            GatedMLP(dim, self.shared, act) if self.shared else None,
            nn.Linear(dim, 1, bias=False) if self.shared_gate else None,
        )

    def part(
        self,
        stored: str = "model.layers.{i}.mlp",
        *,
        router: str = "gate",
        correction: str = "gate.e_score_correction_bias",
        shared: str = "shared_experts",
        names: Mapping[str, str] = PROJECTIONS,
    ) -> Part:
        """With its table, under the file's names; `names` are those of an expert's matrices."""
        found = {f"{stored}.{router}.weight": f"{FF}.router.weight"}
        if self.routing.corrected:
            found[f"{stored}.{correction}"] = f"{FF}.router.correction"
        for e in range(self.routing.experts):
            found |= {f"{stored}.experts.{e}.{k}.weight": f"{FF}.experts.{v}[{e}]" for k, v in names.items()}
        if self.shared:
            found |= {f"{stored}.{shared}.{k}.weight": f"{FF}.shared.{k}.weight" for k in PROJECTIONS}
        if self.shared_gate:
            found[f"{stored}.shared_expert_gate.weight"] = f"{FF}.shared_gate.weight"
        return Part(self, one_to_one(found))
