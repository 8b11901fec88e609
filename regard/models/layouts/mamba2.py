"""Mamba-2: blocks of a norm and a mixer, no feed-forward part (Dao and Gu 2024, arXiv:2405.21060)."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from regard.mixers.parts import MambaConfig, RMSNorm
from regard.models.blocks import MixerOnly
from regard.models.config import Config
from regard.models.layouts.base import Layout, Plan
from regard.models.layouts.shared.mamba import mamba2_part, mamba_start, read_limits
from regard.models.layouts.shared.options import read_eps
from regard.models.layouts.shared.stacks import Layer, Names, Stack, Wiring

__all__ = ["MAMBA2", "NAMES", "LastNorm"]

NAMES = Names("backbone.layers.{i}", "backbone.embeddings", "backbone.norm_f")


class LastNorm(RMSNorm):
    """The norm before the head, which takes the weights' dtype: the stream may be wider."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).to(self.weight.dtype)


def _mamba2(c: Config) -> Plan:
    vocab, dim, layers = c.count("vocab_size", 32768), c.count("hidden_size", 4096), c.count("num_hidden_layers", 64)
    heads, head_dim, expand_by = c.count("num_heads", 128), c.count("head_dim", 64), c.amount("expand", 2)
    if heads * head_dim != int(expand_by * dim):
        raise c.error("head_dim", head_dim, f"expand * hidden_size / num_heads = {expand_by * dim / heads:g}")
    groups = c.count("n_groups", 8)
    if heads % groups:
        raise c.error("n_groups", groups, f"a divisor of num_heads={heads}")
    c.only("hidden_act", ("silu", "swish"), "the convolution's activation")
    c.only("rms_norm", (True,), "the gated norm")
    eps = read_eps(c, 1e-5, "layer_norm_epsilon")
    shell = MambaConfig(
        conv_size=c.count("conv_kernel", 4),
        conv_bias=c.flag("use_conv_bias", True),
        bias=c.flag("use_bias", False),
        eps=eps,
    )
    mixer = mamba2_part(
        "backbone.layers.{i}.mixer",
        shell,
        dim,
        heads,
        head_dim=head_dim,
        state_dim=c.count("state_size", 128),
        groups=groups,
        limits=read_limits(c),
    )
    wiring = Wiring(partial(MixerOnly, wide=c.flag("residual_in_fp32", True)), {"norm": "norm"})
    layer = Layer(mixer, None, wiring)
    norm, last = partial(RMSNorm, dim, eps), partial(LastNorm, dim, eps)
    stack = Stack(vocab, dim, norm, [layer] * layers, NAMES, last_norm=last)
    return stack.plan(tied=c.flag("tie_word_embeddings", False))


MAMBA2 = Layout(
    "mamba2",
    "Mamba2ForCausalLM",
    _mamba2,
    prefix="backbone.",
    spellings={"embedding.weight": "embeddings.weight"},
    # how to compute, and how a fresh model's weights are drawn
    inert=frozenset(
        {
            "chunk_size",
            "rescale_prenorm_residual",
            "time_step_floor",
            "time_step_max",
            "time_step_min",
            "time_step_rank",
        }
    ),
    start=mamba_start,
)
