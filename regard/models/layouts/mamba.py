"""Mamba and Falcon Mamba: blocks of a norm and a mixer, no feed-forward part.

Gu and Dao 2023, arXiv:2312.00752; Zuo et al. 2024, arXiv:2410.05355: norms without weights on steps, B and C.
"""

from __future__ import annotations

from functools import partial

from torch import nn

from regard.mixers.parts import MambaConfig, RMSNorm
from regard.models.blocks import MixerOnly
from regard.models.config import Config
from regard.models.layouts.base import Layout, Plan
from regard.models.layouts.mamba2 import NAMES, LastNorm
from regard.models.layouts.shared.mamba import MambaPart, mamba_start, read_rank
from regard.models.layouts.shared.options import read_eps, silu_only
from regard.models.layouts.shared.stacks import Layer, Stack, Wiring

__all__ = ["FALCON_MAMBA", "MAMBA"]

# how to compute, how a fresh model's weights are drawn, and a width that follows from the others
INERT = frozenset(
    {
        "rescale_prenorm_residual",
        "time_step_floor",
        "time_step_init_scheme",
        "time_step_max",
        "time_step_min",
        "time_step_scale",
        "use_associative_scan",
        "use_mambapy",
    }
)


def _mamba(c: Config, *, normed: bool, tied: bool) -> Plan:
    vocab, dim, layers = c.count("vocab_size", 50280), c.count("hidden_size", 768), c.count("num_hidden_layers", 32)
    width = int(c.amount("expand", 2) * dim)
    given = c.get("intermediate_size")
    if given not in (None, width):
        raise c.error("intermediate_size", given, f"expand * hidden_size = {width}, or none")
    silu_only(c)
    eps = read_eps(c, 1e-5, "layer_norm_epsilon")
    shell = MambaConfig(
        conv_size=c.count("conv_kernel", 4),
        conv_bias=c.flag("use_conv_bias", True),
        bias=c.flag("use_bias", False),
    )
    inner = partial(nn.RMSNorm, eps=read_eps(c, 1e-6, "mixer_rms_eps"), elementwise_affine=False) if normed else None
    mixer = MambaPart(dim, width, c.count("state_size", 16), read_rank(c, "time_step_rank", dim), shell, inner)
    wiring = Wiring(partial(MixerOnly, wide=c.flag("residual_in_fp32", True)), {"norm": "norm"})
    layer = Layer(mixer.part("backbone.layers.{i}.mixer"), None, wiring)
    norm, last = partial(RMSNorm, dim, eps), partial(LastNorm, dim, eps)
    stack = Stack(vocab, dim, norm, [layer] * layers, NAMES, last_norm=last)
    return stack.plan(tied=c.flag("tie_word_embeddings", tied))


MAMBA = Layout(
    "mamba",
    "MambaForCausalLM",
    partial(_mamba, normed=False, tied=True),
    prefix="backbone.",
    spellings={"embedding.weight": "embeddings.weight"},
    inert=INERT,
    start=mamba_start,
)
FALCON_MAMBA = Layout(
    "falcon_mamba",
    "FalconMambaForCausalLM",
    partial(_mamba, normed=True, tied=True),
    prefix="backbone.",
    inert=INERT,
    start=mamba_start,
)
