"""BigBird: BERT's encoder with blocks (Zaheer et al. 2020, arXiv:2007.14062).

Loaded models answer as the released code does in evaluation: blocks are counted over the slots of the call, the first
block stands in place of every random one, and up to (5 + 2 random) blocks everything is read.
"""

from __future__ import annotations

import math

from torch import nn

from regard.models.config import Config
from regard.models.layouts.base import Layout, Plan
from regard.models.layouts.shared.bert_like import HEADS, POSITION_IDS, BertLike, bert_words, encoder_sizes
from regard.models.layouts.shared.blocks import read_block_mixer
from regard.models.tables import Ignored

__all__ = ["BIG_BIRD"]

WORDS = bert_words("bert.", ("BigBirdForMaskedLM", "BigBirdForPreTraining"))
FAMILY = BertLike("bert.", vocab=50358, places=4096, act="gelu_new", words=WORDS, pooler="pooler")


def _big_bird(c: Config) -> Plan:
    sizes = encoder_sizes(c)
    bias = c.flag("use_bias", True)
    mixer = read_block_mixer(c, sizes.dim, sizes.heads, sizes.scores, bias=bias, out_bias=True)

    def one(i: int) -> nn.Module:
        return mixer()

    scale = math.sqrt(sizes.dim) if c.flag("rescale_embeddings", False) else None
    return FAMILY.plan(c, sizes, one, bias=bias, scale=scale)


BIG_BIRD = Layout(
    "big_bird",
    "BigBirdModel",
    _big_bird,
    prefix="bert.",
    headless=True,
    ignored=(
        POSITION_IDS,
        Ignored("cls.*", f"next sentence, and words where `architectures` names no class with them: {HEADS}"),
        Ignored("classifier.*", HEADS),
        Ignored("qa_classifier.*", HEADS),
    ),
    # Heads of tasks are no part of the encoder.
    inert=frozenset({"classifier_dropout"}),
)
