"""RecurrentGemma: Griffin's recurrent blocks, with local attention in every third layer by default.

De et al. 2024, arXiv:2402.19427; Botev et al. 2024, arXiv:2404.07839.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from regard.masks import Window
from regard.mixers.parts import Projections, RMSNorm
from regard.models.blocks import Embedding, Softcap
from regard.models.config import Config
from regard.models.feedforward import ACTIVATIONS, activation
from regard.models.layouts.base import Layout, Plan
from regard.models.layouts.shared.options import Sizes, read_eps, read_sizes
from regard.models.layouts.shared.parts import AttentionPart, GatedPart, Part, read_scores
from regard.models.layouts.shared.rotary import rotary_from_config
from regard.models.layouts.shared.rows import BOTH, MIXER, ROTARY_BUFFER, module_rows
from regard.models.layouts.shared.stacks import PRE_NORM, Layer, Names, Stack, Wiring
from regard.models.tables import Row, Squeezed, one_to_one
from regard.nn import GriffinRecurrent
from regard.positions import Rotary

__all__ = ["RECURRENT_GEMMA"]

KINDS = ("recurrent", "attention")
PROJECTED = {"x": "linear_x", "y": "linear_y", "o": "linear_out"}
GATES = {"recurrence_gate": "recurrent_gate", "input_gate": "input_gate"}
WIRING = Wiring(PRE_NORM.block, {"temporal_pre_norm": "mixer_norm", "channel_pre_norm": "ff_norm"})
STORED = "model.layers.{i}.temporal_block"


@dataclass(frozen=True)
class _Recurrent:
    sizes: Sizes
    width: int
    conv_size: int
    act: str

    def __call__(self) -> nn.Module:
        return GriffinRecurrent(
            self.sizes.dim,
            self.sizes.heads,
            width=self.width,
            conv_size=self.conv_size,
            activation=activation(self.act),
        )

    def part(self) -> Part:
        """With its table."""
        rows = module_rows({f"{STORED}.{theirs}": f"{MIXER}.{ours}_proj" for ours, theirs in PROJECTED.items()}, BOTH)
        names = {f"rg_lru.{theirs}_{k}": f"{ours}.{k}" for ours, theirs in GATES.items() for k in BOTH}
        names |= {"rg_lru.recurrent_param": "p", "conv_1d.bias": "conv.bias"}
        rows += one_to_one({f"{STORED}.{theirs}": f"{MIXER}.{ours}" for theirs, ours in names.items()})
        return Part(self, [*rows, Row(f"{STORED}.conv_1d.weight", (f"{MIXER}.conv.weight",), Squeezed(1))])


def _kinds(c: Config, layers: int) -> list[str]:
    """What each layer mixes with: the pattern, repeated over the depth."""
    pattern = c.get("block_types")
    pattern = ["recurrent", "recurrent", "attention"] if pattern is None else pattern
    if not isinstance(pattern, list) or not pattern or any(kind not in KINDS for kind in pattern):
        raise c.error("block_types", pattern, f"a list of {' and '.join(KINDS)}")
    return [pattern[i % len(pattern)] for i in range(layers)]


def _recurrent_gemma(c: Config) -> Plan:
    sizes = read_sizes(c, vocab=256000, dim=2560, layers=26, heads=10)
    width, hidden = c.count("lru_width", sizes.dim), c.count("intermediate_size", 3 * sizes.dim)
    if width % sizes.heads:
        raise c.error("lru_width", width, f"a multiple of num_attention_heads={sizes.heads}")
    if hidden % 2:
        raise c.error("intermediate_size", hidden, "an even number: gate and up together")
    c.only("embeddings_scale_by_sqrt_dim", (True,), "the only form of this family that other software runs")
    rotary = rotary_from_config(c, sizes.head_dim, partial=True, fraction=0.5)
    if type(rotary) is not Rotary or rotary.scaling is not None:
        raise c.error("rope_parameters", c.get("rope_parameters") or c.get("rope_scaling"), "rope_type default")
    act = c.name("hidden_activation", "gelu_pytorch_tanh", ACTIVATIONS)
    attention = AttentionPart(
        sizes,
        Projections(bias=c.flag("attention_bias", False), out_bias=True),
        read_scores(c),
        Window(c.count("attention_window_size", 2048)),
        rotary=rotary,
    )
    recurrent = _Recurrent(sizes, width, c.count("conv1d_width", 4), act)
    mixers = {"recurrent": recurrent.part(), "attention": attention.part(STORED)}
    ff = GatedPart(sizes.dim, hidden // 2, act, bias=True).part("model.layers.{i}.mlp_block")
    # the family keeps the embedding's factor in bfloat16, in models of any dtype
    scale = float(torch.tensor(sizes.dim**0.5, dtype=torch.bfloat16, device="cpu"))
    stack = Stack(
        sizes.vocab,
        sizes.dim,
        partial(RMSNorm, sizes.dim, read_eps(c), unit_offset=True),
        [Layer(mixers[kind], ff, WIRING) for kind in _kinds(c, sizes.layers)],
        Names(norm="model.final_norm"),
        embedding=partial(Embedding, scale=scale),
        finish=partial(Softcap, c.amount("logits_soft_cap", 30.0)),
    )
    return stack.plan(tied=c.flag("tie_word_embeddings", True))


RECURRENT_GEMMA = Layout(
    "recurrent_gemma",
    "RecurrentGemmaForCausalLM",
    _recurrent_gemma,
    prefix="model.",
    ignored=(ROTARY_BUFFER,),
    synonyms={"_block_types": "block_types", "sliding_window": "attention_window_size"},
    inert=frozenset({"final_w_init_variance_scale", "w_init_variance_scale"}),
)
