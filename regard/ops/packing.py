"""Sequences packed into rows, for operations that carry a state: where segments start, and one state per sequence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from regard.checks import describe
from regard.coordinates import can_read
from regard.masks import Segments

__all__ = ["Ids", "by_sequence", "packed_lengths", "segment_starts_of"]

Ids = Tensor | Segments


def packed_lengths(segments: Ids | None, batch: int, tokens: int) -> tuple[int, ...] | None:
    """The lengths that `Segments.from_lengths` was given, checked, or None for ids."""
    if not isinstance(segments, Segments) or segments.packing is None:
        return None
    lengths = segments.packing.q_lengths
    if lengths != segments.packing.k_lengths:
        raise ValueError(
            "segments: a recurrence has no keys of its own; give Segments.from_lengths one list of lengths"
        )
    if batch != 1 or sum(lengths) != tokens:
        raise ValueError(
            f"segments: expected lengths that sum to the tokens of one row, got a sum of {sum(lengths)} for"
            f" {batch} rows of {tokens}"
        )
    return lengths


def segment_starts_of(segments: Ids | None, batch: int, tokens: int) -> Tensor | None:
    """Which tokens open a segment, bool (B, T), the first token never; `segments` are ids (B, T) or (T,)."""
    if segments is None:
        return None
    ids = segments.q_ids if isinstance(segments, Segments) else segments
    if not isinstance(ids, Tensor) or ids.is_floating_point() or ids.dtype == torch.bool:
        raise TypeError(f"segments: expected integer ids {(batch, tokens)} or Segments, got {describe(segments)}")
    if tuple(ids.shape) not in ((batch, tokens), (tokens,)):
        raise ValueError(f"segments: expected shape {(batch, tokens)}, one id per token, got {tuple(ids.shape)}")
    if isinstance(segments, Segments) and segments.k_ids is not None and segments.k_ids is not ids:
        raise ValueError("segments: a recurrence has no keys of its own; give Segments one tensor of ids")
    early, late = ids.expand(batch, tokens)[:, :-1], ids.expand(batch, tokens)[:, 1:]
    if can_read(early) and bool((late < early).any()):
        raise ValueError("segments: expected ids that never fall within a row, got a smaller id after a larger one")
    return torch.cat((early.new_zeros(batch, min(tokens, 1), dtype=torch.bool), early != late), 1)


def by_sequence(
    lengths: Sequence[int],
    tensors: Sequence[tuple[Tensor, int]],
    state: Tensor | None,
    body: Callable[[list[Tensor], Tensor | None, Tensor], tuple[Tensor, Tensor]],
    axis: int,
) -> tuple[Tensor, Tensor]:
    """Run `body` on packed sequences as rows of a batch: (output with one row, last state of each sequence).

    `tensors` are (tensor with batch size 1, its time axis), which the operation must ignore where they are 0;
    ``body(tensors, state, lengths)`` gets batches of sequences of about one length, padded with zeros at the end,
    and their lengths. `axis` is the output's time axis. At most half of what it computes is padding.
    """
    device = tensors[0][0].device
    groups: dict[int, list[int]] = {}
    for number, length in enumerate(lengths):
        groups.setdefault(max(length - 1, 0).bit_length() if length else -1, []).append(number)
    offsets = [0, *accumulate(lengths)]
    outs, states, places, rows = [], [], [], []
    for members in groups.values():
        longest = max(lengths[number] for number in members)
        own = torch.tensor([lengths[number] for number in members], device=device)
        first = torch.tensor([offsets[number] for number in members], device=device)
        step = torch.arange(longest, device=device)
        real = step < own[:, None]
        index = torch.where(real, first[:, None] + step, 0)

        def rows_of(x: Tensor, time: int, index: Tensor = index, real: Tensor = real) -> Tensor:
            taken = x.squeeze(0).index_select(time - 1, index.flatten()).unflatten(time - 1, tuple(index.shape))
            shape = [1] * taken.ndim
            shape[time - 1], shape[time] = index.shape
            return torch.where(real.view(shape), taken, 0.0).movedim(time - 1, 0)

        given = None if state is None else state.index_select(0, torch.tensor(members, device=device))
        out, new = body([rows_of(x, time) for x, time in tensors], given, own)
        outs.append(out.movedim(axis, 1)[real])
        states.append(new)
        places.append(index[real])
        rows += members
    joined, order = torch.cat(outs), torch.cat(places).argsort()
    back = torch.tensor(rows, device=device).argsort()
    return joined[order].unsqueeze(0).movedim(1, axis), torch.cat(states)[back]
