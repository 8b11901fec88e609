"""What a model costs to run: parameters, caches and states, work and traffic, and what other layers would cost.

Everything is read off a built model, which may be on the meta device (`regard.models.presets`): sizes off its modules,
caches off what their ``init_cache`` makes, work by the closed forms of `regard.analysis.costs`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from torch import nn

from regard.analysis.alternatives import HYBRID, alternatives
from regard.analysis.costs import expert_parameters, experts_touched, idle_parameters, matrix_macs, tokens_like
from regard.analysis.layer_costs import STATE_BITS, Kind, MixerCosts, Setting, mixer_costs
from regard.analysis.layer_names import feedforward_label
from regard.models.decoder import Decoder

__all__ = ["Crossover", "Estimate", "estimate"]


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
    own: MixerCosts
    others: tuple[MixerCosts, ...]
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
            "layers": [kind.as_dict() for kind in own.kinds],
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
            "state": {"elements": own.state, "convolution_elements": own.conv_state, "bytes": own.state_bytes},
            "prefill": {"flops": self.prefill_flops, "bytes": self.prefill_bytes},
            "decode": {"flops": self.decode_flops, "bytes": self.decode_bytes},
            "alternatives": [one.as_dict() for one in self.others],
            "crossovers": [asdict(one) for one in self.crossovers],
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
    odd = next((type(layer).__name__ for layer in model.layers if not hasattr(layer, "mixer")), None)
    if odd is not None:
        raise TypeError(f"model: expected blocks with one mixer each, got a {odd}, whose costs are not known")
    mixers: list[Any] = [layer.mixer for layer in model.layers]
    own = mixer_costs("as it is", mixers, setting)
    others = tuple(mixer_costs(name, layers, setting) for name, layers in alternatives(mixers).items())
    return Estimate(model, setting, own, others, _feedforwards(model), _crossovers(own, others, setting))


def _feedforward_parts(model: Decoder) -> list[nn.Module]:
    parts = (getattr(layer, "ff", None) for layer in model.layers)
    return [part for part in parts if isinstance(part, nn.Module)]


def _feedforwards(model: Decoder) -> tuple[tuple[str, int, int], ...]:
    counts: dict[tuple[str, int], int] = {}
    for part in _feedforward_parts(model):
        key = feedforward_label(part), sum(p.numel() for p in part.parameters())
        counts[key] = counts.get(key, 0) + 1
    return tuple((name, layers, size) for (name, size), layers in counts.items())


def _crossovers(own: MixerCosts, others: Sequence[MixerCosts], setting: Setting) -> tuple[Crossover, ...]:
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
