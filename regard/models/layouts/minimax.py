"""MiniMax-01: seven layers of lightning attention, one of softmax attention, scaled residuals (arXiv:2501.08313)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from regard.coordinates import plain_tensors
from regard.decays import lightning_slopes
from regard.masks import Causal, Mask, Window
from regard.mixers.parts import RMSNorm, Scores
from regard.models.blocks import ScaledResidual
from regard.models.config import Config
from regard.models.layouts.base import Layout, Plan
from regard.models.layouts.llama import ROTARY_BUFFER, Shape, attention_rows, read_shape
from regard.models.layouts.rotary import rotary_from_config
from regard.models.layouts.stacks import NUMBERED, Experts, Layer, Stack, kinds_of, routing_of, silu_of
from regard.models.tables import Derived, FusedQKV, Row, same
from regard.nn import LightningAttention, MultiHeadAttention
from regard.positions import Rotary

__all__ = ["MINIMAX"]

KINDS = ("full_attention", "linear_attention")


@dataclass(frozen=True)
class _Attention:
    shape: Shape
    mask: Mask
    scores: Scores
    rotary: Rotary

    def __call__(self) -> nn.Module:
        s = self.shape
        return MultiHeadAttention(
            s.dim,
            s.heads,
            kv_heads=s.kv_heads,
            head_dim=s.head_dim,
            scores=self.scores,
            mask=self.mask,
            rotary=self.rotary,
        )


@dataclass(frozen=True)
class _Lightning:
    shape: Shape
    number: int

    @property
    def slopes(self) -> Tensor:
        """This layer's decay rates, float64."""
        with plain_tensors():
            return lightning_slopes(self.shape.heads, self.number, self.shape.layers, geometric=True)

    def __call__(self) -> nn.Module:
        s = self.shape
        return LightningAttention(s.dim, s.heads, head_dim=s.head_dim, slopes=self.slopes)

    def rows(self, own: str = "layers.{i}.mixer") -> list[Row]:
        """Its table: [q, k, v] for every head in one matrix."""
        names = {"out_proj": "o_proj", "output_gate": "g_proj", "norm": "norm"}
        rows = same({f"{STORED}.{theirs}.weight": f"{own}.{ours}.weight" for theirs, ours in names.items()})
        whole = FusedQKV(self.shape.heads, self.shape.heads, self.shape.head_dim, groups=self.shape.heads)
        return [*rows, Row(f"{STORED}.qkv_proj.weight", tuple(f"{own}.{name}_proj.weight" for name in "qkv"), whole)]

    def derived(self, block: int) -> list[Derived]:
        """The decays over blocks of tokens that other software keeps beside the weights."""
        name = STORED.replace("{i}", str(self.number))
        heads = self.shape.heads
        shapes = (heads, 1, 1), (heads, block, 1), (heads, block, 1), (1, heads, block, block)
        return [
            Derived(f"{name}.{kind}", shape, partial(self.decays, kind, block))
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
        heads, layers = self.shape.heads, self.shape.layers
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


def _minimax(c: Config, has: Callable[[str], bool]) -> Plan:
    s = read_shape(c, vocab=32000, dim=4096, layers=32, heads=32, kv_heads=8, head_dim=None)
    act, eps = silu_of(c, "the linear layers' projections"), c.number("rms_norm_eps", 1e-5, least=0.0)
    window = None if c.get("sliding_window") is None else c.count("sliding_window", 1)
    attention = _Attention(
        s,
        Causal() if window is None else Window(window),
        Scores(dropout=c.dropout("attention_dropout")),
        _rotary(c, s.head_dim),
    )
    c.only("postnorm", (True, None), "residuals start at the normed tokens")
    c.only("shared_intermediate_size", (0, None), "no expert that every token goes through")
    routing = routing_of(c, "num_local_experts", 8, 2, normalized=True)
    moe = Experts(s.dim, c.count("intermediate_size", 14336), act, routing)
    rows = moe.rows("model.layers.{i}.block_sparse_moe", names=NUMBERED)
    scales = {"full_attention": _scales(c, "full_attn"), "linear_attention": _scales(c, "linear_attn")}
    ff_scales, block = _scales(c, "mlp"), c.count("block_size", 256)
    parts: list[Layer] = []
    derived: list[Derived] = []
    for i, kind in enumerate(kinds_of(c, "layer_types", s.layers, KINDS, lambda i: KINDS[i % 2])):
        wired = partial(ScaledResidual, mixer_scales=scales[kind], ff_scales=ff_scales)
        if kind == "full_attention":
            parts.append(Layer(attention, moe, attention_rows(bias=False) + rows, wired))
        else:
            lightning = _Lightning(s, i)
            parts.append(Layer(lightning, moe, lightning.rows() + rows, wired))
            derived += lightning.derived(block)
    stack = Stack(s.vocab, s.dim, partial(RMSNorm, s.dim, eps), parts)
    tied = c.flag("tie_word_embeddings", False)
    return stack.plan(("input_layernorm", "post_attention_layernorm"), tied=tied, derived=tuple(derived))


MINIMAX = Layout(
    "minimax",
    "MiniMaxForCausalLM",
    _minimax,
    prefix="model.",
    ignored=(ROTARY_BUFFER,),
    synonyms={"num_experts": "num_local_experts"},
    inert=frozenset({"router_jitter_noise", "shared_moe_mode"}),  # noise in training; of a shared expert
)
