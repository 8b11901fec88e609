"""The cache of a whole stack: one cache a layer, moved together."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.serialization import add_safe_globals
from torch.utils import _pytree as pytree

from regard.checks import describe
from regard.errors import CacheError
from regard.tokens import TokenLayout

__all__ = ["ModelCache"]


class ModelCache:
    """The layers' caches in order, of any kinds; the caller owns it and every call updates it in place.

    All operations hold for every layer or for none: what one layer refuses is refused before another has changed.

    Args:
        layers: one cache a layer, all of one length.
    """

    def __init__(self, layers: list[Any]) -> None:
        self.layers = layers

    def __iter__(self) -> Iterator[Any]:
        return iter(self.layers)

    def __repr__(self) -> str:
        kinds = ", ".join(sorted({type(c).__name__ for c in self.layers}))
        return f"ModelCache({len(self.layers)} layers of {kinds}, batch={self.batch}, length={self.length})"

    @property
    def batch(self) -> int:
        """Rows."""
        rows: int = self.layers[0].batch
        return rows

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
        return min((c.capacity for c in self.layers if c.capacity is not None), default=None)

    @property
    def nbytes(self) -> int:
        """Bytes held by all layers."""
        return sum(c.nbytes for c in self.layers)

    def room_for(self, tokens: int) -> None:
        """Raises CacheFull, before anything changes, where ``tokens`` more a row do not fit."""
        for c in self.layers:
            c.room_for(tokens)

    def resolve_tokens(self, batch: int, tokens: int, device: torch.device, **given: Any) -> TokenLayout:
        """Where a call's tokens stand after those seen; ``given``: its ``keep``, ``positions`` and ``segments``."""
        resolved: TokenLayout = self.layers[0].resolve_tokens(batch, tokens, device, **given)
        return resolved

    def reset(self) -> None:
        """Forgets every token."""
        for c in self.layers:
            c.reset()

    def crop(self, n: int) -> None:
        """Keeps the first ``n`` tokens; raises and changes nothing where a layer cannot go back that far."""
        for c in self.layers:
            if c.capacity is None:  # a cache that is never full forgets, so it may have to refuse: tried on a copy
                c.clone().crop(n)
        for c in self.layers:
            c.crop(n)

    def roll_back(self, n: int) -> None:
        """Undoes what an interrupted call left in some layers; where one cannot, ``length`` raises afterwards."""
        for c in self.layers:
            with contextlib.suppress(CacheError):
                c.crop(n)

    def reorder(self, index: Tensor | Sequence[int]) -> None:
        """Row ``i`` becomes what row ``index[i]`` was; any number of rows, no storage shared afterwards."""
        for c in self.layers:
            c.reorder(index)

    def clone(self) -> ModelCache:
        """An independent copy."""
        return ModelCache([c.clone() for c in self.layers])


def _flatten(cache: ModelCache) -> tuple[list[Any], None]:
    return [cache.layers], None


def _flatten_with_keys(cache: ModelCache) -> tuple[list[tuple[Any, Any]], None]:
    return [(pytree.GetAttrKey("layers"), cache.layers)], None


def _unflatten(children: Any, context: None) -> ModelCache:
    (layers,) = children
    return ModelCache(layers)


add_safe_globals([ModelCache])
pytree.register_pytree_node(
    ModelCache,
    _flatten,
    _unflatten,
    serialized_type_name="regard.models.ModelCache",
    flatten_with_keys_fn=_flatten_with_keys,
)


def check_ids(ids: Tensor) -> tuple[int, int]:
    """Checks the ids of a call on a stack; returns the batch size and the number of tokens."""
    if not isinstance(ids, Tensor) or ids.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"ids: expected a tensor of integers (B, T), got {describe(ids)}")
    if ids.dim() != 2:
        raise ValueError(f"ids: expected shape (B, T), got {tuple(ids.shape)}; ids[None] is a batch of one")
    return int(ids.shape[0]), int(ids.shape[1])
