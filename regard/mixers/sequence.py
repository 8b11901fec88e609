"""A call's tokens as layers with a state see them: a `TokenSequence`, and the recurrent operations over it.

A `TokenSequence` has the real tokens of each row first, padding behind them. So convolutions and states see real tokens
only, wherever padding stood, and the results go back to the places that the tokens came from.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.caches import StateCache
from regard.checks import scale_of
from regard.ops.convolutions import convolve
from regard.ops.states import RecurrenceCall, ScanCall, SelectiveScanCall, run_state_call
from regard.tokens import TokenLayout
from regard.transitions import Decay, Delta, GeneralizedDelta, Transition

__all__ = ["TokenSequence", "compute_dtype", "identity", "last_segment", "scan_matrix", "sequence_of", "widened"]


@dataclass(frozen=True)
class TokenSequence:
    """The tokens of a call: real ones first in each row.

    Its methods are the recurrent operations, made blind to padding (which leaves every state as it was) and bounded by
    segments. What they return is in the compute dtype, outside autocast too: a sum that overflows half precision may
    yet be normalised to a moderate number, so only a layer's end rounds.
    """

    x: Tensor  # (B, T, dim), 0 at padding
    positions: Tensor  # (B, T): the running count of real tokens in their segment
    real: Tensor | None = None  # bool (B, T), or None: all are
    segments: Tensor | None = None  # ids (B, T), never falling, or None: one segment, the state's
    order: Tensor | None = None  # (B, T): the place in the call that each token came from
    drop_state: Tensor | None = None  # bool (B,): the first token opens a segment, and the state before it is dropped

    @property
    def segment_starts(self) -> Tensor | None:
        """Which tokens open a segment, bool (B, T), the first token never; None where there is one segment."""
        ids = self.segments
        if ids is None:
            return None
        first = ids.new_zeros(ids.shape[0], min(ids.shape[1], 1), dtype=torch.bool)
        return torch.cat((first, ids[:, 1:] != ids[:, :-1]), 1)

    @property
    def lengths(self) -> Tensor | None:
        """Real tokens (B,), or None: all are."""
        return None if self.real is None else self.real.sum(1)

    # ---- operations ------------------------------------------------------------------------------------------------

    def recur(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        transition: Transition,
        state: Tensor | None = None,
        scale: float | None = None,
    ) -> tuple[Tensor, Tensor]:
        """`regard.recurrence`, of decays and strengths that the layer formed itself: nothing is read to check them."""
        q, k, v = (widened(x) for x in (q, k, v))
        if self.real is not None:
            decay = transition.log_decay
            if decay is not None:
                decay = decay[None, :, None].expand(q.shape[0], -1, q.shape[2]) if decay.ndim == 1 else decay
                decay = self.mask_padding(decay, 2)
            if isinstance(transition, Delta):
                transition = Delta(self.mask_padding(transition.beta, 2), decay)
            elif isinstance(transition, GeneralizedDelta):
                v, write = self.mask_padding(v, 2), self.mask_padding(transition.write_key, 2)
                transition = GeneralizedDelta(transition.read_key, write, decay)
            else:
                v, transition = self.mask_padding(v, 2), Decay(decay)
        factor = scale_of(scale, k.shape[3], k.dtype)
        one = transition
        call = RecurrenceCall(
            *(q, k, v, one.beta, one.log_decay, state, self.segment_starts, factor),
            chunk_size=None,
            read_key=one.read_key,
            write_key=one.write_key,
        )
        return run_state_call(call)

    def recur_both_ways(self, q: Tensor, k: Tensor, v: Tensor, transition: Decay, scale: float | None = None) -> Tensor:
        """`regard.recurrence` over the tokens and over the reversed tokens, added; a token reads itself once."""
        q, k, v = (widened(x) for x in (q, k, v))
        back, decay = self.reversed(), transition.log_decay
        past, _ = self.recur(q, k, v, transition, None, scale)
        turned = decay if decay is None or decay.ndim == 1 else decay.flip(2)
        future, _ = back.recur(q.flip(2), k.flip(2), v.flip(2), Decay(turned), None, scale)
        own = (q * k).sum(-1, keepdim=True) * scale_of(scale, k.shape[3], k.dtype)
        return past + future.flip(2) - own.repeat_interleave(v.shape[1] // k.shape[1], 1) * v

    def scan(self, log_a: Tensor, x: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """`regard.scan`, in the same way."""
        x = widened(x)
        if self.real is not None:
            x = self.mask_padding(x)
            log_a = self.mask_padding(log_a.expand(*x.shape[:2], *log_a.shape[2:]))
        return run_state_call(ScanCall(x, log_a, state, self.segment_starts))

    def selective_scan(
        self, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, state: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """`regard.selective_scan`, in the same way."""
        call = SelectiveScanCall(widened(x), self.mask_padding(dt), A, B, C, D, state, self.segment_starts)
        return run_state_call(call)

    def conv(self, x: Tensor, weight: Tensor, bias: Tensor | None, conv_state: Tensor | None) -> tuple[Tensor, Tensor]:
        """`regard.short_conv`; the state returned ends at the last real token."""
        return convolve(widened(x), weight, bias, conv_state, self.segment_starts, self.lengths)

    def mask_padding(self, x: Tensor, axis: int = 1) -> Tensor:
        """`x` with 0 at padding; its time axis is 1, or 2 with heads before it."""
        if self.real is None:
            return x
        real = self.real if axis == 1 else self.real[:, None]
        return torch.where(real.view(*real.shape, *[1] * (x.ndim - real.ndim)), x, 0.0)

    def reversed(self) -> TokenSequence:
        """The same tokens backwards in time, padding first."""
        flip = {name: None if (t := getattr(self, name)) is None else t.flip(1) for name in ("real", "segments")}
        if flip["segments"] is not None:
            flip["segments"] = -flip["segments"]
        return dataclasses.replace(self, x=self.x.flip(1), positions=self.positions.flip(1), **flip)

    # ---- places ----------------------------------------------------------------------------------------------------

    def unsort(self, y: Tensor, axis: int = 1) -> Tensor:
        """A result (B, T, ...), or (B, H, T, ...) with axis 2, back at the call's own places; 0 at padding."""
        if self.order is None:
            return y
        back = self.order.argsort(1) if axis == 1 else self.order.argsort(1)[:, None]
        back = back.view(*back.shape, *[1] * (y.ndim - back.ndim))
        return torch.gather(self.mask_padding(y, axis), axis, back.expand(*y.shape[:axis], -1, *y.shape[axis + 1 :]))


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype of gates and states: float64 beside float64, else float32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def widened(x: Tensor) -> Tensor:
    """The same numbers in the compute dtype."""
    return x.to(compute_dtype(x))


