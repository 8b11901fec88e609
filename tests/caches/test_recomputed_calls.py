"""Activation checkpointing beside caches: a call that the backward pass would run again is refused, others are not."""

from __future__ import annotations

import gc

import pytest
import torch
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

from regard.catalog import RECORDS
from regard.errors import CacheError
from regard.masks import Causal
from regard.models import Decoder, Embedding, GatedMLP, PreNorm, activation
from regard.nn import GatedDeltaNet, MultiHeadAttention

pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # torch's, without gradients

KINDS = ["mha", "window", "mla", "gated_deltanet", "mamba", "rglru", "cross", "linear_cross"]
DECODING = [record for record in RECORDS if record.cached]


def selective():
    return create_selective_checkpoint_contexts(lambda ctx, op, *args, **kwargs: CheckpointPolicy.PREFER_RECOMPUTE)


MODES = {
    "reentrant": {"use_reentrant": True},
    "hooks": {"use_reentrant": False},
    "selective": {"use_reentrant": False, "context_fn": selective},
    "without early stop": {"use_reentrant": False, "early_stop": False},
}


def filled(record):
    torch.manual_seed(0)
    layer, x = record.build(16, 4).double(), torch.randn(2, 9, 16, dtype=torch.float64)
    context = torch.randn(2, 5, 20, dtype=torch.float64) if record.context else None
    cache = layer.init_cache(2, 16)
    layer(x[:, :4], context, cache=cache)
    return layer, x[:, 4:].clone().requires_grad_(), cache


def contents(cache):
    return [cache.length, getattr(cache, "asked", 0), *(None if t is None else t.clone() for t in tree_leaves(cache))]


def same(one, other):
    return all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("record", DECODING, ids=lambda record: record.name)
def test_a_checkpointed_call_is_refused_before_anything_changes(record, mode):
    layer, x, cache = filled(record)
    before = contents(cache)
    with pytest.raises(CacheError, match=r"outside torch.utils.checkpoint.* Nothing was changed"):
        checkpoint(lambda x: layer(x, cache=cache), x, **MODES[mode])
    assert same(contents(cache), before)
    want = torch.autograd.grad(layer(x, cache=cache.clone()).square().sum(), x)[0]
    out = layer(x, cache=cache)  # outside, it is an ordinary call
    torch.testing.assert_close(torch.autograd.grad(out.square().sum(), x)[0], want)
    assert cache.length == (5 if record.context else 9)


@pytest.mark.parametrize("outer", MODES)
@pytest.mark.parametrize("inner", MODES)
def test_nested_checkpoints(outer, inner):
    layer, x, cache = filled(next(r for r in RECORDS if r.name == "gated_deltanet"))

    def within(x):
        return checkpoint(lambda x: layer(x, cache=cache), x * 2, **MODES[inner])

    with pytest.raises(CacheError, match="checkpoint"):
        checkpoint(within, x, **MODES[outer])
    assert cache.length == 4


@pytest.mark.parametrize("mode", ["reentrant", "hooks"])
@pytest.mark.parametrize(
    "around",
    [torch.no_grad, torch.enable_grad, torch.autograd.graph.save_on_cpu, torch.inference_mode],
    ids=lambda around: around.__name__,
)
def test_what_stands_between_the_checkpoint_and_the_call_hides_nothing(around, mode):
    """Whatever its own mode, the call would run a second time, and store a second time."""
    layer, x, cache = filled(next(r for r in RECORDS if r.name == "mha"))

    def run(x):
        with around():
            looked = layer(x, cache=cache)
        return x * 2 + looked.sum().item()

    with pytest.raises(CacheError, match="checkpoint"):
        checkpoint(run, x, **MODES[mode])
    assert cache.length == 4


def test_looks_into_a_cache_are_refused_too():
    layer, x, cache = filled(next(r for r in RECORDS if r.name == "mha"))
    with pytest.raises(CacheError, match="checkpoint"):
        checkpoint(lambda x: layer.mixing(x, cache=cache)[0], x, use_reentrant=False)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_where_nothing_is_run_again_a_checkpoint_is_an_ordinary_call(kind, mode):
    """Generating through blocks that are wrapped for training: without gradients nothing is recomputed."""
    layer, x, cache = filled(next(r for r in RECORDS if r.name == kind))
    want = layer(x, cache=cache.clone())
    for around in (torch.no_grad, torch.inference_mode):
        own = cache.clone()
        with around():
            out = checkpoint(lambda x, own=own: layer(x, cache=own), x.detach(), **MODES[mode])
        torch.testing.assert_close(out, want.detach())
        assert own.length == cache.length + (0 if getattr(own, "context", False) else 5)


