"""Options of the families, against transformers: models made here at random, written by it, read by us, and back."""

import json

import pytest
import torch

from regard.models import Decoder, load

transformers = pytest.importorskip("transformers")

SMALL = {
    "vocab_size": 61,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": [2, 3],
}
LLAMA = {**SMALL, "intermediate_size": 40, "num_key_value_heads": 2}
GEMMA = {**LLAMA, "head_dim": 6, "sliding_window": 4}
OSS = {**GEMMA, "num_local_experts": 5, "num_experts_per_tok": 3}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 8}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
CASES = {
    "llama-biases-tied": ("Llama", {**LLAMA, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "llama-wide-heads-relu2": ("Llama", {**LLAMA, "head_dim": 10, "hidden_act": "relu2", "rms_norm_eps": 1e-2}),
    "llama-mha": ("Llama", {**LLAMA, "num_key_value_heads": None, "hidden_act": "gelu_new"}),
    "llama-llama3": ("Llama", {**LLAMA, "rope_parameters": LLAMA3}),
    "llama-linear": (
        "Llama",
        {**LLAMA, "rope_parameters": {"rope_type": "linear", "rope_theta": 100.0, "factor": 3.0}},
    ),
    "llama-dynamic": (
        "Llama",
        {**LLAMA, "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
    ),
    "llama-yarn": ("Llama", {**LLAMA, "rope_parameters": YARN}),
    "llama-yarn-mscale": (
        "Llama",
        {**LLAMA, "rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.3, "truncate": False}},
    ),
    "mistral-window": ("Mistral", {**LLAMA, "sliding_window": 3, "head_dim": 8}),
    "mistral-full": ("Mistral", {**LLAMA, "sliding_window": None, "hidden_act": "gelu"}),
    "falcon-multi-query": ("Falcon", {**SMALL, "bias": True}),
    "falcon-multi-head": ("Falcon", {**SMALL, "multi_query": False}),
    "falcon-sequential": ("Falcon", {**SMALL, "multi_query": False, "parallel_attn": False, "bias": True}),
    "falcon-sequential-alibi": (
        "Falcon",
        {**SMALL, "multi_query": False, "parallel_attn": False, "alibi": True, "bias": True},
    ),
    "falcon-multi-query-alibi": ("Falcon", {**SMALL, "alibi": True, "activation": "relu"}),
    "falcon-grouped": ("Falcon", {**SMALL, "new_decoder_architecture": True, "num_kv_heads": 3, "bias": True}),
    "falcon-grouped-one-norm": (
        "Falcon",
        {
            **SMALL,
            "new_decoder_architecture": True,
            "num_kv_heads": 2,
            "num_ln_in_parallel_attn": 1,
            "ffn_hidden_size": 30,
        },
    ),
    "falcon-untied": ("Falcon", {**SMALL, "tie_word_embeddings": False}),
    "bloom": ("Bloom", {**SMALL, "hidden_dropout": 0.1}),
    "bloom-post-norm-residual": (
        "Bloom",
        {**SMALL, "apply_residual_connection_post_layernorm": True, "tie_word_embeddings": False},
    ),
    "gemma2": (
        "Gemma2",
        {**GEMMA, "query_pre_attn_scalar": 9, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 1.5},
    ),
    "gemma2-no-caps": (
        "Gemma2",
        {
            **GEMMA,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "tie_word_embeddings": False,
            "attention_bias": True,
        },
    ),
    "gemma2-layer-types": ("Gemma2", {**GEMMA, "layer_types": ["full_attention", "sliding_attention"]}),
    "gpt-oss": ("GptOss", OSS),
    "gpt-oss-plain-rope": (
        "GptOss",
        {
            **OSS,
            "attention_bias": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e3},
            "swiglu_limit": 0.5,
        },
    ),
}


def write(cls, options, folder):
    """A random model of that class with every tensor away from its initial constants, saved by transformers."""
    torch.manual_seed(0)
    options = dict(options)
    config = getattr(transformers, f"{cls}Config")(**options)
    attention = "sdpa" if cls == "Falcon" else "eager"  # its eager path adds ALiBi twice
    model = getattr(transformers, f"{cls}ForCausalLM")._from_config(config, attn_implementation=attention).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.normal_(std=0.5 if "norm" in name or p.dim() == 1 else 0.3)
    model.save_pretrained(folder)
    return model


@pytest.fixture
def ids():
    return torch.randint(4, 61, (2, 13), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
@pytest.mark.parametrize("case", CASES)
def test_logits_and_round_trip(case, ids, tmp_path):
    cls, options = CASES[case]
    peer = write(cls, options, tmp_path / "peer")
    model = load(tmp_path / "peer")
    want = peer(ids).logits
    close = {"rtol": 1e-4, "atol": 2e-5 * float(want.abs().max())}
    torch.testing.assert_close(model(ids), want, **close)
    assert model.end_ids == (2, 3)

    keep = torch.ones_like(ids, dtype=torch.bool)
    keep[1, :4] = False
    torch.testing.assert_close(model(ids, keep=keep)[1:, 4:], peer(ids[1:, 4:]).logits, **close)

    model.save(tmp_path / "ours")
    again = type(peer).from_pretrained(tmp_path / "ours", attn_implementation=peer.config._attn_implementation)
    assert torch.equal(again(ids).logits, want)


@torch.no_grad()
def test_falcon_alibi_rounds_its_products(tmp_path):
    """Slopes that are no powers of two, and more than 256 tokens: slope times place is formed in bfloat16."""
    options = {**SMALL, "hidden_size": 36, "num_attention_heads": 12, "alibi": True, "max_position_embeddings": 512}
    peer = write("Falcon", options, tmp_path)
    ids = torch.randint(4, 61, (1, 300))
    model = load(tmp_path)
    want, cache = peer(ids).logits, model.init_cache(1, 300)
    close = {"rtol": 1e-4, "atol": 2e-5 * float(want.abs().max())}
    torch.testing.assert_close(model(ids), want, **close)
    torch.testing.assert_close(torch.cat([model(part, cache=cache) for part in ids.split(90, 1)], 1), want, **close)


@torch.no_grad()
def test_old_style_options(ids, tmp_path):
    """What files of earlier years say: rope_theta and rope_scaling outside, torch_dtype, keys left out."""
    peer = write("Llama", {**LLAMA, "rope_parameters": {**LLAMA3}}, tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    scaling = config.pop("rope_parameters")
    config["rope_theta"] = scaling.pop("rope_theta")
    config["rope_scaling"] = {"type": scaling.pop("rope_type"), **scaling}
    config["torch_dtype"] = config.pop("dtype")
    for key in ("head_dim", "attention_bias", "mlp_bias", "tie_word_embeddings", "hidden_act"):
        del config[key]
    path.write_text(json.dumps(config))
    torch.testing.assert_close(load(tmp_path)(ids), peer(ids).logits, rtol=1e-4, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("cls", ["BertModel", "BertForMaskedLM", "BertForPreTraining", "BertForSequenceClassification"])
def test_bert_with_and_without_heads(cls, tmp_path):
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=61, hidden_size=24, num_hidden_layers=2, num_attention_heads=3, intermediate_size=40,
        max_position_embeddings=32, type_vocab_size=3, hidden_act="gelu_new", layer_norm_eps=1e-6,
    )  # fmt: skip
    peer = getattr(transformers, cls)._from_config(config, attn_implementation="eager").eval()
    peer.save_pretrained(tmp_path / "peer")
    ids, types = torch.randint(0, 61, (2, 9)), torch.randint(0, 3, (2, 9))
    keep = torch.ones_like(ids, dtype=torch.bool)
    keep[1, 6:] = False
    inner = getattr(peer, "bert", peer)
    want = inner(ids, attention_mask=keep.long(), token_type_ids=types)
    model = load(tmp_path / "peer")
    got = model(ids, keep=keep, types=types)
    torch.testing.assert_close(got[keep], want.last_hidden_state[keep], rtol=1e-4, atol=1e-5)
    if want.pooler_output is not None:
        torch.testing.assert_close(model.pool(got), want.pooler_output, rtol=1e-4, atol=1e-5)
    else:
        with pytest.raises(ValueError, match="pooler"):
            model.pool(got)
    model.save(tmp_path / "ours")
    again = transformers.BertModel.from_pretrained(tmp_path / "ours", attn_implementation="eager")
    assert torch.equal(
        again(ids, attention_mask=keep.long(), token_type_ids=types).last_hidden_state, want.last_hidden_state
    )


@torch.no_grad()
def test_shards_and_a_model_saved_without_its_head(ids, tmp_path):
    peer = write("Bloom", SMALL, tmp_path / "whole")
    want = peer(ids).logits
    peer.save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    assert (tmp_path / "shards" / "model.safetensors.index.json").exists()
    torch.testing.assert_close(load(tmp_path / "shards")(ids), want, rtol=1e-4, atol=1e-4)
    peer.transformer.save_pretrained(tmp_path / "body")
    body = load(tmp_path / "body")
    assert isinstance(body, Decoder)
    torch.testing.assert_close(body(ids), want, rtol=1e-4, atol=1e-4)
