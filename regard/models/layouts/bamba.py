"""Bamba: Mamba-2 in most layers, attention with partly rotated heads in some (IBM, Princeton, CMU, UIUC 2024)."""

from __future__ import annotations

from regard.mixers.parts import MambaConfig, Projections
from regard.models.blocks import PreNorm
from regard.models.config import Config
from regard.models.layouts.base import Layout, Plan
from regard.models.layouts.shared.mamba import mamba2_part, read_limits
from regard.models.layouts.shared.options import kinds_of, read_eps, read_sizes, silu_only
from regard.models.layouts.shared.parts import AttentionPart, GatedPart, read_scores
from regard.models.layouts.shared.rotary import rotary_from_config
from regard.models.layouts.shared.rows import ROTARY_BUFFER
from regard.models.layouts.shared.stacks import Layer, Names, Wiring, rms_decoder

__all__ = ["BAMBA"]

WIRING = Wiring(PreNorm, {"input_layernorm": "mixer_norm", "pre_ff_layernorm": "ff_norm"})
KINDS = ("mamba", "attention")


def _kinds(c: Config, layers: int) -> list[str]:
    """``layer_types``, or by the list of the layers that have attention; none by default."""
    chosen = c.get("attn_layer_indices") or []
    fine = isinstance(chosen, list) and all(isinstance(i, int) and 0 <= i < layers for i in chosen)
    if not fine or len(set(chosen)) != len(chosen):
        raise c.error("attn_layer_indices", chosen, f"a list of different layers from 0 to {layers - 1}")
    return kinds_of(c, "layer_types", layers, KINDS, lambda i: KINDS[i in chosen])


def _bamba(c: Config) -> Plan:
    sizes = read_sizes(c, vocab=128000, dim=4096, layers=32, heads=32, kv_heads=8)
    act, eps = silu_only(c), read_eps(c, 1e-5)
    heads, head_dim, groups = c.count("mamba_n_heads", 128), c.get("mamba_d_head", 64), c.count("mamba_n_groups", 1)
    width = int(c.amount("mamba_expand", 2) * sizes.dim)
    head_dim = width // heads if head_dim in ("auto", None) else c.count("mamba_d_head", 64)
    if heads * head_dim != width:
        raise c.error("mamba_d_head", head_dim, f"mamba_expand * hidden_size / mamba_n_heads = {width / heads:g}")
    if heads % groups:
        raise c.error("mamba_n_groups", groups, f"a divisor of mamba_n_heads={heads}")
    shell = MambaConfig(
        conv_size=c.count("mamba_d_conv", 4),
        conv_bias=c.flag("mamba_conv_bias", True),
        bias=c.flag("mamba_proj_bias", False),
        eps=eps,
    )
    mamba = mamba2_part(
        "model.layers.{i}.mamba",
        shell,
        sizes.dim,
        heads,
        head_dim=head_dim,
        state_dim=c.count("mamba_d_state", 256),
        groups=groups,
        limits=read_limits(c),
    )
    attention = AttentionPart(
        sizes,
        Projections(bias=c.flag("attention_bias", False)),
        read_scores(c),
        rotary=rotary_from_config(c, sizes.head_dim, partial=True, fraction=0.5),
    )
    mixers = {"mamba": mamba, "attention": attention.part()}
    ff = GatedPart(sizes.dim, c.count("intermediate_size", 14336), act, c.flag("mlp_bias", False))
    layers = [Layer(mixers[kind], ff.part("model.layers.{i}.feed_forward"), WIRING) for kind in _kinds(c, sizes.layers)]
    return rms_decoder(c, sizes, eps, layers, names=Names(norm="model.final_layernorm"))


BAMBA = Layout(
    "bamba",
    "BambaForCausalLM",
    _bamba,
    prefix="model.",
    ignored=(ROTARY_BUFFER,),
    inert=frozenset({"mamba_chunk_size", "num_logits_to_keep", "z_loss_coefficient"}),  # how to compute and train
)
