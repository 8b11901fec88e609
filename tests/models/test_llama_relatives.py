"""Qwen2, Qwen3, Phi-3, OLMo 2, Granite and Mixtral against transformers' own models, random and in float64."""

import contextlib
import json

import pytest
import torch

import regard
from regard.errors import CheckpointError
from regard.models import generate, load
from regard.models.presets import skeleton

transformers = pytest.importorskip("transformers")

CLOSE = {"rtol": 1e-10, "atol": 1e-10}
SMALL = {
    "vocab_size": 61,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WINDOW = {"use_sliding_window": True, "sliding_window": 4}
MIXED = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
TIED, WIDE, BIASED = {"tie_word_embeddings": True}, {"head_dim": 10}, {"attention_bias": True}
MULTI_HEAD = {"num_key_value_heads": None}
LINEAR = {"rope_parameters": {"rope_type": "linear", "rope_theta": 100.0, "factor": 3.0}}
DYNAMIC = {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}
YARN = {
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 4.0,
        "original_max_position_embeddings": 8,
    }
}
LLAMA3 = {
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    }
}


def longrope(pairs, **further):
    factors = {"short_factor": [1.0 + 0.1 * i for i in range(pairs)], "long_factor": [2.0 + i for i in range(pairs)]}
    return {"rope_type": "longrope", "rope_theta": 1e4, **factors, **further}


LONG = {"original_max_position_embeddings": 32, "max_position_embeddings": 128}
FACTORS = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.4,
    "residual_multiplier": 0.22,
    "logits_scaling": 7.0,
}
EXPERTS = {"num_local_experts": 5, "num_experts_per_tok": 3}
CASES = {
    "qwen2": ("Qwen2", {}),
    "qwen2-tied-windows-in-upper-layers": ("Qwen2", {**TIED, **WINDOW, "max_window_layers": 1}),
    "qwen2-windows-in-all-layers": ("Qwen2", {**WINDOW, "max_window_layers": 0, "rms_norm_eps": 1e-2}),
    "qwen2-windows-not-in-use": ("Qwen2", {"sliding_window": 4, "max_window_layers": 0, "use_sliding_window": False}),
    "qwen2-mixed-layers": ("Qwen2", {**WINDOW, **MIXED, **MULTI_HEAD, "hidden_act": "gelu"}),
    "qwen2-wide-heads-yarn": ("Qwen2", {**WIDE, **YARN}),
    "qwen2-linear": ("Qwen2", LINEAR),
    "qwen3": ("Qwen3", WIDE),
    "qwen3-biased-tied-mixed-layers": ("Qwen3", {**WIDE, **BIASED, **TIED, **WINDOW, **MIXED}),
    "qwen3-windows-in-upper-layers-llama3": ("Qwen3", {"head_dim": 8, **WINDOW, "max_window_layers": 2, **LLAMA3}),
    "qwen3-multi-head-dynamic": ("Qwen3", {**WIDE, **MULTI_HEAD, **DYNAMIC}),
    "phi3": ("Phi3", MULTI_HEAD),
    "phi3-grouped-window-tied": ("Phi3", {"sliding_window": 4, **TIED, "hidden_act": "relu2"}),
    "phi3-longrope": ("Phi3", {**LONG, "rope_parameters": longrope(2)}),
    "phi3-longrope-part-of-each-head": (
        "Phi3",
        {**LONG, "hidden_size": 48, "rope_parameters": longrope(2, partial_rotary_factor=0.5, attention_factor=1.3)},
    ),
    "phi3-longrope-stated-factor": ("Phi3", {**LONG, "rope_parameters": longrope(2, factor=5.0)}),
    "olmo2": ("Olmo2", {}),
    "olmo2-biased-tied-multi-head": ("Olmo2", {**BIASED, **TIED, **MULTI_HEAD, "rms_norm_eps": 1e-2}),
    "olmo2-yarn": ("Olmo2", YARN),
    "olmo2-wide-heads": ("Olmo2", WIDE),
    "granite": ("Granite", FACTORS),
    "granite-plain": ("Granite", {}),
    "granite-biased-tied-multi-head-yarn": (
        "Granite",
        {**FACTORS, **BIASED, **TIED, **MULTI_HEAD, **YARN, "mlp_bias": True},
    ),
    "mixtral": ("Mixtral", EXPERTS),
    "mixtral-window-wide-heads-tied": ("Mixtral", {**EXPERTS, **WIDE, **TIED, "sliding_window": 4}),
    "mixtral-one-expert-each-linear": (
        "Mixtral",
        {**EXPERTS, "num_experts_per_tok": 1, **LINEAR, "num_key_value_heads": 6},
    ),
}


