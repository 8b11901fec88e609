"""Whole models: adapters, hooks and quantised forms of every linear map and table; and models without values."""

from __future__ import annotations

import contextlib
import copy
import json
from pathlib import Path

import pytest
import torch
from model_calls import beside, cache_of, read_by
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.nn.utils import parametrize

from regard.masks import Causal
from regard.models import Decoder, Embedding, EncoderDecoder, GatedMLP, PreNorm, activation, generate, load
from regard.models.experts import GatedExperts, MixtureOfExperts, Router, Routing
from regard.models.layouts import layout_of
from regard.nn import MultiHeadAttention

FOLDERS = sorted((Path(__file__).parents[1] / "checkpoints").iterdir())


class Doubled(nn.Module):
    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base

    @property
    def weight(self) -> Tensor:
        return self.base.weight

    def forward(self, given: Tensor) -> Tensor:
        return 2 * self.base(given)


class Twice(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


def maps(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, (nn.Linear, nn.Embedding))]


def tied(model: nn.Module, name: str) -> bool:
    if isinstance(model, EncoderDecoder):  # one table, often under two names
        return name in ("encoder.embedding.tokens", "decoder.embedding.tokens") and model.decoder.head is None
    return name == "embedding.tokens" and isinstance(model, Decoder) and model.head is None


def replace(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(parent), leaf, module)


def double(module: nn.Module) -> None:
    with torch.no_grad():
        module.weight.mul_(2)
        if getattr(module, "bias", None) is not None:
            module.bias.mul_(2)


def outputs(model: nn.Module, ids: Tensor) -> list[Tensor]:
    more, ids = beside(model, ids), read_by(model, ids)
    answer = model(ids, **more)
    found = list(answer) if isinstance(answer, tuple) else [answer]
    if isinstance(model, (Decoder, EncoderDecoder)):
        cache, parts = cache_of(model, 2, 8), []
        for part in ids.split([4, 1, 1], 1):
            parts.append(model(part, cache=cache, **({} if parts else more)))
        found.append(torch.cat(parts, 1))
    elif getattr(model, "pooler", None) is not None and getattr(model, "classifier", None) is None:
        found.append(model.pool(found[0]))
    return found


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_every_map_and_table_of_a_family_is_called(folder):
    model = load(folder, dtype=torch.float64)
    ids = torch.randint(0, 20, (2, 6), generator=torch.Generator().manual_seed(0))
    names = [name for name in maps(model) if not tied(model, name)]
    wanted, wrapped, hooked = (copy.deepcopy(model) for _ in range(3))
    calls = dict.fromkeys(names, 0)
    for name in names:
        double(wanted.get_submodule(name))
        replace(wrapped, name, Doubled(wrapped.get_submodule(name)))

        def twice(module, given, out, name=name):
            calls[name] += 1
            return 2 * out

        hooked.get_submodule(name).register_forward_hook(twice)
    with torch.no_grad():
        want = outputs(wanted, ids)
        for changed in (wrapped, hooked):
            for got, right in zip(outputs(changed, ids), want, strict=True):
                torch.testing.assert_close(got, right, rtol=1e-9, atol=1e-9)
        assert all(calls.values()), calls
        if tied(model, "embedding.tokens"):
            replace(model, "embedding.tokens", Doubled(model.embedding.tokens))
            with pytest.raises(ValueError, match=r"head: it is tied to embedding.tokens.weight.* a Doubled"):
                model(ids)


def small(head: bool, **embedding) -> Decoder:
    torch.manual_seed(0)

    def layer(i):
        return PreNorm(
            MultiHeadAttention(8, 2, mask=Causal()),
            GatedMLP(8, 16, activation("silu")),
            nn.LayerNorm(8),
            nn.LayerNorm(8),
        )

    table = Embedding(nn.Embedding(11, 8, **embedding))
    return Decoder(table, [layer], nn.LayerNorm(8), nn.Linear(8, 11) if head else None).eval()


IDS = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])


def test_a_tied_head_refuses_a_table_that_it_cannot_read_before_anything_changes():
    model = small(head=False)
    cache = model.init_cache(2, 8)
    model.embedding.tokens = Doubled(model.embedding.tokens)
    with pytest.raises(ValueError, match=r"expected an nn.Embedding there, or a head of its own"):
        model(IDS, cache=cache)
    assert cache.length == 0
    assert model.hidden(IDS).shape == (2, 4, 8)  # needs no head


