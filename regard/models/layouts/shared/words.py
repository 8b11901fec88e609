"""Heads of masked words: which files have one that is read, and its table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from torch import nn

from regard.models.config import Config
from regard.models.feedforward import activation
from regard.models.layouts.shared.rows import BOTH, WEIGHT, kinds, module_rows
from regard.models.masked_words import MaskedWordsHead
from regard.models.tables import Row, one_to_one

__all__ = ["WordsHead", "WordsPart"]


@dataclass(frozen=True)
class WordsPart:
    """A checkpoint's head: how to make it (``None``: there is none), its rows, and what its `Plan` is told."""

    make: Callable[[], MaskedWordsHead] | None = None
    rows: list[Row] = field(default_factory=list)
    tied: tuple[str, ...] = ()
    headed: str = ""


@dataclass(frozen=True)
class WordsHead:
    """A family's names of its head.

    A head is read where ``architectures`` names a class with one and the file holds it; any other file ends at the last
    hidden state.

    Args:
        classes: those that have the head; a saved folder names the first.
        dense, norm, decoder: the file's names of the linear map, the norm, and the map to the vocabulary.
        bias: that of the bias where the map is tied; ``None`` where the map itself holds it.
        table: the file's name of the vocabulary's table, which the map is tied to.
        act: the activation where no option states it.
        always_tied: the map is tied whatever ``tie_word_embeddings`` says.
    """

    classes: tuple[str, ...]
    dense: str
    norm: str
    decoder: str
    bias: str | None
    table: str
    act: str | None = None
    always_tied: bool = False

    def read(
        self,
        c: Config,
        dim: int,
        vocab: int,
        norm: Callable[[], nn.Module],
        *,
        act: str,
        dense_bias: bool = True,
        norm_bias: bool = True,
        bias: bool = True,
    ) -> WordsPart:
        """The head of one checkpoint; `act` is the activation that its options state."""
        named = c.get("architectures")
        tied = c.flag("tie_word_embeddings", True) or self.always_tied
        if not isinstance(named, list) or not set(named) & set(self.classes) or not c.holds(f"{self.dense}.weight"):
            return WordsPart()
        own = f"{self.decoder}.bias"
        stored = self.bias if tied and self.bias is not None and c.holds(self.bias) else own
        rows = module_rows({self.dense: "head.dense"}, kinds(dense_bias))
        rows += module_rows({self.norm: "head.norm"}, BOTH if norm_bias else WEIGHT)
        rows += one_to_one({stored: "head.bias"} if bias else {})
        rows += module_rows({} if tied else {self.decoder: "head"})
        make = partial(_head, dim, vocab, norm, self.act or act, tied, dense_bias, bias)
        names = (f"{self.table}.weight", f"{self.decoder}.weight") if tied else ()
        return WordsPart(make, rows, names, self.classes[0])


def _head(
    dim: int, vocab: int, norm: Callable[[], nn.Module], act: str, tied: bool, dense_bias: bool, bias: bool
) -> MaskedWordsHead:
    dense = nn.Linear(dim, dim, bias=dense_bias)
    return MaskedWordsHead(dense, activation(act), norm(), vocab, tied=tied, bias=bias)
