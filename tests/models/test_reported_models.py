"""Failures that users of other libraries reported, as far as they concern whole models: caches, loading, saving.

Each test has the number of its report in the project's list.
"""

import copy
import json
import pickle
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from regard.errors import CacheError, CacheFull, CheckpointError
from regard.masks import Causal, Window
from regard.mixers.parts import RMSNorm
from regard.models import Decoder, Embedding, GatedMLP, PreNorm, activation, generate, load
from regard.models.tables import FusedQKV
from regard.nn import MultiHeadAttention
from regard.positions import LearnedPositions, Rotary

CHECKPOINTS = Path(__file__).parents[1] / "checkpoints"
VOCABULARY = 31


def stack(*masks, places=None, rotary=True, dtype=torch.float64):
    """A small decoder with one layer a mask."""

    def layer(mask):
        def make(i):
            mixer = MultiHeadAttention(16, 4, kv_heads=2, mask=mask, rotary=Rotary(4) if rotary else None)
            return PreNorm(mixer, GatedMLP(16, 24, activation("silu")), RMSNorm(16), RMSNorm(16))

        return make

    embedding = Embedding(nn.Embedding(VOCABULARY, 16), places=places)
    return Decoder(embedding, [layer(mask) for mask in masks], RMSNorm(16)).to(dtype).eval()


def tokens(*shape):
    return torch.randint(0, VOCABULARY, shape)


def close(got, want):
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["rotary", "learned", "windows"])
def test_H22_left_padding_during_decoding(kind):
    """Prompts of 3 and 7 tokens together, then five steps: every row as if it were alone."""
    model = {
        "rotary": lambda: stack(Causal(), Causal()),
        "learned": lambda: stack(Causal(), places=LearnedPositions(32, 16), rotary=False),
        "windows": lambda: stack(Window(4), Causal()),
    }[kind]()
    rows = [tokens(1, 8), tokens(1, 12)]
    batch = torch.cat([torch.cat([tokens(1, 4), rows[0]], 1), rows[1]])
    keep = torch.ones(2, 12, dtype=torch.bool)
    keep[0, :4] = False
    cache = model.init_cache(2, 12)
    got = [model(batch[:, :7], keep=keep[:, :7], cache=cache)]
    got += [model(batch[:, t : t + 1], cache=cache) for t in range(7, 12)]
    got = torch.cat(got, 1)
    close(got[:1, 4:], model(rows[0]))
    close(got[1:], model(rows[1]))


@torch.no_grad()
def test_H23_packed_documents_do_not_leak():
    model = stack(Causal(), Window(2))
    docs = [tokens(1, n) for n in (3, 4, 2)]
    segments = torch.tensor([[0] * 3 + [1] * 4 + [2] * 2])
    packed = torch.cat(docs, 1)
    alone = torch.cat([model(d) for d in docs], 1)
    close(model(packed, segments=segments), alone)
    other = packed.clone()
    other[:, :3] = (other[:, :3] + 1) % VOCABULARY
    assert torch.equal(model(other, segments=segments)[:, 3:], model(packed, segments=segments)[:, 3:])
    cache = model.init_cache(1, 9)
    pieces = [model(packed[:, a:b], segments=segments[:, a:b], cache=cache) for a, b in ((0, 2), (2, 5), (5, 9))]
    close(torch.cat(pieces, 1), alone)


@torch.no_grad()
def test_H27_several_tokens_into_a_filled_cache():
    model = stack(Causal(), Window(5))
    ids = tokens(2, 20)
    whole = model(ids)
    for sizes in ([7, 13], [1] * 20, [5, 1, 14], [2, 2, 16]):
        cache = model.init_cache(2, 20)
        close(torch.cat([model(part, cache=cache) for part in ids.split(sizes, 1)], 1), whole)
        assert cache.length == 20


@torch.no_grad()
def test_H31_reorder_moves_every_kind_of_cache():
    model = stack(Causal(), Window(3), Causal())
    prefixes, index = tokens(3, 6), torch.tensor([2, 0, 0])
    cache = model.init_cache(3, 10)
    model(prefixes, cache=cache)
    cache.reorder(index)
    step = tokens(3, 1)
    texts = torch.cat([prefixes[index], step], 1)
    close(model(step, cache=cache), model(texts)[:, -1:])
    # the two copies of row 0 now differ, and do not share storage
    more = tokens(3, 2)
    close(model(more, cache=cache), model(torch.cat([texts, more], 1))[:, -2:])


@torch.no_grad()
def test_H32_a_full_cache_raises_before_anything_changes():
    model = stack(Window(3), Causal(), Causal())
    ids = tokens(1, 8)
    cache = model.init_cache(1, 8)
    model(ids, cache=cache)
    before = cache.clone()
    for extra in (tokens(1, 1), tokens(1, 9)):
        with pytest.raises(CacheFull):
            model(extra, cache=cache)
    assert cache.length == 8
    assert [c.length for c in cache] == [8, 8, 8]
    cache.reset()
    other = tokens(1, 8)
    close(model(other, cache=cache), model(other))
    assert before.length == 8
    with pytest.raises(CacheFull):
        model(tokens(1, 9), cache=model.init_cache(1, 8))