def test_hooks_and_parametrisations_of_a_tied_table():
    model = small(head=False)
    want, seen = model(IDS), []
    model.embedding.tokens.register_forward_hook(lambda module, given, out: seen.append(out.shape))
    assert torch.equal(model(IDS), want) and seen == [(2, 4, 8)]
    doubled = copy.deepcopy(model)
    double(doubled.embedding.tokens)
    parametrize.register_parametrization(model.embedding.tokens, "weight", Twice())
    assert torch.equal(model(IDS), doubled(IDS))


def test_a_table_keeps_the_options_that_torch_gives_it():
    model = small(head=True, padding_idx=0, max_norm=0.5)
    model(torch.tensor([[0, 1, 2]])).sum().backward()
    norms = model.embedding.tokens.weight.detach().norm(dim=1)
    assert bool((norms[1:3] <= 0.5 + 1e-6).all()) and bool((norms[5:] > 0.5).any())
    assert bool((model.embedding.tokens.weight.grad[0] == 0).all())


def test_ids_outside_a_wrapped_or_plain_table():
    model = small(head=True)
    for ids in ([[1, 11]], [[-1, 2]]):
        with pytest.raises(ValueError, match=r"ids: expected 0 to 10, the vocabulary, got "):
            model(torch.tensor(ids))
    model.embedding.tokens = Doubled(model.embedding.tokens)
    with pytest.raises(IndexError):
        model(torch.tensor([[1, 11]]))


@pytest.mark.parametrize("choice", ["few tokens", "traced", "sorted"])
def test_parametrised_experts_and_routers(choice):
    """Stacked tensors are read through their parametrisations, in every way that experts are computed."""
    torch.manual_seed(0)
    moe = MixtureOfExperts(Router(8, Routing(4, 2)), GatedExperts(8, 16, 4, nn.SiLU())).double()
    x, doubled = torch.randn(3, 5, 8, dtype=torch.float64), copy.deepcopy(moe)
    with torch.no_grad():
        for tensor in (doubled.router.weight, doubled.experts.gate_proj, doubled.experts.down_proj):
            tensor.mul_(2)
    parametrize.register_parametrization(moe.router, "weight", Twice())
    for name in ("gate_proj", "down_proj"):
        parametrize.register_parametrization(moe.experts, name, Twice())
    with torch.set_grad_enabled(choice == "sorted"):
        got = torch.compile(moe, backend="eager")(x) if choice == "traced" else moe(x)
        torch.testing.assert_close(got, doubled(x))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")  # torch's own
def test_dynamic_quantisation_of_a_model():
    from torch.ao.quantization import float_qparams_weight_only_qconfig, quantize_dynamic

    for head in (False, True):
        model = small(head)
        quantised = quantize_dynamic(model, {nn.Linear})
        cache = quantised.init_cache(2, 8)
        with torch.no_grad():
            parts = torch.cat([quantised(part, cache=cache) for part in IDS.split(2, 1)], 1)
            assert parts.shape == (2, 4, 11)
            torch.testing.assert_close(quantised(IDS), model(IDS), rtol=0.2, atol=0.2)
        assert len(generate(quantised, [[1, 2, 3]], max_tokens=2, end_ids=())[0].ids) == 2
    tables = quantize_dynamic(small(head=True), {nn.Embedding: float_qparams_weight_only_qconfig})
    with torch.no_grad():
        torch.testing.assert_close(tables(IDS), small(head=True)(IDS), rtol=0.1, atol=0.1)
    with pytest.raises(ValueError, match="head: it is tied"):
        quantize_dynamic(small(head=False), {nn.Embedding: float_qparams_weight_only_qconfig})(IDS)


@pytest.mark.parametrize("where", ["fake", "meta"])
@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_a_model_is_built_trained_and_stepped_without_values(folder, where):
    config = json.loads((folder / "config.json").read_text())
    mode: contextlib.AbstractContextManager = FakeTensorMode() if where == "fake" else torch.device("meta")
    with mode:
        model = layout_of(config, folder.name).read(config, folder.name, lambda name: False).make()
        ids = torch.zeros(2, 5, dtype=torch.long)
        more = beside(model, ids)
        out = model(read_by(model, ids), **more)
        out = out[0] if isinstance(out, tuple) else out
        out.sum().backward()
        if isinstance(model, (Decoder, EncoderDecoder)):
            cache = cache_of(model, 2, 16)
            model(ids, cache=cache, **more)
            with torch.no_grad():
                model(ids[:, :2], cache=cache, keep=torch.ones(2, 2, dtype=torch.bool))
                out = model(ids[:, :1], cache=cache.clone())
            cache.reorder([1, 0])
            cache.reset()
    assert out.shape[0] == 2
