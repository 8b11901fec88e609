"""Whole decoders from the parts of their layers, with their tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import nn

from regard.mixers.parts import RMSNorm
from regard.models.blocks import Embedding, PreNorm, Sandwich
from regard.models.config import Config
from regard.models.decoder import Decoder
from regard.models.layouts.base import Plan
from regard.models.layouts.shared.options import Sizes
from regard.models.layouts.shared.parts import Make, Part
from regard.models.layouts.shared.rows import WEIGHT, module_rows
from regard.models.tables import ComputedTensor, Row, one_to_one, per_layer

__all__ = ["POST_BRANCH_NORM", "PRE_NORM", "SANDWICH", "Layer", "Names", "Stack", "Wiring", "layers_of", "rms_decoder"]


@dataclass(frozen=True)
class Wiring:
    """How a layer's parts and norms become a block.

    Args:
        block: called with the layer's modules, then with one norm for each of `norms`.
        norms: the file's names of a layer's norms, each with the block's name for it.
    """

    block: Callable[..., nn.Module]
    norms: Mapping[str, str]


def _sandwich(mixer: nn.Module, ff: nn.Module, *norms: nn.Module) -> Sandwich:
    return Sandwich(mixer, ff, (norms[0], norms[1]), (norms[2], norms[3]))


def _post_branch(mixer: nn.Module, ff: nn.Module, mixer_norm: nn.Module, ff_norm: nn.Module) -> Sandwich:
    return Sandwich(mixer, ff, (nn.Identity(), mixer_norm), (nn.Identity(), ff_norm))


PRE_NORM = Wiring(PreNorm, {"input_layernorm": "mixer_norm", "post_attention_layernorm": "ff_norm"})
SANDWICH = Wiring(
    _sandwich,
    {
        "input_layernorm": "mixer_norm",
        "post_attention_layernorm": "mixer_post_norm",
        "pre_feedforward_layernorm": "ff_norm",
        "post_feedforward_layernorm": "ff_post_norm",
    },
)
POST_BRANCH_NORM = Wiring(
    _post_branch, {"post_attention_layernorm": "mixer_post_norm", "post_feedforward_layernorm": "ff_post_norm"}
)
"""``x + norm(mixer(x))``, then ``x + norm(ff(x))``."""


@dataclass(frozen=True)
class Layer:
    """One layer: what mixes, what follows (or nothing), and how they are wired."""

    mixer: Part
    ff: Part | None
    wiring: Wiring = PRE_NORM

    def block(self, norm: Make) -> nn.Module:
        """The module."""
        parts = [part.make() for part in (self.mixer, self.ff) if part is not None]
        return self.wiring.block(*parts, *(norm() for _ in self.wiring.norms))


def layers_of(
    mixers: Mapping[str, Part], kinds: Sequence[str], feedforwards: Mapping[str, Part], others: Sequence[str]
) -> list[Layer]:
    """One layer for every pair of kinds, the mixer's and the feed-forward part's."""
    return [Layer(mixers[a], feedforwards[b]) for a, b in zip(kinds, others, strict=True)]


@dataclass(frozen=True)
class Names:
    """What a file calls a decoder's layers and ends.

    Args:
        layer: what leads the names of a layer's norms.
        tokens, norm, head: the embedding's table, the last norm and the head.
        norm_tensors: the tensors of every norm.
    """

    layer: str = "model.layers.{i}"
    tokens: str = "model.embed_tokens"
    norm: str = "model.norm"
    head: str = "lm_head"
    norm_tensors: tuple[str, ...] = WEIGHT


@dataclass(frozen=True)
class Stack:
    """A decoder: an embedding, layers, a norm before the head.

    Args:
        norm: makes every norm.
        names: what the file calls them.
        embedding: from the table of the vocabulary to what enters the stack; `embedding_rows` are its further tensors.
        last_norm: makes the norm before the head, where it is another.
        finish: makes what is done to the logits last, or ``None``.
    """

    vocab: int
    dim: int
    norm: Make
    layers: Sequence[Layer]
    names: Names = Names()
    embedding: Callable[[nn.Embedding], Embedding] = Embedding
    embedding_rows: list[Row] = field(default_factory=list)
    last_norm: Make | None = None
    finish: Make | None = None

    def decoder(self, tied: bool) -> Decoder:
        """The model; a tied one has no head of its own."""
        return Decoder(
            self.embedding(nn.Embedding(self.vocab, self.dim)),
            [self._block] * len(self.layers),
            (self.last_norm or self.norm)(),
            None if tied else nn.Linear(self.dim, self.vocab, bias=False),
            finish=None if self.finish is None else self.finish(),
        )

    def _block(self, i: int) -> nn.Module:
        return self.layers[i].block(self.norm)

    def plan(self, *, tied: bool, computed: tuple[ComputedTensor, ...] = ()) -> Plan:
        """How to build it, and its whole table."""
        n = self.names
        table, head = f"{n.tokens}.weight", f"{n.head}.weight"
        rows = one_to_one({table: "embedding.tokens.weight"} | ({} if tied else {head: "head.weight"}))
        rows += self.embedding_rows + module_rows({n.norm: "norm"}, n.norm_tensors)
        for i, layer in enumerate(self.layers):
            norms = {f"{n.layer}.{stored}": f"layers.{{i}}.{own}" for stored, own in layer.wiring.norms.items()}
            own_rows = layer.mixer.rows + ([] if layer.ff is None else layer.ff.rows)
            rows += per_layer([*module_rows(norms, n.norm_tensors), *own_rows], i)
        return Plan(partial(self.decoder, tied), rows, (table, head) if tied else (), computed)


def rms_decoder(
    c: Config, sizes: Sizes, eps: float, layers: Sequence[Layer], *, tied: bool = False, **further: Any
) -> Plan:
    """A decoder with RMS norms; `tied` is the family's default, `further` is for `Stack`."""
    stack = Stack(sizes.vocab, sizes.dim, partial(RMSNorm, sizes.dim, eps), layers, **further)
    return stack.plan(tied=c.flag("tie_word_embeddings", tied))
