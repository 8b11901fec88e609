"""Phi-3 and Phi-4-mini: fused projections, a part of each head may rotate (Abdin et al. 2024, arXiv:2404.14219)."""

from __future__ import annotations

from functools import partial

from regard.models.blocks import PreNorm
from regard.models.config import Config
from regard.models.layouts.base import Layout, Plan
from regard.models.layouts.shared.options import like_layers, read_eps, read_sizes, read_window, window_mask
from regard.models.layouts.shared.parts import AttentionPart, read_gated, read_scores
from regard.models.layouts.shared.rotary import rotary_from_config
from regard.models.layouts.shared.rows import ROTARY_BUFFER
from regard.models.layouts.shared.stacks import PRE_NORM, Layer, Wiring, rms_decoder

__all__ = ["PHI3"]

KINDS = {"su": "longrope", "yarn": "longrope"}  # what its first files call the scaling


def _phi3(c: Config) -> Plan:
    sizes = read_sizes(c, vocab=32064, dim=3072, layers=32, heads=32)
    c.only("full_attn_mod", (1, None), "the same attention in every layer")
    c.only("interpolate_factor", (1, None))
    c.values.setdefault("original_max_position_embeddings", 4096)
    c.get("original_max_position_embeddings")  # stated even where nothing is scaled
    window = read_window(c)
    like_layers(c, sizes.layers, window)
    attention = AttentionPart(
        sizes,
        scores=read_scores(c),
        mask=window_mask(window),
        rotary=rotary_from_config(c, sizes.head_dim, partial=True, kinds=KINDS),
    )
    ff = read_gated(c, sizes.dim, 8192)
    dropout = c.dropout("resid_pdrop")
    wiring = Wiring(partial(PreNorm, mixer_dropout=dropout, ff_dropout=dropout), PRE_NORM.norms)
    layer = Layer(attention.part(fused="qkv_proj"), ff.part(fused="gate_up_proj"), wiring)
    return rms_decoder(c, sizes, read_eps(c, 1e-5), [layer] * sizes.layers)


PHI3 = Layout(
    "phi3",
    "Phi3ForCausalLM",
    _phi3,
    prefix="model.",
    ignored=(ROTARY_BUFFER,),
    inert=frozenset({"embd_pdrop"}),  # other software reads it nowhere
)
