"""The cache of a whole stack: one cache a layer, moved together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from regard.errors import CacheError, CacheFull

__all__ = ["ModelCache"]


class ModelCache:
    """The layers' caches in order, of any kinds; the caller owns it and every call updates it in place.

    All operations hold for every layer or for none: what one layer refuses is refused before another has changed.

    Args:
        layers: one cache a layer, all of one length.
        batch: rows.
    """

    def __init__(self, layers: list[Any], batch: int) -> None:
        self.layers = layers
        self.batch = batch

    def __iter__(self) -> Iterator[Any]:
        return iter(self.layers)

    def __repr__(self) -> str:
        kinds = ", ".join(sorted({type(c).__name__ for c in self.layers}))
        return f"ModelCache({len(self.layers)} layers of {kinds}, batch={self.batch}, length={self.length})"

    @property
    def length(self) -> int:
        """Tokens seen, padding included.

        Raises:
            CacheError: where a call that failed half way left the layers at different lengths.
        """
        first: int = self.layers[0].length
        if any(c.length != first for c in self.layers):
            raise CacheError("the layers' caches differ in length, as after an interrupted call; reset() the cache")
        return first

    @property
    def capacity(self) -> int | None:
        """The most tokens that fit; ``None`` where no layer is ever full."""
        limits = [c.capacity for c in self.layers if getattr(c, "capacity", None) is not None and not _endless(c)]
        return min(limits) if limits else None

    @property
    def nbytes(self) -> int:
        """Bytes held by all layers."""
        return sum(c.nbytes for c in self.layers)

    def check(self, batch: int, new: int) -> int:
        """Raises, before anything changes, where ``new`` tokens a row do not fit; returns the present length."""
        if batch != self.batch:
            raise CacheError(f"the call has {batch} rows; accepted: {self.batch}, the cache's")
        length, capacity = self.length, self.capacity
        if capacity is not None and length + new > capacity:
            raise CacheFull(f"{new} more tokens do not fit: the cache holds {length} of {capacity}")
        return length

    def next_positions(self, tokens: int, keep: Tensor | None = None, segments: Tensor | None = None) -> Tensor:
        """The positions ``(B, tokens)`` of the tokens of the coming call."""
        positions: Tensor = self.layers[0].next_positions(self.batch, tokens, keep, segments)
        return positions

    def reset(self) -> None:
        """Forgets every token."""
        for c in self.layers:
            c.reset()

    def crop(self, n: int) -> None:
        """Keeps the first ``n`` tokens; raises and changes nothing where a layer cannot go back."""
        if n < 0:
            raise ValueError(f"n={n}; accepted: 0 or more tokens to keep")
        self._all_or_none(lambda c: c.crop(n))

    def reorder(self, index: Tensor) -> None:
        """Row ``i`` becomes what row ``index[i]`` was; any length, no storage shared afterwards."""
        self._all_or_none(lambda c: c.reorder(index))
        self.batch = int(index.shape[0])

    def clone(self) -> ModelCache:
        """An independent copy."""
        return ModelCache([c.clone() for c in self.layers], self.batch)

    def _all_or_none(self, change: Callable[[Any], None]) -> None:
        """Carries out ``change`` on every layer. A layer that may refuse is tried first, on a copy."""
        for c in self.layers:
            if _endless(c):
                change(c.clone())
        for c in self.layers:
            change(c)


def _endless(cache: Any) -> bool:
    """Whether a cache never fills up: it forgets (a ring, a state), so it may be unable to go back."""
    return bool(getattr(cache, "endless", False))


def _flatten(cache: ModelCache) -> tuple[list[Any], int]:
    return cache.layers, cache.batch


def _unflatten(layers: Any, batch: int) -> ModelCache:
    return ModelCache(list(layers), batch)


pytree.register_pytree_node(ModelCache, _flatten, _unflatten, serialized_type_name="regard.models.ModelCache")


def check_call(
    ids: Tensor, keep: Tensor | None, positions: Tensor | None, segments: Tensor | None
) -> tuple[int, int]:
    """Checks the tensors of a call on a stack; returns the batch size and the number of tokens."""
    if ids.dim() != 2:
        raise ValueError(f"ids has shape {tuple(ids.shape)}; accepted: (B, T)")
    if ids.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"ids has dtype {ids.dtype}; accepted: torch.int64 or torch.int32")
    for name, given in (("keep", keep), ("positions", positions), ("segments", segments)):
        if given is not None and given.shape != ids.shape:
            raise ValueError(f"{name} has shape {tuple(given.shape)}; accepted: the shape of ids, {tuple(ids.shape)}")
    if keep is not None and keep.dtype != torch.bool:
        raise TypeError(f"keep has dtype {keep.dtype}; accepted: torch.bool, True where a token is real")
    for name, given in (("positions", positions), ("segments", segments)):
        if given is not None and (given.dtype.is_floating_point or given.dtype == torch.bool):
            raise TypeError(f"{name} has dtype {given.dtype}; accepted: an integer dtype")
    return int(ids.shape[0]), int(ids.shape[1])
