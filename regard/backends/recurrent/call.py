"""The records of one call of an operation with a state: checked arguments that every backend reads, and none changes.

They are not frozen, for that would take as long as the smallest calls' arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from regard.backends.call import inside_transform, may_be_transformed

__all__ = ["RecurrenceCall", "ScanCall", "SelectiveScanCall", "ShortConvCall", "StateCall"]


class StateCall:
    """What the four records share."""

    operation: ClassVar[str]
    first: ClassVar[str] = "x"  # the name of the first tensor
    state: Tensor | None
    segment_starts: Tensor | None  # bool (B, T): the token opens a segment, so the state is zeroed before it

    @property
    def lead(self) -> Tensor:
        """The first tensor, whose dtype and device are the call's."""
        first: Tensor = getattr(self, self.first)
        return first

    @property
    def state_shape(self) -> tuple[int, ...]:
        """The state's shape, the batch included."""
        raise NotImplementedError  # each record has its own

    def first_state(self) -> Tensor:
        """The state before the first token, in the compute dtype; zeros where none was given."""
        if self.state is None:
            return self.lead.new_zeros(self.state_shape, dtype=self.compute_dtype)
        return self.state.to(self.compute_dtype)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Every tensor of the call."""
        return tuple(value for value in vars(self).values() if isinstance(value, Tensor))

    @property
    def device(self) -> torch.device:
        return self.lead.device

    @property
    def compute_dtype(self) -> torch.dtype:
        """Sums and states: float64 for float64 inputs, else float32."""
        return torch.float64 if self.lead.dtype == torch.float64 else torch.float32

    @property
    def wants_grad(self) -> bool:
        """Whether autograd will record this call."""
        return torch.is_grad_enabled() and any(t.requires_grad for t in self.tensors)

    @property
    def transformed(self) -> bool:
        """Whether torch.func transforms or forward-mode derivatives run through the call, in eager mode."""
        return may_be_transformed() and inside_transform(self.tensors)

    def result(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """(output, last state) that share no memory with the state given, not even after no tokens."""
        out, last = pair
        return out, last.clone() if last is self.state else last


@dataclass(eq=False)
class RecurrenceCall(StateCall):
    """q, k (B, Hk, T, Dk), v (B, Hv, T, Dv), beta (B, Hv, T), log_decay as in `Decay`, state (B, Hv, Dk, Dv).

    read_key, write_key (B, Hv, T, Dk) or None, both or neither; beta goes without them.
    """

    operation: ClassVar[str] = "recurrence"
    first: ClassVar[str] = "q"

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor | None
    log_decay: Tensor | None
    state: Tensor | None
    segment_starts: Tensor | None
    scale: float
    chunk_size: int | None
    state_out: Tensor | None = None  # where the last state may be put; only without gradients
    read_key: Tensor | None = None
    write_key: Tensor | None = None

    @property
    def sizes(self) -> tuple[int, int, int, int, int, int]:
        """B, Hk, Hv, T, Dk, Dv."""
        batch, key_heads, tokens, key_dim = self.q.shape
        return batch, key_heads, self.v.shape[1], tokens, key_dim, self.v.shape[3]

    @property
    def state_shape(self) -> tuple[int, ...]:
        batch, _, heads, _, key_dim, value_dim = self.sizes
        return batch, heads, key_dim, value_dim


@dataclass(eq=False)
class ScanCall(StateCall):
    """x (B, T, ...), log_a broadcasting against it, state as x[:, 0]."""

    operation: ClassVar[str] = "scan"

    x: Tensor
    log_a: Tensor
    state: Tensor | None
    segment_starts: Tensor | None

    @property
    def state_shape(self) -> tuple[int, ...]:
        return self.x.shape[0], *self.x.shape[2:]


@dataclass(eq=False)
class SelectiveScanCall(StateCall):
    """x, dt (B, T, d), A (d, N), B, C (B, T, N), D (d,) or None, state (B, d, N)."""

    operation: ClassVar[str] = "selective_scan"

    x: Tensor
    dt: Tensor
    A: Tensor
    B: Tensor
    C: Tensor
    D: Tensor | None
    state: Tensor | None
    segment_starts: Tensor | None

    @property
    def state_shape(self) -> tuple[int, ...]:
        return self.x.shape[0], *self.A.shape


@dataclass(eq=False)
class ShortConvCall(StateCall):
    """x (B, T, C), weight (C, W), bias (C,) or None, state (B, W - 1, C): the inputs before."""

    operation: ClassVar[str] = "short_conv"

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    state: Tensor | None
    segment_starts: Tensor | None

    @property
    def line(self) -> Tensor:
        """The inputs before and those of the call, (B, W - 1 + T, C), in the compute dtype."""
        return torch.cat((self.first_state(), self.x.to(self.compute_dtype)), 1)

    @property
    def state_shape(self) -> tuple[int, ...]:
        return self.x.shape[0], self.weight.shape[1] - 1, self.x.shape[2]
