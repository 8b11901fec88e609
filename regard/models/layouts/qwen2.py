"""Qwen2 and Qwen2.5: biases on q, k and v, windows in the upper layers (Qwen team 2024, arXiv:2407.10671)."""

from __future__ import annotations

from regard.mixers.parts import Projections
from regard.models.config import Config
from regard.models.layouts.base import Layout, Plan
from regard.models.layouts.shared.options import qwen_masks, read_eps, read_sizes
from regard.models.layouts.shared.parts import AttentionPart, read_gated, read_scores
from regard.models.layouts.shared.rotary import rotary_from_config
from regard.models.layouts.shared.rows import ROTARY_BUFFER
from regard.models.layouts.shared.stacks import Layer, rms_decoder

__all__ = ["QWEN2"]


def _qwen2(c: Config) -> Plan:
    sizes = read_sizes(c, vocab=151936, dim=4096, layers=32, heads=32, kv_heads=32)
    attention = AttentionPart(
        sizes,
        Projections(bias=True, out_bias=False),
        read_scores(c),
        rotary=rotary_from_config(c, sizes.head_dim),
    )
    ff = read_gated(c, sizes.dim, 22016).part()
    layers = [Layer(attention.under(mask).part(), ff) for mask in qwen_masks(c, sizes.layers)]
    return rms_decoder(c, sizes, read_eps(c), layers)


QWEN2 = Layout("qwen2", "Qwen2ForCausalLM", _qwen2, prefix="model.", ignored=(ROTARY_BUFFER,))
