"""What every layer with a state of fixed size shares: the steps of a call, its cache, what it costs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from regard.caches import StateCache
from regard.checks import describe, whole
from regard.masks import Causal, Mask
from regard.mixers.base import Traits, check_tokens, floating, no_context
from regard.mixers.costs import state_step_macs, states_macs
from regard.mixers.sequence import TokenSequence, compute_dtype, last_segment, sequence_of
from regard.tokens import TokenLayout, resolve_tokens, takes_token_layout

__all__ = ["RecurrentLayer", "States", "check_cache", "empty_states"]

States = Mapping[str, Tensor]


class RecurrentLayer(nn.Module):
    """A layer that remembers the past in a state of fixed size; ``(B, T, dim)`` in and out.

    Subclasses set `dim`, name their states in `state_shapes`, and write two steps: `mix_tokens`, which combines tokens,
    and `project_output` (norm, gate, output projection), which works on each token alone; and `matrix`, which is the
    first step as a matrix. Where the state is a matrix or a vector that decays, `MatrixStateLayer` and
    `VectorStateLayer` write all three.
    """

    dim: int
    bidirectional = False  # a token reads later ones too, so there is no cache
    decays = True  # states fade, which costs a multiplication
    title = ""  # what tables call the layer; the class's name where empty
    conv_states: tuple[str, ...] = ("conv",)  # the states that are a convolution's last inputs

    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every state, without the batch axis."""
        raise NotImplementedError

    def mix_tokens(self, seq: TokenSequence, states: States) -> tuple[Tensor, Tensor | None, dict[str, Tensor]]:
        """(what the layer mixes (B, G, T, D), the input of the output's gate or None, the new states)."""
        raise NotImplementedError

    def project_output(self, x: Tensor, mixed: Tensor, gate_input: Tensor | None) -> Tensor:
        """The output (B, T, dim) from what was mixed."""
        raise NotImplementedError

    def matrix(self, seq: TokenSequence) -> tuple[Tensor, Tensor]:
        """(M (B, G, T, T), V (B, G, T, D)) with ``M @ V`` what `mix_tokens` gives from an empty state."""
        raise NotImplementedError

    @takes_token_layout
    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        mask: Mask | None = None,
        keep: Tensor | None = None,
        positions: Tensor | TokenLayout | None = None,
        segments: Tensor | None = None,
        cache: StateCache | None = None,
    ) -> Tensor:
        """The mixed tokens (B, T, dim).

        `keep` (B, T) marks the real tokens of this call; the others leave every state untouched. `segments` (B, T)
        are ids that never fall; a new one starts from an empty state. `mask` may only be ``Causal()``.
        """
        seq, layout = self._sequence(x, context, mask, keep, positions, segments, cache)
        mixed, gate_input, states = self.mix_tokens(seq, self._states(seq, cache))
        out = seq.unsort(self.project_output(seq.x, mixed, gate_input))
        if cache is not None:
            cache.commit(states, last_segment(seq, cache), layout, x.shape[1])
        return out

    def mixed(self, x: Tensor, **arguments: Any) -> Tensor:
        """What the layer mixes (B, G, T, D), before norm, gate and output projection; a cache stays as it is."""
        seq, _ = self._sequence(x, **_named(arguments))
        return seq.unsort(self.mix_tokens(seq, self._states(seq, arguments.get("cache")))[0], 2)

    def mixing(self, x: Tensor, context: Tensor | None = None, **arguments: Any) -> tuple[Tensor, Tensor]:
        """(M (B, G, T, T), V (B, G, T, D)) of this call's tokens, with ``M @ V`` what the layer mixes of them.

        A cache may be given only while it is empty: a state does not say which tokens it came from.
        """
        cache = arguments.get("cache")
        if cache is not None and cache.length:
            raise ValueError("cache: a state does not remember its tokens; give the whole sequence, or an empty cache")
        seq, _ = self._sequence(x, context, **_named(arguments, context=False))
        matrix, values = self.matrix(seq)
        return seq.unsort(seq.unsort(matrix, 2).transpose(-1, -2), 2).transpose(-1, -2), seq.unsort(values, 2)

    def init_cache(
        self, batch: int, capacity: int, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None
    ) -> StateCache:
        """Empty states for `batch` rows; `capacity` and `dtype` change nothing: size and precision are fixed."""
        if self.bidirectional:
            raise ValueError("bidirectional: a layer that reads later tokens cannot decode, so it has no cache")
        return empty_states(self, self.state_shapes(), batch, floating(self), device)

    # ---- what the layer says of itself -----------------------------------------------------------------------------

    @property
    def traits(self) -> Traits:
        """What the layer promises."""
        return Traits("recurrent", causal=not self.bidirectional, cached=not self.bidirectional)

    def label(self) -> str:
        """The layer in a few words: what it is, and the shapes of its states."""
        shapes = (" x ".join(map(str, shape)) for shape in self._memories())
        return f"{self.title or type(self).__name__}, {' and '.join(shapes)}"

    def prefill_macs(self, tokens: int) -> int:
        """Multiply-accumulates between tokens and states, for `tokens` tokens from empty states."""
        return states_macs(self._memories(priced=True), tokens)

    def step_macs(self, cached: int) -> int:
        """The same for one token more; `cached` tokens, itself included, cost a state nothing."""
        return sum(state_step_macs(shape, self.decays) for shape in self._memories(priced=True))

    def _memories(self, priced: bool = False) -> list[tuple[int, ...]]:
        """The shapes of the states but for convolutions'; `priced`: raise TypeError where no closed form has one."""
        shapes = [shape for name, shape in self.state_shapes().items() if name not in self.conv_states]
        if priced and any(len(shape) > 3 for shape in shapes):
            raise TypeError(
                f"layer: the costs of {type(self).__name__} are not known; expected states of up to three axes, or"
                " methods prefill_macs and step_macs of its own"
            )
        return shapes

    # ---- the steps of a call ---------------------------------------------------------------------------------------

    def _sequence(
        self,
        x: Tensor,
        context: Tensor | None = None,
        mask: Mask | None = None,
        keep: Tensor | None = None,
        positions: Tensor | TokenLayout | None = None,
        segments: Tensor | None = None,
        cache: StateCache | None = None,
    ) -> tuple[TokenSequence, TokenLayout]:
        check_tokens(self, "x", x, self.dim)
        no_context(self, context)
        if self.bidirectional and (mask is not None or cache is not None):
            name, one = ("cache", describe(cache)) if mask is None else ("mask", describe(mask))
            raise ValueError(f"{name}: expected None in a layer that reads later tokens, got {one}")
        if mask is not None and not isinstance(mask, Causal):
            raise ValueError(f"mask: expected None or Causal(): the past is in a state, got {describe(mask)}")
        check_cache(self, cache, self.state_shapes())
        sizes = (x.shape[0], x.shape[1], x.device)
        given: dict[str, Any] = {"keep": keep, "positions": positions, "segments": segments}
        layout = resolve_tokens(*sizes, **given) if cache is None else cache.resolve_tokens(*sizes, **given)
        return sequence_of(x, layout, cache), layout

    def _states(self, seq: TokenSequence, cache: StateCache | None) -> dict[str, Tensor]:
        """The states before the call's first tokens, 0 in rows where these open a segment; none without a cache."""
        if cache is None:
            return {}
        if seq.drop_state is None:
            return cache.states
        rows = seq.drop_state
        return {
            name: torch.where(rows.view(-1, *[1] * (state.ndim - 1)), 0.0, state)
            for name, state in cache.states.items()
        }