@contextlib.contextmanager
def no_float32():
    """What transformers computes in float32 in models of any dtype (norms, angles, routers) it computes in float64."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "float32", torch.float64)
        patch.setattr(torch, "float", torch.float64)
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        default = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            yield
        finally:
            torch.set_default_dtype(default)


def write(case, folder):
    """A random model with every tensor away from its initial constants, saved by transformers."""
    return write_random(folder, *CASES[case])


def write_random(folder, cls, options):
    torch.manual_seed(0)
    config = getattr(transformers, f"{cls}Config")(**{**SMALL, **options})
    with no_float32():
        model = (
            getattr(transformers, f"{cls}ForCausalLM")
            ._from_config(config, attn_implementation="sdpa", experts_implementation="eager")
            .eval()
        )
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.normal_(std=0.5 if "norm" in name or p.dim() == 1 else 0.3)
    model.save_pretrained(folder)
    return model


def logits(peer, ids):
    with no_float32(), torch.no_grad():
        return peer(ids).logits


@pytest.fixture
def ids():
    return torch.randint(4, 61, (2, 13), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
@pytest.mark.parametrize("case", CASES)
def test_logits_padding_pieces_and_round_trip(case, ids, tmp_path):
    peer = write(case, tmp_path / "peer")
    model = load(tmp_path / "peer", dtype=torch.float64)
    want = logits(peer, ids)
    assert want.dtype == torch.float64
    torch.testing.assert_close(model(ids), want, **CLOSE)

    keep = torch.ones_like(ids, dtype=torch.bool)
    keep[1, :4] = False
    torch.testing.assert_close(model(ids, keep=keep)[1:, 4:], logits(peer, ids[1:, 4:]), **CLOSE)

    cache = model.init_cache(2, ids.shape[1])
    pieces = [model(part, cache=cache) for part in ids.split([5, 1, 1, 6], dim=1)]
    torch.testing.assert_close(torch.cat(pieces, 1), want, **CLOSE)

    model.save(tmp_path / "ours")
    again = type(peer).from_pretrained(tmp_path / "ours", attn_implementation="sdpa")
    ours, theirs = again.state_dict(), peer.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@torch.no_grad()
@pytest.mark.parametrize("case", ["qwen2-mixed-layers", "qwen3", "phi3-longrope", "olmo2", "granite", "mixtral"])
def test_greedy_texts_are_those_of_whole_runs(case, ids, tmp_path):
    peer = write(case, tmp_path)
    want = ids[:1]
    for _ in range(6):
        want = torch.cat([want, logits(peer, want)[:, -1:].argmax(-1)], 1)
    model = load(tmp_path, dtype=torch.float64)
    got = generate(model, ids[0].tolist(), max_tokens=6, end_ids=())
    assert got[0].ids == want[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize("cls", ["Qwen2", "Qwen3", "Phi3", "Olmo2", "Granite", "Mixtral"])
def test_options_that_are_absent_mean_what_the_family_says(cls):
    config = getattr(transformers, f"{cls}Config")(num_hidden_layers=1)
    with torch.device("meta"):
        peer = getattr(transformers, f"{cls}ForCausalLM")(config)
    model = skeleton({"model_type": config.model_type, "num_hidden_layers": 1}, "bare")
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in peer.parameters())
    mixer, theirs = model.layers[0].mixer, config.rope_parameters
    assert (mixer.heads, mixer.kv_heads) == (config.num_attention_heads, config.num_key_value_heads)
    assert mixer.rotary.base == theirs["rope_theta"]
    assert mixer.rotary.scaling is None
    assert model.norm.eps == config.rms_norm_eps
    assert isinstance(mixer.mask, regard.masks.Causal)


REFUSED = [
    ("qwen2", {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}, "layer_types: expected"),
    ("qwen2", {"layer_types": ["full_attention"]}, "layer_types: expected"),
    ("qwen2", {"layer_types": ["full_attention", "chunked_attention", "full_attention"]}, "layer_types: expected"),
    ("qwen2", {"max_window_layers": -1}, "max_window_layers: expected.*, got -1"),
    ("qwen2", {"attention_bias": True}, "attention_bias=True"),
    ("qwen3", {"use_sliding_window": "yes"}, "use_sliding_window: expected.*, got 'yes'"),
    ("qwen3", {"mlp_bias": True}, "mlp_bias=True"),
    ("phi3-longrope", {"rope_parameters": longrope(3)}, "short_factor: expected a list of 2"),
    (
        "phi3-longrope",
        {"rope_parameters": longrope(2, long_factor=[1.0, -1.0])},
        "long_factor: expected a list of 2",
    ),
    ("phi3-longrope", {"rope_parameters": longrope(2, short_mscale=1.1)}, "short_mscale=1.1"),
    ("phi3", {"rope_parameters": {"rope_type": "su", "rope_theta": 1e4}}, "short_factor: expected.*, got None"),
    ("phi3", {"interpolate_factor": 2}, "interpolate_factor: expected.*, got 2"),
    ("phi3", {"attention_bias": True}, "attention_bias=True"),
    ("olmo2", {"clip_qkv": 8.0}, "clip_qkv=8.0"),
    ("olmo2", {"sliding_window": 4}, "sliding_window=4"),
    ("granite", {"residual_multiplier": 0}, "residual_multiplier: expected.*, got 0"),
    ("granite", {"logits_scaling": "x"}, "logits_scaling: expected.*, got 'x'"),
    ("granite", {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}, "layer_types: expected"),
    ("mixtral-window-wide-heads-tied", {"layer_types": ["full_attention"] * 3}, "layer_types: expected"),
    ("granite", {"sliding_window": 4}, "sliding_window=4"),
    ("mixtral", {"num_experts_per_tok": 6}, "num_experts_per_tok: expected.*, got 6"),
    ("mixtral", {"attention_bias": True}, "attention_bias=True"),
]


HARMLESS = {
    "_name_or_path": "someone/something",
    "attn_implementation": "flash_attention_2",
    "auto_map": {"AutoModelForCausalLM": "modeling.Model"},
    "base_model_tp_plan": {"layers.*": "colwise"},
    "layer_types": ["full_attention"] * 3,
    "pretraining_tp": 1,
    "quantization_config": None,
    "torch_dtype": "float64",
    "transformers_version": "4.45.0",
    "unsloth_fixed": True,
    "unsloth_version": "2025.3.1",
    "use_cache": False,
    "use_flash_attn": True,
}


@torch.no_grad()
@pytest.mark.parametrize("case", ["qwen2", "qwen3", "phi3", "olmo2", "granite", "mixtral"])
def test_options_that_change_nothing_are_read(case, ids, tmp_path):
    want = logits(write(case, tmp_path), ids)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | HARMLESS))
    torch.testing.assert_close(load(tmp_path, dtype=torch.float64)(ids), want, **CLOSE)


@torch.no_grad()
def test_yarn_says_that_the_weights_were_trained_with_it(ids, tmp_path):
    want = logits(write("olmo2-yarn", tmp_path), ids)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    config["rope_parameters"]["finetuned"] = True
    path.write_text(json.dumps(config))
    torch.testing.assert_close(load(tmp_path, dtype=torch.float64)(ids), want, **CLOSE)


@pytest.mark.parametrize(("case", "options", "text"), REFUSED)
def test_options_without_a_place_are_named(case, options, text, tmp_path):
    write(case, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for name in options:
        config.pop(name, None)
    (tmp_path / "config.json").write_text(json.dumps(config | options))
    with pytest.raises(CheckpointError, match=f"config.json.*{text}"):
        load(tmp_path)


LONG_CASES = ["phi3-longrope", "phi3-longrope-part-of-each-head", "phi3-longrope-stated-factor"]


@torch.no_grad()
@pytest.mark.parametrize("case", LONG_CASES)
def test_longrope_turns_a_longer_text_by_its_long_factors(case, tmp_path):
    peer = write(case, tmp_path)
    model = load(tmp_path, dtype=torch.float64)
    ids = torch.randint(4, 61, (2, 70), generator=torch.Generator().manual_seed(2))
    for tokens in (32, 33, 70, 32):
        torch.testing.assert_close(model(ids[:, :tokens]), logits(peer, ids[:, :tokens]), **CLOSE)
    cache = model.init_cache(2, 71)
    torch.testing.assert_close(model(ids, cache=cache), logits(peer, ids), **CLOSE)


@torch.no_grad()
def test_longrope_refuses_texts_that_it_would_turn_by_both_sets(tmp_path):
    """Where other software would mix them: a text that grows past the trained context in a cache, or is padded."""
    write("phi3-longrope", tmp_path)
    model = load(tmp_path, dtype=torch.float64)
    ids = torch.randint(4, 61, (1, 40), generator=torch.Generator().manual_seed(2))
    told = "positions: expected at most 31, got .*: give it whole, from position 0, in one call"
    for first in (20, 32, 39):
        cache = model.init_cache(1, 40)
        model(ids[:, :first], cache=cache)
        with pytest.raises(ValueError, match=told):
            model(ids[:, first:], cache=cache)
        assert cache.length == first
    with pytest.raises(ValueError, match=told):
        model(ids, keep=torch.arange(40)[None] > 2)
    with pytest.raises(ValueError, match=told):
        model(ids[:, :4], positions=torch.tensor([[0, 1, 2, 32]]))


@torch.no_grad()
def test_older_spellings_of_longrope(ids, tmp_path):
    peer = write("phi3-longrope", tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    scaling = config.pop("rope_parameters")
    config["rope_theta"] = scaling.pop("rope_theta")
    config["rope_scaling"] = {"type": "su", **{n: scaling[n] for n in ("short_factor", "long_factor")}}
    path.write_text(json.dumps(config))
    torch.testing.assert_close(load(tmp_path, dtype=torch.float64)(ids), logits(peer, ids), **CLOSE)


@torch.no_grad()
def test_dropout_on_residuals_acts_in_training_alone(ids, tmp_path):
    write("phi3", tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"resid_pdrop": 0.5}))
    model = load(tmp_path)
    assert torch.equal(model(ids), model(ids))
    assert not torch.equal(model.train()(ids), model(ids))
