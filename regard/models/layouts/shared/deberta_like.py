"""What DeBERTa's versions share: options of relative places, and the names of what lies round their mixers.

He et al. 2020, arXiv:2006.03654; He, Gao, Chen 2021, arXiv:2111.09543.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import nn

from regard.mixers.disentangled import TERMS, DisentangledAttention, RelativeEmbeddings
from regard.mixers.parts import Projections
from regard.models.config import Config
from regard.models.layouts.shared.bert_like import HEADS, POSITION_IDS, BertLike, EncoderSizes, bert_words
from regard.models.layouts.shared.options import read_eps
from regard.models.layouts.shared.words import WordsHead
from regard.models.tables import Ignored, Row, Shared
from regard.nn import MultiHeadAttention

__all__ = ["IGNORED", "INERT", "PREFIX", "Places", "family", "read_places"]

PREFIX = "deberta."
IGNORED = (
    POSITION_IDS,
    Ignored(f"{PREFIX}embeddings.position_embeddings.weight", "where no absolute positions are added to the input"),
    Ignored("cls.*", f"words where `architectures` names no class with them: {HEADS}"),
    Ignored("lm_predictions.*", f"words where `architectures` names no class with them, or legacy is true: {HEADS}"),
    Ignored("mask_predictions.*", f"which tokens were replaced: {HEADS}"),
    Ignored("pooler.*", HEADS),
    Ignored("classifier.*", HEADS),
    Ignored("qa_outputs.*", HEADS),
)
# Heads of tasks are no part of the encoder; padding is told by the call.
INERT = frozenset(
    {"classifier_dropout", "cls_dropout", "pooler_dropout", "pooler_hidden_act", "pooler_hidden_size"}
) | {
    "padding_idx",
    "summary_activation",
    "summary_last_dropout",
    "summary_type",
    "summary_use_proj",
}


def family(c: Config, defaults: BertLike, cls: str) -> BertLike:
    """The family's names and defaults, with the one of two heads that ``legacy`` means."""
    stored = "lm_predictions.lm_head"
    present = WordsHead(
        (cls,),
        dense=f"{stored}.dense",
        norm=f"{stored}.LayerNorm",
        decoder=stored,
        bias=f"{stored}.bias",
        table=f"{PREFIX}embeddings.word_embeddings",
        always_tied=True,
    )
    return replace(defaults, words=bert_words(PREFIX, (cls,)) if c.flag("legacy", True) else present)


@dataclass(frozen=True)
class Places:
    """What relative places add to the scores; `span` is ``None`` where they add nothing.

    Args:
        terms: the terms, by the names that `DisentangledAttention` gives them.
        span: rows of the table on either side.
        max_distance: of logarithmic buckets, or ``None``.
        norm: epsilon of the layer norm over the table, or ``None``.
        dropout: of the table's rows.
    """

    terms: tuple[str, ...]
    span: int | None
    max_distance: int | None = None
    norm: float | None = None
    dropout: float = 0.0

    def mixers(
        self, sizes: EncoderSizes, *, share: bool = False, talking: bool = False, key_bias: bool = True
    ) -> Callable[[int], nn.Module]:
        """A mixer for each layer; called for the layers of one model, in order."""
        table: list[RelativeEmbeddings] = []  # one, which the layers share

        def mixer(i: int) -> nn.Module:
            if self.span is None:
                head_dim = sizes.dim // sizes.heads
                scores = replace(sizes.scores, scale=1 / math.sqrt(head_dim * (1 + len(self.terms))))
                projections = Projections(bias=True, key_bias=key_bias)
                return MultiHeadAttention(sizes.dim, sizes.heads, projections=projections, scores=scores)
            if i == 0:
                kept = {"max_distance": self.max_distance, "norm": self.norm}
                table[:] = [RelativeEmbeddings(sizes.dim, self.span, **kept, dropout=self.dropout)]  # type: ignore[arg-type]
            return DisentangledAttention(
                sizes.dim,
                sizes.heads,
                table[0],
                terms=self.terms,
                share=share,
                talking=talking,
                scores=sizes.scores,
                key_bias=key_bias,
            )

        return mixer

    def rows(self, layers: int) -> list[Row]:
        """The table's tensors, by their names behind the prefix."""
        names = {} if self.span is None else {"encoder.rel_embeddings.weight": "rows"}
        if self.norm is not None:
            names |= {f"encoder.LayerNorm.{kind}": f"norm.{kind}" for kind in ("weight", "bias")}
        return [
            Row(stored, tuple(f"layers.{i}.mixer.relative.{own}" for i in range(layers)), Shared(layers))
            for stored, own in names.items()
        ]


def read_places(c: Config, *, buckets: bool, places: int, eps: float) -> Places:
    """The options of relative places.

    Args:
        buckets: whether the family has logarithmic buckets and a norm over the table.
        places, eps: the family's defaults of ``max_position_embeddings`` and ``layer_norm_eps``.
    """
    terms = _terms(c)
    relative = c.flag("relative_attention", False)
    stated = c.get("norm_rel_ebd", "none") if buckets else "none"
    kinds = [part.strip() for part in stated.lower().split("|")] if isinstance(stated, str) else []
    if not kinds or set(kinds) - {"none", "layer_norm"} or ("layer_norm" in kinds and not relative):
        raise c.error("norm_rel_ebd", stated, "none, or layer_norm with relative_attention")
    if not relative:
        for name in ("max_relative_positions", *(["position_buckets"] if buckets else [])):
            c.get(name)  # stated even where nothing is relative
        return Places(terms, None)
    longest = _or_none(c, "max_relative_positions") or c.count("max_position_embeddings", places)
    rows = _or_none(c, "position_buckets") if buckets else None
    if rows is not None and not 1 < rows <= longest:
        raise c.error("position_buckets", rows, f"-1 for none, or 2 to max_relative_positions={longest}")
    return Places(
        terms,
        rows or longest,
        None if rows is None else longest,
        read_eps(c, eps, "layer_norm_eps") if "layer_norm" in kinds else None,
        c.dropout("hidden_dropout_prob", 0.1),
    )


def _terms(c: Config) -> tuple[str, ...]:
    """The terms of ``pos_att_type``, a list or a text with bars."""
    stated = c.get("pos_att_type")
    named: Sequence[object] = stated if isinstance(stated, list) else []
    if isinstance(stated, str):
        named = [part.strip() for part in stated.lower().split("|")]
    known = dict(zip(("c2p", "p2c"), TERMS, strict=True))
    if not isinstance(stated, (list, str, type(None))) or len(set(map(str, named))) < len(named):
        raise c.error("pos_att_type", stated, "some of c2p and p2c, or null")
    if any(name not in known for name in named):
        raise c.error("pos_att_type", stated, "some of c2p and p2c, or null")
    return tuple(known[str(name)] for name in named)


def _or_none(c: Config, name: str) -> int | None:
    """A count; ``None`` where it is absent or below 1, which switches it off."""
    value = c.get(name, -1)
    off = value is None or (isinstance(value, int) and not isinstance(value, bool) and value < 1)
    return None if off else c.count(name, 1)
