"""`recurrence` a chunk of tokens at a time, in plain torch: matrix products on any device, differentiable.

With G the running sum of log-decays inside a chunk, ``D_ij = exp(G_i - G_j)`` for j <= i, and S the state before it,

    A = beta_i (k_i . k_j D_ij) for j < i,     (I + A) [U | W] = [beta v | beta e^G k],     V' = U - W S
    O = scale ((e^G q) S + (q_i . k_j D_ij) V'),     S <- e^{G_C} S + (e^{G_C - G} k)^T V'

(V' = v without a delta correction.) With keys r_i that read the old state and w_i that write what they found,

    R_ij = r_i . w_j D_{i-1,j},  K_ij = r_i . k_j D_{i-1,j},     (I - R) U = (e^{G_{i-1}} r) S + K v
    O = scale ((e^G q) S + (q_i . k_j D_ij) v + (q_i . w_j D_ij) U),
    S <- e^{G_C} S + (e^{G_C - G} k)^T v + (e^{G_C - G} w)^T U

Exponents are differences, formed in float64 and never positive. A decay per
channel enters the products of queries with keys: there each pair of neighbouring spans of 1, 2, 4, … tokens is one
product, with the later span's first token as the reference, so both factors are at most 1. A hard reset (the start of a
segment, or a log-decay whose exponential is 0) is counted beside G: pairs with a reset between them have the weight 0.

Chunks are unrolled in a compiled graph, which is therefore made anew for another length. A graph exported with a free
length takes all tokens as one chunk, with the memory of T^2 pairs (times Dk, with a decay per channel).

(Yang et al. 2024, arXiv:2406.06484, eq. 8-11; Yang et al. 2023, arXiv:2312.06635, sec. 4; Dao and Gu 2024,
arXiv:2405.21060, listing 1.)
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.backends.recurrent.call import RecurrenceCall
from regard.coordinates import can_read

__all__ = ["chunked_recurrence"]

CHUNK = 32  # tokens; a power of two
FORGOTTEN = {torch.float32: -104.0, torch.float64: -746.0}  # exp of less is 0; in a sum it would swallow what follows


def chunked_recurrence(call: RecurrenceCall) -> tuple[Tensor, Tensor]:
    """(output, last state), both in the compute dtype."""
    batch, key_heads, heads, tokens, key_dim, value_dim = call.sizes
    if not _free(tokens):  # constants of a compiled graph: as symbols they take a minute to trace
        constants = (len(range(size)) for size in (key_heads, heads, tokens, key_dim, value_dim))
        key_heads, heads, tokens, key_dim, value_dim = constants
    dtype, state = call.compute_dtype, call.first_state()
    if not tokens or not batch or not heads:
        return call.v.new_zeros(batch, heads, tokens, value_dim, dtype=dtype), state
    group, size = heads // key_heads, _chunk_length(call.chunk_size, tokens)

    def chunks(x: Tensor, head_groups: int) -> Tensor:
        """(B, H, T, ...) as (B, Hk, group, N, C, ...), padded with zeros: no decay, nothing written."""
        if _free(size):
            split = x.unsqueeze(2)
        else:
            split = F.pad(x, [0, 0] * (x.ndim - 3) + [0, -tokens % size]).unflatten(2, (-1, size))
        grouped: Tensor = split.unflatten(1, (-1, head_groups))
        return grouped

    q, k = chunks(call.q.to(dtype) * call.scale, 1), chunks(call.k.to(dtype), 1)
    v = chunks(call.v.to(dtype), group)
    decays = _decays(call, chunks, group, dtype)
    state = state.unflatten(1, (key_heads, group))
    if call.read_key is not None:
        out, state = _generalized(call, chunks, decays, (q, k, v), state)
    elif call.beta is None:
        (weights,) = decays.products([q], k)
        written = decays.to_end(k).transpose(-1, -2) @ v
        states = []
        for n in range(v.shape[3]):
            states.append(state)
            state = decays.carried(state, n) + written[:, :, :, n]
        out = decays.from_start(q) @ torch.stack(states, 3) + weights @ v
    else:
        weights, overlaps = decays.products([q, k], k)
        beta = chunks(call.beta.to(dtype), group).unsqueeze(-1)
        right = torch.cat((beta * v, (beta * decays.from_start(k)).expand(*v.shape[:-1], key_dim)), -1)
        solved = torch.linalg.solve_triangular((beta * overlaps).tril(-1), right, upper=False, unitriangular=True)
        values, minus = solved.split((value_dim, key_dim), -1)
        queries = decays.from_start(q).expand(*minus.shape)
        both, ends = torch.cat((minus, queries), -2), decays.to_end(k).transpose(-1, -2)
        inside, across = [], []
        for n in range(v.shape[3]):
            read, asked = (both[:, :, :, n] @ state).split((size, size), -2)
            inside.append(values[:, :, :, n] - read)
            across.append(asked)
            state = decays.carried(state, n) + ends[:, :, :, n] @ inside[-1]
        out = torch.stack(across, 3) + weights @ torch.stack(inside, 3)
    return out.flatten(3, 4).flatten(1, 2)[:, :, :tokens], state.flatten(1, 2)


def _generalized(
    call: RecurrenceCall, chunks: Any, decays: _Decays, operands: tuple[Tensor, Tensor, Tensor], state: Tensor
) -> tuple[Tensor, Tensor]:
    """The generalised delta rule, on chunks: (output, last state)."""
    assert call.read_key is not None and call.write_key is not None
    (q, k, v), group, dtype = operands, operands[2].shape[2], operands[2].dtype
    read, write = call.read_key.to(dtype), chunks(call.write_key.to(dtype), group)
    if call.segment_starts is not None:  # the state before a segment is 0
        read = torch.where(call.segment_starts[:, None, :, None], 0.0, read)
    read = chunks(read, group)
    early = F.pad(read[..., 1:, :], (0, 0, 0, 1))  # where the state that it reads stands: one token before
    by_key, found_by_key = decays.products([q, early], k)
    by_write, found_by_write = decays.products([q, early], write)

    def later(x: Tensor) -> Tensor:
        return F.pad(x[..., :-1, :], (0, 0, 1, 0))

    start = torch.cat((read[..., :1, :], decays.from_start(early)[..., :-1, :]), -2)
    right = torch.cat((later(found_by_key) @ v, start), -1)
    solved = torch.linalg.solve_triangular(-later(found_by_write), right, upper=False, unitriangular=True)
    from_values, from_state = solved.split((v.shape[-1], k.shape[-1]), -1)
    added = decays.to_end(k).transpose(-1, -2) @ v
    ends, states, found = decays.to_end(write).transpose(-1, -2), [], []
    for n in range(v.shape[3]):
        states.append(state)
        found.append(from_values[:, :, :, n] + from_state[:, :, :, n] @ state)
        state = decays.carried(state, n) + added[:, :, :, n] + ends[:, :, :, n] @ found[-1]
    return decays.from_start(q) @ torch.stack(states, 3) + by_key @ v + by_write @ torch.stack(found, 3), state


def _free(size: int) -> bool:
    """Whether a size is a variable of a graph that is being exported."""
    return not isinstance(size, int)


def _chunk_length(given: int | None, tokens: int) -> int:
    """The largest power of two within the wanted size that the tokens need."""
    if _free(tokens):
        return tokens
    wanted = min(CHUNK if given is None else given, 1 << max(tokens - 1, 0).bit_length())
    return 1 << (wanted.bit_length() - 1)


# ---- decays inside chunks --------------------------------------------------------------------------------------------


def _decays(call: RecurrenceCall, chunks: Any, group: int, dtype: torch.dtype) -> _Decays:
    log_decay, segment_starts = call.log_decay, None if call.segment_starts is None else call.segment_starts[:, None]
    if log_decay is None and segment_starts is not None:
        log_decay = torch.zeros_like(segment_starts, dtype=dtype)
    if log_decay is None:
        return _Decays(None, None, dtype)
    log_decay = log_decay.double()  # first: the gradient of what is expanded adds up in it
    if log_decay.ndim == 1:
        log_decay = log_decay[None, :, None]
        log_decay = log_decay + log_decay.new_zeros(call.sizes[3] if segment_starts is None else segment_starts.shape)
    resets = log_decay < FORGOTTEN[dtype]
    if segment_starts is not None:
        resets = resets | (segment_starts if log_decay.ndim == 3 else segment_starts[..., None])
    log_decay = torch.where(resets, 0.0, log_decay)
    heads = group if log_decay.shape[1] > 1 or group == 1 else 1
    sums, counts = chunks(log_decay, heads), None
    if can_read(resets) and not bool(resets.any()):
        sums = sums.cumsum(4)
    else:
        counts = chunks(resets.int(), heads).cumsum(4)
        sums = _sums_since_reset(sums, counts)
    return (_Decays if log_decay.ndim == 3 else _ChannelDecays)(sums, counts, dtype)


def _sums_since_reset(x: Tensor, resets: Tensor) -> Tensor:
    """Running sums over axis 4 that start again at every reset: then no gradient crosses one, not even by rounding."""
    if _free(x.shape[4]):
        return x.cumsum(4)
    step = 1
    while step < x.shape[4]:
        early, late = slice(None, -step), slice(step, None)
        same = resets[:, :, :, :, late] == resets[:, :, :, :, early]
        more = torch.where(same, x[:, :, :, :, early], 0.0)
        x = torch.cat((x[:, :, :, :, :step], x[:, :, :, :, late] + more), 4)
        step *= 2
    return x


class _Decays:
    """Running sums (B, Hk, group, N, C) of log-decays inside chunks, and how many resets have come; None: none."""

    def __init__(self, sums: Tensor | None, resets: Tensor | None, dtype: torch.dtype) -> None:
        self.sums, self.resets, self.dtype = sums, resets, dtype
        if sums is not None:
            self.starting = self._weight(sums, 0.0, resets, 0)
            self.ending = self._weight(sums[:, :, :, :, -1:], sums, *self._pair(slice(-1, None)))
            self.total = self.starting[:, :, :, :, -1]

    def _pair(self, where: slice) -> tuple[Tensor | None, Tensor | None]:
        return (None, None) if self.resets is None else (self.resets[:, :, :, :, where], self.resets)

    def _weight(self, late: Tensor, early: Tensor | float, late_resets: Any, early_resets: Any) -> Tensor:
        """``exp(late - early)``, 0 where a reset lies between."""
        exponent = (late - early).to(self.dtype)
        if late_resets is not None:
            exponent = torch.where(late_resets == early_resets, exponent, -torch.inf)
        return torch.exp(exponent)

    def from_start(self, x: Tensor) -> Tensor:
        """Each row times the share of the state before the chunk that is left at it."""
        return x if self.sums is None else x * self.starting.unsqueeze(-1)

    def to_end(self, k: Tensor) -> Tensor:
        """Each row times the share of it that is left at the end of the chunk."""
        return k if self.sums is None else k * self.ending.unsqueeze(-1)

    def carried(self, state: Tensor, n: int) -> Tensor:
        """What chunk n leaves of a state (B, Hk, group, Dk, Dv)."""
        if self.sums is None:
            return state
        return self.total[:, :, :, n if self.total.shape[3] > 1 else 0, None, None] * state

    def products(self, rows: list[Tensor], k: Tensor) -> list[Tensor]:
        """``sum_c x_ic k_jc exp(G_i - G_j)`` for j <= i, else 0, for each x in `rows`."""
        size = k.shape[-2]
        past = torch.ones(size, size, dtype=torch.bool, device=k.device).tril()
        if self.sums is None:
            return [(x @ k.transpose(-1, -2)).tril() for x in rows]
        exponent = (self.sums.unsqueeze(-1) - self.sums.unsqueeze(-2)).to(self.dtype)
        if self.resets is not None:
            past = past & (self.resets.unsqueeze(-1) == self.resets.unsqueeze(-2))
        weights = torch.exp(
            torch.where(past, exponent, -torch.inf)
        )  # masked first: a positive exponent is never formed
        return [(x @ k.transpose(-1, -2)) * weights for x in rows]


class _ChannelDecays(_Decays):
    """The same with a decay per key channel, sums (B, Hk, group, N, C, Dk)."""

    def from_start(self, x: Tensor) -> Tensor:
        return x * self.starting

    def to_end(self, k: Tensor) -> Tensor:
        return k * self.ending

    def carried(self, state: Tensor, n: int) -> Tensor:
        return self.total[:, :, :, n, :, None] * state

    def products(self, rows: list[Tensor], k: Tensor) -> list[Tensor]:
        size, width = k.shape[-2], 1
        assert self.sums is not None
        if _free(size):
            past = torch.ones(size, size, dtype=torch.bool, device=k.device).tril()[..., None]
            if self.resets is not None:
                past = past & (self.resets.unsqueeze(-2) == self.resets.unsqueeze(-3))
            exponent = (self.sums.unsqueeze(-2) - self.sums.unsqueeze(-3)).to(self.dtype)
            weighted = torch.exp(torch.where(past, exponent, -torch.inf)) * k.unsqueeze(-3)
            return [(x.unsqueeze(-2) * weighted).sum(-1) for x in rows]
        found = [(x * k).sum(-1)[..., None, None].expand(*self.sums.shape[:-1], 1, 1) for x in rows]
        while width < size:  # spans of `width` tokens in pairs: the earlier one's keys, the later one's rows

            def halves(x: Tensor, width: int = width) -> tuple[Tensor, Tensor]:
                early, late = x.unflatten(-2, (-1, 2, width)).unbind(-3)
                return early, late

            early, late = halves(self.sums)
            before, after = (None, None) if self.resets is None else halves(self.resets)
            pivot, middle = late[..., :1, :], None if after is None else after[..., :1, :]
            keys = (halves(k)[0] * self._weight(pivot, early, middle, before)).transpose(-1, -2)
            weight = self._weight(late, pivot, after, middle)
            for number, x in enumerate(rows):
                cross = (halves(x)[1] * weight) @ keys
                top, bottom = found[number].unflatten(-3, (-1, 2)).unbind(-3)
                upper = torch.cat((top, torch.zeros_like(cross)), -1)
                found[number] = torch.cat((upper, torch.cat((cross, bottom), -1)), -2)
            width *= 2
        return [x.squeeze(-3) for x in found]
