"""Stacks that mix layers with a state and attention, and what the layouts of such checkpoints refuse."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from regard.errors import CacheError, CacheFull, CheckpointError
from regard.masks import Causal
from regard.models import Decoder, Embedding, GatedMLP, MixerOnly, PreNorm, activation, generate, load
from regard.nn import (
    HGRN,
    DampedEMA,
    GriffinRecurrent,
    Mamba,
    Mamba2,
    MultiHeadAttention,
    RMSNorm,
    griffin_attention,
)

HERE = Path(__file__).parents[1] / "checkpoints"
MIXERS = (
    lambda: GriffinRecurrent(16, 4),
    lambda: griffin_attention(16, 4, 3),
    lambda: Mamba2(16, 4, state_dim=3, groups=2),
    lambda: MultiHeadAttention(16, 4, mask=Causal()),
    lambda: Mamba(16, state_dim=2),
    lambda: HGRN(16),
    lambda: DampedEMA(16, 2),
)


def hybrid(mixers=MIXERS):
    """One layer of every mixer, in turn with and without a feed-forward part."""

    def layer(i):
        if i % 2:
            return MixerOnly(mixers[i](), RMSNorm(16))
        return PreNorm(mixers[i](), GatedMLP(16, 24, activation("silu")), RMSNorm(16), RMSNorm(16))

    return Decoder(Embedding(torch.nn.Embedding(11, 16)), [layer] * len(mixers), RMSNorm(16)).double().eval()


@torch.no_grad()
def test_a_stack_of_all_kinds_decodes_with_one_cache():
    model, ids = hybrid(), torch.randint(0, 11, (3, 12))
    keep = torch.ones(3, 12, dtype=torch.bool)
    keep[1, :4] = False
    whole = model(ids, keep=keep)
    for sizes in ([1] * 12, [5, 1, 6], [0, 11, 1]):
        cache = model.init_cache(3, 12)
        parts = zip(ids.split(sizes, 1), keep.split(sizes, 1), strict=True)
        steps = torch.cat([model(part, keep=real, cache=cache) for part, real in parts], 1)
        torch.testing.assert_close(steps[keep], whole[keep], rtol=0, atol=1e-10)
    torch.testing.assert_close(whole[1:2, 4:], model(ids[1:2, 4:]), rtol=0, atol=1e-10)
    assert {type(one).__name__ for one in cache} == {"KVCache", "StateCache", "WindowCache"}
    assert cache.capacity == 12 and cache.length == 12


@torch.no_grad()
def test_packed_texts_do_not_see_each_other():
    model, ids = hybrid(), torch.randint(0, 11, (1, 9))
    packed = model(ids, segments=torch.tensor([[0, 0, 0, 0, 2, 2, 2, 5, 5]]))
    parts = ids.split([4, 3, 2], 1)
    torch.testing.assert_close(packed, torch.cat([model(part) for part in parts], 1), rtol=0, atol=1e-10)
    cache = model.init_cache(1, 9)  # a segment that opens in a later call
    outs = [model(part, segments=torch.full_like(part, i), cache=cache) for i, part in enumerate(parts)]
    torch.testing.assert_close(torch.cat(outs, 1), packed, rtol=0, atol=1e-10)


def test_texts_of_different_lengths_are_continued_as_each_alone():
    model = hybrid()
    prompts = [[1, 2, 3, 4, 5, 6, 7], [8, 9], [3, 1, 4, 1]]
    together = generate(model, prompts, max_tokens=6, end_ids=())
    for i, prompt in enumerate(prompts):
        assert together[i].ids == generate(model, prompt, max_tokens=6, end_ids=())[0].ids


@torch.no_grad()
def test_beams_take_every_kind_of_state_along():
    model, ids = hybrid(), torch.randint(0, 11, (3, 6))
    cache = model.init_cache(3, 8)
    model(ids, cache=cache)
    index = torch.tensor([2, 0, 0])
    cache.reorder(index)
    texts = ids[index]
    for last in (torch.tensor([[4], [5], [6]]), torch.tensor([[1], [2], [3]])):
        texts = torch.cat([texts, last], 1)
        torch.testing.assert_close(model(last, cache=cache), model(texts)[:, -1:], rtol=0, atol=1e-10)


@torch.no_grad()
def test_what_a_state_cannot_undo_is_refused_for_all_layers():
    model, ids = hybrid(), torch.randint(0, 11, (1, 6))
    cache = model.init_cache(1, 7)
    model(ids, cache=cache)
    before = [leaf.clone() for leaf in torch.utils._pytree.tree_leaves(cache) if isinstance(leaf, torch.Tensor)]
    with pytest.raises(CacheError, match="cannot go back to 4 of 6"):
        cache.crop(4)
    with pytest.raises(CacheFull):
        model(ids, cache=cache)
    after = [leaf for leaf in torch.utils._pytree.tree_leaves(cache) if isinstance(leaf, torch.Tensor)]
    assert cache.length == 6 and all(map(torch.equal, before, after))
    cache.crop(0)
    torch.testing.assert_close(model(ids, cache=cache), model(ids), rtol=0, atol=1e-10)


def test_a_wide_stream_is_float32_in_a_bfloat16_model():
    block = MixerOnly(torch.nn.Linear(4, 4), RMSNorm(4), wide=True).bfloat16()
    assert block(torch.randn(1, 2, 4, dtype=torch.bfloat16)).dtype == torch.float32
    assert MixerOnly(torch.nn.Linear(4, 4), RMSNorm(4)).bfloat16()(block(torch.randn(1, 2, 4))).dtype == torch.float32
    model = load(HERE / "mamba2", dtype=torch.bfloat16)
    assert model(torch.tensor([[1, 2]])).dtype == torch.bfloat16


# ---- layouts ---------------------------------------------------------------------------------------------------------


def changed(folder, tmp_path, **options):
    """A copy of a checkpoint with other options; None takes one away."""
    config = json.loads((HERE / folder / "config.json").read_text()) | options
    config = {name: value for name, value in config.items() if value is not None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes((HERE / folder / "model.safetensors").read_bytes())
    return tmp_path


@pytest.mark.parametrize(
    ("folder", "options", "words"),
    [
        ("mamba2", {"hidden_act": "gelu"}, "hidden_act: expected.*, got 'gelu'"),
        ("mamba2", {"rms_norm": False}, "rms_norm: expected.*, got False"),
        ("mamba2", {"head_dim": 7}, "head_dim: expected.*, got 7"),
        ("mamba2", {"n_groups": 3}, "n_groups: expected a divisor of num_heads=8.*, got 3"),
        ("mamba2", {"time_step_limit": [0.5, 0.1]}, "time_step_limit: expected"),
        ("mamba2", {"time_step_limit": [0.0, "much"]}, "time_step_limit: expected"),
        ("mamba2", {"time_step_limit": 3}, "time_step_limit: expected.*, got 3"),
        ("mamba2", {"state_size": 8}, "tensors of another shape: "),
        ("mamba2", {"conv_kernel": 3}, "conv1d.weight is"),
        ("mamba2", {"use_conv_bias": False}, "unused tensors: .*conv1d.bias"),
        ("mamba2", {"use_bias": True}, "missing tensors: .*in_proj.bias"),
        ("mamba2", {"swirl": 3}, "unknown option swirl=3"),
        ("recurrent_gemma", {"block_types": ["recurrent", "waves"]}, "block_types: expected"),
        ("recurrent_gemma", {"block_types": []}, r"block_types: expected.*, got \[\]"),
        ("recurrent_gemma", {"block_types": ["recurrent"]}, "missing tensors"),
        ("recurrent_gemma", {"lru_width": 30}, "lru_width: expected.*, got 30"),
        ("recurrent_gemma", {"intermediate_size": 95}, "intermediate_size: expected.*, got 95"),
        (
            "recurrent_gemma",
            {"embeddings_scale_by_sqrt_dim": False},
            "embeddings_scale_by_sqrt_dim: expected",
        ),
        ("recurrent_gemma", {"logits_soft_cap": 0.0}, "logits_soft_cap: expected.*, got 0.0"),
        ("recurrent_gemma", {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "rope_type default"),
        ("recurrent_gemma", {"hidden_activation": "waves"}, "hidden_activation: expected"),
    ],
)
def test_options_that_do_not_fit_are_refused(folder, options, words, tmp_path):
    with pytest.raises(CheckpointError, match=words):
        load(changed(folder, tmp_path, **options))


@pytest.mark.parametrize(
    ("folder", "options"),
    [
        ("mamba2", {"time_step_limit": None}),
        ("mamba2", {"time_step_limit": [0.0, math.inf]}),
        ("mamba2", {"time_step_limit": [0, "inf"], "time_step_rank": "auto", "rms_norm": True}),
        ("mamba2", {"num_heads": 8, "expand": 2.0, "chunk_size": 256, "residual_in_fp32": False}),
        ("recurrent_gemma", {"block_types": None, "_block_types": ["recurrent", "recurrent", "attention"]}),
        ("recurrent_gemma", {"block_types": None, "lru_width": None, "head_dim": None}),
        ("recurrent_gemma", {"rope_parameters": None, "rope_theta": 10000.0}),
        ("recurrent_gemma", {"rope_parameters": None, "partial_rotary_factor": 0.5}),
        ("recurrent_gemma", {"hidden_activation": None, "rms_norm_eps": None, "conv1d_width": None}),
    ],
)
@torch.no_grad()
def test_other_spellings_of_the_same_options(folder, options, tmp_path):
    ids = torch.tensor([[1, 5, 9, 2]])
    assert torch.equal(load(changed(folder, tmp_path, **options))(ids), load(HERE / folder)(ids))


@torch.no_grad()
def test_limits_of_the_steps_are_read(tmp_path):
    ids = torch.tensor([[1, 5, 9, 2]])
    other = load(changed("mamba2", tmp_path, time_step_limit=[0.2, 0.3]))
    assert other.layers[0].mixer.limits == (0.2, 0.3)
    assert not torch.allclose(other(ids), load(HERE / "mamba2")(ids))
    cache = other.init_cache(1, 0)
    steps = torch.cat([other(part, cache=cache) for part in ids.split(1, 1)], 1)
    torch.testing.assert_close(steps, other(ids), rtol=0, atol=1e-5)


def test_an_older_name_of_the_embedding(tmp_path):
    from safetensors.torch import save_file

    tensors = load_file(HERE / "mamba2" / "model.safetensors")
    tensors["backbone.embedding.weight"] = tensors.pop("backbone.embeddings.weight")
    changed("mamba2", tmp_path)
    save_file(tensors, tmp_path / "model.safetensors")
    ids = torch.tensor([[1, 5]])
    assert torch.equal(load(tmp_path)(ids), load(HERE / "mamba2")(ids))
