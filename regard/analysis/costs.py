"""What layers cost: the closed forms of their time and memory, once, and which of them a layer follows.

One sequence; T its tokens, H heads, K and V the channels of a head's keys and values, C the tokens of a chunk. Counts
are multiply-accumulates (MACs; two FLOPs each) of tokens meeting: projections are counted by `matrix_macs`, elementwise
work (norms, activations, softmax) is not counted.

| what | over T tokens | one token after t |
|---|---|---|
| softmax attention, pairs p | H (K + V) p | H (K + V) min(t, window) |
| latent attention | the cheaper form of `LatentSizes`, pairs p | the same, min(t, window) pairs |
| state (K, V), decay | Hk T C K + H T (C V + 2 K V) | 3 H K V; 2 H K V without a decay |
| delta rule | H T (C (3 K + 2 V) + 3 K V + C^2 / 3) | 4 H K V; 3 H K V without a decay |
| state (d, N) per channel | 3 T d N | 3 d N |
| state (d) | T d | d |

Sources: the papers that the layers name; Yang et al. 2024, arXiv:2406.06484, for the delta rule in chunks.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import singledispatch
from math import prod

from torch import float16, nn

from regard.backends.macs import attention_macs, delta_macs, matrix_step_macs, state_macs
from regard.caches import StateCache, WindowCache
from regard.masks.base import reach as furthest_of
from regard.mixers.delta_rule import DeltaRuleLayer
from regard.mixers.griffin import BlockDiagonal
from regard.mixers.kernel_linear import LinearAttention
from regard.mixers.latent import MultiHeadLatentAttention
from regard.mixers.mamba2 import Mamba2
from regard.mixers.parts import ShortConv
from regard.mixers.recurrent import RecurrentLayer
from regard.mixers.softmax import MultiHeadAttention
from regard.models.experts import MixtureOfExperts, Router, Routing

__all__ = [
    "Footprint",
    "attention_macs",
    "causal_pairs",
    "delta_macs",
    "expert_parameters",
    "experts_touched",
    "footprint",
    "idle_parameters",
    "matrix_macs",
    "matrix_step_macs",
    "prefill_macs",
    "state_macs",
    "step_macs",
    "tokens_like",
    "window_of",
]


# ---- closed forms ----------------------------------------------------------------------------------------------------


def causal_pairs(tokens: int, window: int | None = None) -> int:
    """Pairs (query, key) of `tokens` tokens that each read themselves and those before, `window` of them at most.

    >>> causal_pairs(4), causal_pairs(4, 2), causal_pairs(4, 100)
    (10, 7, 10)
    """
    seen = _met(tokens, window)
    return tokens * seen - seen * (seen - 1) // 2


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


def window_of(layer: MultiHeadAttention | MultiHeadLatentAttention) -> int | None:
    """How many tokens, itself included, a token reads at most by the layer's own pattern; None where that is unbounded.

    >>> import regard
    >>> window_of(regard.nn.MultiHeadAttention(64, 8, mask=regard.masks.Window(16)))
    16
    """
    furthest = None if layer.mask is None else furthest_of(layer.mask)
    return None if furthest is None else max(furthest + 1, 0)


def _met(tokens: int, window: int | None) -> int:
    """How many of `tokens` tokens the last one reads."""
    return tokens if window is None else min(window, tokens)


# ---- what a layer remembers ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Footprint:
    """What a layer's cache holds of one sequence, in elements.

    Args:
        per_token: for every token.
        window: for every token that a ring holds.
        slots: tokens that the ring holds.
        state: of fixed size, in at least float32.
        tail: of fixed size too: a convolution's last inputs.
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
        """Elements of states and tails."""
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
        return self.per_token * _met(tokens, self.reach) + self.window * min(tokens, self.slots)


