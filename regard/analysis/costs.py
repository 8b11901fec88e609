"""What a layer costs, whichever it is: what it remembers, what it multiplies, the closed forms that it follows.

Layers say themselves in which closed form of `regard.mixers.costs` their tokens meet: ``layer.prefill_macs(tokens)``
and ``layer.step_macs(cached)``. Their footprint is read off the caches that they make, their matrices off their
modules.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from torch import float16, nn

from regard.caches import LatentCache, StateCache, WindowCache
from regard.mixers.costs import keys_read, window_of
from regard.models.experts import MixtureOfExperts, Router, Routing

__all__ = [
    "Footprint",
    "expert_parameters",
    "experts_touched",
    "footprint",
    "idle_parameters",
    "matrix_macs",
    "prefill_macs",
    "step_macs",
    "tokens_like",
]


def experts_touched(experts: int, chosen: int, tokens: int) -> float:
    """Experts that at least one of so many tokens is expected to choose, if each chooses evenly: E (1 - (1 - k/E)^n).

    >>> experts_touched(256, 8, 1), round(experts_touched(256, 8, 100))
    (8.0, 245)
    """
    return float(experts * (1 - (1 - chosen / experts) ** tokens)) if tokens > 1 else float(chosen)


def tokens_like(state: int, per_token: int, state_bits: Fraction | int = 1, cache_bits: Fraction | int = 1) -> int:
    """The length, in whole tokens, at which a growing cache is as large as a state; in elements, or in bits.

    >>> tokens_like(32 * 128 * 128, 576), tokens_like(32 * 128 * 128, 576, 32, 16)  # KDA against latent attention
    (910, 1820)
    """
    return int(Fraction(state) * state_bits / (per_token * Fraction(cache_bits)))


# ---- what a layer remembers ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Footprint:
    """What a layer's cache holds of one sequence, in elements.

    Args:
        per_token: for every token.
        window: for every token that a ring holds.
        slots: tokens that the ring holds.
        state: of fixed size, in at least float32.
        conv_state: of fixed size too: a convolution's last inputs.
        reach: how many of the tokens held outside a ring the next one reads; None for all.

    >>> import regard
    >>> footprint(regard.nn.MultiHeadAttention(64, 8, kv_heads=2, mask=regard.masks.Causal()))
    Footprint(per_token=32, window=0, slots=0, state=0, conv_state=0, reach=None)
    """

    per_token: int = 0
    window: int = 0
    slots: int = 0
    state: int = 0
    conv_state: int = 0
    reach: int | None = None

    @property
    def fixed(self) -> int:
        """Elements of states and of convolutions' last inputs."""
        return self.state + self.conv_state

    @property
    def ring(self) -> int:
        """Elements of a ring, which is allocated whole."""
        return self.window * self.slots

    def held(self, tokens: int) -> int:
        """Elements of keys and values (or latents) allocated for `tokens` tokens."""
        return self.per_token * tokens + self.ring

    def read(self, tokens: int) -> int:
        """Elements of them that the next token reads after so many."""
        return self.per_token * keys_read(tokens, self.reach) + self.window * min(tokens, self.slots)


def footprint(layer: nn.Module) -> Footprint:
    """What a layer remembers, read off the caches that its ``init_cache`` makes on the meta device."""
    if not hasattr(layer, "init_cache"):
        raise TypeError(f"layer: expected a layer with init_cache, got {type(layer).__name__}")
    none, one = (layer.init_cache(1, tokens, dtype=float16, device="meta") for tokens in (0, 1))  # type: ignore[operator]
    if isinstance(none, StateCache):
        last_inputs = getattr(layer, "conv_states", ())
        sizes = {name: state.numel() for name, state in none.states.items()}
        conv_state = sum(size for name, size in sizes.items() if name in last_inputs)
        return Footprint(state=sum(sizes.values()) - conv_state, conv_state=conv_state)
    if isinstance(none, WindowCache):
        return Footprint(window=none.nbytes // float16.itemsize // none.window, slots=none.window)
    reach = window_of(layer) if isinstance(none, LatentCache) else None
    return Footprint(per_token=(one.nbytes - none.nbytes) // float16.itemsize, reach=reach)


# ---- what its tokens multiply ----------------------------------------------------------------------------------------


def prefill_macs(layer: nn.Module, tokens: int) -> int:
    """Multiply-accumulates between the tokens of a causal layer, for a sequence of `tokens` from an empty cache.

    Raises TypeError for a layer that does not say it.

    >>> import regard
    >>> prefill_macs(regard.nn.MultiHeadAttention(64, 8, mask=regard.masks.Causal()), 10)
    7040
    """
    return int(_said(layer, "prefill_macs")(tokens))


def step_macs(layer: nn.Module, cached: int) -> int:
    """The same for one token, which reads `cached` tokens, itself included."""
    return int(_said(layer, "step_macs")(cached))


def _said(layer: nn.Module, method: str) -> Any:
    found = getattr(layer, method, None)
    if found is None:
        raise TypeError(f"layer: the costs of {type(layer).__name__} are not known; expected a layer with {method}")
    return found


# ---- matrices --------------------------------------------------------------------------------------------------------


def matrix_macs(module: nn.Module) -> int:
    """MACs of one token in a module's matrices and convolutions; of experts, in those that are chosen.

    Linear maps are counted by their weights; any other module that multiplies says so by a method ``matrix_macs()``.
    What a layer names in ``counted_by_form`` is left to its `prefill_macs` and `step_macs`.

    >>> import regard
    >>> matrix_macs(regard.nn.MultiHeadAttention(64, 8, kv_heads=2))
    10240
    """
    if isinstance(module, MixtureOfExperts):
        others = [module.router, module.shared, module.shared_gate]
        return _chosen(module) + sum(matrix_macs(part) for part in others if part is not None)
    if isinstance(module, (nn.Linear, Router)):
        return module.weight.numel()
    if (own := getattr(module, "matrix_macs", None)) is not None:
        return int(own())
    elsewhere = getattr(module, "counted_by_form", ())
    return sum(matrix_macs(part) for name, part in module.named_children() if name not in elsewhere)


def idle_parameters(module: nn.Module) -> int:
    """Parameters of the experts that a token does not choose."""
    return sum(size * (how.experts - how.chosen) for size, how in expert_parameters(module))


def expert_parameters(module: nn.Module) -> list[tuple[int, Routing]]:
    """For every mixture of experts: the parameters of one expert, and how experts are chosen."""
    mixtures = [part for part in module.modules() if isinstance(part, MixtureOfExperts)]
    sizes = [sum(weight.numel() for weight in part.experts.parameters()) for part in mixtures]
    routings = [_routing(part) for part in mixtures]
    return [(size // how.experts, how) for size, how in zip(sizes, routings, strict=True)]


def _routing(module: MixtureOfExperts) -> Routing:
    if not isinstance(module.router, Router):
        raise TypeError(f"router: expected a Router, whose choices are known, got {type(module.router).__name__}")
    return module.router.routing


def _chosen(module: MixtureOfExperts) -> int:
    how = _routing(module)
    return sum(weight.numel() for weight in module.experts.parameters() if weight.ndim == 3) * how.chosen // how.experts
