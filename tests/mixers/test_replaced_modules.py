"""Nobody's module is passed over: adapters, hooks, parametrisations and quantised forms of every projection count."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

from regard.catalog import RECORDS
from regard.masks import Causal
from regard.mixers.base import is_plain
from regard.mixers.latent import LatentProjections
from regard.nn import LatentSizes, Mamba, MultiHeadLatentAttention

BY_NAME = {record.name: record for record in RECORDS}


class Doubled(nn.Module):
    """An adapter that shows the weight of what it wraps."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base

    @property
    def weight(self) -> Tensor:
        return self.base.weight

    @property
    def bias(self) -> Tensor | None:
        return self.base.bias

    def forward(self, *given: Tensor) -> Tensor:
        return 2 * self.base(*given)


class DoubledLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Twice(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


def place_of(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    parent, _, leaf = name.rpartition(".")
    return model.get_submodule(parent), leaf


def wrapped(model: nn.Module, name: str) -> None:
    parent, leaf = place_of(model, name)
    setattr(parent, leaf, Doubled(getattr(parent, leaf)))


def subclassed(model: nn.Module, name: str) -> None:
    model.get_submodule(name).__class__ = DoubledLinear


def hooked(model: nn.Module, name: str) -> None:
    model.get_submodule(name).register_forward_hook(lambda module, given, out: 2 * out)


def overridden(model: nn.Module, name: str) -> None:
    module = model.get_submodule(name)
    plain = module.forward
    module.forward = lambda x: 2 * plain(x)


def parametrised(model: nn.Module, name: str) -> None:
    module = model.get_submodule(name)
    parametrize.register_parametrization(module, "weight", Twice())
    if module.bias is not None:
        parametrize.register_parametrization(module, "bias", Twice())


def pre_hooked(model: nn.Module, name: str) -> None:
    """As weight_norm of old did: the weight is put in place before each call."""
    module = model.get_submodule(name)
    with torch.no_grad():
        weight, bias = module.weight.clone(), None if module.bias is None else module.bias.clone()
        module.weight.zero_()

    def set_weight(module: nn.Module, given: tuple[Tensor, ...]) -> None:
        with torch.no_grad():
            module.weight.copy_(2 * weight)
            if bias is not None:
                module.bias.copy_(2 * bias)

    module.register_forward_pre_hook(set_weight)


WAYS: dict[str, Callable[[nn.Module, str], None]] = {
    "wrapper": wrapped,
    "subclass": subclassed,
    "hook": hooked,
    "pre-hook": pre_hooked,
    "own forward": overridden,
    "parametrised": parametrised,
}


def double(model: nn.Module, name: str) -> None:
    module = model.get_submodule(name)
    with torch.no_grad():
        module.weight.mul_(2)
        if module.bias is not None:
            module.bias.mul_(2)


def linears(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]


def outputs(layer: nn.Module, record) -> list[Tensor]:
    """Without a cache; in parts through one; token by token; and what the cache then holds."""
    torch.manual_seed(1)
    x = torch.randn(2, 7, 16, dtype=torch.float64)
    context = (torch.randn(2, 3, 20, dtype=torch.float64),) if record.context else ()
    found = [layer(x, *context)]
    if record.cached:
        cache = layer.init_cache(2, 8)
        parts = [layer(x[:, :4], *context, cache=cache)]
        parts += [layer(part, cache=cache) for part in x[:, 4:].split(1, 1)]
        found.append(torch.cat(parts, 1))
    return found


@functools.cache
def built(name: str) -> nn.Module:
    torch.manual_seed(0)
    return BY_NAME[name].build(16, 4).double().eval()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", BY_NAME)
def test_what_stands_in_the_place_of_a_projection_is_called(name, way):
    record, layer = BY_NAME[name], built(name)
    with torch.no_grad():
        for projection in linears(layer):
            changed, wanted = copy.deepcopy(layer), copy.deepcopy(layer)
            WAYS[way](changed, projection)
            double(wanted, projection)
            for got, want in zip(outputs(changed, record), outputs(wanted, record), strict=True):
                torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12, msg=lambda m, p=projection: f"{p}: {m}")


def weight_normed(module: nn.Linear) -> None:
    parametrizations.weight_norm(module)


def spectral_normed(module: nn.Linear) -> None:
    parametrizations.spectral_norm(module)


def old_weight_normed(module: nn.Linear) -> None:
    nn.utils.weight_norm(module)


def old_spectral_normed(module: nn.Linear) -> None:
    nn.utils.spectral_norm(module)


def pruned(module: nn.Linear) -> None:
    prune.l1_unstructured(module, "weight", 0.5)


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
@pytest.mark.parametrize("change", [weight_normed, spectral_normed, old_weight_normed, old_spectral_normed, pruned])
@pytest.mark.parametrize("name", ["mha", "mla", "mla_gated", "mamba", "jamba", "kda", "gated_deltanet", "cross"])
def test_torch_s_own_parametrisations(name, change):
    record, layer = BY_NAME[name], copy.deepcopy(built(name))
    for projection in linears(layer):
        change(layer.get_submodule(projection))
    layer.eval()
    with torch.no_grad():
        first = outputs(layer, record)
        plain = copy.deepcopy(built(name))
        for projection in linears(plain):
            module = layer.get_submodule(projection)
            module(torch.zeros(module.in_features, dtype=torch.float64))
            plain.get_submodule(projection).weight.copy_(module.weight)
        for got, want in zip(first, outputs(plain, record), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")  # torch's own
@pytest.mark.parametrize("name", BY_NAME)
def test_dynamic_quantisation(name):
    """Every linear map in its int8 form: calls, parts and steps agree as far as int8 lets them."""
    torch.manual_seed(0)
    record = BY_NAME[name]
    layer = record.build(16, 4).eval()
    quantised = torch.ao.quantization.quantize_dynamic(layer, {nn.Linear})
    assert not linears(quantised)
    with torch.no_grad():
        torch.manual_seed(1)
        x = torch.randn(2, 7, 16)
        context = (torch.randn(2, 3, 20),) if record.context else ()
        got = quantised(x, *context)
        for projection in linears(layer):  # the same maps, by hand, on the plain layer
            stand_in = quantised.get_submodule(projection)
            parent, leaf = place_of(layer, projection)
            setattr(parent, leaf, Caller(stand_in))
        torch.testing.assert_close(got, layer(x, *context), rtol=1e-5, atol=1e-5)
        if record.cached:
            cache = quantised.init_cache(2, 8)
            assert torch.equal(quantised(x, *context, cache=cache), layer(x, *context, cache=layer.init_cache(2, 8)))
            step = quantised(x[:, :1], cache=cache)
            assert step.shape == (2, 1, 16) and bool(step.isfinite().all())


class Caller(nn.Module):
    """Calls what it holds and shows nothing of it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = [inner]

    def forward(self, x: Tensor) -> Tensor:
        return self.inner[0](x)


@pytest.mark.parametrize("name", BY_NAME)
def test_a_layer_needs_no_attribute_of_its_projections(name):
    record, layer = BY_NAME[name], copy.deepcopy(built(name))
    with torch.no_grad():
        want = outputs(layer, record)
        for projection in linears(layer):
            parent, leaf = place_of(layer, projection)
            setattr(parent, leaf, Caller(getattr(parent, leaf)))
        got = outputs(layer, record)
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


class Adds(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base

    @property
    def weight(self) -> Tensor:
        return self.base.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 0.1


def latent(**projections) -> MultiHeadLatentAttention:
    torch.manual_seed(0)
    given = LatentProjections(**projections)
    return MultiHeadLatentAttention(64, 8, LatentSizes(16, 8, 4, 8), projections=given, mask=Causal()).double()


def test_the_absorbed_form_of_latent_attention_passes_over_no_adapter():
    layer, x = latent(), torch.randn(1, 9, 64, dtype=torch.float64)
    assert layer.absorbs(1, 9)
    layer.kv_b_proj = Adds(layer.kv_b_proj)
    assert not layer.absorbs(1, 9)
    cache = layer.init_cache(1, 9)
    got = torch.cat([layer(part, cache=cache) for part in x.split([6, 1, 1, 1], 1)], 1)
    torch.testing.assert_close(got, layer(x), rtol=0, atol=1e-12)
    layer.form, cache = "absorbed", layer.init_cache(1, 9)
    with pytest.raises(ValueError, match=r"form: 'absorbed' reads kv_b_proj.weight alone.* got Adds"):
        layer(x, cache=cache)
    assert cache.length == 0


def test_the_absorbed_form_passes_over_no_bias():
    layer, x = latent(), torch.randn(1, 5, 64, dtype=torch.float64)
    plain, layer.kv_b_proj = layer.kv_b_proj, nn.Linear(16, 8 * 16).double()
    with torch.no_grad():
        layer.kv_b_proj.weight.copy_(plain.weight)
    cache = layer.init_cache(1, 5)
    got = torch.cat([layer(part, cache=cache) for part in x.split(1, 1)], 1)
    torch.testing.assert_close(got, layer(x), rtol=0, atol=1e-12)


def test_a_parametrised_map_is_still_absorbed():
    layer, x = latent(), torch.randn(1, 5, 64, dtype=torch.float64)
    parametrize.register_parametrization(layer.kv_b_proj, "weight", Twice())
    assert layer.absorbs(1, 9)
    cache = layer.init_cache(1, 5)
    got = torch.cat([layer(part, cache=cache) for part in x.split(1, 1)], 1)
    layer.form = "expanded"
    torch.testing.assert_close(got, layer(x), rtol=0, atol=1e-12)


def test_hooks_on_all_modules_see_every_projection():
    for layer in (latent(), Mamba(16).double()):
        x, seen = torch.randn(1, 1, layer.dim, dtype=torch.float64), []
        handle = nn.modules.module.register_module_forward_hook(lambda m, given, out, seen=seen: seen.append(m))
        try:
            layer(x)
        finally:
            handle.remove()
        assert {layer.get_submodule(name) for name in linears(layer)} <= set(seen)


def test_a_gradient_reaches_what_an_adapter_learns():
    layer, x = Mamba(16).double(), torch.randn(1, 5, 16, dtype=torch.float64)
    down, up = nn.Linear(1, 2, bias=False).double(), nn.Linear(2, layer.width, bias=False).double()
    base = layer.dt_proj

    class LowRank(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base, self.down, self.up = base, down, up

        def forward(self, x: Tensor) -> Tensor:
            return self.base(x) + self.up(self.down(x))

    before = layer(x)
    layer.dt_proj = LowRank()
    assert not torch.allclose(layer(x), before)
    layer(x).sum().backward()
    assert bool((up.weight.grad != 0).any()) and bool((down.weight.grad != 0).any())


def test_what_is_plain():
    assert is_plain(nn.Linear(2, 2), nn.Linear)
    for change in (weight_normed, spectral_normed):
        module = nn.Linear(2, 2)
        change(module)
        assert is_plain(module, nn.Linear)
    for change in (hooked, pre_hooked, overridden, subclassed, wrapped):
        box = nn.Sequential(nn.Linear(2, 2))
        change(box, "0")
        assert not is_plain(box[0], nn.Linear)
    assert not is_plain(nn.Identity(), nn.Linear)
