"""What it costs that tokens meet: the closed forms, each once; layers say which of them they follow.

One sequence; T its tokens, H heads, K and V the channels of a head's keys and values, C the tokens of a chunk. Counts
are multiply-accumulates (MACs; two FLOPs each) between tokens, or between a token and a state: projections are counted
by `regard.analysis.costs.matrix_macs`, elementwise work (norms, activations, softmax) is not counted.

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

from collections.abc import Sequence
from math import prod
from typing import Any

from regard.backends.macs import attention_macs, delta_macs, matrix_step_macs, state_macs
from regard.masks.base import reach

__all__ = [
    "attention_macs",
    "causal_pairs",
    "delta_macs",
    "keys_read",
    "state_macs",
    "state_step_macs",
    "states_macs",
    "window_of",
]


def causal_pairs(tokens: int, window: int | None = None) -> int:
    """Pairs (query, key) of `tokens` tokens that each read themselves and those before, `window` of them at most.

    >>> causal_pairs(4), causal_pairs(4, 2), causal_pairs(4, 100)
    (10, 7, 10)
    """
    seen = keys_read(tokens, window)
    return tokens * seen - seen * (seen - 1) // 2


def keys_read(tokens: int, window: int | None) -> int:
    """How many of `tokens` tokens the last one reads."""
    return tokens if window is None else min(window, tokens)


def window_of(layer: Any) -> int | None:
    """How many tokens, itself included, a token reads at most by the layer's own pattern; None where that is unbounded.

    >>> import regard
    >>> window_of(regard.nn.MultiHeadAttention(64, 8, mask=regard.masks.Window(16)))
    16
    """
    furthest = None if layer.mask is None else reach(layer.mask)
    return None if furthest is None else max(furthest + 1, 0)


def state_step_macs(shape: tuple[int, ...], decays: bool = True) -> int:
    """A write and a read of every number of a state, and a decay; a number per channel, (d,), is its own output.

    >>> state_step_macs((4, 16, 32)), state_step_macs((4, 16, 32), decays=False), state_step_macs((64,))
    (6144, 4096, 64)
    """
    return prod(shape) if len(shape) == 1 else matrix_step_macs(prod(shape[:-2]), *shape[-2:], decays=decays)


def states_macs(shapes: Sequence[tuple[int, ...]], tokens: int, key_heads: int | None = None) -> int:
    """`tokens` tokens through states of these shapes: (heads, K, V), (d, N) or (d,); key heads are shared, if fewer."""
    return sum(
        state_macs(key_heads or shape[0], *shape, tokens) if len(shape) == 3 else tokens * state_step_macs(shape)
        for shape in shapes
    )
