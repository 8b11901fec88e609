"""Positions past what a model was made for: refused wherever they are read, never turned by other angles."""

import json
import shutil
import warnings
from pathlib import Path

import pytest
import torch

from regard.masks import Causal
from regard.mixers.latent import LatentSizes
from regard.models import generate, load
from regard.models.layouts.shared.latent import interleaved
from regard.models.layouts.shared.rotary import RotaryWithinContext
from regard.nn import MultiHeadAttention, MultiHeadLatentAttention, Retention
from regard.positions import LearnedPositions, Rotary

LLAMA = Path(__file__).parents[1] / "checkpoints" / "llama"
REFUSED = r"positions: expected at most 31, got 3\d|positions: expected at most 31, got 69"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("dynamic") / "model"
    shutil.copytree(LLAMA, path)
    config = json.loads((path / "config.json").read_text())
    config |= {
        "max_position_embeddings": 32,
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 8.0},
    }
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.fixture
def model(folder):
    return load(folder)


def text(tokens, rows=1):
    return torch.arange(rows * tokens).view(rows, tokens) % 97


def test_a_whole_text_past_the_trained_length(model):
    assert torch.equal(model(text(32)), load(LLAMA)(text(32)))
    with pytest.raises(ValueError, match=REFUSED):
        model(text(70))
    with pytest.raises(ValueError, match=REFUSED):
        model(text(33))
    with pytest.raises(ValueError, match=REFUSED):
        model(text(4), positions=torch.tensor([[0, 1, 2, 32]]))
    assert torch.equal(model(text(4), positions=torch.tensor([[0, 1, 2, 31]])).isfinite().all(), torch.tensor(True))


def test_a_cache_past_the_trained_length_stays_as_it_was(model):
    cache = model.init_cache(1, 40)
    model(text(30), cache=cache)
    with pytest.raises(ValueError, match=REFUSED):
        model(text(3), cache=cache)
    assert cache.length == 30
    got = model(torch.tensor([[30, 31]]), cache=cache)
    assert (got - load(LLAMA)(text(32))[:, 30:]).abs().max() < 1e-5
    with pytest.raises(ValueError, match=REFUSED):
        model(text(1), cache=cache)


def test_generating_past_the_trained_length(model):
    assert len(generate(model, text(30), max_tokens=3, end_ids=())[0].ids) == 3  # the last one is never read
    with pytest.raises(ValueError, match=REFUSED):
        generate(model, text(30), max_tokens=4, end_ids=())
    with pytest.raises(ValueError, match=REFUSED):
        generate(model, [text(31)[0].tolist(), [1]], max_tokens=4, end_ids=())


def test_positions_count_real_tokens(model):
    keep = torch.ones(1, 40, dtype=torch.bool)
    keep[:, :8] = False
    got = model(text(40), keep=keep)[:, 8:]
    assert (got - load(LLAMA)(text(40)[:, 8:])).abs().max() < 1e-5
    segments = torch.arange(40)[None] // 20
    model(text(40), segments=segments)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_as_well(model, backend):
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=backend)
    with torch.no_grad():
        assert (compiled(text(32)) - model(text(32))).abs().max() < 1e-5
        with pytest.raises(ValueError, match=REFUSED):
            compiled(text(33))
        assert (compiled(text(31)) - model(text(31))).abs().max() < 1e-5


def test_exported_as_well(model):
    where = torch.arange(12)[None]
    with torch.no_grad():
        program = torch.export.export(model, (text(12),), {"positions": where}).module()
        assert (program(text(12), positions=where + 20) - model(text(12), positions=where + 20)).abs().max() < 1e-5
        with pytest.raises(ValueError, match=REFUSED):
            program(text(12), positions=where + 21)


def within(dim, **options):
    return RotaryWithinContext(dim, max_positions=32, **options)


def test_every_entry_point_of_the_rotary_part():
    plain, rotary = Rotary(8), within(8)
    x, fits, past = torch.randn(1, 2, 3, 8), torch.tensor([0, 7, 31]), torch.tensor([0, 7, 32])
    assert torch.equal(rotary(x, fits), plain(x, fits))
    assert torch.equal(rotary.angles(fits)[0], plain.angles(fits)[0])
    for call in (lambda p: rotary(x, p), rotary.angles, lambda p: rotary(x, p[None]), lambda p: rotary(x, p.double())):
        with pytest.raises(ValueError, match="positions: expected at most 31, got 32"):
            call(past)
    turned = interleaved(rotary)
    with pytest.raises(ValueError, match="positions: expected at most 31, got 32"):
        turned(x, past)
    assert rotary(x[:, :, :0], past[:0]).shape == (1, 2, 0, 8)
    grown = fits.clone()
    rotary(x, grown)
    grown += 1  # the same tensor, changed in place
    with pytest.raises(ValueError, match="positions: expected at most 31, got 32"):
        rotary(x, grown)


def test_function_transforms_see_the_limit_too():
    rotary, x = within(8), torch.randn(3, 1, 2, 4, 8)
    fits = torch.arange(12).view(3, 4)
    got = torch.vmap(rotary)(x, fits)
    assert torch.equal(got, torch.stack([rotary(a, p) for a, p in zip(x, fits, strict=True)]))
    with pytest.raises(ValueError, match="positions: expected at most 31, got 35"):
        torch.vmap(rotary)(x, fits + 24)
    where = torch.tensor([30.0], dtype=torch.float64)
    slope = torch.func.grad(lambda p: rotary(x[0, :, :, :1].double(), p).sum())(where)
    mine = torch.func.grad(lambda p: Rotary(8)(x[0, :, :, :1].double(), p).sum())(where)
    assert torch.equal(slope, mine)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # jit.trace itself is deprecated, and tells of every shape it reads
        traced = torch.jit.trace(lambda p: rotary(x[0], p), (fits[0],))
    assert torch.equal(traced(fits[1]), rotary(x[0], fits[1]))
    with pytest.raises((ValueError, RuntimeError), match="positions: expected at most 31, got 35"):
        traced(fits[2] + 24)


@pytest.mark.parametrize(
    "make",
    [
        lambda: MultiHeadAttention(16, 2, mask=Causal(), rotary=within(8)),
        lambda: MultiHeadLatentAttention(
            16, 2, LatentSizes(8, 8, 4, 8), mask=Causal(), rotary=within(4, style="interleaved")
        ),
        lambda: Retention(16, 2, rotary=within(8)),
    ],
    ids=["attention", "latent", "retention"],
)
def test_layers_with_such_a_rotary_part(make):
    layer = make().eval()
    layer(torch.randn(1, 32, 16))
    with pytest.raises(ValueError, match="positions: expected at most 31, got 32"):
        layer(torch.randn(1, 33, 16))
    cache = layer.init_cache(1, 40)
    layer(torch.randn(1, 32, 16), cache=cache)
    with pytest.raises(ValueError, match="positions: expected at most 31, got 32"):
        layer(torch.randn(1, 1, 16), cache=cache)
    assert cache.length == 32


@pytest.mark.parametrize("bad", [-1, 8])
def test_learned_positions_outside_the_table(bad):
    places, where = LearnedPositions(8, 4), torch.tensor([0, 1, bad, 2, 3, 4, 5, 6])
    with pytest.raises(ValueError, match=r"positions: expected numbers in \[0, 8\)"):
        places(where)
    compiled = torch.compile(places, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(torch.arange(8)), places(torch.arange(8)))
    with pytest.raises(IndexError):  # torch's own lookup refuses it there
        compiled(where)
