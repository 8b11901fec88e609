"""Hybrids with other options than the stored ones, against transformers."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from regard.models import (
    load,
)

# ---- against transformers, with other options ------------------------------------------------------------------------

SMALL = {
    "vocab_size": 61,
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "max_position_embeddings": 64,
    "intermediate_size": 40,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": [2, 3],
}
MLA = {
    **SMALL,
    "num_key_value_heads": 6,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 6,
    "v_head_dim": 7,
    "q_lora_rank": 9,
}
MOE = {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 12, "first_k_dense_replace": 1}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 8}
SHARP = YARN | {"mscale": 0.707, "mscale_all_dim": 0.707, "beta_fast": 32, "beta_slow": 1}
LING = {
    **{name: value for name, value in MLA.items() if name != "q_lora_rank"},
    "head_dim": 4,
    "num_experts": 8,
    "num_experts_per_token": 2,
    "moe_intermediate_size": 12,
    "num_expert_group": 4,
    "topk_group": 2,
    "short_conv_kernel_size": 3,
}
KIMI = {
    **MLA,
    "q_lora_rank": None,
    "num_experts": 8,
    "num_experts_per_token": 2,
    "moe_intermediate_size": 12,
    "linear_head_dim": 5,
    "linear_num_heads": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
QWEN = {
    **SMALL,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 3,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 12,
    "shared_expert_intermediate_size": 10,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
MINIMAX = {
    **SMALL,
    "num_key_value_heads": 2,
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "block_size": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
JAMBA = {
    **SMALL,
    "num_key_value_heads": 2,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "attn_layer_period": 3,
    "attn_layer_offset": 1,
    "mamba_d_state": 5,
    "mamba_dt_rank": 3,
    "use_mamba_kernels": True,
}
MAMBA = {
    **{
        name: SMALL[name] for name in ("vocab_size", "hidden_size", "num_hidden_layers", "pad_token_id", "eos_token_id")
    },
    "state_size": 5,
    "time_step_rank": 3,
}
BAMBA = {
    **SMALL,
    "num_key_value_heads": 2,
    "mamba_n_heads": 6,
    "mamba_d_head": 8,
    "mamba_d_state": 5,
    "mamba_n_groups": 3,
    "mamba_chunk_size": 4,
    "attn_layer_indices": [0, 2],
}
OLMO = {
    **SMALL,
    "num_key_value_heads": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
CASES = {
    "mamba": ("Mamba", MAMBA),
    "mamba-biases-untied": (
        "Mamba",
        {
            **MAMBA,
            "use_bias": True,
            "use_conv_bias": False,
            "expand": 3,
            "conv_kernel": 2,
            "tie_word_embeddings": False,
        },
    ),
    "mamba-auto-narrow": ("Mamba", {**MAMBA, "time_step_rank": "auto", "residual_in_fp32": False, "expand": 1}),
    "falcon_mamba": ("FalconMamba", MAMBA),
    "falcon_mamba-eps": (
        "FalconMamba",
        {**MAMBA, "mixer_rms_eps": 0.1, "layer_norm_epsilon": 0.01, "use_bias": True, "tie_word_embeddings": False},
    ),
    "bamba": ("Bamba", BAMBA),
    "bamba-biases-limits-tied": (
        "Bamba",
        {
            **BAMBA,
            "mamba_proj_bias": True,
            "mamba_conv_bias": False,
            "attention_bias": True,
            "mlp_bias": True,
            "time_step_limit": (0.01, 0.4),
            "tie_word_embeddings": True,
            "mamba_expand": 3,
            "mamba_d_head": "auto",
            "mamba_n_groups": 1,
            "mamba_d_conv": 3,
            "rope_parameters": {"rope_type": "default", "rope_theta": 50.0, "partial_rotary_factor": 1.0},
        },
    ),
    "bamba-last": ("Bamba", {**BAMBA, "attn_layer_indices": [2], "rms_norm_eps": 1e-2}),
    "olmo_hybrid": ("OlmoHybrid", OLMO),
    "olmo_hybrid-groups-plain-tied": (
        "OlmoHybrid",
        {
            **OLMO,
            "linear_allow_neg_eigval": False,
            "linear_conv_kernel_dim": 2,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "rms_norm_eps": 1e-3,
            "rope_parameters": {"rope_type": "default", "rope_theta": None},
            "layer_types": ["full_attention", "full_attention", "linear_attention"],
        },
    ),
    "deepseek_v2": ("DeepseekV2", {**MLA, **MOE}),
    "deepseek_v2-yarn-biases": ("DeepseekV2", {**MLA, **MOE, "rope_parameters": SHARP, "attention_bias": True}),
    "deepseek_v2-groups": (
        "DeepseekV2",
        {
            **MLA,
            **MOE,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.7,
            "n_shared_experts": 2,
        },
    ),
    "deepseek_v2-tied-relu": (
        "DeepseekV2",
        {**MLA, **MOE, "q_lora_rank": None, "tie_word_embeddings": True, "hidden_act": "relu", "rms_norm_eps": 1e-2},
    ),
    "deepseek_v2-dense": ("DeepseekV2", {**MLA, **MOE, "first_k_dense_replace": 3, "mlp_bias": True}),
    "deepseek_v3": ("DeepseekV3", {**MLA, **MOE, "n_group": 4, "topk_group": 2}),
    "deepseek_v3-yarn": ("DeepseekV3", {**MLA, **MOE, "n_group": 2, "topk_group": 1, "rope_parameters": SHARP}),
    "deepseek_v3-plain-yarn": ("DeepseekV3", {**MLA, **MOE, "n_group": 2, "topk_group": 2, "rope_parameters": YARN}),
    "deepseek_v3-half-split": (
        "DeepseekV3",
        {
            **MLA,
            **MOE,
            "n_group": 1,
            "topk_group": 1,
            "rope_interleave": False,
            "norm_topk_prob": False,
            "attention_bias": True,
        },
    ),
    "kimi_linear": ("KimiLinear", KIMI),
    "kimi_linear-compressed-queries": (
        "KimiLinear",
        {**KIMI, "q_lora_rank": 7, "moe_renormalize": False, "num_expert_group": 2, "linear_conv_kernel_dim": 2},
    ),
    "bailing": ("BailingHybrid", {**LING, "layer_types": KIMI["layer_types"]}),
    "bailing-softplus": ("BailingHybrid", {**LING, "kda_safe_gate": False, "layer_group_size": 2}),
    "bailing-bound": ("BailingHybrid", {**LING, "kda_lower_bound": -1.0, "rope_theta": 100.0, "layer_group_size": 3}),
    "qwen3_next": ("Qwen3Next", QWEN),
    "qwen3_next-biases-tied": (
        "Qwen3Next",
        {**QWEN, "attention_bias": True, "tie_word_embeddings": True, "norm_topk_prob": False, "mlp_only_layers": [1]},
    ),
    "qwen3_next-steps": (
        "Qwen3Next",
        {
            **QWEN,
            "decoder_sparse_step": 2,
            "linear_conv_kernel_dim": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 50.0, "partial_rotary_factor": 0.5},
        },
    ),
    "minimax": ("MiniMax", MINIMAX),
    "minimax-scaled-window": (
        "MiniMax",
        {
            **MINIMAX,
            "head_dim": 6,
            "sliding_window": 3,
            "full_attn_alpha_factor": 3.5,
            "linear_attn_alpha_factor": 2.5,
            "mlp_alpha_factor": 1.5,
            "full_attn_beta_factor": 0.5,
            "linear_attn_beta_factor": 0.7,
            "mlp_beta_factor": 0.9,
        },
    ),
    "jamba": ("Jamba", JAMBA),
    "jamba-biases-dense-tied": (
        "Jamba",
        {
            **JAMBA,
            "num_experts": 1,
            "mamba_proj_bias": True,
            "mamba_conv_bias": False,
            "tie_word_embeddings": True,
            "mamba_dt_rank": "auto",
            "mamba_expand": 3,
        },
    ),
}


def write(cls, options, folder):
    """A random model of that class with every tensor away from its initial constants, saved by transformers."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = getattr(transformers, f"{cls}Config")(**options)
    model = getattr(transformers, f"{cls}ForCausalLM")._from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.normal_(std=0.5 if "norm" in name or p.dim() == 1 else 0.3)
        for name, p in model.named_buffers():
            if name.endswith("correction_bias"):
                p.normal_(std=0.3)
    model.save_pretrained(folder)
    return model


