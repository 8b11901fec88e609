"""Caches as pytrees, in exported steps, and for tensors that have no values."""

from __future__ import annotations

import contextlib
import copy
import io

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree
from torch.utils._pytree import key_get, keystr, tree_flatten_with_path, tree_leaves, tree_map_only

from regard.biases import Alibi
from regard.caches import Cache, KVCache, StateCache
from regard.catalog import RECORDS, find
from regard.masks import Causal
from regard.models import Decoder, Embedding, GatedMLP, PreNorm, activation
from regard.models.cache import ModelCache
from regard.nn import GatedDeltaNet, LightningAttention, MultiHeadAttention, Retention
from regard.positions import Rotary

CACHED = [record.name for record in RECORDS if record.cached]
KINDS = ["mha", "window", "mla", "gated_deltanet", "mamba", "rglru"]


class Step(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x, cache, keep=None):
        return self.inner(x, cache=cache) if keep is None else self.inner(x, cache=cache, keep=keep), cache


def started(name: str, padded: bool = False):
    """A layer, a cache with three tokens in it, and the next."""
    torch.manual_seed(0)
    record = find(name)
    layer, x = record.build(16, 4).eval(), torch.randn(2, 4, 16)
    context = torch.randn(2, 3, 20) if record.context else None
    cache = layer.init_cache(2, 8)
    keep = torch.tensor([[False, True, True], [True, True, True]]) if padded else None
    with torch.no_grad():
        layer(x[:, :3], context, cache=cache, keep=keep)
    return layer, cache, x[:, 3:].contiguous()


