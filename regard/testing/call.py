"""How a module that is not the library's is called: the names of its arguments, and what they mean.

`Call` is written once for a class of modules; `Called` then gives such a module the signature of the library's layers,
so that every check is written once too.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from regard.names import not_among

__all__ = ["CacheArgument", "Call", "Called", "CausalArgument", "Means", "PaddingArgument"]

Means = Literal["keep", "hide", "additive", "lengths"]
Answer = int | str | None


def _one_of(what: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(f"{what}: {not_among(value, known)}")


@dataclass(frozen=True)
class PaddingArgument:
    """The argument that says which tokens are padding.

    Args:
        name: of the argument.
        means: what it holds. "keep": True or 1 at real tokens; "hide": True at padding; "additive": 0 at real tokens,
            -inf at padding; all (B, T). "lengths": the numbers of real tokens (B,), padding after them.
        covers: with a cache, whether it speaks of "all" tokens so far, the cached ones included, or of the "new" ones.
        positions: the argument for the positions of the new tokens (B, T), where the module does not count them itself:
            real tokens are counted from 0.

    Raises ValueError for other meanings.
    """

    name: str
    means: Means = "keep"
    covers: Literal["all", "new"] = "all"
    positions: str | None = None

    def __post_init__(self) -> None:
        _one_of("means", self.means, ("keep", "hide", "additive", "lengths"))
        _one_of("covers", self.covers, ("all", "new"))


@dataclass(frozen=True)
class CausalArgument:
    """How a module that can be causal is told to be: by a mask (T, T), by a flag, or by both.

    Args:
        mask: the argument that takes the mask.
        means: what the mask holds: "keep" (True = may attend), "hide" (True = may not) or "additive" (0 and -inf).
        flag: the argument that is given True.

    Raises ValueError for other meanings, and where neither is named.
    """

    mask: str | None = None
    means: Means = "keep"
    flag: str | None = None

    def __post_init__(self) -> None:
        _one_of("means", self.means, ("keep", "hide", "additive"))
        if self.mask is None and self.flag is None:
            raise ValueError("mask: expected the name of an argument for a mask or a flag, got neither")


@dataclass(frozen=True)
class CacheArgument:
    """How a module continues a sequence.

    Args:
        name: the argument that takes the cache.
        make: makes an empty one for `(batch, capacity)`. Without it the module's `init_cache` does, and the first call
            of a module that has none gets no cache.
        output: where the answer holds the new cache, as in `Call.output`; None: the cache changes in place.
    """

    name: str
    make: Callable[[int, int], Any] | None = None
    output: Answer = None


@dataclass(frozen=True)
class Call:
    """How to call a module: which arguments it takes, by name, and which part of what it returns is the answer.

    Args:
        x: the arguments that get the tokens (several for self-attention by query, key and value); none: the first one.
        output: the answer's index in a tuple, its key or attribute; None: the module returns the answer, or a tuple
            that begins with it.
        batch_first: tokens and answer are (B, T, C), else (T, B, C).
        given: further arguments, the same in every call.
        padding, causal, cache: see there; None where the module has no such thing.
        segments: the argument that takes the ids (B, T) of packed sequences; None where it takes none.

    >>> import torch
    >>> attention = torch.nn.MultiheadAttention(8, 2, batch_first=True)
    >>> call = Call(("query", "key", "value"), padding=PaddingArgument("key_padding_mask", "hide"))
    >>> Called(attention, call)(torch.randn(2, 3, 8), keep=torch.ones(2, 3, dtype=torch.bool)).shape
    torch.Size([2, 3, 8])
    """

    x: str | tuple[str, ...] = ()
    output: Answer = None
    batch_first: bool = True
    given: dict[str, Any] = field(default_factory=dict)
    padding: PaddingArgument | None = None
    causal: CausalArgument | None = None
    cache: CacheArgument | None = None
    segments: str | None = None

    @classmethod
    def read(cls, module: nn.Module) -> Call:
        """The call of a module that names its arguments as the library does: `keep`, `segments`, `cache`."""
        names = inspect.signature(module.forward).parameters
        return cls(
            padding=PaddingArgument("keep", covers="new") if "keep" in names else None,
            cache=CacheArgument("cache") if "cache" in names and hasattr(module, "init_cache") else None,
            segments="segments" if "segments" in names else None,
        )


class Stream:
    """One sequence that a module decodes: the module's own cache, and what the module has been told so far."""

    def __init__(self, held: Any) -> None:
        self.held, self.length = held, 0
        self.keep: Tensor | None = None

    def extended(self, keep: Tensor | None, batch: int, new: int) -> Tensor | None:
        """The flags of all tokens, those of this call included; None where no call has given any."""
        if keep is None and self.keep is None:
            return None
        flags = [torch.ones(batch, self.length, dtype=torch.bool) if self.keep is None else self.keep]
        flags.append(torch.ones(batch, new, dtype=torch.bool) if keep is None else keep)
        return torch.cat([part.to(flags[-1].device) for part in flags], 1)


