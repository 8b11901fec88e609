"""What layers share whose state is one number per channel that decays and is written to.

    h_t = a_t h_{t-1} + w x_t

It is linear in x, channel by channel: the same scan of the identity is the matrix of each channel.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from regard.mixers.parts import split_heads
from regard.mixers.recurrent import RecurrentLayer, States
from regard.mixers.sequence import TokenSequence, scan_matrix, widened

__all__ = ["VectorInputs", "VectorStateLayer"]


@dataclass(frozen=True)
class VectorInputs:
    """What a layer's tokens give the scan.

    Args:
        x: (B, T, C), what enters the states; these are the values of ``M @ V``.
        log_decay: nats per token, <= 0, of the same shape or one that broadcasts to it, with three axes.
        weight: (C,), a factor on x; it is in the matrix.
        states: the layer's other new states (a convolution's last inputs).
    """

    x: Tensor
    log_decay: Tensor
    weight: Tensor | None = None
    states: Mapping[str, Tensor] = field(default_factory=dict)


class VectorStateLayer(RecurrentLayer):
    """A `RecurrentLayer` with one number of state per channel; subclasses write `inputs` and `project_output`."""

    width: int  # C

    def inputs(self, seq: TokenSequence, states: States) -> VectorInputs:
        """What enters the states, and how they fade; `states` are those before the call's tokens, if any."""
        raise NotImplementedError

    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        return {"state": (self.width,)}

    def mix_tokens(self, seq: TokenSequence, states: States) -> tuple[Tensor, Tensor | None, dict[str, Tensor]]:
        given = self.inputs(seq, states)
        entered = given.x if given.weight is None else given.weight * given.x
        h, state = seq.scan(given.log_decay, entered, states.get("state"))
        return split_heads(h, self.width), None, {"state": state, **given.states}

    def matrix(self, seq: TokenSequence) -> tuple[Tensor, Tensor]:
        given = self.inputs(seq, {})
        matrix = scan_matrix(seq, given.log_decay)
        matrix = matrix if given.weight is None else matrix * given.weight[:, None, None]
        return matrix, split_heads(widened(given.x), self.width)
