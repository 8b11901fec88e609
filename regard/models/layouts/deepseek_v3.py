"""DeepSeek-V3 and Kimi K2: latent attention, experts of which corrected sigmoid scores choose (arXiv:2412.19437)."""

from __future__ import annotations

from dataclasses import replace

from regard.models.config import Config
from regard.models.layouts.base import Layout, Plan
from regard.models.layouts.shared.deepseek import TRAINING, deepseek_plan
from regard.models.layouts.shared.latent import FOLLOWING, interleaved, read_latent
from regard.models.layouts.shared.options import read_routing
from regard.models.layouts.shared.rotary import rotary_from_config
from regard.models.layouts.shared.rows import ROTARY_BUFFER, SEVERAL_AHEAD
from regard.models.tables import Ignored

__all__ = ["DEEPSEEK_V3", "KIMI_K2"]


def _deepseek_v3(c: Config) -> Plan:
    dim, heads = c.count("hidden_size", 7168), c.count("num_attention_heads", 128)
    rotary = rotary_from_config(c, c.count("qk_rope_head_dim", 64))
    rotary = interleaved(rotary) if c.flag("rope_interleave", True) else rotary
    latent = read_latent(c, dim=dim, heads=heads, q_rank=1536, rotary=rotary)
    c.only("scoring_func", ("sigmoid", None))
    c.only("topk_method", ("noaux_tc", None))
    routing = read_routing(
        c,
        "n_routed_experts",
        256,
        8,
        score="sigmoid",
        normalized=c.flag("norm_topk_prob", True),
        factor=c.number("routed_scaling_factor", 2.5),
        corrected=True,
        groups={"n_group": 8, "topk_group": 4},
    )
    sizes = {"vocab": c.count("vocab_size", 129280), "layers": c.count("num_hidden_layers", 61)}
    return deepseek_plan(c, latent, routing, **sizes, dense=3, shared=1, hidden=18432, expert=2048)


DEEPSEEK_V3 = Layout(
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    _deepseek_v3,
    prefix="model.",
    ignored=(ROTARY_BUFFER, Ignored("model.layers.61.*", SEVERAL_AHEAD)),
    synonyms={"num_local_experts": "n_routed_experts", "num_mtp_layers": "num_nextn_predict_layers"},
    inert=FOLLOWING | TRAINING | {"num_nextn_predict_layers"},
)
KIMI_K2 = replace(DEEPSEEK_V3, model_type="kimi_k2")
"""The same under the name that Kimi K2's files give."""
