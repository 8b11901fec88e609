"""A plain attention module as anybody writes it, and faults planted in it, each with the check that must name it."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from regard.testing import CacheArgument, Call, PaddingArgument

WINDOW = 4


class Sound(nn.Module):
    """Causal attention over a window: grouped heads, scores that fall with the distance, padding, a cache (k, v)."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(8, 4), nn.Linear(8, 8)

    def heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, 2)).transpose(1, 2)

    def grouped(self, x: Tensor, past: int) -> Tensor:
        return x.repeat_interleave(2, 1)

    def held(self, cache: dict) -> dict:
        return cache

    def place(self, past: int) -> int:
        return past

    def allowed(self, i: Tensor, j: Tensor) -> Tensor:
        return (j <= i) & (j > i - WINDOW)

    def weigh(self, scores: Tensor, allowed: Tensor) -> Tensor:
        scores = scores.masked_fill(~allowed, -1e30)
        raised = (scores - scores.amax(-1, keepdim=True)).exp().masked_fill(~allowed, 0)
        return raised / raised.sum(-1, keepdim=True).clamp_min(1e-30)

    def readable(self, keep: Tensor | None, allowed: Tensor, new: int) -> Tensor:
        return allowed if keep is None else allowed & keep[:, None, None]

    def forward(self, x: Tensor, keep: Tensor | None = None, cache: dict | None = None) -> Tensor:
        q, k, v = self.heads(self.q(x)), self.heads(self.k(x)), self.heads(self.v(x))
        past = 0
        if cache is not None:
            if not cache:
                self.held(cache).clear()
            held = self.held(cache)
            past = held["k"].shape[2] if held else 0
            k, v = ((torch.cat((held[name], new), 2) if held else new) for name, new in (("k", k), ("v", v)))
            held["k"], held["v"] = k, v
            cache["used"] = k
        i = torch.arange(x.shape[1])[:, None] + self.place(past)
        j = torch.arange(k.shape[2])[None]
        k, v = self.grouped(k, past), self.grouped(v, past)
        scores = q @ k.mT - 0.1 * (i - j) ** 2
        allowed = self.readable(keep, self.allowed(i, j).expand(x.shape[0], 1, -1, -1), x.shape[1])
        return self.o((self.weigh(scores, allowed) @ v).transpose(1, 2).flatten(2))

    def init_cache(self, batch: int, capacity: int) -> dict:
        return {}


class BothWays(Sound):
    """Not causal: every token reads every other, told of padding by lengths."""

    def allowed(self, i, j):
        return torch.ones_like(i - j, dtype=torch.bool)

    def forward(self, x, lengths=None):
        keep = None if lengths is None else torch.arange(x.shape[1]) < lengths[:, None]
        return super().forward(x, keep)


class GlobalMaximum(Sound):
    def forward(self, x, keep=None, cache=None):
        return super().forward(x, keep, cache) + 0.01 * x.amax((1, 2), keepdim=True).detach()


class LooksAhead(Sound):
    def allowed(self, i, j):
        return (j <= i + 1) & (j > i - WINDOW)


class CentresInTraining(Sound):
    """Subtracts the mean over time, but in training alone."""

    def forward(self, x, keep=None, cache=None):
        return super().forward(x - x.mean(1, keepdim=True) if self.training else x, keep, cache)


class WindowOffByOne(Sound):
    def allowed(self, i, j):
        return (j <= i) & (j >= i - WINDOW)


