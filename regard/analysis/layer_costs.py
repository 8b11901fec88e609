"""The mixing layers of a model, equal ones together, and what they cost in a setting."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import nn

from regard.analysis.costs import Footprint, footprint, matrix_macs, prefill_macs, step_macs
from regard.analysis.layer_names import mixer_label
from regard.checks import describe, whole

__all__ = ["STATE_BITS", "MixerCosts", "Kind", "Setting", "mixer_costs"]

BITS = 0.01, 64  # that an element of a cache may have
STATE_BITS = 32  # states stay in float32 whatever the dtype


@dataclass(frozen=True)
class Setting:
    """What is planned for.

    Args:
        context: N, tokens of a row.
        batch: B, rows.
        dtype: of the weights.
        cache_bits: of an element of keys, values or latents, on average, from 0.01 to 64; the dtype's by default.
            States are in float32.

    >>> Setting(context=1000, cache_bits=6).bits
    Fraction(6, 1)
    """

    context: int = 32768
    batch: int = 1
    dtype: torch.dtype = torch.bfloat16
    cache_bits: float | None = None

    def __post_init__(self) -> None:
        whole("context", self.context, 1)
        whole("batch", self.batch, 1)
        if not isinstance(self.dtype, torch.dtype) or not self.dtype.is_floating_point:
            raise TypeError(f"dtype: expected a floating torch.dtype, got {self.dtype!r}")
        bits = self.cache_bits
        if bits is not None and (isinstance(bits, bool) or not isinstance(bits, (int, float))):
            raise TypeError(f"cache_bits: expected a number or None, got {describe(bits)}")
        if bits is not None and not BITS[0] <= bits <= BITS[1]:
            raise ValueError(f"cache_bits: expected a number from {BITS[0]} to {BITS[1]}, got {bits}")

    @property
    def bits(self) -> Fraction:
        """Bits of an element of a cache."""
        return Fraction(8 * self.dtype.itemsize if self.cache_bits is None else self.cache_bits)

    def cache_bytes(self, elements: int) -> int:
        """Bytes of so many elements of a cache."""
        return math.ceil(elements * self.bits / 8)


@dataclass(frozen=True)
class Kind:
    """Equal layers of a model: their number; then, of one layer, parameters, elements held for a row, and MACs."""

    name: str
    layers: int
    parameters: int
    holds: Footprint
    macs_per_token: int
    prefill_macs: int
    step_macs: int

    @classmethod
    def of(cls, layer: nn.Module, layers: int, context: int) -> Kind:
        """Read off one of the layers."""
        parameters = sum(p.numel() for p in layer.parameters())
        work = matrix_macs(layer), prefill_macs(layer, context), step_macs(layer, context)
        return cls(mixer_label(layer), layers, parameters, footprint(layer), *work)

    def as_dict(self) -> dict[str, Any]:
        """For JSON: of one layer and row."""
        return {
            "kind": self.name,
            "layers": self.layers,
            "parameters": self.parameters,
            "cache_elements_per_token": self.holds.per_token,
            "window": self.holds.slots or None,
            "window_elements_per_token": self.holds.window,
            "window_elements": self.holds.ring,
            "state_elements": self.holds.state,
            "convolution_elements": self.holds.conv_state,
            "projection_flops_per_token": 2 * self.macs_per_token,
            "mixing_prefill_flops": 2 * self.prefill_macs,
            "mixing_decode_flops": 2 * self.step_macs,
        }


@dataclass(frozen=True)
class MixerCosts:
    """The mixing layers of a model by kind, and their costs over all layers and rows.

    `flops` are of the mixing layers alone, projections included; a decode step is one token in every row, which reads
    `context` tokens.
    """

    name: str
    kinds: tuple[Kind, ...]
    setting: Setting

    def _sum(self, values: Iterable[int]) -> int:
        return sum(kind.layers * value for kind, value in zip(self.kinds, values, strict=True))

    @property
    def parameters(self) -> int:
        """Of the mixing layers."""
        return self._sum(k.parameters for k in self.kinds)

    @property
    def per_token(self) -> int:
        """Elements of cache that each further token of a row adds, whatever its length."""
        return self._sum(k.holds.per_token for k in self.kinds)

    @property
    def window_per_token(self) -> int:
        """Elements of rings for every token in them."""
        return self._sum(k.holds.window for k in self.kinds)

    @property
    def ring(self) -> int:
        """Elements of rings of a row, allocated whole."""
        return self._sum(k.holds.ring for k in self.kinds)

    @property
    def state(self) -> int:
        """Elements of states of a row."""
        return self._sum(k.holds.state for k in self.kinds)

    @property
    def conv_state(self) -> int:
        """Elements of convolutions' last inputs of a row."""
        return self._sum(k.holds.conv_state for k in self.kinds)

    def cache_bytes(self, tokens: int) -> int:
        """Bytes of keys, values and latents of all rows of so many tokens; rings are allocated whole."""
        return self.setting.cache_bytes(self.setting.batch * (self.per_token * tokens + self.ring))

    @property
    def state_bytes(self) -> int:
        """Bytes of states and convolutions' inputs of all rows."""
        return self.setting.batch * (self.state + self.conv_state) * STATE_BITS // 8

    def bytes(self, tokens: int) -> int:
        """Both together."""
        return self.cache_bytes(tokens) + self.state_bytes

    @property
    def prefill_flops(self) -> int:
        """Of `context` tokens in every row."""
        context = self.setting.context
        return 2 * self.setting.batch * self._sum(context * k.macs_per_token + k.prefill_macs for k in self.kinds)

    @property
    def decode_flops(self) -> int:
        """Of one more token in every row."""
        return 2 * self.setting.batch * self._sum(k.macs_per_token + k.step_macs for k in self.kinds)

    @property
    def decode_bytes(self) -> int:
        """What that token reads of the caches, and reads and writes of the states."""
        context = self.setting.context
        read = self.setting.batch * self._sum(k.holds.read(context) for k in self.kinds)
        return self.setting.cache_bytes(read) + 2 * self.state_bytes

    def as_dict(self) -> dict[str, Any]:
        """For JSON: sums over all layers; elements of one row, bytes and FLOPs of all rows."""
        context = self.setting.context
        return {
            "name": self.name,
            "parameters": self.parameters,
            "cache_elements_per_token": self.per_token,
            "window_elements_per_token": self.window_per_token,
            "window_elements": self.ring,
            "state_elements": self.state,
            "convolution_elements": self.conv_state,
            "cache_bytes": self.cache_bytes(context),
            "state_bytes": self.state_bytes,
            "total_bytes": self.bytes(context),
            "prefill_flops": self.prefill_flops,
            "decode_flops": self.decode_flops,
        }


def mixer_costs(name: str, layers: Sequence[Any], setting: Setting) -> MixerCosts:
    """The costs of a stack of mixing layers; equal ones are one kind, kinds in the order of first appearance."""
    counts: dict[tuple[Any, ...], list[Any]] = {}
    for layer in layers:
        key = mixer_label(layer), sum(p.numel() for p in layer.parameters())
        counts.setdefault(key, []).append(layer)
    kinds = tuple(Kind.of(equal[0], len(equal), setting.context) for equal in counts.values())
    return MixerCosts(name, kinds, setting)
