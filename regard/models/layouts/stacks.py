"""What the layouts of mixed stacks share: layers that differ in mixer and feed-forward part, and their tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from regard.models.blocks import Embedding, PreNorm
from regard.models.config import Config
from regard.models.decoder import Decoder
from regard.models.experts import GatedExperts, MixtureOfExperts, Router, Routing
from regard.models.feedforward import ACTIVATIONS, GatedMLP, activation
from regard.models.layouts.base import Plan
from regard.models.tables import Derived, Row, Squeezed, expand, same

__all__ = [
    "NUMBERED",
    "Dense",
    "Experts",
    "Layer",
    "Make",
    "Part",
    "Stack",
    "conv_rows",
    "from_zero",
    "kinds_of",
    "layers_of",
    "routing_of",
    "silu_of",
]

Make = Callable[[], nn.Module]
Part = tuple[Make, list[Row]]
"""How to make a part of a layer, and its table."""
PROJECTIONS = {name: name for name in ("gate_proj", "up_proj", "down_proj")}
NUMBERED = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
"""Mixtral's names of an expert's matrices."""


@dataclass(frozen=True)
class Dense:
    """A gated feed-forward part for every token."""

    dim: int
    hidden: int
    act: str
    bias: bool = False

    def __call__(self) -> nn.Module:
        return GatedMLP(self.dim, self.hidden, activation(self.act), bias=self.bias)

    def rows(self, stored: str, own: str = "layers.{i}.ff") -> list[Row]:
        """Its table, under the file's name for it."""
        kinds = ("weight", "bias") if self.bias else ("weight",)
        return same({f"{stored}.{name}.{k}": f"{own}.{name}.{k}" for name in PROJECTIONS for k in kinds})


@dataclass(frozen=True)
class Experts:
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

    def rows(
        self,
        stored: str,
        *,
        router: str = "gate",
        correction: str = "gate.e_score_correction_bias",
        shared: str = "shared_experts",
        names: Mapping[str, str] = PROJECTIONS,
    ) -> list[Row]:
        """Its table, under the file's names; `names` are those of an expert's matrices."""
        own = "layers.{i}.ff"
        found = {f"{stored}.{router}.weight": f"{own}.router.weight"}
        if self.routing.corrected:
            found[f"{stored}.{correction}"] = f"{own}.router.correction"
        for e in range(self.routing.experts):
            found |= {f"{stored}.experts.{e}.{k}.weight": f"{own}.experts.{v}[{e}]" for k, v in names.items()}
        if self.shared:
            found |= {f"{stored}.{shared}.{k}.weight": f"{own}.shared.{k}.weight" for k in PROJECTIONS}
        if self.shared_gate:
            found[f"{stored}.shared_expert_gate.weight"] = f"{own}.shared_gate.weight"
        return same(found)


def routing_of(
    c: Config, option: str, experts: int, chosen: int, *, groups: Mapping[str, int] | None = None, **rule: Any
) -> Routing:
    """The routing that the options state, with a family's own rule and defaults; `option` names their number.

    `groups` has two options with their defaults: the number of groups, and of those that are open to a token.
    """
    experts, chosen = c.count(option, experts), c.count("num_experts_per_tok", chosen)
    if chosen > experts:
        raise c.error("num_experts_per_tok", chosen, f"at most {option}={experts}")
    if groups is None:
        return Routing(experts, chosen, **rule)
    (all_of, parts), (some_of, opened) = ((name, c.count(name, default)) for name, default in groups.items())
    if experts % parts:
        raise c.error(all_of, parts, f"a divisor of {option}={experts}")
    if opened > parts:
        raise c.error(some_of, opened, f"at most {all_of}={parts}")
    most = experts // parts * opened
    if chosen > most:
        raise c.error(
            "num_experts_per_tok", chosen, f"at most {most}, the experts in {some_of}={opened} of {parts} groups"
        )
    return Routing(experts, chosen, groups=parts, open_groups=opened, **rule)


def silu_of(c: Config, where: str = "the convolutions") -> str:
    """The activation, in a family whose mixers use it too."""
    act = c.name("hidden_act", "silu", ACTIVATIONS)
    if ACTIVATIONS[act] != "silu":
        raise c.error("hidden_act", act, f"silu, which follows {where} too")
    return act


@dataclass(frozen=True)
class Layer:
    """One layer: what mixes, what follows, how they are wired, and the layer's table (``{i}`` is its number)."""

    mixer: Make
    ff: Make
    rows: list[Row]
    block: Callable[..., nn.Module] = PreNorm


def layers_of(
    mixers: Mapping[str, Part], kinds: Sequence[str], feedforwards: Mapping[str, Part], others: Sequence[str]
) -> list[Layer]:
    """One layer for every pair of kinds, the mixer's and the feed-forward part's."""
    pairs = [(mixers[a], feedforwards[b]) for a, b in zip(kinds, others, strict=True)]
    return [Layer(mixer, ff, table + rows) for (mixer, table), (ff, rows) in pairs]


@dataclass(frozen=True)
class Stack:
    """A decoder with a norm before each part and one before the head."""

    vocab: int
    dim: int
    norm: Make
    layers: Sequence[Layer]

    def layer(self, i: int) -> nn.Module:
        part = self.layers[i]
        return part.block(part.mixer(), part.ff(), self.norm(), self.norm())

    def decoder(self, tied: bool) -> Decoder:
        return Decoder(
            Embedding(nn.Embedding(self.vocab, self.dim)),
            [self.layer] * len(self.layers),
            self.norm(),
            None if tied else nn.Linear(self.dim, self.vocab, bias=False),
        )

    def plan(
        self,
        norms: tuple[str, str],
        *,
        tied: bool = False,
        table: str = "model.embed_tokens.weight",
        last: str = "model.norm.weight",
        derived: tuple[Derived, ...] = (),
    ) -> Plan:
        """How to build it, and its whole table; `norms` are the file's names of a layer's two."""
        outer = {table: "embedding.tokens.weight", last: "norm.weight"}
        rows = same(outer | ({} if tied else {"lm_head.weight": "head.weight"}))
        own = ("mixer_norm", "ff_norm")
        both = same(
            {f"model.layers.{{i}}.{n}.weight": f"layers.{{i}}.{o}.weight" for n, o in zip(norms, own, strict=True)}
        )
        for i, part in enumerate(self.layers):
            rows += expand([*both, *part.rows], i)
        return Plan(partial(self.decoder, tied), rows, (table, "lm_head.weight") if tied else (), derived)


def from_zero(c: Config, option: str, default: int) -> int:
    """A whole number of 0 or more."""
    given = c.get(option, default)
    return 0 if given == 0 and not isinstance(given, bool) else c.count(option, default or 1)


def kinds_of(c: Config, option: str, layers: int, known: Sequence[str], default: Callable[[int], str]) -> list[str]:
    """One kind a layer, from a list in the options or by a family's rule."""
    given = c.get(option)
    if given is None:
        return [default(i) for i in range(layers)]
    if not isinstance(given, list) or len(given) != layers or any(kind not in known for kind in given):
        raise c.error(option, given, f"a list of num_hidden_layers={layers} entries, each {' or '.join(known)}")
    return given


def conv_rows(stored: str, widths: Mapping[str, int]) -> list[Row]:
    """One convolution over [q, k, v] that is stored in parts; `widths` are their channels, by their names."""
    rows, first = [], 0
    for name, width in widths.items():
        part = f"layers.{{i}}.mixer.conv.weight[{first}:{first + width}]"
        rows.append(Row(f"{stored}.{name}.weight", (part,), Squeezed(1)))
        first += width
    return rows