def test_a_reentrant_checkpoint_of_what_needs_no_gradient_is_an_ordinary_call():
    layer, x, cache = filled(next(r for r in RECORDS if r.name == "mha"))
    out = checkpoint(lambda x: layer(x, cache=cache), x.detach(), use_reentrant=True)
    assert not out.requires_grad and cache.length == 9


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.name)
def test_checkpoints_without_a_cache_give_the_same_gradients(record, mode):
    torch.manual_seed(0)
    layer, x = record.build(16, 4).double(), torch.randn(2, 5, 16, dtype=torch.float64, requires_grad=True)
    context = (torch.randn(2, 3, 20, dtype=torch.float64),) if record.context else ()
    (want,) = torch.autograd.grad(layer(x, *context).square().sum(), x)
    checkpoint(lambda x: layer(x, *context), x, **MODES[mode]).square().sum().backward()
    torch.testing.assert_close(x.grad, want)


def decoder(make) -> Decoder:
    def layer(i):
        return PreNorm(make(), GatedMLP(8, 16, activation("silu")), torch.nn.LayerNorm(8), torch.nn.LayerNorm(8))

    return Decoder(Embedding(torch.nn.Embedding(11, 8)), [layer, layer], torch.nn.LayerNorm(8)).double()


class Checkpointed(torch.nn.Module):
    def __init__(self, inner, **mode):
        super().__init__()
        self.inner, self.mode = inner, mode

    def forward(self, x, **call):
        return checkpoint(lambda x: self.inner(x, **call), x, **self.mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("make", [lambda: MultiHeadAttention(8, 2, mask=Causal()), lambda: GatedDeltaNet(8, 2)])
def test_a_model_whose_blocks_are_checkpointed(make, mode):
    torch.manual_seed(0)
    model, ids = decoder(make), torch.randint(0, 11, (2, 7))
    want = model(ids)
    cache = model.init_cache(2, 9)
    with torch.no_grad():
        model(ids[:, :4], cache=cache)
    model.layers = torch.nn.ModuleList([Checkpointed(layer, **MODES[mode]) for layer in model.layers])
    before = [contents(c) for c in cache]
    with pytest.raises(CacheError, match="checkpoint"):
        model(ids[:, 4:], cache=cache)
    assert cache.length == 4 and all(same(contents(c), old) for c, old in zip(cache, before, strict=True))
    with torch.no_grad():
        torch.testing.assert_close(model(ids[:, 4:], cache=cache), want[:, 4:].detach())
    model(ids).sum().backward()  # and it trains
    assert cache.length == 7


def test_a_whole_model_and_a_chain_of_layers():
    torch.manual_seed(0)
    model, ids = decoder(lambda: MultiHeadAttention(8, 2, mask=Causal())), torch.randint(0, 11, (2, 7))
    cache = model.init_cache(2, 9)
    weight = model.layers[0].ff.up_proj.weight
    with pytest.raises(CacheError, match="checkpoint"):
        checkpoint(lambda w: model(ids, cache=cache) + w.sum(), weight, use_reentrant=True)
    layer = MultiHeadAttention(8, 2, mask=Causal()).double()
    own, x = layer.init_cache(1, 9), torch.randn(1, 2, 8, dtype=torch.float64, requires_grad=True)
    with pytest.raises(CacheError, match="checkpoint"):
        checkpoint_sequential([lambda x: layer(x, cache=own), torch.tanh], 2, x, use_reentrant=False)
    assert cache.length == 0 and own.length == 0


def test_the_hooks_of_others_stay_in_place():
    layer, x, cache = filled(next(r for r in RECORDS if r.name == "mha"))
    packed: list[str] = []

    def hook(name):
        return torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(name) or t, lambda t: t)

    with hook("outer"), hook("inner"):
        out = layer(x, cache=cache)
        assert set(packed) == {"inner"}
    packed.clear()
    with hook("outer"):
        with hook("inner"):
            layer(x[:, :1], cache=cache)
        assert set(packed) == {"inner"}
        x.exp()
        assert packed[-1] == "outer"
    out.sum().backward()
    with torch.autograd.graph.disable_saved_tensors_hooks("none here"):
        layer(x[:, :1], cache=cache)
    gc.collect()
    assert cache.length == 11


@pytest.mark.parametrize("kind", ["mha", "gated_deltanet"])
@pytest.mark.parametrize("mode", ["reentrant", "hooks"])
def test_compiled_calls(mode, kind):
    layer, x, cache = filled(next(r for r in RECORDS if r.name == kind))
    compiled = torch.compile(lambda x, cache: layer(x, cache=cache), backend="eager")
    with pytest.raises(CacheError, match="checkpoint"):
        checkpoint(lambda x: compiled(x, cache), x, **MODES[mode])
    around = torch.compile(
        lambda x: checkpoint(lambda x: layer(x, cache=cache), x, **MODES[mode]), backend="eager", fullgraph=True
    )
    with pytest.raises(torch._dynamo.exc.Unsupported, match="side effect"):
        around(x)
    assert cache.length == 4
    torch._dynamo.reset()
