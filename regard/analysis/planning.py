"""What a model costs to run: parameters, caches and states, work and traffic, and what other layers would cost.

Everything is read off a built model, which may be on the meta device (`regard.models.presets`): sizes off its modules,
caches off what their ``init_cache`` makes, work by the closed forms of `regard.analysis.costs`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any

import torch
from torch import nn

from regard.analysis.alternatives import HYBRID, alternatives
from regard.analysis.costs import (
    Footprint,
    expert_parameters,
    experts_touched,
    footprint,
    idle_parameters,
    matrix_macs,
    prefill_macs,
    step_macs,
    tokens_like,
)
from regard.analysis.labels import feedforward_label, mixer_label
from regard.masks.checks import whole
from regard.models.decoder import Decoder

__all__ = ["Arrangement", "Crossover", "Estimate", "Kind", "Setting", "estimate"]

STATE_BITS = 32  # states stay in float32 whatever the dtype


@dataclass(frozen=True)
class Setting:
    """What is planned for.

    Args:
        context: N, tokens of a row.
        batch: B, rows.
        dtype: of the weights.
        cache_bits: of an element of keys, values or latents, on average; the dtype's by default. States are in float32.

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
        if self.cache_bits is not None and not 0 < self.cache_bits <= 64:
            raise ValueError(f"cache_bits: expected a number above 0 and at most 64, got {self.cache_bits}")

    @property
    def bits(self) -> Fraction:
        """Bits of an element of a cache."""
        return Fraction(8 * self.dtype.itemsize if self.cache_bits is None else self.cache_bits)

    def cache_bytes(self, elements: int) -> int:
        """Bytes of so many elements of a cache."""
        return math.ceil(elements * self.bits / 8)


@dataclass(frozen=True)
class Kind:
    """Equal layers, each with what it holds of one row (elements) and does."""

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


@dataclass(frozen=True)
class Arrangement:
    """What stands in a model's layers to mix tokens, and its costs over all layers and rows.

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
    def tail(self) -> int:
        """Elements of convolutions' last inputs of a row."""
        return self._sum(k.holds.tail for k in self.kinds)

    def cache_bytes(self, tokens: int) -> int:
        """Bytes of keys, values and latents of all rows of so many tokens; rings are allocated whole."""
        return self.setting.cache_bytes(self.setting.batch * (self.per_token * tokens + self.ring))

    @property
    def state_bytes(self) -> int:
        """Bytes of states and convolutions' inputs of all rows."""
        return self.setting.batch * (self.state + self.tail) * STATE_BITS // 8

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
            "convolution_elements": self.tail,
            "cache_bytes": self.cache_bytes(context),
            "state_bytes": self.state_bytes,
            "total_bytes": self.bytes(context),
            "prefill_flops": self.prefill_flops,
            "decode_flops": self.decode_flops,
        }


@dataclass(frozen=True)
class Crossover:
    """At how many tokens a layer's growing cache is as large as another's state: in elements, and in bytes."""

    state: str
    cache: str
    tokens_by_elements: int
    tokens_by_bytes: int


@dataclass(frozen=True)
class Estimate:
    """A model's costs; `estimate` makes it.

    `bytes` of a prefill or a decode step: the weights that are read once (of experts, those that tokens choosing evenly
    are expected to touch), and caches and states; activations are not counted. A prefill forms the last token's logits.
    """

    model: Decoder
    setting: Setting
    own: Arrangement
    others: tuple[Arrangement, ...]
    feedforwards: tuple[tuple[str, int, int], ...]  # (what, layers, parameters of one)
    crossovers: tuple[Crossover, ...]

    @cached_property
    def parameters(self) -> int:
        """All of them."""
        return sum(p.numel() for p in self.model.parameters())

    @cached_property
    def active(self) -> int:
        """Those that one token is multiplied with: chosen experts only, and no table that is only looked up in."""
        return self.parameters - idle_parameters(self.model) - self._looked_up

    @property
    def weight_bytes(self) -> int:
        """Bytes of all parameters."""
        return self.parameters * self.setting.dtype.itemsize

    @cached_property
    def _head(self) -> int:
        """MACs of one token's logits; the head has the shape of the embedding's table, and may be it."""
        return self.model.embedding.tokens.weight.numel()

    @property
    def _looked_up(self) -> int:
        return 0 if self.model.head is None else self._head

    @cached_property
    def _feedforward_macs(self) -> int:
        return sum(matrix_macs(part) for part in _feedforward_parts(self.model))

    def _weights_read(self, tokens: int) -> int:
        """Bytes of the weights that so many tokens touch together."""
        idle = sum(
            size * (how.experts - experts_touched(how.experts, how.chosen, tokens))
            for size, how in expert_parameters(self.model)
        )
        return round(self.parameters - self._looked_up - idle) * self.setting.dtype.itemsize

    @property
    def prefill_flops(self) -> int:
        """Of `context` tokens in every row."""
        s = self.setting
        return self.own.prefill_flops + 2 * s.batch * (s.context * self._feedforward_macs + self._head)

    @property
    def prefill_bytes(self) -> int:
        """Weights read, caches and states written."""
        return self._weights_read(self.setting.batch * self.setting.context) + self.own.bytes(self.setting.context)

    @property
    def decode_flops(self) -> int:
        """Of one more token in every row."""
        return self.own.decode_flops + 2 * self.setting.batch * (self._feedforward_macs + self._head)

    @property
    def decode_bytes(self) -> int:
        """Weights and caches read, states read and written."""
        return self._weights_read(self.setting.batch) + self.own.decode_bytes

    def as_dict(self) -> dict[str, Any]:
        """For JSON: a layer's entries are of one layer and row, the others of all; FLOPs are twice the MACs."""
        s, own = self.setting, self.own
        return {
            "context": s.context,
            "batch": s.batch,
            "dtype": str(s.dtype).removeprefix("torch."),
            "cache_bits": float(s.bits),
            "parameters": {"total": self.parameters, "active": self.active, "bytes": self.weight_bytes},
            "layers": [_kind_dict(kind) for kind in own.kinds],
            "feedforward": [
                {"kind": name, "layers": layers, "parameters": size} for name, layers, size in self.feedforwards
            ],
            "cache": {
                "elements_per_token": own.per_token,
                "bytes_per_token": float(own.per_token * s.bits / 8),
                "window_elements_per_token": own.window_per_token,
                "window_elements": own.ring,
                "bytes": own.cache_bytes(s.context),
            },
            "state": {"elements": own.state, "convolution_elements": own.tail, "bytes": own.state_bytes},
            "prefill": {"flops": self.prefill_flops, "bytes": self.prefill_bytes},
            "decode": {"flops": self.decode_flops, "bytes": self.decode_bytes},
            "alternatives": [one.as_dict() for one in self.others],
            "crossovers": [asdict(one) for one in self.crossovers],
        }


