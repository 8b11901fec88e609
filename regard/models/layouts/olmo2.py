"""OLMo 2: norms behind both parts, and over whole queries and keys (OLMo team 2024, arXiv:2501.00656)."""

from __future__ import annotations

from functools import partial

from regard.mixers.parts import Projections, RMSNorm
from regard.models.config import Config
from regard.models.layouts.base import Layout, Plan
from regard.models.layouts.shared.options import like_layers, read_eps, read_sizes
from regard.models.layouts.shared.parts import AttentionPart, read_gated, read_scores
from regard.models.layouts.shared.rotary import rotary_from_config
from regard.models.layouts.shared.rows import ROTARY_BUFFER
from regard.models.layouts.shared.stacks import POST_BRANCH_NORM, Layer, rms_decoder

__all__ = ["OLMO2"]


def _olmo2(c: Config) -> Plan:
    sizes = read_sizes(c, vocab=50304, dim=4096, layers=32, heads=32)
    like_layers(c, sizes.layers)
    eps = read_eps(c, 1e-5)
    norm = partial(RMSNorm, eps=eps)
    attention = AttentionPart(
        sizes,
        Projections(bias=c.flag("attention_bias", False), norm=norm, norm_over="all"),
        read_scores(c),
        rotary=rotary_from_config(c, sizes.head_dim),
    )
    ff = read_gated(c, sizes.dim, 11008)
    return rms_decoder(c, sizes, eps, [Layer(attention.part(), ff.part(), POST_BRANCH_NORM)] * sizes.layers)


OLMO2 = Layout("olmo2", "Olmo2ForCausalLM", _olmo2, prefix="model.", ignored=(ROTARY_BUFFER,))
