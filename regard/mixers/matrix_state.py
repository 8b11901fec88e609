"""What layers with a matrix state share: projections, the recurrence, its matrix, norm and gate of the output, costs.

    S_t = a_t * S_{t-1} + k_t v_t^T   (or the delta rule),   o_t = s S_t^T q_t,   y_t = W_o norm_head(o_t[, W_g x_t])

Whatever q, k and a_t are computed from, o is linear in the values. So the same recurrence, fed with the identity
instead of the values, gives the matrix M with ``o = M v``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from regard.checks import whole
from regard.mixers.costs import states_macs
from regard.mixers.parts import merge_heads, split_heads
from regard.mixers.recurrent import RecurrentLayer, States
from regard.mixers.sequence import TokenSequence, compute_dtype, identity, widened
from regard.transitions import Decay, Delta

__all__ = ["HeadProjections", "MatrixInputs", "MatrixStateLayer", "constant_decay"]


class HeadProjections(nn.Module):
    """The sizes of a layer's heads, and the projections to and from them (heads contiguous)."""

    dim: int
    heads: int  # of values and states
    key_heads: int  # of queries and keys; value head h reads key head h // (heads // key_heads)
    key_dim: int
    value_dim: int
    norm: nn.Module | None  # of each head; it takes the gate too where there is one
    g_proj: nn.Module | None  # the gate
    o_proj: nn.Module

    def make_projections(
        self,
        dim: int,
        heads: int,
        *,
        key_heads: int | None = None,
        key_dim: int | None = None,
        value_dim: int | None = None,
        source: int | None = None,
    ) -> None:
        """Check the sizes and make ``q_proj k_proj v_proj``; keys and values are made from `source` channels."""
        self.dim, self.heads = whole("dim", dim, 1), whole("heads", heads, 1)
        self.key_heads = whole("key_heads", heads if key_heads is None else key_heads, 1)
        if heads % self.key_heads:
            raise ValueError(f"key_heads: expected a divisor of heads={heads}, got {key_heads}")
        self.key_dim = whole("key_dim", self.default_key_dim() if key_dim is None else key_dim, 1)
        self.value_dim = whole("value_dim", self.default_value_dim() if value_dim is None else value_dim, 1)
        source = dim if source is None else source
        keys = self.key_heads * self.key_dim
        self.q_proj = nn.Linear(dim, keys, bias=False)
        self.k_proj = nn.Linear(source, keys, bias=False)
        self.v_proj = nn.Linear(source, heads * self.value_dim, bias=False)
        self.norm = self.g_proj = None  # a subclass may make them, and makes o_proj

    def default_key_dim(self) -> int:
        """Dk of a head where it is not given."""
        return self.dim // self.heads

    def default_value_dim(self) -> int:
        """Dv of a head where it is not given."""
        return self.dim // self.heads

    def head_inputs(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The projections of tokens (B, T, dim) by heads: q, k (B, Hk, T, Dk) and v (B, Hv, T, Dv)."""
        q, k = (split_heads(proj(x), self.key_heads) for proj in (self.q_proj, self.k_proj))
        return q, k, split_heads(self.v_proj(x), self.heads)

    def project_output(self, x: Tensor, mixed: Tensor, gate_input: Tensor | None) -> Tensor:
        """``W_o norm_head(mixed)``, or ``W_o norm_head(mixed, W_g x)``, where the norm has a gate: (B, T, dim)."""
        gate = () if self.g_proj is None else (split_heads(self.g_proj(x), self.heads),)
        like = gate[0] if gate else x
        assert self.norm is not None or not gate, "the norm is what applies the gate"
        normed = mixed if self.norm is None else self.norm(mixed, *gate)
        out: Tensor = self.o_proj(merge_heads(normed).to(like.dtype))
        return out


@dataclass(frozen=True)
class MatrixInputs:
    """What a layer's tokens give the recurrence.

    Args:
        q, k: (B, Hk, T, Dk); v: (B, Hv, T, Dv).
        transition: how the state moves.
        weight: (B, Hv, T), a factor on each value as it is written; it is in the matrix.
        gate_input: what `project_output` gets as such.
        states: the layer's other new states (a convolution's last inputs).
    """

    q: Tensor
    k: Tensor
    v: Tensor
    transition: Decay | Delta
    weight: Tensor | None = None
    gate_input: Tensor | None = None
    states: Mapping[str, Tensor] = field(default_factory=dict)


def constant_decay(slopes: Sequence[float], x: Tensor) -> Decay:
    """A decay rate >= 0 per head (`regard.decays.fixed_slopes`), nats per token, for tokens `x`."""
    return Decay(-torch.tensor(slopes, dtype=compute_dtype(x), device=x.device))


class MatrixStateLayer(HeadProjections, RecurrentLayer):
    """A `RecurrentLayer` whose state is a matrix (Dk, Dv) per head.

    Subclasses make their modules (with `make_projections`, and ``norm``, ``o_proj`` and, for a gate, ``g_proj``) and
    write `inputs`. What else differs has a method of its own: `recur`, `project_output`, `state_shapes`.
    """

    scale: float | None = None  # on queries; Dk^-1/2 by default

    def inputs(self, seq: TokenSequence, states: States) -> MatrixInputs:
        """Queries, keys, values and transition of the call's tokens; `states` are those before them, if any."""
        raise NotImplementedError

    def recur(
        self, seq: TokenSequence, given: MatrixInputs, v: Tensor, state: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """(what is mixed of any values `v` (B, Hv, T, D), linear in them; the new state, None where there is none)."""
        v = widened(v)
        v = v if given.weight is None else given.weight[..., None] * v
        if self.bidirectional:
            assert isinstance(given.transition, Decay)
            return seq.recur_both_ways(given.q, given.k, v, given.transition, self.scale), None
        return seq.recur(given.q, given.k, v, given.transition, state, self.scale)

    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        return {"state": (self.heads, self.key_dim, self.value_dim)}

    def mix_tokens(self, seq: TokenSequence, states: States) -> tuple[Tensor, Tensor | None, dict[str, Tensor]]:
        given = self.inputs(seq, states)
        mixed, state = self.recur(seq, given, given.v, states.get("state"))
        return mixed, given.gate_input, {} if state is None else {"state": state, **given.states}

    def matrix(self, seq: TokenSequence) -> tuple[Tensor, Tensor]:
        given = self.inputs(seq, {})
        return self.recur(seq, given, identity(seq, self.heads), None)[0], given.v

    def prefill_macs(self, tokens: int) -> int:
        return states_macs(self._memories(priced=True), tokens, self.key_heads)
