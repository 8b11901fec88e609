"""BERT: the bidirectional post-norm encoder (Devlin et al. 2018, arXiv:1810.04805)."""

from __future__ import annotations

from torch import nn

from regard.mixers.parts import Projections
from regard.models.config import Config
from regard.models.layouts.base import Layout, Plan
from regard.models.layouts.shared.bert_like import HEADS, POSITION_IDS, BertLike, bert_words, encoder_sizes
from regard.models.tables import Ignored
from regard.nn import MultiHeadAttention

__all__ = ["BERT"]

WORDS = bert_words("bert.", ("BertForMaskedLM", "BertForPreTraining"))
FAMILY = BertLike("bert.", vocab=30522, places=512, act="gelu", words=WORDS)


def _bert(c: Config) -> Plan:
    sizes = encoder_sizes(c)

    def mixer(i: int) -> nn.Module:
        return MultiHeadAttention(sizes.dim, sizes.heads, projections=Projections(bias=True), scores=sizes.scores)

    return FAMILY.plan(c, sizes, mixer)


BERT = Layout(
    "bert",
    "BertModel",
    _bert,
    prefix="bert.",
    headless=True,
    spellings={"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"},
    ignored=(
        POSITION_IDS,
        Ignored("cls.*", f"next sentence, and words where `architectures` names no class with them: {HEADS}"),
        Ignored("classifier.*", HEADS),
        Ignored("qa_outputs.*", HEADS),
    ),
    # Heads of tasks are no part of the encoder.
    inert=frozenset({"classifier_dropout"}),
)
