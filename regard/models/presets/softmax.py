"""Released models of softmax attention alone."""

from __future__ import annotations

from regard.models.presets.base import Preset

__all__ = ["PRESETS"]

PRESETS = (
    Preset(
        name="llama-2-70b",
        release="Llama-2-70B",
        source="Touvron et al. 2023, arXiv:2307.09288",
        parameters="70B",
        config={
            "model_type": "llama",
            "vocab_size": 32000,
            "hidden_size": 8192,
            "num_hidden_layers": 80,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "intermediate_size": 28672,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 4096,
            "tie_word_embeddings": False,
        },
    ),
    Preset(
        name="mistral-7b",
        release="Mistral-7B v0.1",
        source="Jiang et al. 2023, arXiv:2310.06825",
        parameters="7B",
        config={
            "model_type": "mistral",
            "vocab_size": 32000,
            "hidden_size": 4096,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "intermediate_size": 14336,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 32768,
            "sliding_window": 4096,
            "tie_word_embeddings": False,
        },
    ),
    Preset(
        name="falcon-40b",
        release="Falcon-40B",
        source="Almazrouei et al. 2023, arXiv:2311.16867",
        parameters="40B",
        config={
            "model_type": "falcon",
            "vocab_size": 65024,
            "hidden_size": 8192,
            "num_hidden_layers": 60,
            "num_attention_heads": 128,
            "num_kv_heads": 8,
            "new_decoder_architecture": True,
            "parallel_attn": True,
            "multi_query": True,
            "alibi": False,
            "bias": False,
            "layer_norm_epsilon": 1e-5,
        },
    ),
)
