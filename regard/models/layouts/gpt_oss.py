"""gpt-oss: sinks, windows in every other layer, a mixture of clamped experts (OpenAI 2025, arXiv:2508.10925)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from regard.mixers.parts import Projections
from regard.models.config import Config
from regard.models.experts import ClampedSwiGLU, MixtureOfExperts, Router, Routing, StackedExperts
from regard.models.layouts.base import Layout, Plan
from regard.models.layouts.shared.options import layer_masks, read_eps, read_routing, read_sizes, read_window
from regard.models.layouts.shared.parts import AttentionPart, Part, read_scores
from regard.models.layouts.shared.rotary import rotary_from_config
from regard.models.layouts.shared.rows import BOTH, FF, ROTARY_BUFFER, module_rows
from regard.models.layouts.shared.stacks import Layer, rms_decoder
from regard.models.tables import one_to_one

__all__ = ["GPT_OSS"]

YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
EXPERTS = ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias")


@dataclass(frozen=True)
class _ClampedExperts:
    dim: int
    hidden: int
    routing: Routing
    alpha: float
    limit: float

    def __call__(self) -> nn.Module:
        gate = ClampedSwiGLU(self.alpha, self.limit)
        router = Router(self.dim, self.routing, bias=True)
        return MixtureOfExperts(router, StackedExperts(self.dim, self.hidden, self.routing.experts, gate))

    def part(self) -> Part:
        """With its table."""
        stored = "model.layers.{i}.mlp"
        rows = module_rows({f"{stored}.router": f"{FF}.router"}, BOTH)
        return Part(self, rows + one_to_one({f"{stored}.experts.{n}": f"{FF}.experts.{n}" for n in EXPERTS}))


def _gpt_oss(c: Config) -> Plan:
    sizes = read_sizes(c, vocab=201088, dim=2880, layers=36, heads=64, kv_heads=8, head_dim=64)
    c.only("hidden_act", ("silu",), "the experts' gate is fixed")
    if c.get("quantization_config") is not None:
        raise c.error("quantization_config", c.get("quantization_config"), "none: dequantised experts, stacked")
    if c.get("rope_parameters") is None and c.get("rope_scaling") is None:
        c.values["rope_parameters"] = dict(YARN)
    attention = AttentionPart(
        sizes,
        Projections(bias=c.flag("attention_bias", True)),
        read_scores(c, sink=True),
        rotary=rotary_from_config(c, sizes.head_dim, base=150000.0),
    )
    experts = _ClampedExperts(
        sizes.dim,
        c.count("intermediate_size", 2880),
        read_routing(c, "num_local_experts", 128, 4, normalized=True),
        c.number("swiglu_alpha", 1.702),
        c.amount("swiglu_limit", 7.0),
    )
    window = read_window(c, 128)
    masks = layer_masks(c, sizes.layers, window, lambda i: "full_attention" if i % 2 else "sliding_attention")
    layers = [Layer(attention.under(mask).part(), experts.part()) for mask in masks]
    return rms_decoder(c, sizes, read_eps(c, 1e-5), layers)


GPT_OSS = Layout(
    "gpt_oss",
    "GptOssForCausalLM",
    _gpt_oss,
    prefix="model.",
    ignored=(ROTARY_BUFFER,),
    synonyms={"num_experts": "num_local_experts", "experts_per_token": "num_experts_per_tok"},
    inert=frozenset({"initial_context_length"}),
    wide_in_float16=("*norm.weight",),
)
