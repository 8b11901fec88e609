"""Qwen3-Next: three layers of Gated DeltaNet, one of gated attention; experts in every layer (Qwen team 2025)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from torch import nn

from regard.mixers.parts import GatedRMSNorm, Projections, RMSNorm
from regard.models.config import Config
from regard.models.layouts.base import Layout, Plan
from regard.models.layouts.shared.options import kinds_of, read_eps, read_routing, read_sizes, silu_only
from regard.models.layouts.shared.parts import AttentionPart, ExpertsPart, GatedPart, Part, read_scores
from regard.models.layouts.shared.rotary import rotary_from_config
from regard.models.layouts.shared.rows import MIXER, ROTARY_BUFFER, kinds, module_rows
from regard.models.layouts.shared.stacks import Stack, layers_of
from regard.models.tables import Bundles, Ignored, Row, Squeezed, one_to_one
from regard.nn import GatedDeltaNet

__all__ = ["QWEN3_NEXT"]

KINDS = ("linear_attention", "full_attention")


@dataclass(frozen=True)
class _GatedDeltaPart:
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

    def part(self, stored: str = "model.layers.{i}.linear_attn") -> Part:
        """With its table: the projections are packed for every key head, [q, k, v.., z..] and [b.., a..]."""
        group = self.heads // self.key_heads
        values = group * self.value_dim
        qkvz = Bundles((self.key_dim, self.key_dim, values, values), self.key_heads)
        ba = Bundles((group, group), self.key_heads)
        names = {"norm": "norm", "out_proj": "o_proj"}
        return Part(
            self,
            [
                *one_to_one({f"{stored}.{name}": f"{MIXER}.{name}" for name in ("A_log", "dt_bias")}),
                *module_rows({f"{stored}.{theirs}": f"{MIXER}.{ours}" for theirs, ours in names.items()}),
                Row(f"{stored}.in_proj_qkvz.weight", tuple(f"{MIXER}.{name}_proj.weight" for name in "qkvg"), qkvz),
                Row(f"{stored}.in_proj_ba.weight", tuple(f"{MIXER}.{name}_proj.weight" for name in "ba"), ba),
                Row(f"{stored}.conv1d.weight", (f"{MIXER}.conv.weight",), Squeezed(1)),
            ],
        )


def _gated(attention: AttentionPart, stored: str = "model.layers.{i}.self_attn") -> Part:
    """Attention with an output gate, and its table: q_proj holds [query, gate] for every head."""
    tensors, s = kinds(attention.projections.bias), attention.sizes
    pair = Bundles((s.head_dim, s.head_dim), s.heads)
    rows = module_rows({f"{stored}.{name}_norm": f"{MIXER}.{name}_norm" for name in "qk"})
    rows += module_rows({f"{stored}.{name}_proj": f"{MIXER}.{name}_proj" for name in "kvo"}, tensors)
    both = [Row(f"{stored}.q_proj.{k}", (f"{MIXER}.q_proj.{k}", f"{MIXER}.gate_proj.{k}"), pair) for k in tensors]
    return Part(attention, rows + both)


def _delta(c: Config, dim: int, eps: float) -> _GatedDeltaPart:
    key_heads, heads = c.count("linear_num_key_heads", 16), c.count("linear_num_value_heads", 32)
    if heads % key_heads:
        raise c.error("linear_num_value_heads", heads, f"a multiple of linear_num_key_heads={key_heads}")
    sizes = c.count("linear_key_head_dim", 128), c.count("linear_value_head_dim", 128)
    return _GatedDeltaPart(dim, key_heads, heads, *sizes, c.count("linear_conv_kernel_dim", 4), eps)


def _feedforward_kinds(c: Config, layers: int) -> list[str]:
    """Which layers have experts."""
    step, plain = c.count("decoder_sparse_step", 1), c.get("mlp_only_layers") or []
    if not isinstance(plain, list) or any(not isinstance(i, int) for i in plain):
        raise c.error("mlp_only_layers", plain, "a list of layers' numbers")
    if c.get("num_experts") == 0:
        return ["dense"] * layers
    return ["dense" if i in plain or (i + 1) % step else "sparse" for i in range(layers)]


def _qwen3_next(c: Config) -> Plan:
    sizes = read_sizes(c, vocab=151936, dim=2048, layers=48, heads=16, kv_heads=2, head_dim=256)
    act, eps = silu_only(c), read_eps(c)
    norm = partial(RMSNorm, eps=eps, unit_offset=True)
    attention = AttentionPart(
        sizes,
        Projections(bias=c.flag("attention_bias", False), gate=True, norm=norm),
        read_scores(c),
        rotary=rotary_from_config(c, sizes.head_dim, partial=True, fraction=0.25),
    )
    interval = c.count("full_attention_interval", 4)
    types = kinds_of(c, "layer_types", sizes.layers, KINDS, lambda i: KINDS[(i + 1) % interval == 0])
    mixers = {"linear_attention": _delta(c, sizes.dim, eps).part(), "full_attention": _gated(attention)}
    ffs = {"dense": GatedPart(sizes.dim, c.count("intermediate_size", 5632), act).part()}
    others = _feedforward_kinds(c, sizes.layers)
    hidden, shared = c.count("moe_intermediate_size", 512), c.count("shared_expert_intermediate_size", 512)
    normalized = c.flag("norm_topk_prob", True)
    if "sparse" in others:
        routing = read_routing(c, "num_experts", 512, 10, normalized=normalized)
        experts = ExpertsPart(sizes.dim, hidden, act, routing, shared=shared, shared_gate=True)
        ffs["sparse"] = experts.part(shared="shared_expert")
    stack = Stack(sizes.vocab, sizes.dim, partial(norm, sizes.dim), layers_of(mixers, types, ffs, others))
    return stack.plan(tied=c.flag("tie_word_embeddings", False))


QWEN3_NEXT = Layout(
    "qwen3_next",
    "Qwen3NextForCausalLM",
    _qwen3_next,
    prefix="model.",
    ignored=(ROTARY_BUFFER, Ignored("mtp.*", "a module that predicts several tokens ahead")),
    synonyms={"num_local_experts": "num_experts"},
    inert=frozenset({"num_experts_per_tok"}),
)
