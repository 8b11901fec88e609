"""Blocks that read a context besides their own tokens, and what they cache."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.serialization import add_safe_globals
from torch.utils import _pytree as pytree

from regard.errors import CacheError

__all__ = ["CrossBlock", "CrossCache", "CrossPostNorm", "CrossPreNorm", "check_context"]


class CrossCache:
    """What a block with cross-attention caches: its tokens' part as any layer's, and the context's keys and values.

    The context is written by the first call that brings it, and kept until `reset`. Length and capacity are those of
    the block's own tokens; `crop` keeps the context.

    Args:
        own: the cache of the layer that mixes the block's own tokens.
        context: the cache of the layer that reads the context.
    """

    def __init__(self, own: Any, context: Any) -> None:
        self.own = own
        self.context = context

    @property
    def batch(self) -> int:
        """Rows."""
        rows: int = self.own.batch
        return rows

    @property
    def length(self) -> int:
        """The block's own tokens, padding included."""
        tokens: int = self.own.length
        return tokens

    @property
    def capacity(self) -> int | None:
        """The most of its own tokens that fit; ``None`` where it is never full."""
        most: int | None = self.own.capacity
        return most

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        held: int = self.own.nbytes + self.context.nbytes
        return held

    @property
    def has_context(self) -> bool:
        """Whether the context was written."""
        return bool(self.context.context)

    def room_for(self, tokens: int) -> None:
        """Raises CacheFull where so many more tokens do not fit."""
        self.own.room_for(tokens)

    def resolve_tokens(self, batch: int, tokens: int, device: torch.device, **given: Tensor | None) -> Any:
        """Where a call's tokens stand after those seen."""
        return self.own.resolve_tokens(batch, tokens, device, **given)

    def reset(self) -> None:
        """Forgets every token, and the context."""
        self.own.reset()
        self.context.reset()

    def crop(self, n: int) -> None:
        """Keeps the first ``n`` tokens, and the context."""
        self.own.crop(n)
        if hasattr(self.context, "asked"):  # counts the queries that have read the context
            self.context.asked = min(self.context.asked, n)

    def reorder(self, index: Any) -> None:
        """Row ``i`` becomes what row ``index[i]`` was."""
        self.own.reorder(index)
        self.context.reorder(index)

    def clone(self) -> CrossCache:
        """An independent copy."""
        return CrossCache(self.own.clone(), self.context.clone())


def _flatten(cache: CrossCache) -> tuple[list[Any], None]:
    return [cache.own, cache.context], None


def _flatten_with_keys(cache: CrossCache) -> tuple[list[tuple[Any, Any]], None]:
    return [(pytree.GetAttrKey("own"), cache.own), (pytree.GetAttrKey("context"), cache.context)], None


def _unflatten(children: Any, context: None) -> CrossCache:
    return CrossCache(*children)


add_safe_globals([CrossCache])
pytree.register_pytree_node(
    CrossCache,
    _flatten,
    _unflatten,
    serialized_type_name="regard.models.CrossCache",
    flatten_with_keys_fn=_flatten_with_keys,
)


class CrossBlock(nn.Module):
    """A layer that mixes its own tokens, one that reads a context, and a feed-forward part; subclasses wire them.

    ``(B, T, dim)`` to ``(B, T, dim)``. What a call brings beside ``x`` (``keep``, ``positions``) describes the block's
    own tokens and goes to `self_mixer`. The context ``(B, S, context dim)`` and ``context_keep (B, S)``, its real
    tokens, go to `cross_mixer`; with a cache only once, for the cache keeps what was made of them.

    Args:
        self_mixer: any layer with the common signature.
        cross_mixer: a layer that reads a context: `regard.nn.MultiHeadAttention` or `regard.nn.LinearCrossAttention`.
        ff: the feed-forward part.
        norms: of the three, in this order.
        dropout: of what each part adds, in training.
    """

    reads_context = True

    def __init__(
        self,
        self_mixer: nn.Module,
        cross_mixer: nn.Module,
        ff: nn.Module,
        norms: tuple[nn.Module, nn.Module, nn.Module],
        *,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.self_mixer, self.cross_mixer, self.ff = self_mixer, cross_mixer, ff
        self.self_norm, self.cross_norm, self.ff_norm = norms
        self.dropout = dropout

    def init_cache(
        self,
        batch: int,
        capacity: int,
        *,
        context: int | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> CrossCache:
        """A cache of `capacity` tokens and a context of at most `context` (default as many)."""
        own = self.self_mixer.init_cache(batch, capacity, dtype=dtype, device=device)  # type: ignore[operator]
        most = capacity if context is None else context
        return CrossCache(own, self.cross_mixer.init_cache(batch, most, dtype=dtype, device=device))  # type: ignore[operator]

    def _mixed(self, x: Tensor, cache: CrossCache | None, call: dict[str, Any]) -> Tensor:
        return self._drop(self.self_mixer(x, cache=None if cache is None else cache.own, **call))

    def _crossed(self, x: Tensor, context: Tensor | None, keep: Tensor | None, cache: CrossCache | None) -> Tensor:
        return self._drop(self.cross_mixer(x, context, keep=keep, cache=None if cache is None else cache.context))

    def _drop(self, y: Tensor) -> Tensor:
        return F.dropout(y, self.dropout, self.training) if self.dropout and self.training else y


class CrossPreNorm(CrossBlock):
    """``x + self_mixer(norm(x))``, then ``x + cross_mixer(norm(x), context)``, then ``x + ff(norm(x))``."""

    def forward(
        self,
        x: Tensor,
        *,
        context: Tensor | None = None,
        context_keep: Tensor | None = None,
        cache: CrossCache | None = None,
        **call: Any,
    ) -> Tensor:
        x = x + self._mixed(self.self_norm(x), cache, call)
        x = x + self._crossed(self.cross_norm(x), context, context_keep, cache)
        return x + self._drop(self.ff(self.ff_norm(x)))


class CrossPostNorm(CrossBlock):
    """``norm(x + self_mixer(x))``, then the same with ``cross_mixer`` and ``ff``.

    Vaswani et al. 2017, arXiv:1706.03762.
    """

    def forward(
        self,
        x: Tensor,
        *,
        context: Tensor | None = None,
        context_keep: Tensor | None = None,
        cache: CrossCache | None = None,
        **call: Any,
    ) -> Tensor:
        x = self.self_norm(x + self._mixed(x, cache, call))
        x = self.cross_norm(x + self._crossed(x, context, context_keep, cache))
        out: Tensor = self.ff_norm(x + self._drop(self.ff(x)))
        return out


def check_context(
    readers: list[bool], caches: list[Any] | None, context: Tensor | None, keep: Tensor | None, segments: Tensor | None
) -> None:
    """Checks, before anything changes, that a stack's call brings a context once, and only where blocks read one.

    Raises:
        ValueError: where it does not.
        CacheError: where the layers' caches do not all hold the context.
    """
    if not any(readers):
        if context is not None or keep is not None:
            raise ValueError("context: expected None, for no block of this decoder reads one, got a tensor")
        return
    held = {c.has_context for c, reads in zip(caches, readers, strict=True) if reads} if caches else {False}
    if len(held) > 1:
        raise CacheError(
            "cache: expected the context in all layers' caches or none; reset() it after an interrupted call"
        )
    if segments is not None:
        raise ValueError("segments: expected None beside a context, which is no segment's, got a tensor")
    if held == {True} and (context is not None or keep is not None):
        raise ValueError("context: expected None, for the cache holds one already (reset it for another), got a tensor")
    if held == {False} and context is None:
        raise ValueError("context: expected a tensor in the first call, got None")
