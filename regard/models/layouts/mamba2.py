"""Mamba-2: blocks of a norm and a mixer, no feed-forward part (Dao and Gu 2024, arXiv:2405.21060)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from regard.mixers.parts import MambaConfig, RMSNorm
from regard.models.blocks import Embedding, MixerOnly
from regard.models.config import Config
from regard.models.decoder import Decoder
from regard.models.layouts.base import Layout, Plan
from regard.models.tables import Row, Squeezed, expand, same
from regard.nn import Mamba2

__all__ = ["MAMBA2"]

TIED = ("backbone.embeddings.weight", "lm_head.weight")


class _LastNorm(RMSNorm):
    """The norm before the head, which takes the weights' dtype: the stream may be wider."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).to(self.weight.dtype)


@dataclass(frozen=True)
class _Parts:
    dim: int
    eps: float
    wide: bool
    mixer: Callable[[], nn.Module]

    def layer(self, i: int) -> nn.Module:
        return MixerOnly(self.mixer(), RMSNorm(self.dim, self.eps), wide=self.wide)

    def decoder(self, vocab: int, layers: int, tied: bool) -> Decoder:
        head = None if tied else nn.Linear(self.dim, vocab, bias=False)
        table = nn.Embedding(vocab, self.dim)
        return Decoder(Embedding(table), [self.layer] * layers, _LastNorm(self.dim, self.eps), head)


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


def _mamba2(c: Config, has: Callable[[str], bool]) -> Plan:
    vocab, dim, layers = c.count("vocab_size", 32768), c.count("hidden_size", 4096), c.count("num_hidden_layers", 64)
    heads, head_dim, expand_by = c.count("num_heads", 128), c.count("head_dim", 64), c.amount("expand", 2)
    if heads * head_dim != int(expand_by * dim):
        raise c.error("head_dim", head_dim, f"expand * hidden_size / num_heads = {expand_by * dim / heads:g}")
    groups = c.count("n_groups", 8)
    if heads % groups:
        raise c.error("n_groups", groups, f"a divisor of num_heads={heads}")
    c.only("hidden_act", ("silu", "swish"), "the convolution's activation")
    c.only("rms_norm", (True,), "the gated norm")
    eps, tied = c.number("layer_norm_epsilon", 1e-5, least=0.0), c.flag("tie_word_embeddings", False)
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
    kinds = ("weight", "bias") if shell.bias else ("weight",)
    stored = [f"{name}_proj.{kind}" for name in ("in", "out") for kind in kinds]
    stored += ["A_log", "D", "dt_bias", "norm.weight"]
    per_layer = same({f"backbone.layers.{{i}}.mixer.{name}": f"layers.{{i}}.mixer.{name}" for name in stored})
    per_layer += same({"backbone.layers.{i}.norm.weight": "layers.{i}.norm.weight"})
    per_layer.append(Row("backbone.layers.{i}.mixer.conv1d.weight", ("layers.{i}.mixer.conv.weight",), Squeezed(1)))
    if shell.conv_bias:
        per_layer += same({"backbone.layers.{i}.mixer.conv1d.bias": "layers.{i}.mixer.conv.bias"})
    rows = same({TIED[0]: "embedding.tokens.weight", "backbone.norm_f.weight": "norm.weight"})
    rows += same({} if tied else {TIED[1]: "head.weight"}) + [
        row for i in range(layers) for row in expand(per_layer, i)
    ]
    parts = _Parts(dim, eps, c.flag("residual_in_fp32", True), mixer)
    return Plan(partial(parts.decoder, vocab, layers, tied), rows, TIED if tied else ())


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
)
