"""Random calls of the recurrent operations, seeded: the first backend in float32 against plain torch in float64.

Sizes, strides, dtypes of the arguments, decays, segments and states are drawn; outputs, last states and every gradient
are compared. A failing number can be run again alone.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from regard.masks import Segments

SIZES = (1, 2, 3, 5, 8, 15, 16, 17, 33, 64, 65, 130)
LENGTHS = (1, 2, 4, 5, 15, 16, 17, 33, 63, 64, 65, 127, 129, 257)
ROUNDING = {torch.bfloat16: 1e-2, torch.float16: 2e-3}  # of a gradient that comes back in its argument's dtype

Call = Callable[..., tuple[Tensor, Tensor]]


class Draw:
    """What is drawn from one seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.batch, self.tokens = self.random.choice((1, 1, 2)), self.random.choice(LENGTHS)
        self.segments: Tensor | Segments | None = None
        self.states = self.batch
        kind = self.random.random()
        if kind < 0.25:
            opens = torch.rand(self.batch, self.tokens, generator=self.generator) < 0.15
            self.segments = opens.long().cumsum(1) - 2
        elif kind < 0.45:
            self.batch, lengths, left = 1, [], self.tokens
            while left:
                lengths.append(min(left, self.random.choice((0, 0, 1, 5, 17, 64))))
                left -= lengths[-1]
            self.segments, self.states = Segments.from_lengths(lengths), len(lengths)

    def one(self, *choices: Any) -> Any:
        return self.random.choice(choices)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator)

    def between(self, low: float, high: float, *shape: int) -> Tensor:
        return low + (high - low) * torch.rand(shape, generator=self.generator)

    def decay(self, *shape: int) -> Tensor:
        """Log-decays, mild or extreme, hard resets among them."""
        g = self.between(-1, 0, *shape)
        rare = torch.rand(shape, generator=self.generator) < 0.1
        return self.one(g, g * 1e-6, g * 0, g * 200, torch.where(rare, 200 * g, g), torch.where(rare, -torch.inf, g))

    def strided(self, x: Tensor) -> Tensor:
        """The same numbers laid out in some other way, NaN between them."""
        kind = self.random.randrange(4)
        if kind == 0 or not x.numel():
            return x
        if kind == 1:
            return x.movedim(0, -1).contiguous().movedim(-1, 0)
        wide = torch.full((*x.shape[:-1], 2 * x.shape[-1] + 1), float("nan"), dtype=x.dtype)
        part = wide[..., 1::2] if kind == 2 else wide[..., 1 : 1 + x.shape[-1]]
        part.copy_(x)
        return part

    def any_dtype(self, x: Tensor) -> Tensor:
        kinds = (torch.float32, torch.float32, torch.bfloat16, torch.float16, torch.float64)
        return self.strided(x.to(self.random.choice(kinds)))

    def maybe(self, make: Callable[[], Tensor]) -> Tensor | None:
        return self.any_dtype(make()) if self.random.random() < 0.5 else None


def recurrence(draw: Draw) -> tuple[Call, dict[str, Tensor | None]]:
    key_heads, key_dim, value_dim = draw.one(1, 2), draw.one(*SIZES), draw.one(*SIZES)
    heads, rows = key_heads * draw.one(1, 2, 3), (draw.batch, draw.tokens)
    shape = (rows[0], heads, rows[1])
    kind, scale = draw.one(None, 1, 3, 4), draw.one(None, 1.0)
    decay = (
        None
        if kind is None
        else draw.any_dtype(
            draw.between(-1, 0, heads) if kind == 1 else draw.decay(*shape, *([key_dim] if kind == 4 else []))
        )
    )
    k = torch.nn.functional.normalize(draw.normal(rows[0], key_heads, rows[1], key_dim), dim=-1)
    given = {
        "q": draw.strided(draw.normal(*k.shape)),
        "k": draw.strided(k),
        "v": draw.strided(draw.normal(*shape, value_dim)),
        "beta": draw.maybe(lambda: draw.between(0, 2, *shape)),
        "decay": decay,
        "state": draw.maybe(lambda: draw.normal(draw.states, heads, key_dim, value_dim)),
    }

    def call(q: Tensor, k: Tensor, v: Tensor, beta: Any, decay: Any, **options: Any) -> tuple[Tensor, Tensor]:
        transition = regard.Decay(decay) if beta is None else regard.Delta(beta, decay)
        return regard.recurrence(q, k, v, transition, scale=scale, **options)

    return call, given