def empty_states(
    layer: nn.Module,
    shapes: Mapping[str, tuple[int, ...]],
    batch: int,
    like: Tensor,
    device: torch.device | str | None,
) -> StateCache:
    """A layer's states of zeros for `batch` rows, by their shapes without the batch axis; `like` is a parameter."""
    kind, place = compute_dtype(like), device or like.device
    rows = whole("batch", batch, 0)
    states = {name: torch.zeros((rows, *shape), dtype=kind, device=place) for name, shape in shapes.items()}
    cache = StateCache(batch, states, place)
    cache.makers = _lineage(layer)
    return cache


def _lineage(layer: nn.Module) -> tuple[str, ...]:
    return tuple(kind.__name__ for kind in type(layer).__mro__)


def check_cache(layer: nn.Module, cache: Any, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise unless `cache` is None or holds states of these shapes, made by a layer of this class.

    A class and one derived from it pass for the same: parametrisations and wrappers derive theirs on the fly.
    """
    if cache is not None and not isinstance(cache, StateCache):
        raise TypeError(f"cache: expected what init_cache gives, or None, got {describe(cache)}")
    if cache is not None and {name: tuple(t.shape[1:]) for name, t in cache.states.items()} != shapes:
        raise ValueError(f"cache: it was made for states of other shapes than {shapes}")
    own = type(layer).__name__
    if cache is not None and cache.makers and own not in cache.makers and cache.makers[0] not in _lineage(layer):
        raise ValueError(f"cache: it was made by a {cache.makers[0]}, whose states mean something else to a {own}")


def _named(arguments: dict[str, Any], context: bool = True) -> dict[str, Any]:
    names = {"mask", "keep", "positions", "segments", "cache"} | ({"context"} if context else set())
    unknown = sorted(set(arguments) - names)
    if unknown:
        raise TypeError(f"{unknown[0]}: expected one of {', '.join(sorted(names))}")
    return arguments
