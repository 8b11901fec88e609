"""Options and tensors that no checkpoint can mean: refused at once, by name, before anything is built from them."""

import json
import shutil
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_models_files import METADATA, gguf, refuses, tensors  # noqa: F401  a fixture

from regard.errors import CheckpointError
from regard.models import load
from regard.models.config import Config, naming
from regard.models.layouts import LAYOUTS

CHECKPOINTS = Path(__file__).parents[1] / "checkpoints"
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}


@pytest.fixture
def copied(tmp_path):
    """A function: a family's checkpoint with some options changed."""

    def copy(family, **options):
        folder = tmp_path / family
        shutil.copytree(CHECKPOINTS / family, folder)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | options))
        return folder

    return copy


HUGE = {
    "layers": ("llama", {"num_hidden_layers": 10**9}, "num_hidden_layers: expected at most.*, got 1000000000"),
    "width": ("llama", {"hidden_size": 10**12}, "hidden_size: expected at most.*, got 1000000000000"),
    "head": ("llama", {"head_dim": 10**10}, "head_dim: expected at most.*, got 10000000000"),
    "encoder layers": ("bert", {"num_hidden_layers": 10**9}, "num_hidden_layers: expected at most.*, got 1000000000"),
    "heads": (
        "bloom",
        {"n_head": 10**9, "num_attention_heads": 10**9},
        "num_attention_heads: expected at most",
    ),
    "slopes": (
        "falcon",
        {"alibi": True, "hidden_size": 10**9, "num_attention_heads": 10**9},
        "hidden_size: expected at most.*, got 1000000000",
    ),
    "experts": ("gpt_oss", {"num_local_experts": 10**30}, "config.json"),
    "vocabulary": ("llama", {"vocab_size": 10**30}, "config.json"),
    "hidden": ("llama", {"intermediate_size": 10**18}, "config.json"),
}


@pytest.mark.parametrize("case", HUGE)
def test_counts_beyond_the_file_end_at_once(copied, case):
    family, options, text = HUGE[case]
    folder, start = copied(family, **options), time.perf_counter()
    refuses(folder, text)
    assert time.perf_counter() - start < 5


def test_gguf_counts_beyond_the_file_end_at_once(tmp_path, tensors):  # noqa: F811
    for key, value in (("llama.block_count", 2**31), ("llama.attention.head_count", 2**31)):
        path = gguf(tmp_path / "m.gguf", {**METADATA, key: value}, tensors)
        refuses(path, f"m.gguf: metadata .*{key.removeprefix('llama.')}: expected at most .*, got {2**31}")


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("llama.rope.freq_base", 0.0, "rope.freq_base: expected.*, got 0.0"),
        ("llama.attention.layer_norm_rms_epsilon", -1.0, "layer_norm_rms_epsilon: expected.*, got -1.0"),
        ("tokenizer.ggml.eos_token_id", "end", "eos_token_id: expected.*, got 'end'"),
        ("tokenizer.ggml.merges", [1, 2], "m.gguf"),
    ],
)
def test_gguf_values_that_cannot_be(tmp_path, tensors, key, value, text):  # noqa: F811
    words = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.tokens": ["a", "b", "ab"]}
    more = {**words, "tokenizer.ggml.merges": ["a b"], key: value}
    refuses(gguf(tmp_path / "m.gguf", {**METADATA, **more}, tensors), text)


VALUES = [
    ("llama", {"rope_parameters": "x"}, "rope_parameters: expected an object.*, got 'x'"),
    ("llama", {"rope_parameters": [1]}, r"rope_parameters: expected an object.*, got \[1\]"),
    ("llama", {"rope_scaling": 5}, "rope_scaling: expected an object.*, got 5"),
    ("llama", {"rope_parameters": {"rope_theta": 0}}, "rope_theta: expected .*above 1.*, got 0"),
    ("llama", {"rope_parameters": {"rope_theta": 10**400}}, "rope_theta: expected a finite number"),
    ("llama", {"rope_parameters": {**YARN, "mscale": "x"}}, "mscale: expected.*, got 'x'"),
    ("llama", {"rope_parameters": {**YARN, "mscale_all_dim": -10.0}}, "mscale_all_dim: expected.*, got -10.0"),
    ("llama", {"rope_parameters": {**YARN, "beta_fast": -1}}, "beta_fast: expected.*, got -1"),
    ("llama", {"rope_parameters": {**YARN, "factor": 10**400}}, "factor: expected"),
    ("llama", {"rope_parameters": {"rope_type": ["yarn"]}}, r"rope_type: expected.*, got \['yarn'\]"),
    (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 4.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
        "high_freq_factor",
    ),
    ("llama", {"rms_norm_eps": -1}, "rms_norm_eps: expected .*of 0 or more.*, got -1"),
    ("llama", {"head_dim": 7}, "head_dim: expected .*an even number.*, got 7"),
    ("gemma2", {"sliding_window": 10**30}, "sliding_window: expected at most.*, got 10*"),
    ("gemma2", {"final_logit_softcapping": 1e308}, r"final_logit_softcapping: expected.*, got 1e\+308"),
    ("gemma2", {"layer_types": 5}, "layer_types: expected a list.*, got 5"),
    ("gemma2", {"layer_types": {"a": 1}}, "layer_types: expected a list"),
    ("gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar: expected a positive number.*, got 0"),
    ("gemma2", {"query_pre_attn_scalar": -4}, "query_pre_attn_scalar: expected a positive number.*, got -4"),
    ("gemma2", {"rms_norm_eps": -1e-6}, "rms_norm_eps: expected.*, got -1e-06"),
    ("bert", {"layer_norm_eps": -1}, "layer_norm_eps: expected.*, got -1"),
    ("bloom", {"layer_norm_epsilon": -1}, "layer_norm_epsilon: expected.*, got -1"),
    ("falcon", {"layer_norm_epsilon": -1}, "layer_norm_epsilon: expected.*, got -1"),
    ("gpt_oss", {"num_experts_per_tok": 99}, "num_experts_per_tok: expected at most num_local_experts.*, got 99"),
    ("gpt_oss", {"swiglu_limit": -7.0}, "swiglu_limit: expected.*, got -7.0"),
    (
        "bloom",
        {"slow_but_exact": True, "pretraining_tp": 2},
        "slow_but_exact: expected .*pretraining_tp above 1",
    ),
]