def identity(seq: TokenSequence, heads: int) -> Tensor:
    """The values (B, heads, T, T) for which what a linear layer mixes is its matrix."""
    batch, tokens, _ = seq.x.shape
    eye = torch.eye(tokens, dtype=seq.x.dtype, device=seq.x.device)
    return eye.expand(batch, heads, -1, -1)


def scan_matrix(seq: TokenSequence, log_a: Tensor) -> Tensor:
    """(B, C, T, T): what `TokenSequence.scan` does to each channel; log-decays broadcast to (B, T, C)."""
    batch, tokens, _ = seq.x.shape
    eye = torch.eye(tokens, dtype=compute_dtype(seq.x), device=seq.x.device)
    eye = eye[None, :, None].expand(batch, -1, log_a.shape[2], -1)
    return seq.scan(log_a[..., None], eye)[0].movedim(1, 2)


def sequence_of(x: Tensor, layout: TokenLayout, cache: StateCache | None) -> TokenSequence:
    """The sequence of a call's tokens: real ones first, segments against the one that the state belongs to."""
    seq = TokenSequence(x, layout.positions)
    ids = layout.segments
    if layout.keep is not None:
        order = torch.argsort((~layout.keep).to(torch.uint8), dim=1, stable=True)
        real = layout.keep.gather(1, order)
        x = torch.where(real[..., None], x.gather(1, order[..., None].expand_as(x)), 0.0)
        seq = TokenSequence(x, layout.positions.gather(1, order), real, None, order)
        if ids is not None:  # padding takes the id of the real token before it
            ids = ids.gather(1, order)
            lowest = torch.iinfo(ids.dtype).min
            ids = torch.where(real, ids, lowest).cummax(1).values if ids.shape[1] else ids
    if ids is None or not ids.shape[1]:
        return seq
    drop_state = None
    if cache is not None and cache.length:
        owner = torch.zeros_like(ids[:, 0]) if cache.owner is None else cache.owner
        drop_state = ids[:, 0] > owner
    return dataclasses.replace(seq, segments=ids, drop_state=drop_state)


def last_segment(seq: TokenSequence, cache: StateCache) -> Tensor | None:
    """The segment of the last real token that the states have seen."""
    if seq.segments is None:
        return cache.owner
    latest = seq.segments[:, -1]
    if seq.real is None:
        return latest.clone()
    before = torch.zeros_like(latest) if cache.owner is None else cache.owner
    return torch.where(seq.real.any(1), latest, before)
