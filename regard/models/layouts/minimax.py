"""MiniMax-01: seven layers of lightning attention, one of softmax attention, scaled residuals (arXiv:2501.08313)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from regard.coordinates import plain_tensors
from regard.decays import lightning_slopes
from regard.mixers.parts import RMSNorm
from regard.models.blocks import ScaledResidual
from regard.models.config import Config
from regard.models.layouts.base import Layout, Plan
from regard.models.layouts.shared.options import (
    Sizes,
    kinds_of,
    read_eps,
    read_routing,
    read_sizes,
    read_window,
    silu_only,
    window_mask,
)
from regard.models.layouts.shared.parts import NUMBERED, AttentionPart, ExpertsPart, Part, read_scores
from regard.models.layouts.shared.rotary import rotary_from_config
from regard.models.layouts.shared.rows import MIXER, ROTARY_BUFFER, module_rows
from regard.models.layouts.shared.stacks import PRE_NORM, Layer, Stack, Wiring
from regard.models.tables import ComputedTensor, FusedQKV, Row
from regard.nn import LightningAttention
from regard.positions import Rotary

__all__ = ["MINIMAX"]

KINDS = ("full_attention", "linear_attention")


@dataclass(frozen=True)
class _Lightning:
    sizes: Sizes
    number: int

    @property
    def slopes(self) -> Tensor:
        """This layer's decay rates, float64."""
        with plain_tensors():
            return lightning_slopes(self.sizes.heads, self.number, self.sizes.layers, geometric=True)

    def __call__(self) -> nn.Module:
        s = self.sizes
        return LightningAttention(s.dim, s.heads, head_dim=s.head_dim, slopes=self.slopes)

    def part(self) -> Part:
        """With its table: [q, k, v] for every head in one matrix."""
        names = {"out_proj": "o_proj", "output_gate": "g_proj", "norm": "norm"}
        rows = module_rows({f"{STORED}.{theirs}": f"{MIXER}.{ours}" for theirs, ours in names.items()})
        whole = FusedQKV(self.sizes.heads, self.sizes.heads, self.sizes.head_dim, groups=self.sizes.heads)
        fused = Row(f"{STORED}.qkv_proj.weight", tuple(f"{MIXER}.{name}_proj.weight" for name in "qkv"), whole)
        return Part(self, [*rows, fused])

    def computed(self, block: int) -> list[ComputedTensor]:
        """The decays over blocks of tokens that other software keeps beside the weights."""
        name = STORED.replace("{i}", str(self.number))
        heads = self.sizes.heads
        shapes = (heads, 1, 1), (heads, block, 1), (heads, block, 1), (1, heads, block, block)
        return [
            ComputedTensor(f"{name}.{kind}", shape, partial(self.decays, kind, block))
            for kind, shape in zip(DECAYS, shapes, strict=True)
        ]

    def decays(self, kind: str, block: int) -> Tensor:
        """One of `DECAYS`, float32: between a block's start or end and its tokens, and between its tokens."""
        with plain_tensors():
            slope = self._rounded()
            places = (torch.arange(block) + 1)[:, None]
            if kind == "slope_rate":
                return slope
            if kind == "query_decay":
                return torch.exp(-slope * places)
            if kind == "key_decay":
                return torch.exp(-slope * (block - places))
            apart = slope * (places - places.T)[None, None]
            return torch.exp(torch.where(apart >= 0, -apart, -torch.inf))

    def _rounded(self) -> Tensor:
        """The rates (H, 1, 1) in float32 arithmetic, as the tensors of a file were made."""
        heads, layers = self.sizes.heads, self.sizes.layers
        base, depth = 1 / (2 ** (8 / heads)), 1 - self.number / (layers - 1 + 1e-5) + 1e-5
        return (base ** (torch.arange(heads) + 1) * depth)[:, None, None]


STORED = "model.layers.{i}.self_attn"
DECAYS = ("slope_rate", "query_decay", "key_decay", "diagonal_decay")


def _scales(c: Config, part: str) -> tuple[float, float]:
    return c.number(f"{part}_alpha_factor", 1.0), c.number(f"{part}_beta_factor", 1.0)


def _rotary(c: Config, head_dim: int) -> Rotary:
    width = c.count("rotary_dim", head_dim)
    if width > head_dim:
        raise c.error("rotary_dim", width, f"at most head_dim={head_dim}")
    return rotary_from_config(c, width, base=1e6)


def _minimax(c: Config) -> Plan:
    sizes = read_sizes(c, vocab=32000, dim=4096, layers=32, heads=32, kv_heads=8)
    act, eps = silu_only(c, "the linear layers' projections"), read_eps(c, 1e-5)
    mask = window_mask(read_window(c))
    attention = AttentionPart(sizes, scores=read_scores(c), mask=mask, rotary=_rotary(c, sizes.head_dim))
    c.only("postnorm", (True, None), "residuals start at the normed tokens")
    c.only("shared_intermediate_size", (0, None), "no expert that every token goes through")
    routing = read_routing(c, "num_local_experts", 8, 2, normalized=True)
    experts = ExpertsPart(sizes.dim, c.count("intermediate_size", 14336), act, routing)
    ff = experts.part("model.layers.{i}.block_sparse_moe", names=NUMBERED)
    scales = {"full_attention": _scales(c, "full_attn"), "linear_attention": _scales(c, "linear_attn")}
    ff_scales, block = _scales(c, "mlp"), c.count("block_size", 256)
    layers: list[Layer] = []
    computed: list[ComputedTensor] = []
    for i, kind in enumerate(kinds_of(c, "layer_types", sizes.layers, KINDS, lambda i: KINDS[i % 2])):
        lightning = _Lightning(sizes, i)
        mixer = attention.part() if kind == "full_attention" else lightning.part()
        computed += [] if kind == "full_attention" else lightning.computed(block)
        wired = partial(ScaledResidual, mixer_scales=scales[kind], ff_scales=ff_scales)
        layers.append(Layer(mixer, ff, Wiring(wired, PRE_NORM.norms)))
    stack = Stack(sizes.vocab, sizes.dim, partial(RMSNorm, sizes.dim, eps), layers)
    return stack.plan(tied=c.flag("tie_word_embeddings", False), computed=tuple(computed))


MINIMAX = Layout(
    "minimax",
    "MiniMaxForCausalLM",
    _minimax,
    prefix="model.",
    ignored=(ROTARY_BUFFER,),
    synonyms={"num_experts": "num_local_experts"},
    inert=frozenset({"router_jitter_noise", "shared_moe_mode"}),  # noise in training; of a shared expert
)
