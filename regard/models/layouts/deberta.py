"""DeBERTa: contents and relative places in terms of their own (He et al. 2020, arXiv:2006.03654)."""

from __future__ import annotations

from regard.mixers.disentangled import TERMS
from regard.models.config import Config
from regard.models.layouts.base import Layout, Plan
from regard.models.layouts.shared.bert_like import BertLike, Extent, bert_words, encoder_sizes
from regard.models.layouts.shared.deberta_like import IGNORED, INERT, PREFIX, family, read_places
from regard.models.layouts.shared.rows import BOTH, MIXER, module_rows
from regard.models.tables import FusedQKV, fused_rows, one_to_one

__all__ = ["DEBERTA"]

CLS = "DebertaForMaskedLM"
FAMILY = BertLike(PREFIX, vocab=50265, places=512, act="gelu", words=bert_words(PREFIX, (CLS,)), eps=1e-7, pooler=None)


def _deberta(c: Config) -> Plan:
    sizes = encoder_sizes(c)
    places = read_places(c, buckets=False, places=512, eps=1e-7)
    talking = c.flag("talking_head", False)
    if talking and places.span is None:
        raise c.error("talking_head", True, "false without relative_attention")
    c.only("embedding_size", (sizes.dim, None), "tables as wide as the layers")
    qkv = fused_rows(
        "in_proj",
        f"{MIXER}.*_proj",
        ("weight",),
        FusedQKV(sizes.heads, sizes.heads, sizes.dim // sizes.heads, sizes.heads),
    )
    qkv += one_to_one({"q_bias": f"{MIXER}.q_proj.bias", "v_bias": f"{MIXER}.v_proj.bias"})
    if places.span is not None and TERMS[0] in places.terms:
        qkv += module_rows({"pos_proj": f"{MIXER}.place_k_proj"})
    if places.span is not None and TERMS[1] in places.terms:
        qkv += module_rows({"pos_q_proj": f"{MIXER}.place_q_proj"}, BOTH)
    if talking:
        qkv += module_rows({"head_logits_proj": f"{MIXER}.logits_mix", "head_weights_proj": f"{MIXER}.weights_mix"})
    extent = Extent(c.flag("position_biased_input", True), 0, qkv, places.rows(sizes.layers))
    mixer = places.mixers(sizes, talking=talking, key_bias=False)
    return family(c, FAMILY, CLS).plan(c, sizes, mixer, extent=extent)


DEBERTA = Layout(
    "deberta",
    "DebertaModel",
    _deberta,
    prefix=PREFIX,
    headless=True,
    spellings={"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"},
    ignored=IGNORED,
    inert=INERT,
)
