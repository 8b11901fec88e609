"""Every check of the contract finds a fault planted for it, in every dtype, and passes the same layer without it."""

from __future__ import annotations

import re
from collections.abc import Callable

import foreign
import pytest
import torch
from torch import Tensor, nn

import regard
from regard import backends
from regard.backends.native import library
from regard.biases import Alibi
from regard.masks import Causal
from regard.testing import CHECKS, DTYPES, Subject, run_checks


class Layer(nn.Module):
    """A sound layer, whose parts the faulty ones below override: causal attention with everything the contract asks."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = regard.nn.MultiHeadAttention(8, 2, mask=Causal())

    def forward(self, x: Tensor, context: Tensor | None = None, **given) -> Tensor:
        return self.inner(x, context, **given)

    def init_cache(self, batch: int, capacity: int):
        return self.inner.init_cache(batch, capacity)

    def mixing(self, x: Tensor, **given) -> tuple[Tensor, Tensor]:
        return self.inner.mixing(x, **given)

    def mixed(self, x: Tensor, **given) -> Tensor:
        return self.inner.mixed(x, **given)


class Leaks(Layer):
    """A maximum over all tokens, whose gradient is 0 almost everywhere."""

    def forward(self, x, context=None, **given):
        return self.inner(x, context, **given) + 0.01 * x.amax((1, 2), keepdim=True).detach() if x.numel() else x


class MixesRows(Layer):
    def forward(self, x, context=None, **given):
        return self.inner(x, context, **given) + (0.3 * x.mean(0) if x.shape[0] else 0)


class ForgetsTheFirstToken(Layer):
    """With a cache, later calls do not read slot 0."""

    def forward(self, x, context=None, cache=None, **given):
        if cache is not None and cache.length:
            hidden = torch.arange(cache.length + x.shape[1], device=x.device) > 0
            given["mask"] = hidden.expand(x.shape[1], -1)
        return self.inner(x, context, cache=cache, **given)


class IgnoresPaddingOnTheLeft(Layer):
    def forward(self, x, context=None, keep=None, **given):
        if keep is not None and not bool(keep[:, 0].all()):
            keep = None
        return self.inner(x, context, keep=keep, **given)


class CountsPaddingOnTheRight(Layer):
    def forward(self, x, context=None, keep=None, **given):
        whole = self.inner(x, context, keep=keep, **given)
        return whole if keep is None or bool(keep[:, -1].all()) else whole * 1.5


class CountsSlots(Layer):
    """A bias by distance in slots, from a layer that promises not to count them."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = regard.nn.MultiHeadAttention(8, 2, mask=Causal(), bias=Alibi(torch.tensor([1.0, 3.0])))


class IgnoresSegments(Layer):
    def forward(self, x, context=None, segments=None, **given):
        return self.inner(x, context, **given)


class ForgetsToReorderValues(Layer):
    def init_cache(self, batch, capacity):
        cache = self.inner.init_cache(batch, capacity)
        whole = cache.reorder

        def reorder(index):
            v = cache.v.clone()
            whole(index)
            cache.v.copy_(v[:1].expand_as(cache.v))

        cache.reorder = reorder
        return cache


class TakesMoreThanItHolds(Layer):
    """A full cache drops its oldest token instead of raising."""

    def forward(self, x, context=None, cache=None, **given):
        if cache is not None and cache.length + x.shape[1] > cache.capacity:
            cache.crop(cache.length - x.shape[1])
        return self.inner(x, context, cache=cache, **given)


class CropsTooMuch(Layer):
    def init_cache(self, batch, capacity):
        cache = self.inner.init_cache(batch, capacity)
        whole = cache.crop
        cache.crop = lambda n: whole(max(n - 1, 0) if 0 < n < cache.length else n)
        return cache


class DependsOnTheBackend(Layer):
    def forward(self, x, context=None, **given):
        out = self.inner(x, context, **given)
        return out * 1.3 if backends._current() == "chunked" else out


class _Scaled(torch.autograd.Function):
    """The identity with a gradient that is too large."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return 1.5 * grad


class WrongGradient(Layer):
    def forward(self, x, context=None, **given):
        return _Scaled.apply(self.inner(x, context, **given))


class UnreachedParameter(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Parameter(torch.ones(8))


class _Square(torch.autograd.Function):
    """x² with the right gradient, which is not differentiable itself."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 2 * x.detach() * grad


class WrongSecondGradient(Layer):
    def forward(self, x, context=None, **given):
        return self.inner(x, context, **given) + _Square.apply(x)


class RoundsOnTheWay(Layer):
    """Rounds in between, except where the definition runs and in float64."""

    def forward(self, x, context=None, **given):
        out = self.inner(x, context, **given)
        if backends._current() == "reference" or x.dtype == torch.float64:
            return out
        step = 2.0**-3 if x.dtype in (torch.bfloat16, torch.float16) else 2.0**-16
        return out + ((out / step).round() * step - out).detach()


class AvoidsTheKernels(Layer):
    def forward(self, x, context=None, **given):
        with regard.use_backend("chunked"):
            return self.inner(x, context, **given)


class AssumesContiguity(Layer):
    def forward(self, x, context=None, **given):
        flat = torch.as_strided(x, x.shape, (x.shape[1] * x.shape[2], x.shape[2], 1))
        return self.inner(flat, context, **given)


class WritesItsInput(Layer):
    def forward(self, x, context=None, **given):
        out = self.inner(x, context, **given)
        with torch.no_grad():
            x.data.mul_(1.5)
        return out


class ReadsUnwrittenMemory(Layer):
    def forward(self, x, context=None, **given):
        return self.inner(x, context, **given) + 0 * torch.empty_like(x)


