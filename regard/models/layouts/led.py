"""LED: BART with Longformer's attention in the encoder (Beltagy et al. 2020, arXiv:2004.05150).

Which tokens of the source are global is an argument of the call, ``source_global``; by default none are.
"""

from __future__ import annotations

from torch import nn

from regard.mixers.parts import Scores
from regard.models.config import Config
from regard.models.layouts.base import Layout, Plan
from regard.models.layouts.shared.bart_like import INERT, SYNONYMS, BartLike, bart_start, stack_sizes
from regard.models.layouts.shared.options import attention_reaches
from regard.nn import Longformer

__all__ = ["LED"]

QKV = {
    f"longformer_self_attn.{name}{kind}": f"{name[0]}{kind}_proj"
    for name in ("query", "key", "value")
    for kind in ("", "_global")
}
FAMILY = BartLike("led.", pre_norm=False, vocab=50265, act="gelu", qkv={**QKV, "output": "o_proj"})


def _led(c: Config) -> Plan:
    encoder = stack_sizes(c, "encoder", layers=12, places="max_encoder_position_embeddings", default_places=16384)
    decoder = stack_sizes(c, "decoder", layers=12, places="max_decoder_position_embeddings", default_places=1024)
    reaches = attention_reaches(c, encoder.layers)
    scores = Scores(dropout=c.dropout("attention_dropout", 0.0))

    def mixer(i: int) -> nn.Module:
        return Longformer(encoder.dim, encoder.heads, reaches[i], scores=scores)

    return FAMILY.plan(c, encoder, decoder, mixer)


LED = Layout(
    "led",
    "LEDForConditionalGeneration",
    _led,
    prefix=FAMILY.prefix,
    ignored=FAMILY.ignored(),
    synonyms=SYNONYMS,
    inert=INERT,
    start=bart_start,
)