class Called(nn.Module):
    """A module behind the signature of the library's layers: ``(x, keep=, segments=, cache=)``, ``init_cache``."""

    def __init__(self, module: nn.Module, call: Call) -> None:
        super().__init__()
        self.module, self.call = module, call

    def init_cache(self, batch: int, capacity: int) -> Stream:
        """An empty cache, made as the call says."""
        assert self.call.cache is not None, "the checks of caches ask for one"
        make: Any = self.call.cache.make or getattr(self.module, "init_cache", None)
        return Stream(None if make is None else make(batch, capacity))

    def forward(
        self, x: Tensor, *, keep: Tensor | None = None, segments: Tensor | None = None, cache: Stream | None = None
    ) -> Tensor:
        call, batch, new = self.call, x.shape[0], x.shape[1]
        past = 0 if cache is None else cache.length
        whole = keep if cache is None else cache.extended(keep, batch, new)
        arguments = dict(call.given)
        if call.padding is not None and whole is not None:
            arguments |= _padding_arguments(call.padding, whole, x)
        if call.causal is not None:
            arguments |= _causal_arguments(call.causal, past, x)
        if call.segments is not None and segments is not None:
            arguments[call.segments] = segments
        if call.cache is not None and cache is not None and cache.held is not None:
            arguments[call.cache.name] = cache.held
        fed = x if call.batch_first else x.transpose(0, 1)
        names = (call.x,) if isinstance(call.x, str) else call.x
        arguments |= dict.fromkeys(names, fed)
        found = self.module(*(() if names else (fed,)), **arguments)
        if cache is not None:
            if call.cache is not None and call.cache.output is not None:
                cache.held = _part(found, call.cache.output, "cache.output")
            cache.length, cache.keep = past + new, whole
        if isinstance(found, tuple) and call.output is None:
            found = found[0]
        out = _part(found, call.output, "output")
        if not isinstance(out, Tensor):
            raise TypeError(f"output: expected a tensor, got {type(out).__name__}; name the part that is the answer")
        return out if call.batch_first else out.transpose(0, 1)


def _part(found: Any, where: Answer, what: str) -> Any:
    if where is None:
        return found
    try:
        return getattr(found, where) if isinstance(where, str) and hasattr(found, where) else found[where]
    except (LookupError, TypeError):
        raise TypeError(f"{what}: the module returned a {type(found).__name__} without {where!r}") from None


def _padding_arguments(padding: PaddingArgument, keep: Tensor, x: Tensor) -> dict[str, Tensor]:
    first = 0 if padding.covers == "all" else keep.shape[1] - x.shape[1]
    arguments = {padding.name: _meaning(keep[:, first:], padding.means, x)}
    if padding.positions is not None:
        counted = (keep.long().cumsum(1) - 1).clamp_min(0)
        arguments[padding.positions] = counted[:, keep.shape[1] - x.shape[1] :]
    return arguments


def _causal_arguments(causal: CausalArgument, past: int, x: Tensor) -> dict[str, Any]:
    arguments: dict[str, Any] = {} if causal.flag is None else {causal.flag: True}
    if causal.mask is not None:
        may = torch.ones(x.shape[1], past + x.shape[1], dtype=torch.bool, device=x.device).tril(past)
        arguments[causal.mask] = _meaning(may, causal.means, x)
    return arguments


def _meaning(keep: Tensor, means: Means, x: Tensor) -> Tensor:
    if means == "keep":
        return keep
    if means == "hide":
        return ~keep
    if means == "lengths":
        return keep.sum(1)
    dtype = x.dtype if x.is_floating_point() else torch.float32
    return torch.zeros(keep.shape, dtype=dtype, device=keep.device).masked_fill(~keep, -torch.inf)
