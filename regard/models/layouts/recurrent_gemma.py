"""RecurrentGemma: Griffin's recurrent blocks, with local attention in every third layer by default.

De et al. 2024, arXiv:2402.19427; Botev et al. 2024, arXiv:2404.07839.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from regard.masks import Window
from regard.mixers.parts import Projections, RMSNorm, Scores
from regard.models.blocks import Embedding, PreNorm, Softcap
from regard.models.config import Config
from regard.models.decoder import Decoder
from regard.models.feedforward import ACTIVATIONS, GatedMLP, activation
from regard.models.layouts.base import Layout, Plan
from regard.models.layouts.llama import ROTARY_BUFFER, TIED, Shape, read_shape
from regard.models.layouts.rotary import rotary_from_config
from regard.models.tables import Row, Squeezed, expand, same
from regard.nn import GriffinRecurrent, MultiHeadAttention
from regard.positions import Rotary

__all__ = ["RECURRENT_GEMMA"]

KINDS = ("recurrent", "attention")
PROJECTED = {"x": "linear_x", "y": "linear_y", "o": "linear_out"}
KEPT = ("weight", "bias")
GATES = {"recurrence_gate": "recurrent_gate", "input_gate": "input_gate"}


@dataclass(frozen=True)
class _Parts:
    shape: Shape
    width: int
    conv_size: int
    hidden: int
    act: str
    eps: float
    projections: Projections
    scores: Scores
    window: int
    rotary: Rotary

    def norm(self) -> RMSNorm:
        return RMSNorm(self.shape.dim, self.eps, unit_offset=True)

    def layer(self, kind: str, i: int) -> nn.Module:
        mixer = self.attention() if kind == "attention" else self.recurrent()
        ff = GatedMLP(self.shape.dim, self.hidden, activation(self.act), bias=True)
        return PreNorm(mixer, ff, self.norm(), self.norm())

    def recurrent(self) -> GriffinRecurrent:
        s = self.shape
        return GriffinRecurrent(
            s.dim, s.heads, width=self.width, conv_size=self.conv_size, activation=activation(self.act)
        )

    def attention(self) -> MultiHeadAttention:
        s = self.shape
        return MultiHeadAttention(
            s.dim,
            s.heads,
            kv_heads=s.kv_heads,
            head_dim=s.head_dim,
            projections=self.projections,
            scores=self.scores,
            mask=Window(self.window),
            rotary=self.rotary,
        )

    def decoder(self, kinds: list[str], tied: bool, scale: float, cap: float) -> Decoder:
        s = self.shape
        return Decoder(
            Embedding(nn.Embedding(s.vocab, s.dim), scale=scale),
            [partial(self.layer, kind) for kind in kinds],
            self.norm(),
            None if tied else nn.Linear(s.dim, s.vocab, bias=False),
            finish=Softcap(cap),
        )


def _kinds(c: Config, layers: int) -> list[str]:
    """What each layer mixes with: the pattern, repeated over the depth."""
    pattern = c.get("block_types")
    pattern = ["recurrent", "recurrent", "attention"] if pattern is None else pattern
    if not isinstance(pattern, list) or not pattern or any(kind not in KINDS for kind in pattern):
        raise c.error("block_types", pattern, f"a list of {' and '.join(KINDS)}")
    return [pattern[i % len(pattern)] for i in range(layers)]


def _recurrent_rows() -> list[Row]:
    stored, own = "model.layers.{i}.temporal_block", "layers.{i}.mixer"
    names = {f"{stored}.{theirs}.{k}": f"{own}.{ours}_proj.{k}" for ours, theirs in PROJECTED.items() for k in KEPT}
    names |= {f"{stored}.rg_lru.{theirs}_{k}": f"{own}.{ours}.{k}" for ours, theirs in GATES.items() for k in KEPT}
    names |= {f"{stored}.rg_lru.recurrent_param": f"{own}.p", f"{stored}.conv_1d.bias": f"{own}.conv.bias"}
    return [*same(names), Row(f"{stored}.conv_1d.weight", (f"{own}.conv.weight",), Squeezed(1))]


def _attention_rows(bias: bool) -> list[Row]:
    kinds = {"q": bias, "k": bias, "v": bias, "o": True}
    names = [f"{name}_proj.{k}" for name, biased in kinds.items() for k in (KEPT if biased else ("weight",))]
    return same({f"model.layers.{{i}}.temporal_block.{name}": f"layers.{{i}}.mixer.{name}" for name in names})


def _recurrent_gemma(c: Config, has: Callable[[str], bool]) -> Plan:
    s = read_shape(c, vocab=256000, dim=2560, layers=26, heads=10, kv_heads=None, head_dim=None)
    bias, tied = c.flag("attention_bias", False), c.flag("tie_word_embeddings", True)
    width, hidden = c.count("lru_width", s.dim), c.count("intermediate_size", 3 * s.dim)
    if width % s.heads:
        raise c.error("lru_width", width, f"a multiple of num_attention_heads={s.heads}")
    if hidden % 2:
        raise c.error("intermediate_size", hidden, "an even number: gate and up together")
    c.only("embeddings_scale_by_sqrt_dim", (True,), "the only form of this family that other software runs")
    rotary = rotary_from_config(c, s.head_dim, partial=True, fraction=0.5)
    if type(rotary) is not Rotary or rotary.scaling is not None:
        raise c.error("rope_parameters", c.get("rope_parameters") or c.get("rope_scaling"), "rope_type default")
    parts = _Parts(
        shape=s,
        width=width,
        conv_size=c.count("conv1d_width", 4),
        hidden=hidden // 2,
        act=c.name("hidden_activation", "gelu_pytorch_tanh", ACTIVATIONS),
        eps=c.number("rms_norm_eps", 1e-6, least=0.0),
        projections=Projections(bias=bias, out_bias=True),
        scores=Scores(dropout=c.dropout("attention_dropout")),
        window=c.count("attention_window_size", 2048),
        rotary=rotary,
    )
    kinds = _kinds(c, s.layers)
    stored = {"temporal_pre_norm": "mixer_norm", "channel_pre_norm": "ff_norm"}
    shared = {f"model.layers.{{i}}.{name}.weight": f"layers.{{i}}.{own}.weight" for name, own in stored.items()}
    shared |= {
        f"model.layers.{{i}}.mlp_block.{part}_proj.{k}": f"layers.{{i}}.ff.{part}_proj.{k}"
        for part in ("gate", "up", "down")
        for k in KEPT
    }
    per_kind = {"recurrent": _recurrent_rows(), "attention": _attention_rows(bias)}
    rows = same({TIED[0]: "embedding.tokens.weight", "model.final_norm.weight": "norm.weight"})
    rows += same({} if tied else {TIED[1]: "head.weight"})
    rows += [row for i, kind in enumerate(kinds) for row in expand([*same(shared), *per_kind[kind]], i)]
    # the family keeps the embedding's factor in bfloat16, in models of any dtype
    scale = float(torch.tensor(s.dim**0.5, dtype=torch.bfloat16, device="cpu"))
    make = partial(parts.decoder, kinds, tied, scale, c.amount("logits_soft_cap", 30.0))
    return Plan(make, rows, TIED if tied else ())


RECURRENT_GEMMA = Layout(
    "recurrent_gemma",
    "RecurrentGemmaForCausalLM",
    _recurrent_gemma,
    prefix="model.",
    ignored=(ROTARY_BUFFER,),
    synonyms={"_block_types": "block_types", "sliding_window": "attention_window_size"},
    inert=frozenset({"final_w_init_variance_scale", "w_init_variance_scale"}),
)
