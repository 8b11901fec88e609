"""Random programs of calls on every recurrent layer: padding, segments, caches; each segment run alone is the truth.

In float32, so that the kernels run, and in float64.
"""

from __future__ import annotations

import pickle
import random
from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from regard.catalog import RECORDS, Record
from regard.testing import Subject

LAYERS = [r for r in RECORDS if r.kind in ("recurrent", "kernel") and not r.context]
PADDING = (float("nan"), float("inf"), 1e30)


class Program:
    """A layer, its cache, and the real tokens that each row has seen, as (segment, token)."""

    def __init__(self, record: Record, dtype: torch.dtype, seed: int) -> None:
        self.random, self.generator = random.Random(seed), torch.Generator().manual_seed(seed)
        self.subject, self.dtype = Subject.of(record).at(dtype), dtype
        self.layer: Any = self.subject.layer()
        self.batch = self.random.choice((1, 2, 3))
        self.padded, self.packed = self.random.random() < 0.7, self.random.random() < 0.5
        self.cache = self.layer.init_cache(self.batch, 0) if record.cached else None
        self.restart()

    def restart(self) -> None:
        self.seen: list[list[tuple[int, Tensor]]] = [[] for _ in range(self.batch)]
        self.latest = [0] * self.batch

    def change_cache(self) -> None:
        """Something that a caller may do between two calls."""
        action = self.random.choice(("clone", "pickle", "reorder", "crop", "reset"))
        if action == "clone":
            self.cache = self.cache.clone()
        elif action == "pickle":
            self.cache = pickle.loads(pickle.dumps(self.cache))
        elif action == "reorder":
            index = [self.random.randrange(self.batch) for _ in range(self.random.choice((1, 2, self.batch)))]
            self.cache.reorder(index)
            self.seen, self.latest = [list(self.seen[i]) for i in index], [self.latest[i] for i in index]
            self.batch = len(index)
        elif action == "crop":
            self.cache.crop(self.cache.length)
        else:
            self.cache.reset()
            self.restart()

    def call(self) -> None:
        """One call, every real token of it compared."""
        shape = (self.batch, self.random.choice((0, 1, 1, 2, 5, 20)))
        x = torch.randn(*shape, self.subject.dim, generator=self.generator, dtype=torch.float64).to(self.dtype)
        keep = torch.rand(shape, generator=self.generator) < self.random.choice((0.0, 0.5, 1.0))
        arguments: dict[str, Tensor] = {}
        if self.padded:
            arguments["keep"] = keep
            x[~keep] = self.random.choice(PADDING)
        ids = torch.tensor(self.latest)[:, None].expand(shape)
        if self.packed:
            ids = ids + (torch.rand(shape, generator=self.generator) < 0.25).long().cumsum(1)
            arguments["segments"] = ids
        out = self.layer(x, cache=self.cache, **arguments)
        assert out.shape == x.shape and torch.isfinite(out).all()
        for row in range(self.batch):
            first = len(self.seen[row])
            real = keep[row].nonzero()[:, 0].tolist() if self.padded else range(shape[1])
            self.seen[row] += [(int(ids[row, t]), x[row, t]) for t in real]
            self.latest[row] = int(ids[row, -1]) if shape[1] else self.latest[row]
            if len(self.seen[row]) > first:
                self.close(out[row, list(real)], self.alone(row)[first:])

    def alone(self, row: int) -> Tensor:
        """The row's segments, each in a call of its own."""
        outs = []
        for segment in sorted({number for number, _ in self.seen[row]}):
            outs.append(self.layer(torch.stack([x for number, x in self.seen[row] if number == segment])[None])[0])
        return torch.cat(outs)

    def close(self, got: Tensor, want: Tensor) -> None:
        limit = (1e-9 if self.dtype == torch.float64 else 3e-5) * max(1.0, float(want.abs().max()))
        torch.testing.assert_close(got, want, rtol=0, atol=limit)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("record", LAYERS, ids=lambda record: record.name)
@torch.no_grad()
def test_programs(record: Record, dtype: torch.dtype, seed: int) -> None:
    program = Program(record, dtype, seed)
    for _ in range(program.random.randint(1, 5) if record.cached else 1):
        if program.cache is not None and program.random.random() < 0.3:
            program.change_cache()
        program.call()


def test_kernels_after_memory_full_of_nan() -> None:
    """What earlier calls left in the kernels' memory changes no bit."""

    def run(fill: float | None, key_dim: int, value_dim: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(0)
        found: list[Tensor] = []
        for channel in (False, True):
            for delta in (False, True):
                make = [torch.rand(1, 2, 100, d, generator=generator) for d in (key_dim, key_dim, value_dim)]
                q, k, v = ((x if fill is None else torch.full_like(x, fill)).requires_grad_() for x in make)
                decay = -torch.rand(1, 2, 100, *[key_dim] * channel, generator=generator)
                beta = torch.rand(1, 2, 100, generator=generator) / key_dim
                out, last = regard.recurrence(q, k, v, regard.Delta(beta, decay) if delta else regard.Decay(decay))
                found += [out.detach(), last.detach(), *torch.autograd.grad(out.sum(), (q, k, v))]
        return found

    want = run(None, 33, 70)
    for sizes in ((140, 140), (64, 64), (33, 70)):
        run(float("nan"), *sizes)
        for got, wanted in zip(run(None, 33, 70), want, strict=True):
            assert torch.equal(got, wanted)