@torch.no_grad()
def test_H32_a_failing_call_changes_no_layer():
    model = stack(Causal(), Causal(), Causal())
    ids = tokens(2, 9)
    cache = model.init_cache(2, 9)
    model(ids[:, :5], cache=cache)

    def fail(*_):
        raise RuntimeError("interrupted")

    handle = model.layers[2].mixer.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="interrupted"):
        model(ids[:, 5:], cache=cache)
    handle.remove()
    assert [c.length for c in cache] == [5, 5, 5]
    close(model(ids[:, 5:], cache=cache), model(ids)[:, 5:])
    for bad in ({"keep": torch.ones(2, 3, dtype=torch.bool)}, {"segments": torch.tensor([[0], [1]])}):
        with pytest.raises(ValueError):
            model(ids[:, :4], cache=model.init_cache(2, 9), **bad)
    cache.crop(5)
    with pytest.raises(ValueError, match="rows"):
        model(ids[:1, :1], cache=cache)


@torch.no_grad()
def test_H32_crop_holds_for_all_layers_or_none():
    model = stack(Causal(), Window(3))
    ids = tokens(1, 10)
    cache = model.init_cache(1, 10)
    model(ids[:, :8], cache=cache)
    with pytest.raises(CacheError):
        cache.crop(2)
    assert [c.length for c in cache] == [8, 8]
    close(model(ids[:, 8:], cache=cache), model(ids)[:, 8:])

    plain = stack(Causal(), Causal())
    cache = plain.init_cache(1, 10)
    plain(ids, cache=cache)
    cache.crop(12)
    assert cache.length == 10
    cache.crop(4)
    close(plain(ids[:, 4:], cache=cache), plain(ids)[:, 4:])
    with pytest.raises(ValueError):
        cache.crop(-1)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_H33_a_row_does_not_depend_on_its_batch(dtype):
    model = stack(Causal(), Window(4), dtype=dtype)
    ids = tokens(1, 9)
    alone = model(ids)
    assert torch.equal(model(ids), alone)
    repeated = model(ids.expand(8, -1))
    assert all(torch.equal(row, repeated[0]) for row in repeated)
    mixed = torch.cat([tokens(1, 12), torch.cat([tokens(1, 3), ids], 1)])
    keep = torch.ones(2, 12, dtype=torch.bool)
    keep[1, :3] = False
    # one unit in the last place an operation; two layers have about twenty in a row
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 20 * 2**-8}[dtype] * float(alone.abs().max())
    assert (repeated[:1] - alone).abs().max() <= tolerance
    assert (model(mixed, keep=keep)[1:, 3:] - alone).abs().max() <= tolerance


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # torch's own attention has no batching rule
@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_H34_other_modes_of_autograd(family):
    model = load(CHECKPOINTS / family, dtype=torch.float64)
    model.layers = model.layers[:1]  # tracing takes seconds a layer
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    with torch.no_grad():
        for length in (5, 17, 33):
            ids = tokens(2, length)
            close(compiled(ids), model(ids))

    parameters = dict(model.named_parameters())

    def loss(p):
        return torch.func.functional_call(model, p, (ids,)).square().mean()

    direction = {n: torch.randn_like(p) for n, p in parameters.items()}
    slope = sum((g * direction[n]).sum() for n, g in torch.func.grad(loss)(parameters).items())
    with torch.no_grad():
        step = 1e-5
        ahead, behind = (loss({n: p + s * direction[n] for n, p in parameters.items()}) for s in (step, -step))
    torch.testing.assert_close(slope, (ahead - behind) / (2 * step), rtol=1e-5, atol=1e-8)
    two = {n: torch.stack([p, 0.5 * p]) for n, p in parameters.items()}
    got = torch.vmap(lambda p: torch.func.functional_call(model, p, (ids,)))(two)
    close(got[0], model(ids))


def test_H35_fused_projections_by_value():
    """Rows filled with their own number tell the orders apart; shapes do not."""
    rows = torch.arange(24.0)

    def split(heads, kv_heads, groups):
        layout = FusedQKV(heads, kv_heads, 2, groups=groups)
        stored = rows[: 2 * (heads + 2 * kv_heads)]
        for tensor in (stored, stored[:, None].expand(-1, 3)):  # a bias, a weight
            parts = layout.split(tensor)
            assert torch.equal(layout.join(parts), tensor)
        return [p[:, 0].tolist() for p in layout.split(stored[:, None])]

    q, k, v = split(4, 2, groups=1)  # [Q | K | V]
    assert (q[2:4], k, v) == ([2, 3], [8, 9, 10, 11], [12, 13, 14, 15])
    q, k, v = split(4, 4, groups=4)  # [q k v] head by head
    assert (q[2:4], k[:2], v[:2]) == ([6, 7], [2, 3], [4, 5])
    q, k, v = split(4, 2, groups=2)  # [q q k v] group by group
    assert (q[2:4], k[:2], v[:2]) == ([2, 3], [4, 5], [6, 7])
    with pytest.raises(ValueError, match="16 rows"):
        FusedQKV(4, 2, 2, groups=2).split(rows)