@torch.no_grad()
@pytest.mark.parametrize("case", CASES)
def test_logits_and_round_trip(case, tmp_path):
    cls, options = CASES[case]
    peer = write(cls, options, tmp_path / "peer")
    ids = torch.randint(4, 61, (2, 13), generator=torch.Generator().manual_seed(1))
    model = load(tmp_path / "peer")
    want = peer(ids).logits
    close = {"rtol": 1e-4, "atol": 2e-5 * float(want.abs().max())}
    torch.testing.assert_close(model(ids), want, **close)
    assert model.end_ids == (2, 3)

    keep = torch.ones_like(ids, dtype=torch.bool)
    keep[1, :4] = False
    torch.testing.assert_close(model(ids, keep=keep)[1:, 4:], peer(ids[1:, 4:]).logits, **close)

    model.save(tmp_path / "ours")
    written, stored = (load_file(tmp_path / who / "model.safetensors") for who in ("ours", "peer"))
    assert set(written) == set(stored) and all(torch.equal(written[name], stored[name]) for name in stored)
    again = type(peer).from_pretrained(tmp_path / "ours", attn_implementation="eager")
    torch.testing.assert_close(again(ids).logits, want, **close)


@torch.no_grad()
def test_kernels_of_convolutions_that_transformers_cut_in_thirds(tmp_path):
    peer = write("OlmoHybrid", {**OLMO, "linear_value_head_dim": 8}, tmp_path / "peer")
    ids = torch.randint(4, 61, (2, 13), generator=torch.Generator().manual_seed(1))
    model, want = load(tmp_path / "peer"), peer(ids).logits
    close = {"rtol": 1e-4, "atol": 2e-5 * float(want.abs().max())}
    torch.testing.assert_close(model(ids), want, **close)
    model.save(tmp_path / "ours")
    names = [f"model.layers.0.linear_attn.{name}_conv1d.weight" for name in "qkv"]
    written, stored = (load_file(tmp_path / who / "model.safetensors") for who in ("ours", "peer"))
    assert [len(written[name]) for name in names] == [8, 8, 16]
    assert torch.equal(*(torch.cat([one[name] for name in names]) for one in (written, stored)))
    torch.testing.assert_close(load(tmp_path / "ours")(ids), want, **close)
