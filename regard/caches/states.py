"""The cache of layers with a state: of fixed size, however many tokens were seen."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from regard.caches.base import Cache
from regard.tokens import TokenLayout

__all__ = ["StateCache"]


class StateCache(Cache):
    """The state that a recurrent layer carries, and the tail of its convolution: of fixed size, never full.

    `states` are zeros, batch on axis 0, by name; they stay in float32 (float64 in a float64 layer). `crop` raises
    `CacheError` unless it drops nothing or everything. Layers of another class than the one that made it refuse it.
    """

    makers: tuple[str, ...] = ()  # the maker's class and its bases, by name; none where no layer made it

    def __init__(self, batch: int, states: Mapping[str, Tensor], device: Any = None) -> None:
        super().__init__(batch, 1, device)
        self.tensor_names = (*states, "owner")
        self.context = False  # whether the states are of a context, written once, and not of the sequence itself
        self.owner: Tensor | None = None  # the segment (B,) of the last real token in the state
        for name, state in states.items():
            setattr(self, name, state)

    @property
    def states(self) -> dict[str, Tensor]:
        """The states by name."""
        return {name: getattr(self, name) for name in self.tensor_names if name != "owner"}

    def reset(self) -> None:
        super().reset()
        self.owner = None
        self.context = False
        for name, state in self.states.items():
            setattr(self, name, torch.zeros_like(state))

    def commit(self, states: Mapping[str, Tensor], owner: Tensor | None, layout: TokenLayout, tokens: int) -> None:
        """Take over the new states: the call has succeeded."""
        for name, state in states.items():
            new = state.detach()
            # a view would keep all that it was cut from, and an output that the caller may write to
            alone = not torch.compiler.is_compiling() and new.untyped_storage().nbytes() == new.nbytes
            setattr(self, name, new if alone else new.clone())
        self.owner = owner
        self.history.write(self.length, layout, tokens)
        self.length += tokens
