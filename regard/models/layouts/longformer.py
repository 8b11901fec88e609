"""Longformer: RoBERTa's encoder with windows and global tokens (Beltagy et al. 2020, arXiv:2004.05150).

Which tokens are global is an argument of the call, ``global_tokens``; by default none are.
"""

from __future__ import annotations

from torch import nn

from regard.models.config import Config
from regard.models.layouts.base import Layout, Plan
from regard.models.layouts.shared.bert_like import HEADS, POSITION_IDS, BertLike, encoder_sizes
from regard.models.layouts.shared.options import attention_reaches, from_zero
from regard.models.layouts.shared.words import WordsHead
from regard.models.tables import Ignored
from regard.nn import Longformer

__all__ = ["LONGFORMER"]

WORDS = WordsHead(
    ("LongformerForMaskedLM",),
    dense="lm_head.dense",
    norm="lm_head.layer_norm",
    decoder="lm_head.decoder",
    bias="lm_head.bias",
    table="longformer.embeddings.word_embeddings",
    act="gelu",
)
FAMILY = BertLike("longformer.", vocab=30522, places=512, act="gelu", words=WORDS)
GLOBAL = {"query_global": "q_global_proj", "key_global": "k_global_proj", "value_global": "v_global_proj"}


def _longformer(c: Config) -> Plan:
    sizes = encoder_sizes(c)
    reaches = attention_reaches(c, sizes.layers)
    c.only("attention_mode", ("longformer", "sliding_chunks", None), "an exact window with global tokens")
    c.only("attention_dilation", ([1] * sizes.layers, None), "windows without gaps")
    c.only("autoregressive", (False, None), "the bidirectional encoder")
    c.only("ignore_attention_mask", (False, None), "padding is not read")

    def mixer(i: int) -> nn.Module:
        return Longformer(sizes.dim, sizes.heads, reaches[i], scores=sizes.scores)

    # RoBERTa's table of positions: padding's row, those before it, and then position 0.
    return FAMILY.plan(c, sizes, mixer, more=GLOBAL, first=from_zero(c, "pad_token_id", 1) + 1)


LONGFORMER = Layout(
    "longformer",
    "LongformerModel",
    _longformer,
    prefix="longformer.",
    headless=True,
    ignored=(
        POSITION_IDS,
        Ignored("lm_head.*", f"words where `architectures` names no class with them: {HEADS}"),
        Ignored("classifier.*", HEADS),
        Ignored("qa_outputs.*", HEADS),
    ),
    # Heads of tasks are no part of the encoder; the export changes how the window is cut, not what it holds.
    inert=frozenset({"classifier_dropout", "onnx_export"}),
)
