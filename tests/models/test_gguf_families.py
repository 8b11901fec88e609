"""GGUF files of several families, written by the `gguf` package, against the folders that they were made of."""

import json

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from test_llama_relatives import CASES, FACTORS, LLAMA3, LONG, longrope, write_random

from regard.errors import CheckpointError
from regard.models import load

OWN_CASES = {
    "phi3-window-tied": ("Phi3", {"sliding_window": 4, "tie_word_embeddings": True}),
    "llama": ("Llama", {}),
    "llama-biased-tied": ("Llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "llama-llama3": ("Llama", {"head_dim": 16, **LLAMA3}),
    "llama-every-pair-its-factor": (
        "Llama",
        {**LONG, "rope_parameters": {**longrope(2), "long_factor": [1.0, 1.1], "attention_factor": 1.0}},
    ),
}


def write(case, folder):
    return write_random(folder, *(OWN_CASES | CASES)[case])


# beside the folder's names: the folder's matrices of one expert, and what llama.cpp calls all of them
EXPERTS = {"w1": "ffn_gate_exps", "w2": "ffn_down_exps", "w3": "ffn_up_exps"}
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "block_sparse_moe.gate": "ffn_gate_inp",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
INTERLEAVED = ("llama", "granite", "mixtral")


def stored(folder, config):
    """The folder's tensors as llama.cpp's converter lays them out."""
    family, out, experts = config["model_type"], {}, {}
    for name, t in load_file(folder / "model.safetensors").items():
        whole, _, kind = name.rpartition(".")
        if not whole.startswith("model.layers."):
            ends = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
            out[f"{ends[whole]}.{kind}"] = t
            continue
        _, _, i, own = whole.split(".", 3)
        if ".experts." in own:
            e, matrix = own.split(".")[-2:]
            experts.setdefault(f"blk.{i}.{EXPERTS[matrix]}.weight", {})[int(e)] = t
            continue
        if family == "olmo2" and own == "post_attention_layernorm":
            out[f"blk.{i}.post_attention_norm.{kind}"] = t
            continue
        if family in INTERLEAVED and own in ("self_attn.q_proj", "self_attn.k_proj"):
            heads = config["num_attention_heads" if "q_" in own else "num_key_value_heads"]
            t = t.view(heads, 2, -1, *t.shape[1:]).transpose(1, 2).reshape(t.shape)
        out[f"blk.{i}.{NAMES[own]}.{kind}"] = t
    return out | {name: torch.stack([of[e] for e in sorted(of)]) for name, of in experts.items()}


def converted(folder, path, *, change=lambda writer: None, further=None):
    """The folder as a GGUF file; `change` adds metadata, `further` are more tensors."""
    c = json.loads((folder / "config.json").read_text())
    family = c["model_type"]
    w = gguf.GGUFWriter(path, "llama" if family == "mixtral" else family)
    head_dim = c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"]
    rope = c.get("rope_parameters") or {}
    w.add_context_length(c["max_position_embeddings"])
    w.add_embedding_length(c["hidden_size"])
    w.add_block_count(c["num_hidden_layers"])
    w.add_feed_forward_length(c["intermediate_size"])
    w.add_head_count(c["num_attention_heads"])
    w.add_head_count_kv(c["num_key_value_heads"])
    w.add_key_length(head_dim)
    w.add_value_length(head_dim)
    w.add_layer_norm_rms_eps(c["rms_norm_eps"])
    w.add_rope_freq_base(rope["rope_theta"])
    w.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    w.add_vocab_size(c["vocab_size"])
    w.add_file_type(gguf.LlamaFileType.ALL_F32)
    if family == "granite":
        w.add_embedding_scale(c["embedding_multiplier"])
        w.add_residual_scale(c["residual_multiplier"])
        w.add_logit_scale(c["logits_scaling"])
        w.add_attention_scale(c["attention_multiplier"])
    if family == "mixtral":
        w.add_expert_count(c["num_local_experts"])
        w.add_expert_used_count(c["num_experts_per_tok"])
    if family == "phi3":
        w.add_sliding_window(c["sliding_window"] or 0)
    if rope["rope_type"] == "yarn":
        w.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        w.add_rope_scaling_factor(rope["factor"])
        w.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    change(w)
    for name, t in (stored(folder, c) | (further or {})).items():
        w.add_tensor(name, np.ascontiguousarray(t.float().numpy()))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return path


def same(folder, path, tokens=13):
    """Both as float32 parameters in float64 arithmetic: the file stores float32."""
    ids = torch.randint(4, 61, (2, tokens), generator=torch.Generator().manual_seed(1))
    want, got = load(folder, dtype=torch.float32).double(), load(path).double()
    with torch.no_grad():
        torch.testing.assert_close(got(ids), want(ids), rtol=1e-12, atol=1e-12)
        got.float().save(folder.parent / "again")
        again = load(folder.parent / "again").double()
        torch.testing.assert_close(again(ids), want(ids), rtol=1e-12, atol=1e-12)


PLAIN = [
    *("llama", "llama-biased-tied", "granite", "granite-plain", "phi3", "phi3-window-tied", "olmo2"),
    *("olmo2-wide-heads", "olmo2-biased-tied-multi-head", "qwen2", "qwen2-wide-heads-yarn", "qwen3", "mixtral"),
]


@pytest.mark.parametrize("case", PLAIN)
def test_the_file_gives_the_logits_of_its_folder(case, tmp_path):
    write(case, tmp_path / "folder")
    same(tmp_path / "folder", converted(tmp_path / "folder", tmp_path / "m.gguf"))


def llama3_factors(config):
    """By llama.cpp's converter's rule: wavelengths against the trained context, in Python's floats."""
    rope, out = config["rope_parameters"], []
    low = rope["original_max_position_embeddings"] / rope["low_freq_factor"]
    high = rope["original_max_position_embeddings"] / rope["high_freq_factor"]
    for j in range(0, config["head_dim"], 2):
        length = 2 * np.pi * rope["rope_theta"] ** (j / config["head_dim"])
        if length < high:
            out.append(1.0)
        elif length > low:
            out.append(rope["factor"])
        else:
            smooth = (rope["original_max_position_embeddings"] / length - rope["low_freq_factor"]) / (
                rope["high_freq_factor"] - rope["low_freq_factor"]
            )
            out.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return torch.tensor(out)


def test_factors_of_llama3_are_its_options(tmp_path):
    write("llama-llama3", tmp_path / "folder")
    config = json.loads((tmp_path / "folder" / "config.json").read_text())
    path = converted(tmp_path / "folder", tmp_path / "m.gguf", further={"rope_freqs.weight": llama3_factors(config)})
    same(tmp_path / "folder", path)
    assert load(path).layers[0].mixer.rotary == load(tmp_path / "folder").layers[0].mixer.rotary
    wide = {"head_dim": 128, "rope_parameters": {**config["rope_parameters"], "original_max_position_embeddings": 8192}}
    from regard.models.gguf_rotary import _from_factors

    got = _from_factors(llama3_factors(wide).tolist(), 128, 5e5, 131072)
    assert got["rope_type"] == "llama3" and got["original_max_position_embeddings"] == 8192 and got["factor"] == 8.0


def test_factors_of_no_known_rule_divide_the_frequencies_at_any_length(tmp_path):
    write("llama-every-pair-its-factor", tmp_path / "folder")
    config = json.loads((tmp_path / "folder" / "config.json").read_text())
    factors = config["rope_parameters"]["short_factor"]
    further = {"rope_freqs.weight": torch.tensor(factors)}
    path = converted(tmp_path / "folder", tmp_path / "m.gguf", further=further)
    same(tmp_path / "folder", path, tokens=32)
    mixer = load(path).layers[0].mixer
    plain = load(converted(tmp_path / "folder", tmp_path / "plain.gguf")).layers[0].mixer
    divided = plain.rotary.frequencies() / torch.tensor(factors, dtype=torch.float64)
    torch.testing.assert_close(mixer.rotary.frequencies(), divided, rtol=1e-15, atol=0)
    load(path)(torch.zeros(1, 140, dtype=torch.long))


@pytest.mark.parametrize("case", ["phi3-longrope", "phi3-longrope-part-of-each-head", "phi3-longrope-stated-factor"])
def test_short_and_long_factors_of_phi3(case, tmp_path):
    peer = write(case, tmp_path / "folder")
    rope = peer.config.rope_parameters
    given = rope.get("attention_factor")
    factor = rope.get("factor") or 128 / 32
    amplitude = given or float(np.sqrt(1 + np.log(factor) / np.log(32)))

    def change(w):
        w.add_rope_scaling_orig_ctx_len(32)
        w.add_rope_scaling_attn_factors(amplitude)

    further = {f"rope_factors_{n}.weight": torch.tensor(rope[f"{n}_factor"]) for n in ("short", "long")}
    path = converted(tmp_path / "folder", tmp_path / "m.gguf", change=change, further=further)
    if case == "phi3-longrope-stated-factor":  # its attention factor reaches the file in float32
        ids = torch.randint(4, 61, (2, 13), generator=torch.Generator().manual_seed(1))
        got, want = load(path).double()(ids), load(tmp_path / "folder", dtype=torch.float32).double()(ids)
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
    else:
        same(tmp_path / "folder", path)


def test_what_has_no_place_is_named(tmp_path):
    write("llama", tmp_path / "folder")
    two = torch.ones(2)

    def refuses(text, **how):
        path = tmp_path / "m.gguf"
        path.unlink(missing_ok=True)
        with pytest.raises(CheckpointError, match=text):
            load(converted(tmp_path / "folder", path, **how))

    refuses(
        r"rope_freqs\.weight is \(3,\), expected \(2,\): one factor a pair",
        further={"rope_freqs.weight": torch.ones(3)},
    )
    refuses(
        r"expected rope_freqs\.weight alone, or .*, got rope_factors_long\.weight",
        further={"rope_factors_long.weight": two},
    )
    refuses(
        r"rope\.scaling\.type: expected none beside the factors in rope_freqs\.weight, got 'yarn'",
        further={"rope_freqs.weight": two},
        change=lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.YARN),
    )
    refuses(
        r"rope\.scaling\.attn_factor: expected 1\.0 .*, got 1\.5",
        change=lambda w: w.add_rope_scaling_attn_factors(1.5),
    )
    refuses(r"expert_used_count: expected None or 0", change=lambda w: w.add_expert_used_count(2))
    refuses("missing tensors: .*ffn_down_exps", change=lambda w: (w.add_expert_count(4), w.add_expert_used_count(2)))


def test_granite_without_its_factors_is_plain(tmp_path):
    write("granite", tmp_path / "folder")
    config = json.loads((tmp_path / "folder" / "config.json").read_text())
    config |= dict.fromkeys(FACTORS, 1.0) | {"attention_multiplier": 0.5}  # the sizes of a head are 4
    (tmp_path / "folder" / "config.json").write_text(json.dumps(config | {"attention_multiplier": 0.0}))
    path = converted(tmp_path / "folder", tmp_path / "m.gguf")
    (tmp_path / "folder" / "config.json").write_text(json.dumps(config))
    same(tmp_path / "folder", path)