@pytest.mark.parametrize(("family", "options", "text"), VALUES)
def test_values_that_cannot_be_are_named(copied, family, options, text):
    refuses(copied(family, **options), "config.json.*" + text)


def test_bloom_sums_its_slices_either_way_with_one_slice(copied):
    load(copied("bloom", slow_but_exact=True, pretraining_tp=1))


@pytest.mark.parametrize("error", [ValueError, TypeError, ZeroDivisionError, KeyError, IndexError, RuntimeError])
def test_what_unfit_options_raise_names_their_file(error):
    with (
        pytest.raises(CheckpointError, match=r"^a/config\.json: .*: '?odd size'?\)$") as caught,
        naming("a/config.json"),
    ):
        raise error("odd size" if error is KeyError else "odd size\nand where that was found")
    assert isinstance(caught.value.__cause__, error)
    with pytest.raises(CheckpointError, match=r"^b: x: expected.*, got 1"), naming("a/config.json"):
        raise Config({}, "b").error("x", 1, "2")


def test_a_model_that_cannot_be_built_names_the_options():
    options = {"vocab_size": 2**53, "hidden_size": 2**14, "num_attention_heads": 8, "num_hidden_layers": 1}
    plan = LAYOUTS["bloom"].read(options, "some/config.json", lambda name: True)
    with torch.device("meta"), pytest.raises(CheckpointError, match=r"^some/config\.json: its options cannot be used"):
        plan.make()


NUMBERS = {
    "I32": lambda t: t.to(torch.int32),
    "BOOL": lambda t: t > 0,
    "F8_E4M3": lambda t: t.to(torch.float8_e4m3fn),
    "C64": lambda t: t.to(torch.complex64),
}


@pytest.mark.parametrize("kind", NUMBERS)
@pytest.mark.parametrize("stated", ["float32", None])
def test_numbers_that_no_parameter_has(copied, kind, stated):
    folder = copied("llama", dtype=stated)
    held = load_file(folder / "model.safetensors")
    for name in ("model.norm.weight", "lm_head.weight"):
        held[name] = NUMBERS[kind](held[name])
    save_file(held, folder / "model.safetensors")
    refuses(
        folder, rf"model.safetensors .*expected torch.float16.*lm_head.weight is {kind}, model.norm.weight is {kind}"
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_every_floating_kind_is_read(copied, dtype):
    folder = copied("llama", dtype=None)
    held = load_file(folder / "model.safetensors")
    save_file({n: t.to(dtype) for n, t in held.items()}, folder / "model.safetensors")
    assert load(folder).norm.weight.dtype == dtype


def test_integers_that_are_not_read_may_stand(copied):
    folder = copied("bert")
    held = load_file(folder / "model.safetensors")
    prefix = "bert." if any(n.startswith("bert.") for n in held) else ""
    held[f"{prefix}embeddings.position_ids"] = torch.arange(64)[None]
    save_file(held, folder / "model.safetensors")
    load(folder)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"dtype": "float32"}, TypeError, "^dtype: expected.*, got 'float32'"),
        ({"dtype": torch.float8_e4m3fn}, TypeError, r"^dtype: expected.*, got torch\.float8"),
        ({"device": "nowhere"}, ValueError, "^device: expected.*, got 'nowhere'"),
        ({"device": 1.5}, TypeError, r"^device: expected.*, got 1\.5"),
        ({"path": 5}, TypeError, "^path: expected.*, got 5"),
    ],
)
def test_arguments_of_load_are_named(arguments, error, text):
    with pytest.raises(error, match=text):
        load(**{"path": CHECKPOINTS / "llama", **arguments})
