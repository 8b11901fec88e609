"""Released models of latent attention in every layer."""

from __future__ import annotations

from typing import Any

from regard.models.presets.base import Preset

__all__ = ["PRESETS"]

LATENT = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}


def _yarn(factor: float, mscale: float, fast: float = 32.0) -> dict[str, Any]:
    return {
        "type": "yarn",
        "factor": factor,
        "beta_fast": fast,
        "beta_slow": 1.0,
        "mscale": mscale,
        "mscale_all_dim": mscale,
        "original_max_position_embeddings": 4096,
    }


V2: dict[str, Any] = {
    "model_type": "deepseek_v2",
    "vocab_size": 102400,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "rope_scaling": _yarn(40.0, 0.707),
    "max_position_embeddings": 163840,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "norm_topk_prob": False,
    "scoring_func": "softmax",
    "tie_word_embeddings": False,
} | LATENT

V3: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "q_lora_rank": 1536,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
} | LATENT

SEVERAL = "without the module that predicts a second token ahead (14B more in the file)"

PRESETS = (
    Preset(
        name="deepseek-v2",
        release="DeepSeek-V2",
        source="DeepSeek-AI 2024, arXiv:2405.04434",
        parameters="236B",
        active="21B",
        config=V2
        | {
            "hidden_size": 5120,
            "num_hidden_layers": 60,
            "num_attention_heads": 128,
            "intermediate_size": 12288,
            "moe_intermediate_size": 1536,
            "n_routed_experts": 160,
            "topk_method": "group_limited_greedy",
            "n_group": 8,
            "topk_group": 3,
            "routed_scaling_factor": 16.0,
            "q_lora_rank": 1536,
        },
    ),
    Preset(
        name="deepseek-v2-lite",
        release="DeepSeek-V2-Lite",
        source="DeepSeek-AI 2024, arXiv:2405.04434",
        parameters="15.7B",
        active="2.4B",
        config=V2
        | {
            "hidden_size": 2048,
            "num_hidden_layers": 27,
            "num_attention_heads": 16,
            "intermediate_size": 10944,
            "moe_intermediate_size": 1408,
            "n_routed_experts": 64,
            "topk_method": "greedy",
            "routed_scaling_factor": 1.0,
            "q_lora_rank": None,
        },
    ),
    Preset(
        name="deepseek-v3",
        release="DeepSeek-V3",
        source="DeepSeek-AI 2024, arXiv:2412.19437",
        parameters="671B",
        active="37B",
        note=SEVERAL,
        config=V3
        | {
            "vocab_size": 129280,
            "num_attention_heads": 128,
            "first_k_dense_replace": 3,
            "n_routed_experts": 256,
            "n_group": 8,
            "topk_group": 4,
            "routed_scaling_factor": 2.5,
            "rope_theta": 10000.0,
            "rope_scaling": _yarn(40.0, 1.0),
            "max_position_embeddings": 163840,
        },
    ),
    Preset(
        name="kimi-k2",
        release="Kimi K2",
        source="Kimi team 2025, arXiv:2507.20534",
        parameters="1T",
        active="32B",
        config=V3
        | {
            "model_type": "kimi_k2",
            "vocab_size": 163840,
            "num_attention_heads": 64,
            "first_k_dense_replace": 1,
            "n_routed_experts": 384,
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 2.827,
            "rope_theta": 50000.0,
            "rope_scaling": _yarn(32.0, 1.0, fast=1.0),
            "max_position_embeddings": 131072,
        },
    ),
)