@pytest.mark.parametrize("family", ["falcon", "bloom", "llama"])
def test_H35_load_and_save_keep_every_value(family, tmp_path):
    folder = CHECKPOINTS / family
    load(folder).save(tmp_path)
    read, written = load_file(folder / "model.safetensors"), load_file(tmp_path / "model.safetensors")
    assert set(read) == set(written)
    assert all(torch.equal(read[name], written[name]) for name in read)


def edited(tmp_path, family, tensors=None, config=None):
    """A copy of a checkpoint with its tensors and options changed by functions."""
    folder = tmp_path / "edited"
    shutil.copytree(CHECKPOINTS / family, folder)
    if tensors is not None:
        held = load_file(folder / "model.safetensors")
        tensors(held)
        save_file(held, folder / "model.safetensors")
    if config is not None:
        options = json.loads((folder / "config.json").read_text())
        config(options)
        (folder / "config.json").write_text(json.dumps(options))
    return folder


def test_H36a_a_tied_head_that_differs_is_refused(tmp_path):
    def other_head(t):
        t["lm_head.weight"] = t["transformer.word_embeddings.weight"] + 1

    with pytest.raises(CheckpointError, match=r"tied .* transformer\.word_embeddings\.weight and lm_head\.weight"):
        load(edited(tmp_path, "falcon", other_head))


def test_H36b_missing_and_unused_tensors_are_listed(tmp_path):
    def drop(t):
        del t["lm_head.weight"], t["model.layers.1.mlp.up_proj.weight"]
        t["model.layers.9.extra"] = torch.zeros(2)

    with pytest.raises(CheckpointError) as caught:
        load(edited(tmp_path, "llama", drop))
    text = str(caught.value)
    assert re.search(r"missing tensors: lm_head\.weight, model\.layers\.1\.mlp\.up_proj\.weight;", text)
    assert "unused tensors: model.layers.9.extra" in text


@pytest.mark.parametrize("stored", ["transformer.word_embeddings.weight", "lm_head.weight", "both"])
def test_H36c_tied_tensors_share_storage_for_good(stored, tmp_path):
    def one_name(t):
        table = t["transformer.word_embeddings.weight"]
        if stored != "transformer.word_embeddings.weight":
            t["lm_head.weight"] = table.clone()
        if stored == "lm_head.weight":
            del t["transformer.word_embeddings.weight"]

    model = load(edited(tmp_path, "falcon", one_name))
    want = load(CHECKPOINTS / "falcon")(torch.tensor([[1, 2, 3]]))
    assert torch.equal(model(torch.tensor([[1, 2, 3]])), want)
    for other in (
        model,
        copy.deepcopy(model),
        copy.deepcopy(model).to(torch.float64),
        pickle.loads(pickle.dumps(model)),
    ):
        before = other(torch.tensor([[4]]))
        with torch.no_grad():
            other.embedding.tokens.weight[7] += 1.0
        change = (other(torch.tensor([[4]])) - before).abs()[0, 0]
        assert change[7] > 0  # the head reads the table itself
        assert change.sum() == change[7]


def test_H36d_a_wrong_shape_is_named_with_both(tmp_path):
    def narrow(t):
        t["transformer.h.1.mlp.dense_h_to_4h.weight"] = torch.zeros(128, 31)
        t["transformer.h.0.self_attention.query_key_value.weight"] = torch.zeros(65, 32)

    with pytest.raises(CheckpointError) as caught:
        load(edited(tmp_path, "falcon", narrow))
    assert "transformer.h.1.mlp.dense_h_to_4h.weight is (128, 31), expected (128, 32)" in str(caught.value)
    assert "transformer.h.0.self_attention.query_key_value.weight is (65, 32), expected (64, 32)" in str(caught.value)


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss", "bloom"])
def test_H36e_copies_are_the_same_model(family):
    model = load(CHECKPOINTS / family)
    ids = torch.tensor([[1, 5, 9, 2]])
    want = model(ids)
    fresh = load(CHECKPOINTS / family)
    with torch.no_grad():
        for p in fresh.parameters():
            p.zero_()
    fresh.load_state_dict(model.state_dict(), strict=True)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), fresh):
        assert torch.equal(other(ids), want)


@pytest.mark.parametrize("family", ["llama", "mistral", "falcon", "bloom", "gemma2", "gpt_oss", "bert"])
def test_H36f_every_parameter_gets_a_gradient(family):
    model = load(CHECKPOINTS / family)
    out = model(torch.arange(24).view(2, 12))
    if family == "bert":
        out = model.pool(out)
    out.square().sum().backward()
    assert not [name for name, p in model.named_parameters() if p.grad is None]


def test_an_interrupted_generation_leaves_the_model_as_it_was():
    model = load(CHECKPOINTS / "llama").train()
    generate(model, [1, 2], max_tokens=2)
    assert model.training
