"""Mamba-2: blocks of a norm and a mixer, no feed-forward part (Dao and Gu 2024, arXiv:2405.21060)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor

from regard.mixers.parts import MambaConfig, RMSNorm
from regard.models.blocks import MixerOnly
from regard.models.config import Config
from regard.models.layouts.base import Layout, Plan
from regard.models.layouts.shared.options import read_eps
from regard.models.layouts.shared.parts import Part
from regard.models.layouts.shared.rows import MIXER, kinds
from regard.models.layouts.shared.stacks import Layer, Names, Stack, Wiring
from regard.models.tables import Row, Squeezed, one_to_one
from regard.nn import Mamba2

__all__ = ["MAMBA2"]

NAMES = Names("backbone.layers.{i}", "backbone.embeddings", "backbone.norm_f")
STORED = "backbone.layers.{i}.mixer"


class _LastNorm(RMSNorm):
    """The norm before the head, which takes the weights' dtype: the stream may be wider."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).to(self.weight.dtype)


def _limits(c: Config) -> tuple[float, float]:
    """The two bounds of the steps; JSON has no infinity, so files write it in one of several ways."""
    given = c.get("time_step_limit")
    if given is None:
        return 0.0, math.inf
    bounds = [_number(entry) for entry in given] if isinstance(given, list) else []
    if len(bounds) != 2 or not 0.0 <= bounds[0] <= bounds[1]:
        raise c.error("time_step_limit", given, "two numbers with 0 <= first <= second")
    return bounds[0], bounds[1]


def _number(entry: Any) -> float:
    if isinstance(entry, dict) and list(entry) == ["__float__"]:
        entry = entry["__float__"]
    if entry in ("Infinity", "inf"):
        return math.inf
    return float(entry) if isinstance(entry, (int, float)) and not isinstance(entry, bool) else math.nan


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
    mixer = partial(
        Mamba2,
        dim,
        heads,
        head_dim=head_dim,
        state_dim=c.count("state_size", 128),
        groups=groups,
        limits=_limits(c),
        shell=shell,
    )
    names = {name: name for name in ("A_log", "D", "dt_bias", "norm.weight")}
    names |= {f"{name}_proj.{k}": f"{name}_proj.{k}" for name in ("in", "out") for k in kinds(shell.bias)}
    names |= {"conv1d.bias": "conv.bias"} if shell.conv_bias else {}
    rows = one_to_one({f"{STORED}.{theirs}": f"{MIXER}.{ours}" for theirs, ours in names.items()})
    rows.append(Row(f"{STORED}.conv1d.weight", (f"{MIXER}.conv.weight",), Squeezed(1)))
    wiring = Wiring(partial(MixerOnly, wide=c.flag("residual_in_fp32", True)), {"norm": "norm"})
    layer = Layer(Part(mixer, rows), None, wiring)
    norm, last = partial(RMSNorm, dim, eps), partial(_LastNorm, dim, eps)
    stack = Stack(vocab, dim, norm, [layer] * layers, NAMES, last_norm=last)
    return stack.plan(tied=c.flag("tie_word_embeddings", False))


def _start(config: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Linear maps start as torch's; where the options say so, a layer's last is divided by the root of the layers."""
    c = Config(config, source)
    scaled = c.flag("rescale_prenorm_residual", False)
    return {"std": c.amount("initializer_range", 0.1), "depth_scaled": scaled, "linear_std": False}


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
    start=_start,
)