class ReshapesNothing(Layer):
    def forward(self, x, context=None, **given):
        return self.inner(x.reshape(x.shape[0], -1, x.shape[2]), context, **given)


class TellsAnotherMatrix(Layer):
    def mixing(self, x, **given):
        matrix, values = self.inner.mixing(x, **given)
        return matrix * 1.2, values


class TellsAMatrixThatLooksAhead(Layer):
    def mixing(self, x, **given):
        matrix, values = self.inner.mixing(x, **given)
        return matrix + torch.ones_like(matrix).triu(1), values - values

    def mixed(self, x, **given):
        return 0 * self.inner.mixed(x, **given)


class KeepsItsStateOutside(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.outside = torch.rand(1).item() + 0.5

    def forward(self, x, context=None, **given):
        return self.inner(x, context, **given) * self.outside


class LooksAtValues(Layer):
    def forward(self, x, context=None, **given):
        return self.inner(x, context, **given) * (2.0 if x.sum().item() == 0.5 else 1.0)


class BreaksTheGraph(Layer):
    def forward(self, x, context=None, **given):
        torch._dynamo.graph_break()
        return self.inner(x, context, **given)


class SaysNothing(Layer):
    """Wrong padding flags are ignored."""

    def forward(self, x, context=None, keep=None, **given):
        if keep is not None and (keep.dtype != torch.bool or keep.shape != x.shape[:2]):
            keep = None
        return self.inner(x, context, keep=keep, **given)


class SaysItUnnamed(Layer):
    def forward(self, x, context=None, **given):
        try:
            return self.inner(x, context, **given)
        except ValueError as error:
            raise ValueError("this does not fit") from error


# check, faulty layer, the words that must stand in what is found
FAULTS: list[tuple[str, Callable[[], nn.Module], str]] = [
    ("causality", Leaks, "after changing those from"),
    ("batch_independence", MixesRows, "row 0 of 2 after changing row 1: off by"),
    ("splits", ForgetsTheFirstToken, "against one call: off by"),
    ("left_padding", IgnoresPaddingOnTheLeft, "padded, against the row alone: off by"),
    ("right_padding", CountsPaddingOnTheRight, "padded, against the row alone: off by"),
    ("interior_padding", CountsSlots, "padded, against the row alone: off by"),
    ("packed", IgnoresSegments, "segment 1 of row 0: off by"),
    ("reorder", ForgetsToReorderValues, "after reorder"),
    ("cache_rules", TakesMoreThanItHolds, "a cache of 7 took token 7"),
    ("cache_rules", CropsTooMuch, "a step repeated after crop: off by"),
    ("backends_agree", DependsOnTheBackend, "backend chunked, output: off by"),
    ("gradients", WrongGradient, "gradient"),
    ("gradients", UnreachedParameter, "spare has no finite gradient"),
    ("second_gradients", WrongSecondGradient, "second derivatives differ|the gradient of"),
    ("native_runs", AvoidsTheKernels, "these backends ran.*chunked"),
    ("low_precision", RoundsOnTheWay, "the plain formula by"),
    ("strides", AssumesContiguity, "every second channel: off by"),
    ("strides", WritesItsInput, "the input was modified|off by"),
    ("unwritten_memory", ReadsUnwrittenMemory, "fresh memory full of NaN: .*not finite"),
    ("empty_inputs", ReshapesNothing, "it raised RuntimeError.*0 elements"),
    ("mixing", TellsAnotherMatrix, "M @ V, against what the layer mixes: off by"),
    ("mixing", TellsAMatrixThatLooksAhead, "above the diagonal"),
    ("copies", KeepsItsStateOutside, "a state_dict round trip: off by"),
    ("meta_device", LooksAtValues, "it raised RuntimeError.*meta"),
    ("compiled", BreaksTheGraph, "it raised Unsupported"),
    ("error_texts", SaysNothing, "a wrong keep raised nothing"),
    ("error_texts", SaysItUnnamed, "does not begin with it"),
    ("inductor", BreaksTheGraph, "it raised Unsupported"),
]


def subject(make: Callable[[], nn.Module], dtype: torch.dtype) -> Subject:
    return Subject("planted", make, 8, counts_slots=False, off_kernels="", dtype=dtype)


def test_every_check_has_a_fault():
    """Those that anybody's modules are asked too have theirs in foreign.py."""
    faults = {name for name, _, _ in FAULTS} | {fault.check for fault in foreign.FAULTS}
    assert faults == {check.name for check in CHECKS}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("name", "fault", "words"), FAULTS, ids=[f"{name}-{make.__name__}" for name, make, _ in FAULTS]
)
def test_the_fault_is_found_and_named(name, fault, words, dtype):
    (found,) = run_checks(subject(fault, dtype), only=[name])
    if found.passed is None:
        assert dtype == torch.float64 or library.REASON or name == "inductor", found.text
        return
    assert found.passed is False, f"{fault.__name__} was not found by {name}"
    assert re.search(words, found.text), found.text


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_sound_layer_passes(dtype):
    results = run_checks(subject(Layer, dtype))
    assert [(one.name, one.text) for one in results if one.passed is False] == []


def test_exemptions_name_a_check_and_say_why():
    bad = Subject("theirs", Layer, 8, exempt={"nonsense": "because it is so and not otherwise"})
    with pytest.raises(ValueError, match="exempt: expected names of checks, got nonsense"):
        run_checks(bad)
    with pytest.raises(ValueError, match="exempt: expected a sentence that says why splits does not apply, got 'no'"):
        run_checks(Subject("theirs", Layer, 8, exempt={"splits": "no"}))
    good = Subject("theirs", ForgetsTheFirstToken, 8, exempt={"splits": "its cache holds the latest tokens alone"})
    (found,) = run_checks(good, only=["splits"])
    assert found.passed is None and "latest tokens" in found.text
