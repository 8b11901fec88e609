"""Anybody's modules: each planted fault is found and named as the first cause, and sound modules raise no alarm."""

from __future__ import annotations

import random
import re

import pytest
import torch
from foreign import FAULTS, STATED, UNCACHED, WHOLE, Sound
from torch import nn

from regard.testing import CHECKS, CacheArgument, Call, CausalArgument, PaddingArgument, Subject, check

DTYPES = (torch.float64, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fault", FAULTS, ids=[f"{fault.check}-{fault.make.__name__}" for fault in FAULTS])
def test_the_fault_is_the_first_cause_and_the_only_one(fault, dtype):
    random.seed(0)
    found = check(fault.make, fault.call, **fault.stated, dtype=dtype)
    causes = {one.name: one.text for one in found.causes}
    assert list(causes) == [fault.check], found
    assert re.search(fault.words, causes[fault.check]), causes


def test_many_checks_have_a_fault_among_these():
    foreign = {one.name for one in check(Sound, WHOLE, **STATED) if one.passed}
    assert {fault.check for fault in FAULTS} >= foreign - {"copies"}
    assert {fault.check for fault in FAULTS} <= {one.name for one in CHECKS}


ROWS = PaddingArgument("key_padding_mask", "hide")
SOUND = {
    "plain": (Sound, WHOLE, STATED),
    "without a cache": (Sound, UNCACHED, STATED),
    "attention": (
        lambda: nn.MultiheadAttention(8, 2, batch_first=True, dropout=0.1),
        Call(("query", "key", "value"), padding=ROWS, given={"need_weights": False}),
        {},
    ),
    "causal attention, time first": (
        lambda: nn.MultiheadAttention(8, 2),
        Call(
            ("query", "key", "value"),
            batch_first=False,
            padding=ROWS,
            causal=CausalArgument("attn_mask", "hide"),
            given={"need_weights": False},
        ),
        {"averages": True, "counts_slots": False},
    ),
    "encoder": (
        lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True),
        Call("src", padding=PaddingArgument("src_key_padding_mask", "hide")),
        {"averages": True, "counts_slots": False},
    ),
    "causal encoder": (
        lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=True),
        Call(
            "src",
            padding=PaddingArgument("src_key_padding_mask", "hide"),
            causal=CausalArgument("src_mask", "hide", flag="is_causal"),
        ),
        {"averages": True},
    ),
    "recurrent": (
        lambda: nn.GRU(8, 8, batch_first=True),
        Call(cache=CacheArgument("hx", output=1)),
        {"causal": True},
    ),
    "two layers of LSTM": (
        lambda: nn.LSTM(8, 8, 2, dropout=0.1, batch_first=True),
        Call(cache=CacheArgument("hx", output=1)),
        {"causal": True},
    ),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", SOUND)
def test_sound_modules_raise_no_alarm(name, dtype):
    make, call, stated = SOUND[name]
    found = check(make, call, **stated, dtype=dtype)
    assert found.ok, found
    found = check(make(), call, **stated)  # its own weights and dtype
    assert found.ok, found


def _hugging(kind, **options):
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.3,
        pad_token_id=None,
        **options,
    )
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    return model, CacheArgument(
        "past_key_values", make=lambda batch, capacity: transformers.DynamicCache(config=config)
    )


@pytest.mark.parametrize(
    ("kind", "options", "stated"),
    [("Llama", {}, {}), ("Mistral", {"sliding_window": 4}, {"window": 7}), ("Qwen2", {}, {})],
)
def test_models_of_transformers_raise_no_alarm(kind, options, stated):
    model, cache = _hugging(kind, **options)
    call = Call("input_ids", output="logits", padding=PaddingArgument("attention_mask"), cache=cache)
    found = check(model, call, vocabulary=32, causal=True, **stated)
    assert found.ok, found
    ran = {one.name for one in found if one.passed}
    assert {"causality", "streams", "splits", "left_padding", "dead_rows", "gradients", "polarity"} <= ran


def test_a_prefill_on_a_warm_cache_of_jamba_is_found():
    """transformers 5.23 answers otherwise there than in one call; single steps agree."""
    transformers = pytest.importorskip("transformers")
    config = transformers.JambaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_layer_period=2,
        attn_layer_offset=1,
        num_experts=2,
        num_experts_per_tok=1,
        mamba_d_state=4,
        mamba_dt_rank=4,
        initializer_range=0.3,
        pad_token_id=None,
    )
    cache = CacheArgument("past_key_values", make=lambda batch, capacity: transformers.DynamicCache(config=config))
    call = Call("input_ids", output="logits", padding=PaddingArgument("attention_mask"), cache=cache)
    found = check(transformers.JambaForCausalLM(config), call, vocabulary=32, causal=True)
    assert [one.name for one in found.causes] == ["splits"], found
    assert "the calls [4, 7] against one call: off by" in found.causes[0].text


def test_attention_that_returns_its_weights_has_rows_of_nan():
    """torch's own, with need_weights=True: the averages are 0/0 where all keys are padding."""
    found = check(nn.MultiheadAttention(8, 2, batch_first=True), Call(("query", "key", "value"), padding=ROWS))
    assert [one.name for one in found.causes] == ["dead_rows"]


def test_what_is_said_wrongly_is_said_so():
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    with pytest.raises(TypeError, match=r"module: expected a torch.nn.Module or what makes one, got int"):
        Subject.around(lambda: 3)
    with pytest.raises(ValueError, match="dim: expected the width of the tokens, for ReLU does not say it"):
        Subject.around(nn.ReLU())
    with pytest.raises(ValueError, match=r"means: expected one of keep, .*, got 'hid'; did you mean 'hide'\?"):
        PaddingArgument("mask", "hid")
    with pytest.raises(ValueError, match="mask: expected the name of an argument for a mask or a flag, got neither"):
        CausalArgument()
    with pytest.raises(TypeError, match=r"promises: expected one of .*, got 'windows'; did you mean 'window'\?"):
        check(attention, windows=4)
    with pytest.raises(ValueError, match="window: expected a whole number from 1 on, got 0"):
        check(attention, window=0)
    (first, *_) = check(attention, Call("tokens"))
    assert first.name == "shapes" and "unexpected keyword argument 'tokens'" in first.text
    (first, *_) = check(attention, Call(("query", "key", "value"), output="logits"))
    assert "output: the module returned a tuple without 'logits'" in first.text
