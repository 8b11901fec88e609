"""What every cache shares: places of tokens, room, reset, crop, reorder, copies, and being a pytree."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from regard.caches.recomputation import refuse_recomputation
from regard.caches.trees import register
from regard.checks import describe, whole
from regard.coordinates import has_values
from regard.errors import CacheError, CacheFull
from regard.tokens import HISTORY_TENSORS, TokenHistory, TokenLayout, resolve_tokens

__all__ = ["Cache", "KVView"]

C = TypeVar("C", bound="Cache")


@dataclass(frozen=True)
class KVView:
    """The keys that a call may read; columns are slots ``first…``; keep, segments (B, columns) or None if all alike.

    `fresh` is what the call itself brings, which the cache's `commit` stores once the call has succeeded: its keys and
    values (or, in a `LatentCache`, the one tensor that both are read from) and its tokens' places.
    """

    k: Tensor
    v: Tensor
    first: int
    keep: Tensor | None
    segments: Tensor | None
    fresh: tuple[Any, ...]

    @classmethod
    def alone(cls, k: Tensor, v: Tensor, layout: TokenLayout) -> KVView:
        """What a call without a cache reads: its own keys."""
        return cls(k, v, 0, layout.keep, layout.segments, (k, v, layout))


class Cache:
    """The rules every kind shares. Subclasses name their tensors (batch on axis 0) in `tensor_names`."""

    tensor_names: tuple[str, ...] = ()
    capacity: int | None = None  # tokens; None where a cache is never full

    def __init__(self, batch: int, slots: int, device: torch.device | str | None) -> None:
        self.length = 0
        self.history = TokenHistory(whole("batch", batch, 0), slots, device)

    def __init_subclass__(cls) -> None:
        register(cls)

    @property
    def batch(self) -> int:
        """Rows."""
        return self.history.batch

    @property
    def nbytes(self) -> int:
        """Bytes of storage held."""
        return sum(t.numel() * t.element_size() for t in self.tensors().values() if t is not None)

    def resolve_tokens(self, batch: int, tokens: int, device: torch.device, **given: Any) -> TokenLayout:
        """Where a call's tokens stand after those seen; `given` are the call's keep, positions, segments."""
        refuse_recomputation()
        if batch != self.batch:
            raise ValueError(f"cache: made for {self.batch} rows, got a call with {batch}")
        return resolve_tokens(batch, tokens, device, history=self.history, length=self.length, **given)

    def next_positions(
        self, batch: int, tokens: int, keep: Tensor | None = None, segments: Tensor | None = None
    ) -> Tensor:
        """The positions (B, T) that the next call's tokens get by default."""
        device = next((t.device for t in self.tensors().values() if t is not None), torch.device("cpu"))
        return self.resolve_tokens(batch, tokens, device, keep=keep, segments=segments).positions

    def room_for(self, tokens: int) -> None:
        """Raise `CacheFull` when `tokens` more do not fit."""
        if self.capacity is not None and self.length + tokens > self.capacity:
            raise CacheFull(
                f"cache: it holds {self.length} of {self.capacity} tokens and has no room for {tokens} more;"
                " nothing was changed"
            )

    def reset(self) -> None:
        """Forget every token; storage stays."""
        self.length = 0
        self.history = TokenHistory(self.batch, self.history.size, self.history.device)

    def crop(self, n: int) -> None:
        """Keep the first `n` tokens seen, if there are more; `CacheError` where the others cannot be undone."""
        whole("n", n, 0)
        if n >= self.length:
            return
        if n == 0:
            self.reset()
            return
        self._can_crop(n)
        self.length = n

    def _can_crop(self, n: int) -> None:
        raise CacheError(
            f"cache: {type(self).__name__} cannot go back to {n} of {self.length} tokens; nothing was changed"
        )

    def reorder(self, index: Tensor | Sequence[int]) -> None:
        """Row b becomes the old row ``index[b]``; any number of rows, none sharing storage afterwards."""
        if not isinstance(index, Tensor):
            index = torch.tensor(list(index)) if len(index) else torch.zeros(0, dtype=torch.long)
        if index.ndim != 1 or index.is_floating_point() or index.dtype == torch.bool:
            raise ValueError(f"index: expected an integer tensor of rows, one-dimensional, got {describe(index)}")
        if index.numel() and has_values(index) and not (0 <= int(index.min()) and int(index.max()) < self.batch):
            raise ValueError(f"index: expected rows from 0 to {self.batch - 1}, got {index.tolist()}")
        self._map(lambda t: t.index_select(0, index.to(t.device)))
        self.history.batch = index.numel()

    def __repr__(self) -> str:
        room = "" if self.capacity is None else f" of {self.capacity}"
        return f"{type(self).__name__}({self.batch} rows, {self.length}{room} tokens, {self.nbytes:,} bytes)"

    def clone(self: C) -> C:
        """A copy that shares no storage."""
        copied: C = tree_map_only(Tensor, Tensor.clone, self)
        return copied

    def _marks(self, first: int, layout: TokenLayout, new: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """(keep, segments) of the slots from `first` on, the call's tokens `new` (B, H, T, D) last; None: all alike."""
        keep, segments = self.history.read(first, self.length)
        fresh = layout.keep, layout.segments
        seen, tokens = (new.shape[0], self.length - first), (new.shape[0], new.shape[2])
        if keep is None and fresh != (None, None):
            keep = torch.ones(seen, dtype=torch.bool, device=new.device)
            segments = torch.zeros(seen, dtype=torch.long, device=new.device)
        if keep is None or segments is None:
            return None, None
        new_keep = fresh[0] if fresh[0] is not None else keep.new_ones(tokens)
        new_segments = fresh[1] if fresh[1] is not None else segments.new_zeros(tokens)
        return torch.cat((keep, new_keep), 1), torch.cat((segments, new_segments), 1)

    def _map(self, fn: Callable[[Tensor], Tensor]) -> None:
        new = {name: None if t is None else fn(t) for name, t in self.tensors().items()}
        for name, t in new.items():
            setattr(self.history if name in HISTORY_TENSORS else self, name, t)

    def tensors(self) -> dict[str, Tensor | None]:
        own: dict[str, Tensor | None] = {name: getattr(self, name) for name in self.tensor_names}
        return own | {name: getattr(self.history, name) for name in HISTORY_TENSORS}
