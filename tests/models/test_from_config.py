"""A model of every family from its options alone: the names of a loaded one, weights to train from, and a way back."""

import json
import math
from pathlib import Path

import pytest
import torch
from model_calls import beside, read_by

import regard
from regard.errors import CheckpointError
from regard.models import LAYOUTS, from_config
from regard.models.presets import PRESETS, preset

FOLDERS = Path(__file__).parents[1] / "checkpoints"
CONFIGS = {folder.name: json.loads((folder / "config.json").read_text()) for folder in sorted(FOLDERS.iterdir())}
SMALL = {
    "vocab_size": 61,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
OTHERS = {name: {"model_type": name, **SMALL} for name in ("granite", "mixtral", "olmo2", "phi3", "qwen2", "qwen3")}
OTHERS |= {name: {**CONFIGS["t5_v1_1"], "model_type": name} for name in ("mt5", "umt5")}
OTHERS["kimi_k2"] = {**CONFIGS["deepseek_v3"], "model_type": "kimi_k2"}
OTHERS["regard_decoder"] = {"model_type": "regard_decoder", "layer_types": ["mamba2", "hgrn", "gqa"], **SMALL}
VISION = {key: CONFIGS["vit"][key] for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "patch_size")}
VISION |= {"intermediate_size": 48, "image_size": 24}
OTHERS["deit"] = {"model_type": "deit", **VISION}
OTHERS["siglip"] = {"model_type": "siglip", "vision_config": VISION, "text_config": {}}
for absent in ("num_key_value_heads", "num_hidden_layers"):
    del OTHERS["regard_decoder"][absent]
ALL = {config["model_type"]: config for config in (*CONFIGS.values(), *OTHERS.values())}


def loss_of_a_guess(model, config):
    ids = torch.randint(3, config["vocab_size"], (2, 12))
    logits = model(ids[:, :-1]).float()
    return float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()))


def test_every_family_is_tried():
    assert sorted(ALL) == sorted(LAYOUTS)


@torch.no_grad()
@pytest.mark.parametrize("name", ALL)
def test_options_alone_make_a_model_that_trains_saves_and_loads(name, tmp_path):
    config = {key: value for key, value in ALL[name].items() if key not in ("dtype", "torch_dtype")}
    model = from_config(config)
    assert model.training and all(bool(tensor.isfinite().all()) for tensor in model.state_dict().values())
    model.save(tmp_path)
    again = regard.load(tmp_path)
    assert again.state_dict().keys() == model.state_dict().keys()
    for key, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[key], tensor) and again.state_dict()[key].dtype == tensor.dtype, key
    ids = read_by(model, torch.randint(3, config.get("vocab_size", 9), (2, 9)))
    more = beside(model, ids)
    rounding = 1e-6 if ids.is_floating_point() else 0.0  # convolutions go other ways by where weights lie in memory
    torch.testing.assert_close(again(ids, **more), model.eval()(ids, **more), rtol=0, atol=rounding)


@torch.no_grad()
@pytest.mark.parametrize("name", CONFIGS)
def test_parameters_are_called_as_those_of_the_loaded_model(name):
    loaded, made = regard.load(FOLDERS / name), from_config(FOLDERS / name)
    shapes = {key: tensor.shape for key, tensor in loaded.state_dict().items()}
    assert {key: tensor.shape for key, tensor in made.state_dict().items()} == shapes
    dtypes = {key: tensor.dtype for key, tensor in loaded.state_dict().items()}
    assert {key: tensor.dtype for key, tensor in made.state_dict().items()} == dtypes


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "qwen3", "qwen3_next", "jamba", "kimi_linear", "mixtral", "deepseek_v3"])
def test_a_decoder_starts_at_the_loss_of_a_guess(name):
    config = {**ALL[name], "initializer_range": 0.02}
    assert abs(loss_of_a_guess(from_config(config), config) - math.log(config["vocab_size"])) < 0.3


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "mixtral", "bert"])
def test_transformers_loads_what_it_saves(name, tmp_path):
    transformers = pytest.importorskip("transformers")
    model = from_config({**ALL[name], "initializer_range": 0.2}, dtype=torch.float32).eval()
    model.save(tmp_path)
    kind = getattr(transformers, json.loads((tmp_path / "config.json").read_text())["architectures"][0])
    peer = kind.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager").eval()
    ids = torch.randint(3, ALL[name]["vocab_size"], (2, 9))
    theirs = peer(ids)
    torch.testing.assert_close(model(ids), theirs[0], rtol=0, atol=1e-5 * float(theirs[0].abs().max()))


