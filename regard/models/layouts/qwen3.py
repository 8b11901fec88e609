"""Qwen3: norms over each head's queries and keys (Qwen team 2025, arXiv:2505.09388)."""

from __future__ import annotations

from functools import partial

from regard.mixers.parts import Projections, RMSNorm
from regard.models.config import Config
from regard.models.layouts.base import Layout, Plan
from regard.models.layouts.shared.options import qwen_masks, read_eps, read_sizes
from regard.models.layouts.shared.parts import AttentionPart, read_gated, read_scores
from regard.models.layouts.shared.rotary import rotary_from_config
from regard.models.layouts.shared.rows import ROTARY_BUFFER
from regard.models.layouts.shared.stacks import Layer, rms_decoder

__all__ = ["QWEN3"]


def _qwen3(c: Config) -> Plan:
    sizes = read_sizes(c, vocab=151936, dim=4096, layers=32, heads=32, kv_heads=32, head_dim=128)
    eps = read_eps(c)
    attention = AttentionPart(
        sizes,
        Projections(bias=c.flag("attention_bias", False), norm=partial(RMSNorm, eps=eps)),
        read_scores(c),
        rotary=rotary_from_config(c, sizes.head_dim),
    )
    ff = read_gated(c, sizes.dim, 22016).part()
    layers = [Layer(attention.under(mask).part(), ff) for mask in qwen_masks(c, sizes.layers)]
    return rms_decoder(c, sizes, eps, layers)


QWEN3 = Layout("qwen3", "Qwen3ForCausalLM", _qwen3, prefix="model.", ignored=(ROTARY_BUFFER,))
