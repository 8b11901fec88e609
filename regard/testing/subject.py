"""What a check is run on: a way to make a layer, its inputs, and the promises it gives."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from regard.mixers.base import Record
from regard.testing.violation import close

__all__ = ["TOLERANCES", "Subject", "Trace"]


# What two ways to the same numbers may differ by, of the largest entry: by another order of sums, and by the same one.
TOLERANCES: dict[torch.dtype, tuple[float, float]] = {
    torch.float64: (1e-10, 1e-12),
    torch.float32: (4e-5, 4e-6),
    torch.bfloat16: (4e-2, 2e-2),
    torch.float16: (6e-3, 3e-3),
}


@dataclass
class Trace:
    """What a check did to a subject so far: the tokens it drew last, and the largest difference it saw.

    "Largest" is in terms of what was allowed.
    """

    inputs: str | None = None
    effect: float | None = None
    allowed: float | None = None

    def saw(self, effect: float, allowed: float) -> None:
        """Remember a difference, where it is the largest so far."""
        if self.effect is None or self.allowed is None or effect * self.allowed > self.effect * allowed:
            self.effect, self.allowed = effect, allowed


@dataclass(frozen=True)
class Subject:
    """A layer under test.

    Args:
        name: how results call it.
        make: makes one layer that takes ``(B, T, dim)`` and the contract's keyword arguments.
        dim: its width.
        causal: token t never depends on a later one.
        cached: it decodes with a cache from its ``init_cache``.
        counts_slots: padding between real tokens may move its masks or biases (padding before or after never may).
        context: it is called with a context of ``layer.context_dim`` channels.
        exempt: checks that do not apply, each with the reason in one sentence.
        off_kernels: why the library's CPU kernels need not run it; empty where they must, being built.
        dtype: what its parameters and tokens are made in.
        trace: what the check that runs has done so far.
    """

    name: str
    make: Callable[[], nn.Module]
    dim: int
    causal: bool = True
    cached: bool = True
    counts_slots: bool = True
    context: bool = False
    exempt: dict[str, str] = field(default_factory=dict)
    off_kernels: str = "it is not said to be made of the library's operations"
    dtype: torch.dtype = torch.float64
    trace: Trace = field(default_factory=Trace, compare=False, repr=False)

    @classmethod
    def of(cls, record: Record, dim: int = 16, heads: int = 4) -> Subject:
        """A catalogue record as a subject."""
        promises = dataclasses.asdict(record.traits)
        del promises["kind"]
        return cls(record.name, lambda: record.build(dim, heads), dim, **promises)

    def at(self, dtype: torch.dtype) -> Subject:
        """The same subject in another dtype."""
        return dataclasses.replace(self, dtype=dtype)

    @property
    def tolerance(self) -> float:
        """What two ways to the same numbers may differ by, of the largest entry."""
        return TOLERANCES[self.dtype][0]

    def close(self, what: str, got: Tensor, want: Tensor, *, same_order: bool = False) -> None:
        """Raise `ContractViolation` unless two tensors agree as closely as the dtype lets two ways to them agree.

        `same_order`: both were summed in the same order.
        """
        self.trace.saw(*close(what, got, want, TOLERANCES[self.dtype][same_order]))

    @property
    def device(self) -> torch.device:
        """The device that the environment variable REGARD_DEVICE names; the CPU by default."""
        return torch.device(os.environ.get("REGARD_DEVICE", "cpu"))

    def layer(self, seed: int = 0) -> nn.Module:
        """A fresh layer in evaluation mode with random parameters, biases and norms included."""
        layer = self.make()
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in layer.parameters():
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                wide = parameter.ndim > 1
                parameter.copy_(noise / parameter.shape[-1] ** 0.5 if wide else parameter.double() + 0.3 * noise)
        return layer.to(self.device, self.dtype).eval()

    def tokens(self, batch: int, length: int, seed: int = 1) -> Tensor:
        """Random tokens (B, T, dim)."""
        self.trace.inputs = f"tokens({batch}, {length}, seed={seed})"
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randn(batch, length, self.dim, generator=generator, dtype=torch.float64)
        return tokens.to(self.device, self.dtype)

    def context_for(self, layer: Any, x: Tensor, length: int = 7) -> dict[str, Tensor]:
        """``{"context": …}`` where the layer takes one, the same in every row, else nothing."""
        if not self.context:
            return {}
        generator = torch.Generator().manual_seed(2)
        one = torch.randn(1, length, layer.context_dim, generator=generator, dtype=torch.float64)
        return {"context": one.to(x.device, x.dtype).expand(x.shape[0], -1, -1)}

    def run(self, layer: nn.Module, x: Tensor, **arguments: Any) -> Tensor:
        """Call the layer, with a context where it takes one."""
        if "context" not in arguments:
            arguments |= self.context_for(layer, x)
        out: Tensor = layer(x, **arguments)
        return out
