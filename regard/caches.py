"""Caches: what a layer remembers of the tokens it has seen, owned by the caller and updated in place by the call.

`KVCache` holds keys and values of up to `capacity` tokens; `WindowCache` holds the latest ones in a ring; `LatentCache`
holds one short vector a token that all heads share; `StateCache` holds a state of fixed size. All caches share the
rules of `Cache`. What is stored is detached; storage is allocated once. A call first looks, and changes the cache only
when it has succeeded (`commit`). Caches are pytrees whose tensors are leaves.

>>> import torch, regard
>>> layer = regard.nn.MultiHeadAttention(16, 4, kv_heads=2, mask=regard.masks.Causal())
>>> cache = layer.init_cache(batch=1, capacity=8)
>>> x = torch.randn(1, 5, 16)
>>> y = torch.cat([layer(x[:, :3], cache=cache), layer(x[:, 3:], cache=cache)], 1)
>>> torch.allclose(y, layer(x), atol=1e-6), cache.length, cache.nbytes
(True, 5, 512)
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree

from regard.errors import CacheError, CacheFull
from regard.masks.checks import describe, whole
from regard.tokens import Placed, Slots, TokenLog, place

__all__ = ["Cache", "Held", "KVCache", "LatentCache", "StateCache", "WindowCache"]

C = TypeVar("C", bound="Cache")


@dataclass(frozen=True)
class Held:
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
    def alone(cls, k: Tensor, v: Tensor, placed: Placed) -> Held:
        """What a call without a cache reads: its own keys."""
        return cls(k, v, 0, placed.keep, placed.segments, (k, v, placed))


class Cache:
    """The rules every kind shares. Subclasses name their tensors (batch on axis 0) in `tensor_names`."""

    tensor_names: tuple[str, ...] = ()
    capacity: int | None = None  # tokens; None where a cache is never full

    def __init__(self, batch: int, slots: int, device: torch.device | str | None) -> None:
        self.length = 0
        self.log = TokenLog(whole("batch", batch, 0), slots, device)

    def __init_subclass__(cls) -> None:
        _pytree.register_pytree_node(cls, _flatten, lambda leaves, context: _unflatten(cls, leaves, context))

    @property
    def batch(self) -> int:
        """Rows."""
        return self.log.batch

    @property
    def nbytes(self) -> int:
        """Bytes of storage held."""
        return sum(t.numel() * t.element_size() for t in self._tensors().values() if t is not None)

    def place(self, batch: int, tokens: int, device: torch.device, **given: Tensor | None) -> Placed:
        """Where a call's tokens stand after those seen; `given` are the call's keep, positions, segments."""
        if batch != self.batch:
            raise ValueError(f"cache: made for {self.batch} rows, got a call with {batch}")
        return place(batch, tokens, device, log=self.log, length=self.length, **given)

    def next_positions(
        self, batch: int, tokens: int, keep: Tensor | None = None, segments: Tensor | None = None
    ) -> Tensor:
        """The positions (B, T) that the next call's tokens get by default."""
        device = next((t.device for t in self._tensors().values() if t is not None), torch.device("cpu"))
        return self.place(batch, tokens, device, keep=keep, segments=segments).positions

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
        self.log = TokenLog(self.batch, self.log.size, self.log.device)

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
        if index.numel() and not (0 <= int(index.min()) and int(index.max()) < self.batch):
            raise ValueError(f"index: expected rows from 0 to {self.batch - 1}, got {index.tolist()}")
        self._map(lambda t: t.index_select(0, index.to(t.device)))
        self.log.batch = index.numel()

    def __repr__(self) -> str:
        room = "" if self.capacity is None else f" of {self.capacity}"
        return f"{type(self).__name__}({self.batch} rows, {self.length}{room} tokens, {self.nbytes:,} bytes)"

    def clone(self: C) -> C:
        """A copy that shares no storage."""
        return copy.deepcopy(self)

    def _marks(self, first: int, placed: Placed, new: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """(keep, segments) of the slots from `first` on, the call's tokens `new` (B, H, T, D) last; None: all alike."""
        keep, segments = self.log.read(first, self.length)
        fresh = placed.keep, placed.segments
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
        new = {name: None if t is None else fn(t) for name, t in self._tensors().items()}
        for name, t in new.items():
            setattr(self.log if name in _LOGGED else self, name, t)

    def _tensors(self) -> dict[str, Tensor | None]:
        own: dict[str, Tensor | None] = {name: getattr(self, name) for name in self.tensor_names}
        return own | {name: getattr(self.log, name) for name in _LOGGED}


_LOGGED = ("keep", "segments", "counts")


def _flatten(cache: Cache) -> tuple[list[Any], Any]:
    tensors = cache._tensors()
    facts = {key: value for key, value in cache.__dict__.items() if key not in tensors and key != "log"}
    return list(tensors.values()), (list(tensors), facts, (cache.log.batch, cache.log.size, cache.log.device))


def _unflatten(cls: type[Cache], leaves: Any, context: Any) -> Cache:
    names, facts, log = context
    cache = cls.__new__(cls)
    cache.__dict__.update(facts)
    cache.log = TokenLog(*log)
    for name, leaf in zip(names, leaves, strict=True):
        setattr(cache.log if name in _LOGGED else cache, name, leaf)
    return cache


def _copied(old: Tensor, new: Tensor) -> Tensor:
    """What is stored and what is new, rounded as it will be stored, along the slots (axis 2), in new's dtype."""
    return torch.cat((old.to(new.dtype), new.to(old.dtype).to(new.dtype)), 2)


def _appended(buffer: Tensor, new: Tensor, length: int) -> Tensor:
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
        self.context = False  # whether it holds a context, written once, instead of the sequence itself
        self.asked = 0  # query tokens that have read the context

    def reset(self) -> None:
        super().reset()
        self.context, self.asked = False, 0

    @property
    def first(self) -> int:
        """The oldest slot that the next query may need."""
        return 0

    def extend(self, k: Tensor, v: Tensor, placed: Placed) -> Held:
        """What a call with new keys (B, Hkv, T, Dk) and values reads, the new ones last; nothing is changed yet."""
        self.room_for(k.shape[2])
        self.fits(k, v)
        first = self.first
        keep, segments = self._marks(first, placed, k)
        return Held(
            self._joined(self.k, k, first), self._joined(self.v, v, first), first, keep, segments, (k, v, placed)
        )

    def _joined(self, buffer: Tensor, new: Tensor, first: int) -> Tensor:
        return _copied(Slots(buffer, 2).read(first, self.length), new)

    def commit(self, k: Tensor, v: Tensor, placed: Placed) -> None:
        """Store the new keys and values: the call has succeeded."""
        self._store(k.detach(), v.detach())
        self.log.write(self.length, placed, k.shape[2])
        self.length += k.shape[2]

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
        return _appended(buffer, new, self.length)


class WindowCache(_KeysAndValues):
    """The latest `window` tokens in a ring, for a layer that needs no older ones: 2 · B · Hkv · window · D elements.

    Never full. `length` counts the tokens seen. `crop` raises `CacheError` once what it would need was overwritten.
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
        return max(
            self.oldest, self.length - (self.window - 1)
        )  # the next query reads itself and window - 1 older tokens

    def reset(self) -> None:
        super().reset()
        self.oldest = 0

    def _can_crop(self, n: int) -> None:
        if max(0, n - max(self.window - 1, 1)) < self.oldest:  # and the last one's place, which the next counts from
            super()._can_crop(n)

    def commit(self, k: Tensor, v: Tensor, placed: Placed) -> None:
        super().commit(k, v, placed)
        self.oldest = max(self.oldest, self.length - self.window)


class LatentCache(Cache):
    """What latent attention keeps of up to `capacity` tokens: B · capacity · (rank + rope_dim) elements, no heads.

    `latent` (B, 1, capacity, rank + rope_dim): the normed latent, then the rotated key part that all heads share. As
    keys all of it is read, as values its first `rank` channels. Raises `CacheFull` before anything changes.
    """

    tensor_names = ("latent",)

    def __init__(
        self, batch: int, capacity: int, rank: int, rope_dim: int, dtype: torch.dtype, device: Any = None
    ) -> None:
        super().__init__(batch, whole("capacity", capacity, 0), device)
        self.capacity, self.rank = capacity, rank
        self.latent = torch.zeros(batch, 1, capacity, rank + rope_dim, dtype=dtype, device=device)

    def _can_crop(self, n: int) -> None:
        """Earlier tokens are all still there."""

    def extend(self, latent: Tensor, placed: Placed) -> Held:
        """What a call with new latents (B, 1, T, rank + rope_dim) reads, the new ones last; nothing is changed yet."""
        self.room_for(latent.shape[2])
        if latent.shape[3] != self.latent.shape[3]:
            raise ValueError(f"cache: made for latents of {self.latent.shape[3]}, got a layer with {latent.shape[3]}")
        if latent.device != self.latent.device:
            raise ValueError(f"cache: it is on {self.latent.device}, got latents on {latent.device}")
        joined = _appended(self.latent, latent, self.length)
        return Held(joined, joined[..., : self.rank], 0, *self._marks(0, placed, latent), (latent, placed))

    def commit(self, latent: Tensor, placed: Placed) -> None:
        """Store the new latents: the call has succeeded."""
        Slots(self.latent, 2).write(self.length, latent.detach())
        self.log.write(self.length, placed, latent.shape[2])
        self.length += latent.shape[2]


class StateCache(Cache):
    """The state that a recurrent layer carries, and the tail of its convolution: of fixed size, never full.

    `states` are zeros, batch on axis 0, by name; they stay in float32 (float64 in a float64 layer). `crop` raises
    `CacheError` unless it drops nothing or everything. Layers of another class than the one that made it refuse it.
    """

    makers: tuple[str, ...] = ()  # the maker's class and its bases, by name; none where no layer made it

    def __init__(self, batch: int, states: Mapping[str, Tensor], device: Any = None) -> None:
        super().__init__(batch, 1, device)
        self.tensor_names = (*states, "owner")
        self.owner: Tensor | None = None  # the segment (B,) of the last real token in the state
        for name, state in states.items():
            setattr(self, name, state)

    @property
    def states(self) -> dict[str, Tensor]:
        """The states by name."""
        return {name: getattr(self, name) for name in self.tensor_names if name != "owner"}

    def reset(self) -> None:
        super().reset()
        self.owner = None
        for name, state in self.states.items():
            setattr(self, name, torch.zeros_like(state))

    def commit(self, states: Mapping[str, Tensor], owner: Tensor | None, placed: Placed, tokens: int) -> None:
        """Take over the new states: the call has succeeded."""
        for name, state in states.items():
            new = state.detach()
            # a view would keep all that it was cut from, and an output that the caller may write to
            alone = not torch.compiler.is_compiling() and new.untyped_storage().nbytes() == new.nbytes
            setattr(self, name, new if alone else new.clone())
        self.owner = owner
        self.log.write(self.length, placed, tokens)
        self.length += tokens