def footprint(layer: nn.Module) -> Footprint:
    """What a layer remembers, read off the caches that its ``init_cache`` makes on the meta device."""
    if not hasattr(layer, "init_cache"):
        raise TypeError(f"layer: expected a layer with init_cache, got {type(layer).__name__}")
    none, one = (layer.init_cache(1, tokens, dtype=float16, device="meta") for tokens in (0, 1))  # type: ignore[operator]
    if isinstance(none, StateCache):
        conv_states = _conv_states(layer)
        sizes = [(tuple(state.shape[1:]), state.numel()) for state in none.states.values()]
        conv_state = sum(size for shape, size in sizes if shape in conv_states)
        return Footprint(state=sum(size for _, size in sizes) - conv_state, conv_state=conv_state)
    if isinstance(none, WindowCache):
        return Footprint(window=none.nbytes // float16.itemsize // none.window, slots=none.window)
    reach = window_of(layer) if isinstance(layer, MultiHeadLatentAttention) else None
    return Footprint(per_token=(one.nbytes - none.nbytes) // float16.itemsize, reach=reach)


def _conv_states(layer: nn.Module) -> set[tuple[int, ...]]:
    return {module.state_shape for module in layer.modules() if isinstance(module, ShortConv)}


# ---- which form a layer follows --------------------------------------------------------------------------------------


@singledispatch
def prefill_macs(layer: nn.Module, tokens: int) -> int:
    """MACs in which the tokens of a causal layer meet, for a sequence of `tokens` from an empty cache.

    Raises TypeError for a layer whose form is not known.

    >>> import regard
    >>> prefill_macs(regard.nn.MultiHeadAttention(64, 8, mask=regard.masks.Causal()), 10)
    7040
    """
    raise TypeError(f"layer: the costs of {type(layer).__name__} are not known; accepted: a layer of regard.nn")


@singledispatch
def step_macs(layer: nn.Module, cached: int) -> int:
    """The same for one token, which reads `cached` tokens, itself included."""
    raise TypeError(f"layer: the costs of {type(layer).__name__} are not known; accepted: a layer of regard.nn")


@prefill_macs.register
def _(layer: MultiHeadAttention, tokens: int) -> int:
    return attention_macs(layer.heads, layer.head_dim, layer.head_dim, causal_pairs(tokens, window_of(layer)))


@step_macs.register
def _(layer: MultiHeadAttention, cached: int) -> int:
    return attention_macs(layer.heads, layer.head_dim, layer.head_dim, _met(cached, window_of(layer)))


def _latent(layer: MultiHeadLatentAttention, queries: int, keys: int, pairs: int) -> int:
    """A window bounds the pairs; the expanded form still forms the keys and values of every latent."""
    cost = layer.sizes.absorbed_cost if layer.absorbs(queries, keys) else layer.sizes.expanded_cost
    return layer.heads * cost(queries, keys, pairs)


@prefill_macs.register
def _(layer: MultiHeadLatentAttention, tokens: int) -> int:
    return _latent(layer, tokens, tokens, causal_pairs(tokens, window_of(layer)))


@step_macs.register
def _(layer: MultiHeadLatentAttention, cached: int) -> int:
    return _latent(layer, 1, cached, _met(cached, window_of(layer)))


@prefill_macs.register
def _(layer: RecurrentLayer, tokens: int) -> int:
    shape = _state(layer)
    if len(shape) == 3:
        heads, key_dim, value_dim = shape
        shared = layer.groups if isinstance(layer, Mamba2) else heads
        return state_macs(shared, heads, key_dim, value_dim, tokens)
    return tokens * _step(shape)


@step_macs.register
def _(layer: RecurrentLayer, cached: int) -> int:
    shape = _state(layer)
    if len(shape) == 3:
        return matrix_step_macs(*shape, decays=not isinstance(layer, LinearAttention))
    return _step(shape)


@prefill_macs.register
def _(layer: DeltaRuleLayer, tokens: int) -> int:
    return delta_macs(layer.heads, layer.key_dim, layer.value_dim, tokens)


@step_macs.register
def _(layer: DeltaRuleLayer, cached: int) -> int:
    decays = type(layer).log_decay is not DeltaRuleLayer.log_decay
    return matrix_step_macs(layer.heads, layer.key_dim, layer.value_dim, decays=decays, delta=True)


def _state(layer: RecurrentLayer) -> tuple[int, ...]:
    shapes = [shape for shape in layer.state_shapes().values() if shape not in _conv_states(layer)]
    if len(shapes) != 1 or len(shapes[0]) > 3:
        raise TypeError(f"layer: the costs of {type(layer).__name__} are not known; accepted: a layer with one state")
    return shapes[0]


def _step(shape: tuple[int, ...]) -> int:
    """A decay, a write and a read of every number of a state; a vector is its own output."""
    return prod(shape) * (3 if len(shape) > 1 else 1)


# ---- matrices --------------------------------------------------------------------------------------------------------


def matrix_macs(module: nn.Module) -> int:
    """MACs of one token in a module's matrices and convolutions; of experts, in those that are chosen.

    Latent attention's ``kv_b_proj`` is left to `prefill_macs` and `step_macs`, for its use depends on the form.

    >>> import regard
    >>> matrix_macs(regard.nn.MultiHeadAttention(64, 8, kv_heads=2))
    10240
    """
    if isinstance(module, MixtureOfExperts):
        others = [module.router, module.shared, module.shared_gate]
        return _chosen(module) + sum(matrix_macs(part) for part in others if part is not None)
    if isinstance(module, (nn.Linear, ShortConv, BlockDiagonal, Router)):
        return module.weight.numel()
    parts = dict(module.named_children())
    if isinstance(module, MultiHeadLatentAttention):
        parts.pop("kv_b_proj")
    return sum(map(matrix_macs, parts.values()))


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
