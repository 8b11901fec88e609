"""Caches of keys and values: of up to `capacity` tokens, or of the latest ones in a ring; either may hold a context."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from regard.caches.base import Cache, KVView
from regard.checks import whole
from regard.tokens import Slots, TokenHistory, TokenLayout

__all__ = ["KVCache", "WindowCache"]


def _copied(old: Tensor, new: Tensor) -> Tensor:
    """What is stored and what is new, rounded as it will be stored, along the slots (axis 2), in new's dtype."""
    return torch.cat((old.to(new.dtype), new.to(old.dtype).to(new.dtype)), 2)


def appended(buffer: Tensor, new: Tensor, length: int) -> Tensor:
    """As `_copied`, of a buffer with room behind its first `length` slots; a view of it if no gradient is recorded."""
    if torch.is_grad_enabled():  # autograd may keep what the call reads, and the buffer changes later
        return _copied(buffer.narrow(2, 0, length), new)
    buffer.narrow(2, length, new.shape[2]).copy_(new)  # past the length: nobody reads it until the commit
    return buffer.narrow(2, 0, length + new.shape[2]).to(new.dtype)


class _KeysAndValues(Cache):
    """Keys (B, Hkv, slots, Dk) and values (B, Hkv, slots, Dv), rounded to the cache's dtype."""

    tensor_names = ("k", "v")

    def __init__(
        self,
        batch: int,
        slots: int,
        kv_heads: int,
        key_dim: int,
        value_dim: int,
        dtype: torch.dtype,
        device: Any = None,
    ) -> None:
        super().__init__(batch, slots, device)
        self.k = torch.zeros(batch, kv_heads, slots, key_dim, dtype=dtype, device=device)
        self.v = torch.zeros(batch, kv_heads, slots, value_dim, dtype=dtype, device=device)
        self.context = False  # whether it holds a context, written once and kept whole, and not the sequence itself
        self.asked = 0  # query tokens that have read the context

    def reset(self) -> None:
        super().reset()
        self.context, self.asked = False, 0

    @property
    def first(self) -> int:
        """The oldest slot that the next query may need."""
        return 0

    def extend(self, k: Tensor, v: Tensor, layout: TokenLayout) -> KVView:
        """What a call with new keys (B, Hkv, T, Dk) and values reads, the new ones last; nothing is changed yet."""
        self.room_for(k.shape[2])
        self.fits(k, v)
        first = self.first
        keep, segments = self._marks(first, layout, k)
        return KVView(
            self._joined(self.k, k, first), self._joined(self.v, v, first), first, keep, segments, (k, v, layout)
        )

    def _joined(self, buffer: Tensor, new: Tensor, first: int) -> Tensor:
        return _copied(Slots(buffer, 2).read(first, self.length), new)

    def commit(self, k: Tensor, v: Tensor, layout: TokenLayout) -> None:
        """Store the new keys and values: the call has succeeded."""
        self._store(k.detach(), v.detach())
        self.history.write(self.length, layout, k.shape[2])
        self.length += k.shape[2]

    def commit_context(self, asked: int, k: Tensor, v: Tensor, layout: TokenLayout) -> None:
        """As `commit`, of a context's keys and values (none once they are here), which `asked` query tokens read."""
        if not self.context:
            self._keep_whole(k.shape[2])
            self.context = True
        self.commit(k, v, layout)
        self.asked += asked

    def _keep_whole(self, tokens: int) -> None:
        """Make sure that a context of so many tokens stays."""

    def _store(self, k: Tensor, v: Tensor) -> None:
        Slots(self.k, 2).write(self.length, k)
        Slots(self.v, 2).write(self.length, v)

    def fits(self, k: Tensor, v: Tensor) -> None:
        """Raise ValueError unless keys and values of these shapes can be stored here."""
        for name, own, new in (("keys", self.k, k), ("values", self.v, v)):
            if own.shape[1] != new.shape[1] or own.shape[3] != new.shape[3]:
                have, want = (f"{x.shape[1]} heads of {x.shape[3]}" for x in (own, new))
                raise ValueError(f"cache: made for {name} of {have}, got a layer with {want}")
            if own.device != new.device:
                raise ValueError(f"cache: it is on {own.device}, got {name} on {new.device}")


class KVCache(_KeysAndValues):
    """Keys and values of up to `capacity` tokens, preallocated: 2 · B · Hkv · capacity · D elements.

    Raises `CacheFull` before anything changes. Made by a layer's ``init_cache(batch, capacity)``.
    """

    def __init__(
        self,
        batch: int,
        capacity: int,
        kv_heads: int,
        key_dim: int,
        value_dim: int,
        dtype: torch.dtype,
        device: Any = None,
    ) -> None:
        super().__init__(batch, whole("capacity", capacity, 0), kv_heads, key_dim, value_dim, dtype, device)
        self.capacity = capacity

    def _can_crop(self, n: int) -> None:
        """Earlier tokens are all still there."""

    def _joined(self, buffer: Tensor, new: Tensor, first: int) -> Tensor:
        return appended(buffer, new, self.length)


class WindowCache(_KeysAndValues):
    """The latest `window` tokens in a ring, for a layer that needs no older ones: 2 · B · Hkv · window · D elements.

    Never full. `length` counts the tokens seen. `crop` raises `CacheError` once what it would need was overwritten.
    A context is kept whole, in storage of its own size where it is longer than the window, until `reset`.
    """

    def __init__(
        self,
        batch: int,
        window: int,
        kv_heads: int,
        key_dim: int,
        value_dim: int,
        dtype: torch.dtype,
        device: Any = None,
    ) -> None:
        super().__init__(batch, whole("window", window, 1), kv_heads, key_dim, value_dim, dtype, device)
        self.window = window
        self.oldest = 0  # the oldest slot still in the ring

    @property
    def first(self) -> int:
        if self.context:
            return 0
        return max(
            self.oldest, self.length - (self.window - 1)
        )  # the next query reads itself and window - 1 older tokens

    def reset(self) -> None:
        super().reset()
        self.oldest = 0
        if self.history.size != self.window:
            self._resize(self.window)

    def _keep_whole(self, tokens: int) -> None:
        if tokens > self.window:
            self._resize(tokens)

    def _resize(self, slots: int) -> None:
        """Empty storage for so many tokens."""
        self.k, self.v = (t.new_zeros(*t.shape[:2], slots, t.shape[3]) for t in (self.k, self.v))
        self.history = TokenHistory(self.batch, slots, self.history.device)

    def _joined(self, buffer: Tensor, new: Tensor, first: int) -> Tensor:
        return appended(buffer, new, self.length) if self.context else super()._joined(buffer, new, first)

    def _can_crop(self, n: int) -> None:
        if self.context:
            return
        if max(0, n - max(self.window - 1, 1)) < self.oldest:  # and the last one's place, which the next counts from
            super()._can_crop(n)

    def commit(self, k: Tensor, v: Tensor, layout: TokenLayout) -> None:
        super().commit(k, v, layout)
        if not self.context:
            self.oldest = max(self.oldest, self.length - self.window)
