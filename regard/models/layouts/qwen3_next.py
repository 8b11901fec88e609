"""Qwen3-Next: three layers of Gated DeltaNet, one of gated attention; experts in every layer (Qwen team 2025)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import nn

from regard.masks import Causal
from regard.mixers.parts import GatedRMSNorm, Projections, RMSNorm, Scores
from regard.models.config import Config
from regard.models.layouts.base import Layout, Plan
from regard.models.layouts.llama import ROTARY_BUFFER, Shape, read_shape
from regard.models.layouts.rotary import rotary_from_config
from regard.models.layouts.stacks import Dense, Experts, Part, Stack, kinds_of, layers_of, routing_of, silu_of
from regard.models.tables import Bundles, Ignored, Row, Squeezed, same
from regard.nn import GatedDeltaNet, MultiHeadAttention
from regard.positions import Rotary

__all__ = ["QWEN3_NEXT"]

KINDS = ("linear_attention", "full_attention")


@dataclass(frozen=True)
class _Delta:
    dim: int
    key_heads: int
    heads: int
    key_dim: int
    value_dim: int
    conv_size: int
    eps: float

    def __call__(self) -> nn.Module:
        return GatedDeltaNet(
            self.dim,
            self.heads,
            key_heads=self.key_heads,
            key_dim=self.key_dim,
            value_dim=self.value_dim,
            conv_size=self.conv_size,
            norm=partial(GatedRMSNorm, eps=self.eps),
        )

    def rows(self, stored: str, own: str = "layers.{i}.mixer") -> list[Row]:
        """Its table: the projections are packed for every key head, [q, k, v.., z..] and [b.., a..]."""
        group = self.heads // self.key_heads
        values = group * self.value_dim
        qkvz = Bundles((self.key_dim, self.key_dim, values, values), self.key_heads)
        names = {
            "A_log": "A_log",
            "dt_bias": "dt_bias",
            "norm.weight": "norm.weight",
            "out_proj.weight": "o_proj.weight",
        }
        return [
            *same({f"{stored}.{theirs}": f"{own}.{ours}" for theirs, ours in names.items()}),
            Row(f"{stored}.in_proj_qkvz.weight", tuple(f"{own}.{name}_proj.weight" for name in "qkvg"), qkvz),
            Row(
                f"{stored}.in_proj_ba.weight",
                tuple(f"{own}.{name}_proj.weight" for name in "ba"),
                Bundles((group, group), self.key_heads),
            ),
            Row(f"{stored}.conv1d.weight", (f"{own}.conv.weight",), Squeezed(1)),
        ]


@dataclass(frozen=True)
class _Attention:
    shape: Shape
    eps: float
    bias: bool
    scores: Scores
    rotary: Rotary

    def __call__(self) -> nn.Module:
        s = self.shape
        norm = partial(RMSNorm, eps=self.eps, unit_offset=True)
        return MultiHeadAttention(
            s.dim,
            s.heads,
            kv_heads=s.kv_heads,
            head_dim=s.head_dim,
            projections=Projections(bias=self.bias, gate=True, norm=norm),
            scores=self.scores,
            mask=Causal(),
            rotary=self.rotary,
        )

    def rows(self, stored: str, own: str = "layers.{i}.mixer") -> list[Row]:
        """Its table: q_proj holds [query, gate] for every head."""
        kinds = ("weight", "bias") if self.bias else ("weight",)
        pair = Bundles((self.shape.head_dim, self.shape.head_dim), self.shape.heads)
        names = [f"{name}_norm.weight" for name in "qk"] + [f"{name}_proj.{k}" for name in "kvo" for k in kinds]
        rows = same({f"{stored}.{name}": f"{own}.{name}" for name in names})
        return rows + [Row(f"{stored}.q_proj.{k}", (f"{own}.q_proj.{k}", f"{own}.gate_proj.{k}"), pair) for k in kinds]


def _delta(c: Config, dim: int, eps: float) -> _Delta:
    key_heads, heads = c.count("linear_num_key_heads", 16), c.count("linear_num_value_heads", 32)
    if heads % key_heads:
        raise c.error("linear_num_value_heads", heads, f"a multiple of linear_num_key_heads={key_heads}")
    sizes = c.count("linear_key_head_dim", 128), c.count("linear_value_head_dim", 128)
    return _Delta(dim, key_heads, heads, *sizes, c.count("linear_conv_kernel_dim", 4), eps)


def _feedforward_kinds(c: Config, layers: int) -> list[str]:
    """Which layers have experts."""
    step, plain = c.count("decoder_sparse_step", 1), c.get("mlp_only_layers") or []
    if not isinstance(plain, list) or any(not isinstance(i, int) for i in plain):
        raise c.error("mlp_only_layers", plain, "a list of layers' numbers")
    if c.get("num_experts") == 0:
        return ["dense"] * layers
    return ["dense" if i in plain or (i + 1) % step else "sparse" for i in range(layers)]


def _qwen3_next(c: Config, has: Callable[[str], bool]) -> Plan:
    s = read_shape(c, vocab=151936, dim=2048, layers=48, heads=16, kv_heads=2, head_dim=256)
    act, eps = silu_of(c), c.number("rms_norm_eps", 1e-6, least=0.0)
    attention = _Attention(
        s,
        eps,
        c.flag("attention_bias", False),
        Scores(dropout=c.dropout("attention_dropout")),
        rotary_from_config(c, s.head_dim, partial=True, fraction=0.25),
    )
    delta = _delta(c, s.dim, eps)
    interval = c.count("full_attention_interval", 4)
    kinds = kinds_of(c, "layer_types", s.layers, KINDS, lambda i: KINDS[(i + 1) % interval == 0])
    mixers: dict[str, Part] = {
        "linear_attention": (delta, delta.rows("model.layers.{i}.linear_attn")),
        "full_attention": (attention, attention.rows("model.layers.{i}.self_attn")),
    }
    mlp = "model.layers.{i}.mlp"
    dense = Dense(s.dim, c.count("intermediate_size", 5632), act)
    others = _feedforward_kinds(c, s.layers)
    sizes = c.count("moe_intermediate_size", 512), c.count("shared_expert_intermediate_size", 512)
    normalized = c.flag("norm_topk_prob", True)
    ffs: dict[str, Part] = {"dense": (dense, dense.rows(mlp))}
    if "sparse" in others:
        routing = routing_of(c, "num_experts", 512, 10, normalized=normalized)
        moe = Experts(s.dim, sizes[0], act, routing, shared=sizes[1], shared_gate=True)
        ffs["sparse"] = moe, moe.rows(mlp, shared="shared_expert")
    norm = partial(RMSNorm, s.dim, eps, unit_offset=True)
    stack = Stack(s.vocab, s.dim, norm, layers_of(mixers, kinds, ffs, others))
    return stack.plan(("input_layernorm", "post_attention_layernorm"), tied=c.flag("tie_word_embeddings", False))


QWEN3_NEXT = Layout(
    "qwen3_next",
    "Qwen3NextForCausalLM",
    _qwen3_next,
    prefix="model.",
    ignored=(ROTARY_BUFFER, Ignored("mtp.*", "a module that predicts several tokens ahead")),
    synonyms={"num_local_experts": "num_experts"},
    inert=frozenset({"num_experts_per_tok"}),
)