class WindowByBlocks(Sound):
    """Reads from the start of the block before: how far back that is depends on the place."""

    def allowed(self, i, j):
        return (j <= i) & (j >= (i // WINDOW - 1) * WINDOW)


class SwapsHeadsInSteps(Sound):
    def grouped(self, x, past):
        return x.repeat(1, 2, 1, 1) if past else x.repeat_interleave(2, 1)


class PositionRestarts(Sound):
    def place(self, past):
        return 0

    def allowed(self, i, j):
        past = j.shape[1] - i.shape[0]
        return super().allowed(i + past, j)


class AlignsTopLeft(Sound):
    """Several tokens on a warm cache read what they would in a first call."""

    def allowed(self, i, j):
        return super().allowed(i - i[0], j) if len(i) > 1 else super().allowed(i, j)


class Inverted(Sound):
    def readable(self, keep, allowed, new):
        return super().readable(None if keep is None else ~keep, allowed, new)


class SoftmaxOverQueries(Sound):
    def weigh(self, scores, allowed):
        return super().weigh(scores.mT, allowed.mT).mT


class SoftmaxOverHeads(Sound):
    def weigh(self, scores, allowed):
        return scores.softmax(1).masked_fill(~allowed, 0)


class SoftmaxOverRows(Sound):
    def weigh(self, scores, allowed):
        return scores.softmax(0).masked_fill(~allowed, 0)


class ConvolvesPadding(Sound):
    """Each token is mixed with the one before, padding or not."""

    def forward(self, x, keep=None):
        return super().forward(x + 0.5 * F.pad(x, (0, 0, 1, 0))[:, :-1], keep)


class ConvolvesBothWays(BothWays):
    def forward(self, x, lengths=None):
        return super().forward(x + 0.5 * F.pad(x, (0, 0, 0, 1))[:, 1:], lengths)


class ReadsBeyondTheLength(BothWays):
    def forward(self, x, lengths=None):
        return super().forward(x, None if lengths is None else lengths + 1)


class MasksTooWeakly(Sound):
    def readable(self, keep, allowed, new):
        self.flags = keep
        return allowed

    def weigh(self, scores, allowed):
        weak = 0 if self.flags is None else -3.0 * (~self.flags[:, None, None]).to(scores.dtype)
        return super().weigh(scores + weak, allowed)


class TakesFlagsForLengths(Sound):
    def readable(self, keep, allowed, new):
        if keep is not None:
            keep = torch.arange(keep.shape[1]) < keep.sum(1, keepdim=True)
        return super().readable(keep, allowed, new)


class CacheForgetsPadding(Sound):
    """Padding in the cache is read by later calls."""

    def readable(self, keep, allowed, new):
        if keep is not None:
            keep = torch.cat((torch.ones_like(keep[:, : keep.shape[1] - new]), keep[:, keep.shape[1] - new :]), 1)
        return super().readable(keep, allowed, new)


class DividesByNothing(Sound):
    def weigh(self, scores, allowed):
        return scores.masked_fill(~allowed, -torch.inf).softmax(-1)


class StateOnTheModule(Sound):
    """Keys and values stand on the module; a first call clears them."""

    def __init__(self) -> None:
        super().__init__()
        self.state: dict = {}

    def held(self, cache):
        return self.state


class OneCacheForAll(Sound):
    """Every cache is the same dictionary, emptied when a new one is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.only: dict = {}

    def init_cache(self, batch, capacity):
        self.only.clear()
        return self.only

    def forward(self, x, keep=None, cache=None):
        if cache is not None and cache and cache["k"].shape[0] != x.shape[0]:
            cache.clear()
        return super().forward(x, keep, cache)


class DropsInEvaluation(Sound):
    def weigh(self, scores, allowed):
        return F.dropout(super().weigh(scores, allowed), 0.2, training=True)


class Dice(Sound):
    def forward(self, x, keep=None, cache=None):
        return super().forward(x, keep, cache) * (1 + 0.01 * random.random())


class RemembersTheLastCall(Sound):
    def __init__(self) -> None:
        super().__init__()
        self.last = 0.0

    def forward(self, x, keep=None, cache=None):
        out = super().forward(x, keep, cache) + self.last
        self.last = float(x.detach().mean())
        return out


class NormalisesTheBatch(Sound):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x, keep=None, cache=None):
        return super().forward(self.norm(x.mT).mT, keep, cache)


class ChangesItsInput(Sound):
    def forward(self, x, keep=None, cache=None):
        x.data.mul_(1.1)
        return super().forward(x, keep, cache)


class ChangesTheFlags(Sound):
    def forward(self, x, keep=None, cache=None):
        if keep is not None:
            keep[:, 0] = False
        return super().forward(x, keep, cache)


class DropsTheOddToken(Sound):
    def forward(self, x, keep=None, cache=None):
        even = max(x.shape[1] // 2 * 2, 1)
        return super().forward(x[:, :even], keep if keep is None else keep[:, :even], cache)


class DividesByTheLength(Sound):
    def forward(self, x, keep=None, cache=None):
        return super().forward(x, keep, cache) * (1 + 1 / x.shape[1])


class ReadsFreshMemory(Sound):
    def forward(self, x, keep=None, cache=None):
        fresh = torch.empty(1, dtype=torch.int32)  # whose floats would be NaN by chance now and then
        return super().forward(x, keep, cache) + (fresh == torch.iinfo(torch.int32).max)


class SparesAParameter(Sound):
    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Parameter(torch.ones(8))


class CutsTheGraph(Sound):
    """Keys take no part in the gradient of the queries' loss, though they do in the answer."""

    def grouped(self, x, past):
        return super().grouped(x.detach() + 0.5 * (x - x.detach()), past)


class FastPathWithoutPadding(Sound):
    def forward(self, x, keep=None, cache=None):
        return super().forward(x, keep if torch.is_grad_enabled() else None, cache)


class TrustsStrides(Sound):
    def forward(self, x, keep=None, cache=None):
        return super().forward(torch.as_strided(x, x.shape, (x.shape[1] * 8, 8, 1)), keep, cache)


class IgnoresSegments(Sound):
    def forward(self, x, segments=None):
        return super().forward(x)


class Fault(NamedTuple):
    make: type[nn.Module]
    check: str
    words: str
    call: Call
    stated: dict[str, Any]


WHOLE = Call(padding=PaddingArgument("keep"), cache=CacheArgument("cache"))
UNCACHED = Call(padding=PaddingArgument("keep"))
LENGTHS = Call(padding=PaddingArgument("lengths", "lengths"))
STATED: dict[str, Any] = {"dim": 8, "causal": True, "averages": True, "window": WINDOW}
# what moves a token's answer by its neighbours has neither the window nor the average of the attention alone
LOOSE: dict[str, Any] = {"dim": 8, "causal": True}

FAULTS = [
    Fault(GlobalMaximum, "causality", "after changing those from 1 on: off by", WHOLE, LOOSE),
    Fault(LooksAhead, "causality", "after changing those from 1 on: off by", WHOLE, STATED),
    Fault(CentresInTraining, "causality", "in training mode: off by", WHOLE, STATED),
    Fault(WindowOffByOne, "window", "4 tokens was stated; a token reads 5 tokens", WHOLE, STATED),
    Fault(WindowByBlocks, "window", "a token reads 5 to 8 tokens, by the place", WHOLE, STATED),
    Fault(SwapsHeadsInSteps, "splits", "against one call: off by", WHOLE, STATED),
    Fault(PositionRestarts, "splits", "against one call: off by", WHOLE, STATED),
    Fault(AlignsTopLeft, "splits", r"the calls \[4, 7\] against one call: off by", WHOLE, STATED),
    Fault(Inverted, "polarity", "the flags are inverted", WHOLE, STATED),
    Fault(SoftmaxOverQueries, "averages", "2 equal tokens, against one of them alone: off by", WHOLE, STATED),
    Fault(SoftmaxOverHeads, "averages", "equal tokens, against one of them alone: off by", WHOLE, STATED),
    Fault(SoftmaxOverRows, "batch_independence", "after changing row 1: off by", WHOLE, STATED),
    Fault(ConvolvesPadding, "left_padding", "padded, against the row alone: off by", UNCACHED, LOOSE),
    Fault(ConvolvesBothWays, "right_padding", "padded, against the row alone: off by", LENGTHS, {"dim": 8}),
    Fault(ReadsBeyondTheLength, "right_padding", "padded, against the row alone: off by", LENGTHS, {"dim": 8}),
    Fault(MasksTooWeakly, "left_padding", "padded, against the row alone: off by", UNCACHED, STATED),
    Fault(TakesFlagsForLengths, "left_padding", "padded, against the row alone: off by", UNCACHED, STATED),
    Fault(CacheForgetsPadding, "left_padding", r"padded, in the calls \[4, 5\]: off by", WHOLE, STATED),
    Fault(DividesByNothing, "dead_rows", "row 1, token 0 is not finite", WHOLE, STATED),
    Fault(StateOnTheModule, "streams", "stream 0 of two in turns", WHOLE, STATED),
    Fault(OneCacheForAll, "streams", "stream . of two in turns", WHOLE, STATED),
    Fault(DropsInEvaluation, "evaluation", "with another torch.manual_seed: off by", WHOLE, LOOSE),
    Fault(Dice, "determinism", "the same call of two copies in evaluation mode: off by", WHOLE, STATED),
    Fault(RemembersTheLastCall, "stateless", "a call repeated after another one: off by", WHOLE, STATED),
    Fault(NormalisesTheBatch, "batch_independence", "changing row 1, in training mode: off by", WHOLE, STATED),
    Fault(ChangesItsInput, "inputs_unmodified", "the tokens were changed in place, in evaluation mode", WHOLE, STATED),
    Fault(ChangesTheFlags, "inputs_unmodified", "the flags of padding were changed in place", WHOLE, STATED),
    Fault(
        DropsTheOddToken, "shapes", r"tokens of shape \(2, 3, 8\) gave an answer of shape \(2, 2, 8\)", WHOLE, STATED
    ),
    Fault(DividesByTheLength, "prefixes", "the first 1 of 11 tokens, against these alone: off by", WHOLE, LOOSE),
    Fault(ReadsFreshMemory, "unwritten_memory", "fresh memory full of NaN: off by", WHOLE, STATED),
    Fault(SparesAParameter, "gradients", "^spare has no finite gradient", WHOLE, STATED),
    Fault(
        CutsTheGraph, "gradients", "the gradient of [kv].weight: of length .* off finite differences by", WHOLE, STATED
    ),
    Fault(FastPathWithoutPadding, "no_grad", "without gradients, padded: off by", WHOLE, STATED),
    Fault(TrustsStrides, "strides", "every second channel: off by", WHOLE, STATED),
    Fault(IgnoresSegments, "packed", "segment 1 of row 0: off by", Call(segments="segments"), LOOSE),
]
