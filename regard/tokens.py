"""Which tokens are real, which segment each belongs to, and where it stands: the bookkeeping of layers and caches.

`resolve_tokens` turns a call's ``keep``, ``positions`` and ``segments`` into a `TokenLayout`, reading what a cache's
`TokenHistory` remembers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from regard.checks import describe
from regard.coordinates import can_read

__all__ = ["HISTORY_TENSORS", "TokenLayout", "Slots", "TokenHistory", "resolve_tokens", "takes_token_layout"]

F = TypeVar("F", bound=Callable[..., Any])
HISTORY_TENSORS = ("keep", "segments", "counts")  # the tensors of a `TokenHistory`


def takes_token_layout(forward: F) -> F:
    """Marks a layer's ``forward`` whose `positions` may be a `TokenLayout`; one that overrides it is not marked."""
    forward.takes_token_layout = True  # type: ignore[attr-defined]
    return forward


class Slots:
    """A tensor with an axis of `size` slots; slot s lives at ``s % size``, so it is a ring once it is full."""

    def __init__(self, data: Tensor, axis: int) -> None:
        self.data, self.axis = data, axis

    @property
    def size(self) -> int:
        return self.data.shape[self.axis]

    def read(self, first: int, stop: int) -> Tensor:
        """Slots ``first..stop`` in order: a view, or a copy where the ring wraps."""
        size = self.size
        if first >= stop:
            return self.data.narrow(self.axis, 0, 0)
        start, end = first % size, (stop - 1) % size + 1
        if start < end:
            return self.data.narrow(self.axis, start, end - start)
        return torch.cat(
            (self.data.narrow(self.axis, start, size - start), self.data.narrow(self.axis, 0, end)), self.axis
        )

    def write(self, first: int, values: Tensor) -> None:
        """Put `values` at slots ``first…``; of more than `size` only the latest stay."""
        size, extra = self.size, values.shape[self.axis] - self.size
        if extra > 0:
            first, values = first + extra, values.narrow(self.axis, extra, size)
        start, done = first % size if size else 0, 0
        while done < values.shape[self.axis]:
            part = min(size - start, values.shape[self.axis] - done)
            self.data.narrow(self.axis, start, part).copy_(values.narrow(self.axis, done, part))
            start, done = 0, done + part


@dataclass(frozen=True)
class TokenLayout:
    """The tokens of one call, resolved once: a model passes this to its layers as their `positions`.

    `keep` None: all are real; `segments` None: one segment, the last of the cache.
    """

    keep: Tensor | None  # bool (B, T)
    segments: Tensor | None  # int64 (B, T)
    positions: Tensor  # int64 (B, T)
    counts: Tensor | None  # int64 (B, T): the next position after each token; None: positions are plain slots
    length: int = 0  # tokens before the call

    def real(self, x: Tensor) -> Tensor:
        """x (B, T, dim) with 0 at padding: what stands there would reach the gradients of projections."""
        return x if self.keep is None else torch.where(self.keep[..., None], x, 0.0)


class TokenHistory:
    """What a cache remembers of each slot, once any is special: keep, segment id, running count."""

    def __init__(self, batch: int, size: int, device: torch.device | str | None) -> None:
        self.batch, self.size, self.device = batch, size, device
        self.keep: Tensor | None = None
        self.segments: Tensor | None = None
        self.counts: Tensor | None = None

    def last(self, length: int) -> tuple[Tensor | None, Tensor | None]:
        """(next position, segment id) after `length` tokens, each (B,); None where they are `length` and 0."""
        if self.counts is None or self.segments is None or not length:
            return None, None
        count, segment = (Slots(data, 1).read(length - 1, length)[:, 0] for data in (self.counts, self.segments))
        return count.clone(), segment.clone()  # a ring writes over the slots that it was read from

    def read(self, first: int, stop: int) -> tuple[Tensor | None, Tensor | None]:
        """(keep, segments) of slots ``first..stop``, each (B, stop - first) or None where nothing is special."""
        if self.keep is None or self.segments is None:
            return None, None
        return Slots(self.keep, 1).read(first, stop), Slots(self.segments, 1).read(first, stop)

    def write(self, length: int, layout: TokenLayout, tokens: int) -> None:
        """Remember the tokens at slots ``length…``."""
        if not tokens or (layout.counts is None and self.counts is None):
            return
        if self.keep is None:
            shape = (self.batch, self.size)
            self.keep = torch.ones(shape, dtype=torch.bool, device=self.device)
            self.segments = torch.zeros(shape, dtype=torch.long, device=self.device)
            self.counts = torch.zeros(shape, dtype=torch.long, device=self.device)
            first = max(0, length - self.size)
            Slots(self.counts, 1).write(
                first, torch.arange(first + 1, length + 1, device=self.device).expand(self.batch, -1)
            )
        assert self.segments is not None and self.counts is not None and layout.counts is not None
        keep = torch.ones_like(layout.counts, dtype=torch.bool) if layout.keep is None else layout.keep
        segments = torch.zeros_like(layout.counts) if layout.segments is None else layout.segments
        for data, values in ((self.keep, keep), (self.segments, segments), (self.counts, layout.counts)):
            Slots(data, 1).write(length, values)


