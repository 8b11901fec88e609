"""What a check is run on: a way to make a layer, its inputs, and the promises it gives."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from regard.mixers.base import Record

__all__ = ["ContractViolation", "Subject", "close"]


class ContractViolation(AssertionError):
    """A layer broke a promise of the contract; the text says which, on what input, and by how much."""


def close(what: str, got: Tensor, want: Tensor, tolerance: float = 1e-10) -> None:
    """Raise `ContractViolation` unless two tensors agree to `tolerance` of the largest wanted entry (at least 1)."""
    if got.shape != want.shape:
        raise ContractViolation(f"{what}: shapes {tuple(got.shape)} and {tuple(want.shape)} differ")
    if not torch.isfinite(got).all():
        raise ContractViolation(f"{what}: {int((~torch.isfinite(got)).sum())} entries are not finite")
    if not got.numel():
        return
    got, want = got.detach().double(), want.detach().double()
    off = float((got - want).abs().max())
    limit = tolerance * max(1.0, float(want.abs().max()))
    if off > limit:
        raise ContractViolation(f"{what}: off by {off:.3g}, allowed {limit:.3g}")


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
    """

    name: str
    make: Callable[[], nn.Module]
    dim: int
    causal: bool = True
    cached: bool = True
    counts_slots: bool = True
    context: bool = False
    exempt: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, record: Record, dim: int = 16, heads: int = 4) -> Subject:
        """A catalogue record as a subject."""
        return cls(
            record.name,
            lambda: record.build(dim, heads),
            dim,
            causal=record.causal,
            cached=record.cached,
            counts_slots=record.counts_slots,
            context=record.context,
            exempt=record.exempt,
        )

    @property
    def device(self) -> torch.device:
        """The device that the environment variable REGARD_DEVICE names; the CPU by default."""
        return torch.device(os.environ.get("REGARD_DEVICE", "cpu"))

    def layer(self, dtype: torch.dtype = torch.float64, seed: int = 0) -> nn.Module:
        """A fresh layer in evaluation mode with random parameters, biases and norms included."""
        layer = self.make()
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in layer.parameters():
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                wide = parameter.ndim > 1
                parameter.copy_(noise / parameter.shape[-1] ** 0.5 if wide else parameter.double() + 0.3 * noise)
        return layer.to(self.device, dtype).eval()

    def tokens(self, batch: int, length: int, dtype: torch.dtype = torch.float64, seed: int = 1) -> Tensor:
        """Random tokens (B, T, dim)."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(batch, length, self.dim, generator=generator, dtype=torch.float64).to(self.device, dtype)

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