def scan(draw: Draw) -> tuple[Call, dict[str, Tensor | None]]:
    rest = draw.one((), (3,), (2, 5), (130,))
    shape = (draw.batch, draw.tokens, *rest)
    log_a = draw.decay(*(1 if draw.random.random() < 0.2 else size for size in shape))
    state = draw.maybe(lambda: draw.normal(draw.states, *rest))
    return regard.scan, {"log_a": draw.any_dtype(log_a), "x": draw.strided(draw.normal(*shape)), "state": state}


def selective_scan(draw: Draw) -> tuple[Call, dict[str, Tensor | None]]:
    rows, width, states = (draw.batch, draw.tokens), draw.one(*SIZES), draw.one(1, 3, 16, 17)
    return regard.selective_scan, {
        "x": draw.strided(draw.normal(*rows, width)),
        "dt": draw.any_dtype(draw.between(0, draw.one(1e-3, 1), *rows, width)),
        "A": draw.any_dtype(draw.between(-draw.one(1, 16), 0, width, states)),
        "B": draw.any_dtype(draw.normal(*rows, states)),
        "C": draw.any_dtype(draw.normal(*rows, states)),
        "D": draw.maybe(lambda: draw.normal(width)),
        "state": draw.maybe(lambda: draw.normal(draw.states, width, states)),
    }


def short_conv(draw: Draw) -> tuple[Call, dict[str, Tensor | None]]:
    channels, taps = draw.one(*SIZES), draw.one(1, 2, 4, 7)
    return lambda backend=None, **given: regard.short_conv(**given), {
        "x": draw.strided(draw.normal(draw.batch, draw.tokens, channels)),
        "weight": draw.any_dtype(draw.normal(channels, taps)),
        "bias": draw.maybe(lambda: draw.normal(channels)),
        "state": draw.maybe(lambda: draw.normal(draw.states, taps - 1, channels)),
    }


def everything(call: Call, given: dict[str, Tensor | None], **options: Any) -> dict[str, Tensor]:
    """Output, last state, and the gradient of every argument."""
    leaves = {name: None if x is None else x.detach().requires_grad_() for name, x in given.items()}
    named = {name: x for name, x in leaves.items() if x is not None}
    out, last = call(**leaves, **options)
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(y.shape, generator=generator, dtype=torch.float64) for y in (out, last)]
    loss = sum((y.double() * w).sum() for y, w in zip((out, last), weights, strict=True))
    gradients = torch.autograd.grad(loss, list(named.values()), allow_unused=True)  # type: ignore[arg-type]
    found = {"out": out.detach(), "last": last.detach()}
    return found | {f"d {name}": g for name, g in zip(named, gradients, strict=True) if g is not None}


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("draw_call", [recurrence, scan, selective_scan, short_conv])
def test_random_calls(draw_call: Callable[[Draw], tuple[Call, dict[str, Tensor | None]]], seed: int) -> None:
    draw = Draw(seed)
    call, given = draw_call(draw)
    got = everything(call, given, segments=draw.segments)
    wide = {name: None if x is None else x.double() for name, x in given.items()}
    want = everything(call, wide, segments=draw.segments, backend="chunked")
    for name, w in want.items():
        if name not in got:
            assert not w.any(), name
            continue
        g, size = got[name], float(w.abs().max()) if w.numel() else 1.0
        assert g.shape == w.shape, name
        limit = max(1e-4 if name.startswith("d ") else 2e-5, ROUNDING.get(g.dtype, 0.0))
        assert bool(((g.double() - w).abs() <= limit * max(size, 1e-3)).all()), name