def resolve_tokens(
    batch: int,
    tokens: int,
    device: torch.device,
    *,
    keep: Tensor | None = None,
    positions: Tensor | TokenLayout | None = None,
    segments: Tensor | None = None,
    history: TokenHistory | None = None,
    length: int = 0,
) -> TokenLayout:
    """Check keep, positions and segments, each (B, T) or None, of a call that follows `length` tokens in `log`.

    The default position of a token is the number of real tokens before it in its segment, the cache's included. A
    `TokenLayout` in place of positions is the answer, and brings keep and segments with it.
    """
    shape = (batch, tokens)
    if isinstance(positions, TokenLayout):
        _check_layout(positions, shape, length, keep, segments)
        return positions
    if keep is not None:
        if not isinstance(keep, Tensor) or keep.dtype != torch.bool:
            raise TypeError(f"keep: expected a bool tensor {shape}, True = real token, got {describe(keep)}")
        if tuple(keep.shape) != shape:
            raise ValueError(f"keep: expected shape {shape}, one flag per token of this call, got {tuple(keep.shape)}")
        if can_read(keep) and bool(keep.all()):
            keep = None
    for name, ids in (("segments", segments), ("positions", positions)):
        if ids is None:
            continue
        if not isinstance(ids, Tensor) or ids.is_floating_point() or ids.dtype == torch.bool:
            raise TypeError(f"{name}: expected an integer tensor {shape}, got {describe(ids)}")
        if ids.shape != shape and not (name == "positions" and ids.shape in ((tokens,), (1, tokens))):
            raise ValueError(
                f"{name}: expected shape {shape}, one number per token of this call, got {tuple(ids.shape)}"
            )
    count, last = (None, None) if history is None else history.last(length)
    if segments is not None:
        segments = segments.long()
        _check_segments(segments, torch.zeros_like(segments[:, 0]) if last is None and length and tokens else last)
    elif last is not None:
        segments = last[:, None].expand(shape)
    if keep is None and segments is None:
        if positions is None:
            positions = torch.arange(length, length + tokens, device=device)
        return TokenLayout(None, None, positions.expand(shape), None, length)
    real = torch.ones(shape, dtype=torch.bool, device=device) if keep is None else keep
    ids = torch.zeros(shape, dtype=torch.long, device=device) if segments is None else segments
    before = torch.full((batch,), length, device=device) if count is None else count
    counts = _running_count(real, ids, before, torch.zeros_like(before) if last is None else last)
    where = (counts - 1).clamp(min=0) if positions is None else positions.expand(shape)
    return TokenLayout(keep, segments, where, counts, length)


def _check_layout(
    layout: TokenLayout, shape: tuple[int, int], length: int, keep: Tensor | None, segments: Tensor | None
) -> None:
    """Raise unless a layout that was resolved before is this call's."""
    if keep is not None or segments is not None:
        raise ValueError("positions: a TokenLayout stands for keep and segments too; give them without it, or it alone")
    if tuple(layout.positions.shape) != shape:
        raise ValueError(f"positions: expected a TokenLayout of {shape} tokens, got {tuple(layout.positions.shape)}")
    if layout.length != length:
        raise ValueError(f"positions: expected a TokenLayout after {length} tokens, got one after {layout.length}")


def _check_segments(segments: Tensor, last: Tensor | None) -> None:
    if not can_read(segments) or not segments.numel():
        return
    if bool((segments[:, 1:] < segments[:, :-1]).any()):
        raise ValueError("segments: expected ids that never fall within a row, got a smaller id after a larger one")
    if last is not None and bool((segments[:, 0] < last).any()):
        raise ValueError(
            "segments: the call's first id is smaller than the cache's last one; ids never fall within a row"
        )


def _running_count(keep: Tensor, segments: Tensor, before: Tensor, last: Tensor) -> Tensor:
    """Real tokens of its own segment up to and including each token, those in the cache counted on."""
    total = keep.long().cumsum(1)
    earlier = torch.cat((last[:, None], segments[:, :-1]), 1)
    starts = segments != earlier
    # the total before the latest start; before any start the cache's count is still running
    offset = torch.where(starts, total - keep.long(), torch.full_like(total, -1)).cummax(1).values
    return torch.where(offset < 0, before[:, None] + total, total - offset)
