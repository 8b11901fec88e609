"""Decoders made of the catalogue's mechanisms by name: how `regard.models.decoder` builds one, and its written form."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from regard.catalog import RECORDS, find
from regard.checks import describe, positive, whole
from regard.masks import Causal, Window
from regard.mixers.parts import RMSNorm, Scores
from regard.models.blocks import Embedding, PreNorm
from regard.models.config import Config
from regard.models.decoder import Decoder
from regard.models.feedforward import GatedMLP, activation
from regard.models.layouts.base import Layout, Plan, plain_start
from regard.models.tables import Row
from regard.nn import HGRN, ForgetBounds, MultiHeadAttention, griffin_attention
from regard.positions import Rotary

__all__ = ["CATALOGUE", "Parts", "causal_names", "make_mixer"]

MakeMixer = Callable[[int], nn.Module]

# What the catalogue builds small for its tests, with the sizes that its sources published.
PUBLISHED: Mapping[str, Callable[[int, int], nn.Module]] = {
    "window": lambda dim, heads: MultiHeadAttention(dim, heads, mask=Window(4096), rotary=Rotary(dim // heads)),
    "griffin_attention": griffin_attention,
    "softcap": lambda dim, heads: MultiHeadAttention(
        dim, heads, mask=Causal(), scores=Scores(softcap=50.0), rotary=Rotary(dim // heads)
    ),
}


def causal_names() -> list[str]:
    """The mechanisms that a decoder can be made of."""
    return [record.name for record in RECORDS if record.causal and not record.context]


def make_mixer(name: str, dim: int, heads: int) -> nn.Module:
    """A layer of the mechanism of that name, with the published sizes.

    Raises:
        ValueError: for a name that is not known, is not causal, or reads a context; and as the layer's constructor.
    """
    names = [record.name for record in RECORDS]
    if name not in names:
        near = difflib.get_close_matches(name, names, 1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise ValueError(f"layers: expected names among {', '.join(causal_names())}, got {name!r}{hint}")
    record = find(name)
    if record.context:
        raise ValueError(f"layers: expected mechanisms of one sequence, got {name!r}, which reads a context beside it")
    if not record.causal:
        raise ValueError(f"layers: expected causal mechanisms, got {name!r}, in which tokens read later ones")
    return PUBLISHED.get(name, record.build)(dim, heads)


@dataclass(frozen=True)
class Parts:
    """What a decoder is made of; the arguments are those of `regard.models.decoder`, with every size stated."""

    vocab: int
    dim: int
    layers: tuple[str | MakeMixer, ...]
    heads: int
    hidden: int
    tied: bool
    std: float

    @classmethod
    def of(
        cls,
        vocab: int,
        dim: int,
        layers: Sequence[str | MakeMixer],
        heads: int | None,
        hidden: int | None,
        tied: bool,
        std: float,
    ) -> Parts:
        """With sizes that were left open filled in, all of them checked."""
        whole("vocab", vocab, 1)
        whole("dim", dim, 1)
        if isinstance(layers, str) or not isinstance(layers, Sequence) or not layers:
            raise TypeError(f"layers: expected a list of names or factories, at least one, got {describe(layers)}")
        for entry in layers:
            if not isinstance(entry, str) and (not callable(entry) or isinstance(entry, nn.Module)):
                raise TypeError(f"layers: expected names and factories of layers, got {describe(entry)} among them")
        count = max(1, dim // 64) if heads is None else whole("heads", heads, 1)
        if dim % count:
            raise ValueError(f"heads: expected a divisor of dim={dim}, got {count}" + (" by default" * (heads is None)))
        wide = -(-dim // 3) * 8 if hidden is None else whole("hidden", hidden, 1)
        if not isinstance(tied, bool):
            raise TypeError(f"tied: expected True or False, got {describe(tied)}")
        return cls(vocab, dim, tuple(layers), count, wide, tied, positive("std", std))

    def make(self) -> Decoder:
        """The model; its weights are torch's own start until they are initialised or read."""
        bounds = ForgetBounds(max(1, self.layers.count("hgrn")), self.dim) if "hgrn" in self.layers else None
        return Decoder(
            Embedding(nn.Embedding(self.vocab, self.dim)),
            [partial(self._block, bounds)] * len(self.layers),
            RMSNorm(self.dim),
            None if self.tied else nn.Linear(self.dim, self.vocab, bias=False),
        )

    def _block(self, bounds: ForgetBounds | None, i: int) -> nn.Module:
        entry = self.layers[i]
        if not isinstance(entry, str):
            mixer = entry(i)
            if not isinstance(mixer, nn.Module):
                raise TypeError(f"layers: expected factories of layers, got one that gives {describe(mixer)}")
            traits = getattr(mixer, "traits", None)
            if traits is not None and not traits.causal:
                raise ValueError(f"layers: expected causal layers, got a {type(mixer).__name__} that is not")
        elif entry == "hgrn" and bounds is not None:  # each layer forgets less than the one below it
            mixer = HGRN(self.dim, low=bounds.bound(self.layers[:i].count("hgrn")))
        else:
            mixer = make_mixer(entry, self.dim, self.heads)
        return PreNorm(mixer, GatedMLP(self.dim, self.hidden, activation("silu")), RMSNorm(self.dim), RMSNorm(self.dim))

    def config(self) -> dict[str, Any] | None:
        """What ``config.json`` states; ``None`` where a layer has no name."""
        if not all(isinstance(entry, str) for entry in self.layers):
            return None
        return {
            "model_type": CATALOGUE.model_type,
            "vocab_size": self.vocab,
            "hidden_size": self.dim,
            "layer_types": list(self.layers),
            "num_attention_heads": self.heads,
            "intermediate_size": self.hidden,
            "tie_word_embeddings": self.tied,
            "initializer_range": self.std,
        }


@dataclass(frozen=True)
class Shared:
    """One tensor that stands in the model under several names."""

    names: int

    def split(self, stored: Tensor) -> Sequence[Tensor]:
        return (stored,) * self.names

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        return parts[0]


def _plan(c: Config) -> Plan:
    layers = c.get("layer_types")
    if not isinstance(layers, list) or not layers or not all(isinstance(entry, str) for entry in layers):
        raise c.error("layer_types", layers, "a list of names of mechanisms, at least one")
    for entry in dict.fromkeys(layers):
        if entry not in causal_names():
            raise c.error("layer_types", entry, ", ".join(causal_names()))
    dim = c.count("hidden_size", 64)
    parts = Parts.of(
        c.count("vocab_size", 256),
        dim,
        layers,
        c.count("num_attention_heads", max(1, dim // 64)),
        c.count("intermediate_size", -(-dim // 3) * 8),
        c.flag("tie_word_embeddings", True),
        c.amount("initializer_range", 0.02),
    )
    with torch.device("meta"):
        model = parts.make()
    rows = []
    names: dict[int, list[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        names.setdefault(id(tensor), []).append(name)
    for first, *others in names.values():
        rows.append(Row(first, (first, *others), Shared(1 + len(others))) if others else Row(first, (first,)))
    return Plan(parts.make, rows)


def _start(config: Mapping[str, Any], source: str) -> dict[str, Any]:
    return {**plain_start(config, source), "depth_scaled": True}


CATALOGUE = Layout("regard_decoder", "Decoder", _plan, start=_start)
