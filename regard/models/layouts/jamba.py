"""Jamba: seven layers of Mamba with inner norms, one of attention; experts in every other layer (arXiv:2403.19887)."""

from __future__ import annotations

from functools import partial

from regard.mixers.parts import MambaConfig, RMSNorm
from regard.models.config import Config
from regard.models.layouts.base import Layout, Plan
from regard.models.layouts.shared.mamba import MambaPart, read_rank
from regard.models.layouts.shared.options import from_zero, read_eps, read_routing, read_sizes, silu_only
from regard.models.layouts.shared.parts import AttentionPart, ExpertsPart, GatedPart, Part, read_scores
from regard.models.layouts.shared.stacks import PRE_NORM, Layer, Names, Wiring, rms_decoder

__all__ = ["JAMBA"]

NORMED = {"dt": "dt_layernorm", "B": "b_layernorm", "C": "c_layernorm"}
WIRING = Wiring(PRE_NORM.block, {"input_layernorm": "mixer_norm", "pre_ff_layernorm": "ff_norm"})


def _mamba(c: Config, dim: int, eps: float) -> MambaPart:
    shell = MambaConfig(
        conv_size=c.count("mamba_d_conv", 4),
        conv_bias=c.flag("mamba_conv_bias", True),
        bias=c.flag("mamba_proj_bias", False),
    )
    c.only("mamba_inner_layernorms", (True, None))
    width, state = c.count("mamba_expand", 2) * dim, c.count("mamba_d_state", 16)
    return MambaPart(dim, width, state, read_rank(c, "mamba_dt_rank", dim), shell, partial(RMSNorm, eps=eps), NORMED)


def _every(c: Config, what: str, layers: int, period: int, offset: int, kinds: tuple[Part, Part]) -> list[Part]:
    """One layer of every so many is of the second kind."""
    period, offset = c.count(f"{what}_layer_period", period), from_zero(c, f"{what}_layer_offset", offset)
    if offset >= period:
        raise c.error(f"{what}_layer_offset", offset, f"less than {what}_layer_period={period}")
    return [kinds[i % period == offset] for i in range(layers)]


def _jamba(c: Config) -> Plan:
    sizes = read_sizes(c, vocab=65536, dim=4096, layers=32, heads=32, kv_heads=8)
    act, eps = silu_only(c), read_eps(c)
    attention, mamba = AttentionPart(sizes, scores=read_scores(c)), _mamba(c, sizes.dim, eps)
    stored, hidden = "model.layers.{i}.feed_forward", c.count("intermediate_size", 14336)
    dense = sparse = GatedPart(sizes.dim, hidden, act).part(stored)  # one expert is no choice
    if c.count("num_experts", 16) > 1:
        experts = ExpertsPart(sizes.dim, hidden, act, read_routing(c, "num_experts", 16, 2))
        sparse = experts.part(stored, router="router")
    mixers = _every(c, "attn", sizes.layers, 8, 4, (mamba.part("model.layers.{i}.mamba"), attention.part()))
    ffs = _every(c, "expert", sizes.layers, 2, 1, (dense, sparse))
    layers = [Layer(mixer, ff, WIRING) for mixer, ff in zip(mixers, ffs, strict=True)]
    return rms_decoder(c, sizes, eps, layers, names=Names(norm="model.final_layernorm"))


JAMBA = Layout(
    "jamba",
    "JambaForCausalLM",
    _jamba,
    prefix="model.",
    synonyms={"num_local_experts": "num_experts"},
    # how other software computes
    inert=frozenset(
        {
            "calc_logits_for_entire_prompt",
            "n_ctx",
            "num_experts_per_tok",
            "num_logits_to_keep",
            "use_associative_scan",
            "use_mamba_kernels",
            "use_mambapy",
        }
    ),
)