def _kind_dict(kind: Kind) -> dict[str, Any]:
    holds = kind.holds
    return {
        "kind": kind.name,
        "layers": kind.layers,
        "parameters": kind.parameters,
        "cache_elements_per_token": holds.per_token,
        "window": holds.slots or None,
        "window_elements_per_token": holds.window,
        "window_elements": holds.ring,
        "state_elements": holds.state,
        "convolution_elements": holds.tail,
        "projection_flops_per_token": 2 * kind.macs_per_token,
        "mixing_prefill_flops": 2 * kind.prefill_macs,
        "mixing_decode_flops": 2 * kind.step_macs,
    }


def estimate(model: nn.Module, setting: Setting | None = None) -> Estimate:
    """The costs of a decoder, which may be on the meta device.

    Raises TypeError for a model that is no decoder, and for layers whose costs are not known.

    >>> from regard.models.presets import preset
    >>> found = estimate(preset("DeepSeek-V2").build(), Setting(cache_bits=6))
    >>> found.own.per_token, found.as_dict()["cache"]["bytes_per_token"]
    (34560, 25920.0)
    """
    if not isinstance(model, Decoder):
        raise TypeError(f"model: expected a Decoder, which keeps caches, got {type(model).__name__}")
    setting = setting or Setting()
    mixers: list[Any] = [layer.mixer for layer in model.layers]
    own = arrangement("as it is", mixers, setting)
    others = tuple(arrangement(name, layers, setting) for name, layers in alternatives(mixers).items())
    return Estimate(model, setting, own, others, _feedforwards(model), _crossovers(own, others, setting))


def arrangement(name: str, layers: Sequence[Any], setting: Setting) -> Arrangement:
    """Layers of a stack by kind, in the order in which kinds appear."""
    counts: dict[tuple[Any, ...], list[Any]] = {}
    for layer in layers:
        key = mixer_label(layer), sum(p.numel() for p in layer.parameters())
        counts.setdefault(key, []).append(layer)
    kinds = tuple(Kind.of(equal[0], len(equal), setting.context) for equal in counts.values())
    return Arrangement(name, kinds, setting)


def _feedforward_parts(model: Decoder) -> list[nn.Module]:
    parts = (getattr(layer, "ff", None) for layer in model.layers)
    return [part for part in parts if isinstance(part, nn.Module)]


def _feedforwards(model: Decoder) -> tuple[tuple[str, int, int], ...]:
    counts: dict[tuple[str, int], int] = {}
    for part in _feedforward_parts(model):
        key = feedforward_label(part), sum(p.numel() for p in part.parameters())
        counts[key] = counts.get(key, 0) + 1
    return tuple((name, layers, size) for (name, size), layers in counts.items())


def _crossovers(own: Arrangement, others: Sequence[Arrangement], setting: Setting) -> tuple[Crossover, ...]:
    """Of every state against every cache; a stack that has only one of them is compared with the hybrid's other."""
    hybrid = next(one for one in others if one.name == HYBRID)

    def of(attribute: str) -> list[Kind]:
        found = ([kind for kind in one.kinds if getattr(kind.holds, attribute)] for one in (own, hybrid))
        return next((kinds for kinds in found if kinds), [])

    growing = [kind for kind in own.kinds if kind.holds.per_token or kind.holds.window] or of("per_token")
    return tuple(
        Crossover(
            state.name,
            cache.name,
            tokens_like(state.holds.state, cache.holds.per_token + cache.holds.window),
            tokens_like(state.holds.state, cache.holds.per_token + cache.holds.window, STATE_BITS, setting.bits),
        )
        for state in of("state")
        for cache in growing
    )
