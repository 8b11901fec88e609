"""DeepSeek-V2: latent attention, experts of which softmax scores choose (DeepSeek-AI 2024, arXiv:2405.04434)."""

from __future__ import annotations

from regard.models.config import Config
from regard.models.layouts.base import Layout, Plan
from regard.models.layouts.shared.deepseek import TRAINING, deepseek_plan
from regard.models.layouts.shared.latent import FOLLOWING, interleaved, read_latent
from regard.models.layouts.shared.options import read_routing
from regard.models.layouts.shared.rotary import rotary_from_config
from regard.models.layouts.shared.rows import ROTARY_BUFFER

__all__ = ["DEEPSEEK_V2"]

METHODS = {"greedy": False, "group_limited_greedy": True}


def _deepseek_v2(c: Config) -> Plan:
    dim, heads = c.count("hidden_size", 4096), c.count("num_attention_heads", 32)
    rope = c.count("qk_rope_head_dim", 64)
    latent = read_latent(c, dim=dim, heads=heads, q_rank=1536, rotary=interleaved(rotary_from_config(c, rope)))
    c.only("scoring_func", ("softmax", None))
    c.only("norm_topk_prob", (False, None), "this family's experts keep their scores")
    grouped = METHODS[c.name("topk_method", "greedy", METHODS)]
    c.get("n_group"), c.get("topk_group")  # stated even where nothing is grouped
    factor, routing = c.number("routed_scaling_factor", 1.0), None
    if c.get("n_routed_experts", 64) is not None:
        groups = {"n_group": 1, "topk_group": 1} if grouped else None
        routing = read_routing(c, "n_routed_experts", 64, 0, groups=groups, factor=factor)
    sizes = {"vocab": c.count("vocab_size", 102400), "layers": c.count("num_hidden_layers", 32)}
    return deepseek_plan(c, latent, routing, **sizes, dense=0, shared=2, hidden=11008, expert=1407)


DEEPSEEK_V2 = Layout(
    "deepseek_v2",
    "DeepseekV2ForCausalLM",
    _deepseek_v2,
    prefix="model.",
    ignored=(ROTARY_BUFFER,),
    synonyms={"num_experts": "n_routed_experts"},
    inert=FOLLOWING | TRAINING,
)
