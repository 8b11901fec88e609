"""Multi-head latent attention of transformers, as it is and in each of its two forms."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from golden_adapters.case import Case, Paths, Peer
from golden_adapters.layers import keep_of, linears, positions_of, run
from golden_adapters.modules import module_config
from golden_adapters.rotary_config import rotary_of, tables
from regard.masks import Causal
from regard.nn import LatentProjections, LatentSizes, MultiHeadLatentAttention
from regard.positions import Rotary

NAMES = {
    "q_proj": "q_proj",
    "q_a_proj": "q_a_proj",
    "q_a_norm": "q_a_layernorm",
    "q_b_proj": "q_b_proj",
    "kv_a_proj": "kv_a_proj_with_mqa",
    "kv_a_norm": "kv_a_layernorm",
    "kv_b_proj": "kv_b_proj",
    "gate_proj": "g_proj",
    "o_proj": "o_proj",
}


def way(form: str | None, case: Case, peer: Peer, wanted: frozenset[str]) -> dict[str, Tensor]:
    config, x = module_config(case), peer["input.hidden"]
    positions, heads = positions_of(peer, x), int(config["num_attention_heads"])
    state = linears(peer, NAMES)
    sizes = LatentSizes(
        rank=int(config["kv_lora_rank"]),
        nope_dim=int(config["qk_nope_head_dim"]),
        rope_dim=int(config["qk_rope_head_dim"]),
        value_dim=int(config["v_head_dim"]),
        q_rank=config.get("q_lora_rank"),
    )
    case.refuse_unless(config.get("num_key_value_heads") in (None, heads), "num_key_value_heads other than the heads")
    gate = None
    if "gate_proj.weight" in state:
        gate = "head" if state["gate_proj.weight"].shape[0] == heads else "channel"
    rotary = rotary_for(case, config, sizes, positions)
    layer = MultiHeadLatentAttention(
        int(config["hidden_size"]),
        heads,
        sizes,
        projections=LatentProjections(bias="o_proj.bias" in state, gate=gate),
        mask=Causal(),
        rotary=rotary,
    )
    layer.form = form
    layer = layer.to(x.dtype).eval()
    layer.load_state_dict({name: tensor.detach() for name, tensor in state.items()}, strict=True)
    found = run(case, wanted, layer, state, x, keep=keep_of(case, peer), positions=positions)
    return found | tables(case, wanted, rotary, positions, x)


def rotary_for(case: Case, config: dict[str, Any], sizes: LatentSizes, positions: Tensor) -> Rotary | None:
    """The family decides whether anything rotates; DeepSeek-V3 alone may turn half-split pairs."""
    if case.config["config_class"] == "KimiLinearConfig":
        return None
    given = case.config.get("rope_parameters") or config["rope_parameters"]
    limit = int(config.get("max_position_embeddings") or config["model_max_length"])
    plain = rotary_of(case, given, sizes.rope_dim, positions, max_positions=limit, partial=False)
    style = "interleaved" if config.get("rope_interleave", True) else "half"
    return None if plain is None else Rotary(plain.dim, plain.base, style, plain.scaling)


def paths(case: Case) -> Paths | None:
    if "kv_b_proj.weight" not in case.names("weight"):
        return None
    return {form or "cheaper": partial(way, form, case) for form in (None, "expanded", "absorbed")}


ADAPTERS: dict[str, Callable[[Case], Paths | None]] = dict.fromkeys(
    ("deepseek_v2_mla", "deepseek_v3_mla", "kimi_linear_mla_nope"), paths
)