def test_the_width_that_options_state_is_that_of_the_weights():
    model = from_config({**ALL["llama"], "initializer_range": 0.5})
    weights = [model.layers[0].mixer.q_proj.weight, model.layers[0].ff.down_proj.weight, model.embedding.tokens.weight]
    assert [float(weight.detach().std()) for weight in weights] == pytest.approx([0.5] * 3, rel=0.15)


@pytest.mark.parametrize("scaled", [False, True])
def test_mamba2_starts_as_its_authors_code_does(scaled):
    config = {**ALL["mamba2"], "rescale_prenorm_residual": scaled}
    mixer = from_config(config).layers[0].mixer
    bound = mixer.out_proj.in_features**-0.5 / (config["num_hidden_layers"] ** 0.5 if scaled else 1.0)
    assert float(mixer.out_proj.weight.detach().abs().max()) == pytest.approx(bound, rel=0.05)


def test_a_preset_is_named_in_letters_of_either_case():
    model = from_config("Llama-2-70B", device="meta")
    assert model.layers[79].mixer.k_proj.weight.shape == (1024, 8192)
    assert model.origin.config == preset("llama-2-70b").config


@pytest.mark.parametrize("name", PRESETS)
def test_every_whole_preset_has_the_names_of_its_skeleton(name):
    if PRESETS[name].partial:
        with pytest.raises(CheckpointError, match="config: expected a preset of a whole model"):
            from_config(name, device="meta")
    elif preset(name).build().state_dict().keys() != from_config(name, device="meta").state_dict().keys():
        raise AssertionError(name)


def test_dtypes_are_those_of_the_options_or_of_the_call():
    config = {**ALL["llama"], "dtype": "bfloat16"}
    assert {p.dtype for p in from_config(config).parameters()} == {torch.bfloat16}
    assert {p.dtype for p in from_config(config, torch.float64).parameters()} == {torch.float64}
    kept = from_config(ALL["qwen3_next"], torch.bfloat16).state_dict()
    assert {tensor.dtype for tensor in kept.values()} == {
        tensor.dtype for tensor in regard.load(FOLDERS / "qwen3_next", torch.bfloat16).state_dict().values()
    }


@pytest.mark.parametrize(
    ("config", "options", "error", "text"),
    [
        ({"model_type": "zamba"}, {}, CheckpointError, "config: model_type: expected one of bailing_hybrid"),
        ({"model_type": "llama", "shear": 2}, {}, CheckpointError, "config: unknown option shear=2"),
        (
            {"model_type": "llama", "num_hidden_layers": 0},
            {},
            CheckpointError,
            "num_hidden_layers: expected a positive",
        ),
        (
            {**SMALL, "model_type": "llama", "initializer_range": -1},
            {},
            CheckpointError,
            "initializer_range: expected a po",
        ),
        ({**SMALL, "model_type": "llama", "dtype": "int8"}, {}, CheckpointError, "config: dtype: expected float32"),
        ("gpt-9", {}, ValueError, "config: expected options, a folder with config.json, or one of llama-2-70b"),
        (Path("nowhere"), {}, ValueError, "config: expected options, a folder with config.json"),
        (7, {}, TypeError, "config: expected options, a preset's name or a folder, got int 7"),
        (ALL["llama"], {"dtype": torch.int8}, TypeError, "dtype: expected one of torch.float16"),
        (ALL["llama"], {"device": "moon"}, ValueError, "device: expected one that torch knows"),
    ],
    ids=str,
)
def test_what_makes_no_model_is_refused_by_name(config, options, error, text):
    with pytest.raises(error) as raised:
        from_config(config, **options)
    assert text in str(raised.value)


def test_a_folder_without_options_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"path: expected a folder with config\.json"):
        from_config(tmp_path)
