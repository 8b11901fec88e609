"""BigBird-Pegasus: an encoder of blocks and a decoder (Zaheer et al. 2020, arXiv:2007.14062).

The encoder answers as the released code does in evaluation; see `regard.models.layouts.big_bird`.
"""

from __future__ import annotations

import math

from torch import nn

from regard.mixers.parts import Scores
from regard.models.config import Config
from regard.models.layouts.base import Layout, Plan
from regard.models.layouts.shared.bart_like import INERT, SYNONYMS, BartLike, bart_start, stack_sizes
from regard.models.layouts.shared.blocks import read_block_mixer

__all__ = ["BIGBIRD_PEGASUS"]

QKV = {"self.query": "q_proj", "self.key": "k_proj", "self.value": "v_proj", "output": "o_proj"}
FAMILY = BartLike("model.", pre_norm=True, vocab=96103, act="gelu_new", qkv=QKV)


def _bigbird_pegasus(c: Config) -> Plan:
    encoder, decoder = (
        stack_sizes(c, stack, layers=16, places="max_position_embeddings", default_places=4096)
        for stack in ("encoder", "decoder")
    )
    bias = c.flag("use_bias", False)
    scores = Scores(dropout=c.dropout("attention_dropout", 0.0))
    mixer = read_block_mixer(c, encoder.dim, encoder.heads, scores, bias=bias, out_bias=bias)

    def one(i: int) -> nn.Module:
        return mixer()

    scale = math.sqrt(encoder.dim) if c.flag("scale_embedding", True) else None
    return FAMILY.plan(c, encoder, decoder, one, bias=bias, scale=scale)


BIGBIRD_PEGASUS = Layout(
    "bigbird_pegasus",
    "BigBirdPegasusForConditionalGeneration",
    _bigbird_pegasus,
    prefix=FAMILY.prefix,
    ignored=FAMILY.ignored(),
    synonyms=SYNONYMS,
    inert=INERT,
    start=bart_start,
)