def same(one, other) -> None:
    assert type(one) is type(other) and one.length == other.length
    for a, b in zip(tree_leaves(one), tree_leaves(other), strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", CACHED)
def test_leaves_are_named_and_a_tree_comes_back_whole(name, padded):
    layer, cache, x = started(name, padded)
    leaves, spec = tree_flatten_with_path(cache)
    for path, leaf in leaves:
        assert key_get(cache, path) is leaf
    names = {keystr(path) for path, _ in leaves}
    assert {f".{own}" for own in cache.tensor_names} | {
        ".history.keep",
        ".history.segments",
        ".history.counts",
    } == names
    back = _pytree.tree_unflatten([leaf for _, leaf in leaves], spec)
    same(back, cache)
    assert vars(back).keys() == vars(cache).keys() and repr(back) == repr(cache)
    stored = _pytree.treespec_loads(_pytree.treespec_dumps(spec))
    assert stored == spec
    again = _pytree.tree_unflatten([None if leaf is None else leaf.clone() for _, leaf in leaves], stored)
    with torch.no_grad():
        torch.testing.assert_close(layer(x, cache=again), layer(x, cache=cache))
    same(again, cache)


@pytest.mark.parametrize("name", CACHED)
def test_a_map_over_the_leaves_moves_rows_and_devices(name):
    _, cache, _ = started(name, padded=True)
    first = tree_map_only(torch.Tensor, lambda t: t[:1].clone(), cache)
    assert first.batch == 1 and cache.batch == 2
    first.reset()
    shifted = tree_map_only(torch.Tensor, lambda t: t.to("meta"), cache)
    assert shifted.history.device == torch.device("meta") and shifted.nbytes == cache.nbytes


def test_a_user_s_own_cache_is_a_pytree_too():
    class Mine(KVCache):
        pass

    cache = Mine(1, 4, 2, 3, 3, torch.float32)
    back = _pytree.tree_unflatten(*_pytree.tree_flatten(cache))
    assert type(back) is Mine and back.capacity == 4


@pytest.mark.parametrize(
    "name, padded, strict",
    [
        *((name, False, False) for name in CACHED),
        *((name, *how) for name in KINDS for how in ((True, False), (False, True))),
    ],
)
def test_an_exported_step_gives_what_eager_gives(name, padded, strict):
    layer, cache, x = started(name, padded)
    before = cache.clone()
    with torch.no_grad():
        program = torch.export.export(Step(layer), (x, cache), strict=strict).module()
        same(cache, before)  # nothing was stored by exporting
        other = torch.randn_like(x)
        eager = cache.clone()
        want = layer(other, cache=eager)
        got, after = program(other, cache)
    torch.testing.assert_close(got, want)
    same(after, eager)


@pytest.mark.parametrize("name", KINDS)
def test_an_exported_step_with_padding_in_the_call(name):
    layer, cache, x = started(name)
    keep = torch.tensor([[True], [False]])
    with torch.no_grad():
        program = torch.export.export(Step(layer), (x, cache, keep)).module()
        eager, turned = cache.clone(), ~keep
        want = layer(x, cache=eager, keep=turned)
        got, after = program(x, cache, turned)
    torch.testing.assert_close(got, want)
    same(after, eager)


@pytest.mark.parametrize("name", KINDS)
def test_an_exported_step_is_saved_and_loaded(name):
    layer, cache, x = started(name)
    with torch.no_grad():
        file = io.BytesIO()
        torch.export.save(torch.export.export(Step(layer), (x, cache)), file)
        file.seek(0)
        eager = cache.clone()
        want = layer(x, cache=eager)
        got, after = torch.export.load(file).module()(x, cache)
    torch.testing.assert_close(got, want)
    same(after, eager)


@pytest.mark.parametrize("strict", [False, True])
def test_a_step_for_any_number_of_rows(strict):
    layer, cache, x = started("mha")
    rows = torch.export.Dim("rows", min=2, max=64)
    shapes = {"x": {0: rows}, "cache": [{0: rows}, {0: rows}, [None, None, None]]}
    with torch.no_grad():
        program = torch.export.export(Step(layer), (x, cache), dynamic_shapes=shapes, strict=strict).module()
        cache.reorder([1, 0, 1])
        eager, x = cache.clone(), torch.randn(3, 1, 16)
        want = layer(x, cache=eager)
        got, after = program(x, cache)
    torch.testing.assert_close(got, want)
    same(after, eager)


def decoder(make) -> Decoder:
    def layer(i):
        return PreNorm(make(i), GatedMLP(8, 16, activation("silu")), nn.LayerNorm(8), nn.LayerNorm(8))

    return Decoder(Embedding(nn.Embedding(11, 8)), [layer, layer], nn.LayerNorm(8)).eval()


def mixed(i: int) -> nn.Module:
    return MultiHeadAttention(8, 2, mask=Causal(), rotary=Rotary(4)) if i else GatedDeltaNet(8, 2)


@pytest.mark.parametrize("strict", [False, True])
def test_a_model_s_cache(strict):
    torch.manual_seed(0)
    model, ids = decoder(mixed), torch.randint(0, 11, (2, 5))
    cache = model.init_cache(2, 8)
    with torch.no_grad():
        model(ids[:, :4], cache=cache)
        leaves, spec = tree_flatten_with_path(cache)
        assert ".layers[1].k" in {keystr(path) for path, _ in leaves}
        assert all(key_get(cache, path) is leaf for path, leaf in leaves)
        assert _pytree.treespec_loads(_pytree.treespec_dumps(spec)) == spec
        file = io.BytesIO()
        torch.export.save(torch.export.export(Step(model), (ids[:, 4:], cache), strict=strict), file)
        file.seek(0)
        eager = cache.clone()
        want = model(ids[:, 4:], cache=eager)
        got, after = torch.export.load(file).module()(ids[:, 4:], cache)
    torch.testing.assert_close(got, want)
    assert isinstance(after, ModelCache) and after.length == 5
    for one, other in zip(after, eager, strict=True):
        same(one, other)


# ---- without values --------------------------------------------------------------------------------------------------


def used(layer: nn.Module, record) -> torch.Tensor:
    """Forward, backward, calls through a cache with all that they take, and what is done to a cache."""
    x = torch.randn(2, 5, 16)
    context = (torch.randn(2, 3, 20),) if record.context else ()
    layer(x, *context).sum().backward()
    out = layer(x, *context)
    if record.cached:
        cache = layer.init_cache(2, 16)
        layer(x, *context, cache=cache)
        out = layer(x[:, :1], cache=cache)
        with torch.no_grad():
            layer(x[:, :2], cache=cache)
        if not record.context:
            layer(x[:, :2], cache=cache, keep=torch.ones(2, 2, dtype=torch.bool))
            layer(x[:, :2], cache=cache, segments=torch.ones(2, 2, dtype=torch.long))
        cache.reorder([1, 0])
        cache.reorder(torch.zeros(2, dtype=torch.long))
        layer(x[:, :1], cache=cache.clone())
        copy.copy(cache).reset()
    return out


@pytest.mark.parametrize("where", ["fake", "meta"])
@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.name)
def test_layers_are_built_and_stepped_without_values(record, where):
    mode: contextlib.AbstractContextManager = FakeTensorMode() if where == "fake" else torch.device("meta")
    with mode:
        out = used(record.build(16, 4), record)
    assert isinstance(out, FakeTensor) if where == "fake" else out.device.type == "meta"
    assert out.shape[0] == 2 and out.shape[2] == 16


@pytest.mark.parametrize(
    "make",
    [
        lambda: LightningAttention(16, 4),
        lambda: Retention(16, 4),
        lambda: MultiHeadAttention(16, 4, bias=Alibi(4)),
        lambda: MultiHeadAttention(16, 4, mask=Causal(), rotary=Rotary(4)),
    ],
)
def test_a_layer_built_on_the_meta_device_is_whole_once_it_has_weights(make):
    torch.manual_seed(0)
    plain, x = make(), torch.randn(2, 5, 16)
    with torch.device("meta"):
        late = make()
    late.to_empty(device="cpu").load_state_dict(plain.state_dict())
    assert torch.equal(late(x), plain(x))


def test_what_layers_share_remembers_nothing_of_tensors_without_values():
    rotary, bias = Rotary(4), Alibi(4)

    def make():
        return MultiHeadAttention(16, 4, mask=Causal(), rotary=rotary, bias=bias)

    torch.manual_seed(0)
    plain, x = make(), torch.randn(2, 5, 16)
    want = plain(x)
    for mode in (FakeTensorMode(allow_non_fake_inputs=True), torch.device("meta")):
        with mode:
            used(make(), find("mha"))
        assert torch.equal(plain(x), want)


def test_fake_states_are_a_cache_s():
    with FakeTensorMode():
        cache = GatedDeltaNet(8, 2).init_cache(1, 4)
        assert isinstance(cache, StateCache) and isinstance(cache, Cache)
        assert all(isinstance(state, FakeTensor) for state in cache.states.values())
