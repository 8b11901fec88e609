"""One layout a family, as data; ``config.json``'s ``model_type`` picks it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from regard.errors import CheckpointError
from regard.models.layouts.bailing_hybrid import BAILING_HYBRID
from regard.models.layouts.bamba import BAMBA
from regard.models.layouts.base import Layout, Plan
from regard.models.layouts.beit import BEIT
from regard.models.layouts.bert import BERT
from regard.models.layouts.big_bird import BIG_BIRD
from regard.models.layouts.bigbird_pegasus import BIGBIRD_PEGASUS
from regard.models.layouts.bloom import BLOOM
from regard.models.layouts.catalogue import CATALOGUE
from regard.models.layouts.deberta import DEBERTA
from regard.models.layouts.deberta_v2 import DEBERTA_V2
from regard.models.layouts.deepseek_v2 import DEEPSEEK_V2
from regard.models.layouts.deepseek_v3 import DEEPSEEK_V3, KIMI_K2
from regard.models.layouts.detr import DETR_LAYOUT
from regard.models.layouts.falcon import FALCON
from regard.models.layouts.gemma2 import GEMMA2
from regard.models.layouts.gpt2 import GPT2
from regard.models.layouts.gpt_oss import GPT_OSS
from regard.models.layouts.granite import GRANITE
from regard.models.layouts.jamba import JAMBA
from regard.models.layouts.kimi_linear import KIMI_LINEAR
from regard.models.layouts.led import LED
from regard.models.layouts.llama import LLAMA, MISTRAL
from regard.models.layouts.longformer import LONGFORMER
from regard.models.layouts.mamba import FALCON_MAMBA, MAMBA
from regard.models.layouts.mamba2 import MAMBA2
from regard.models.layouts.minimax import MINIMAX
from regard.models.layouts.mixtral import MIXTRAL
from regard.models.layouts.modernbert import MODERNBERT
from regard.models.layouts.mpt import MPT
from regard.models.layouts.olmo2 import OLMO2
from regard.models.layouts.olmo_hybrid import OLMO_HYBRID
from regard.models.layouts.phi3 import PHI3
from regard.models.layouts.qwen2 import QWEN2
from regard.models.layouts.qwen3 import QWEN3
from regard.models.layouts.qwen3_next import QWEN3_NEXT
from regard.models.layouts.recurrent_gemma import RECURRENT_GEMMA
from regard.models.layouts.reformer import REFORMER
from regard.models.layouts.siglip import SIGLIP, SIGLIP_VISION
from regard.models.layouts.swin import SWIN, SWINV2
from regard.models.layouts.t5 import MT5, T5, UMT5
from regard.models.layouts.vit import DEIT, VIT
from regard.models.layouts.whisper import WHISPER

__all__ = ["CATALOGUE", "LAYOUTS", "Layout", "Plan", "layout_of"]

LAYOUTS: dict[str, Layout] = {
    layout.model_type: layout
    for layout in (
        BAILING_HYBRID,
        BAMBA,
        BEIT,
        BERT,
        BIGBIRD_PEGASUS,
        BIG_BIRD,
        BLOOM,
        CATALOGUE,
        DEBERTA,
        DEBERTA_V2,
        DEEPSEEK_V2,
        DEEPSEEK_V3,
        DEIT,
        DETR_LAYOUT,
        FALCON,
        FALCON_MAMBA,
        GEMMA2,
        GPT2,
        GPT_OSS,
        GRANITE,
        JAMBA,
        KIMI_K2,
        KIMI_LINEAR,
        LED,
        LLAMA,
        LONGFORMER,
        MAMBA,
        MAMBA2,
        MINIMAX,
        MISTRAL,
        MIXTRAL,
        MODERNBERT,
        MPT,
        MT5,
        OLMO2,
        OLMO_HYBRID,
        PHI3,
        QWEN2,
        QWEN3,
        QWEN3_NEXT,
        RECURRENT_GEMMA,
        REFORMER,
        SIGLIP,
        SIGLIP_VISION,
        SWIN,
        SWINV2,
        T5,
        UMT5,
        VIT,
        WHISPER,
    )
}
"""Every family that can be loaded, by its ``model_type``."""


def layout_of(config: Mapping[str, Any], source: str) -> Layout:
    """The family that ``model_type`` names; CheckpointError lists those there are."""
    layout = LAYOUTS.get(str(config.get("model_type")))
    if layout is None:
        known = ", ".join(sorted(LAYOUTS))
        raise CheckpointError(f"{source}: model_type: expected one of {known}, got {config.get('model_type')!r}")
    return layout
