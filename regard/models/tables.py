"""Tables of tensor names: which tensors of a file are which tensors of a model, read in both directions.

A row of a table maps names of the file to names of the model. Most rows are one to one; the others state a reshape that
goes both ways, so that loading and saving cannot drift apart. A name of the model may be a part of a tensor, along its
first axis: ``experts.up_proj[3]``, ``conv.weight[8:16]``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

__all__ = [
    "Bundles",
    "ComputedTensor",
    "FusedQKV",
    "Ignored",
    "Reshape",
    "RotaryPermuted",
    "Row",
    "Same",
    "Shared",
    "Squeezed",
    "Transposed",
    "Viewed",
    "fused_rows",
    "listed",
    "one_to_one",
    "part_of",
    "parts_of",
    "per_layer",
    "whole_name",
]


class Reshape(Protocol):
    """How one tensor of a file becomes tensors of the model, and back."""

    def split(self, stored: Tensor) -> Sequence[Tensor]:
        """From the file to the model."""
        ...

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """From the model to the file."""
        ...


@dataclass(frozen=True)
class Same:
    """The tensor itself."""

    def split(self, stored: Tensor) -> Sequence[Tensor]:
        return (stored,)

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        (part,) = parts
        return part


@dataclass(frozen=True)
class Shared:
    """One tensor that a model lists under several names, because its parts share a module."""

    names: int

    def split(self, stored: Tensor) -> Sequence[Tensor]:
        return (stored,) * self.names

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        return parts[0]


@dataclass(frozen=True)
class Transposed:
    """A weight stored as ``(in, out)``; `then` is what its transpose holds."""

    then: Reshape = field(default_factory=Same)

    def split(self, stored: Tensor) -> Sequence[Tensor]:
        return self.then.split(stored.t().contiguous())

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        return self.then.join(parts).t().contiguous()


@dataclass(frozen=True)
class Squeezed:
    """A tensor stored with one more axis, of size 1, than in the model, as kernels of depthwise convolutions are."""

    axis: int

    def split(self, stored: Tensor) -> Sequence[Tensor]:
        if stored.shape[self.axis] != 1:
            raise ValueError(f"shape: expected 1 at axis {self.axis}, got {tuple(stored.shape)}")
        return (stored.squeeze(self.axis),)

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        (part,) = parts
        return part.unsqueeze(self.axis)


@dataclass(frozen=True)
class Viewed:
    """A tensor that is flat in the model and stored in another shape."""

    shape: tuple[int, ...]

    def split(self, stored: Tensor) -> Sequence[Tensor]:
        if tuple(stored.shape) != self.shape:
            raise ValueError(f"shape: expected {self.shape}, got {tuple(stored.shape)}")
        return (stored.reshape(-1),)

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        (part,) = parts
        return part.view(self.shape)


@dataclass(frozen=True)
class Bundles:
    """Several tensors in one, by rows that come in ``groups`` equal bundles; each has ``sizes`` rows of every tensor.

    >>> [part.tolist() for part in Bundles((1, 2), groups=2).split(torch.arange(6.0))]
    [[0.0, 3.0], [1.0, 2.0, 4.0, 5.0]]
    """

    sizes: tuple[int, ...]
    groups: int

    def split(self, stored: Tensor) -> Sequence[Tensor]:
        rows = sum(self.sizes)
        if stored.shape[0] != rows * self.groups:
            raise ValueError(f"shape: expected {rows * self.groups} rows, got {tuple(stored.shape)}")
        bundles = stored.view(self.groups, rows, *stored.shape[1:])
        return [part.reshape(-1, *stored.shape[1:]).clone() for part in bundles.split(self.sizes, dim=1)]

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        bundles = [p.reshape(self.groups, -1, *p.shape[1:]) for p in parts]
        return torch.cat(bundles, dim=1).reshape(-1, *parts[0].shape[1:])


@dataclass(frozen=True)
class FusedQKV:
    """Query, key and value projections in one tensor, by rows.

    The rows come in ``groups`` equal bundles, each holding its share of the query heads, then of the key heads, then of
    the value heads. ``groups=1`` is ``[all q | all k | all v]``; one bundle a key/value head is
    ``[q .. q k v] [q .. q k v] ..``; with as many key/value heads as query heads that is ``[q k v]`` head by head.

    >>> rows = torch.arange(16.0)                                       # heads=4, kv_heads=2, head_dim=2
    >>> [part.tolist() for part in FusedQKV(4, 2, 2, groups=2).split(rows)]
    [[0.0, 1.0, 2.0, 3.0, 8.0, 9.0, 10.0, 11.0], [4.0, 5.0, 12.0, 13.0], [6.0, 7.0, 14.0, 15.0]]
    """

    heads: int
    kv_heads: int
    head_dim: int
    groups: int

    def _bundles(self) -> Bundles:
        q, kv = (n * self.head_dim // self.groups for n in (self.heads, self.kv_heads))
        return Bundles((q, kv, kv), self.groups)

    def split(self, stored: Tensor) -> Sequence[Tensor]:
        return self._bundles().split(stored)

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        return self._bundles().join(parts)


@dataclass(frozen=True)
class RotaryPermuted:
    """Rows of a query or key projection stored for interleaved rotary pairs, in a model that rotates halves."""

    heads: int

    def split(self, stored: Tensor) -> Sequence[Tensor]:
        rows = stored.view(self.heads, -1, 2, *stored.shape[1:])
        return (rows.transpose(1, 2).reshape(stored.shape),)

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        (part,) = parts
        return part.view(self.heads, 2, -1, *part.shape[1:]).transpose(1, 2).reshape(part.shape)


@dataclass(frozen=True)
class Row:
    """One tensor of the file and the tensors of the model that it holds."""

    stored: str
    own: tuple[str, ...]
    reshape: Reshape = field(default_factory=Same)


@dataclass(frozen=True)
class ComputedTensor:
    """A tensor that follows from the options, and is no parameter: one that is read must be of `shape` and as
    ``make()`` says; it is written all the same, for other software reads it.
    """

    stored: str
    shape: tuple[int, ...]
    make: Callable[[], Tensor]


@dataclass(frozen=True)
class Ignored:
    """Tensors of a file that may stand unused: a pattern (``fnmatch``) and the reason."""

    pattern: str
    reason: str


def one_to_one(names: dict[str, str]) -> list[Row]:
    """One row a pair ``file: model``."""
    return [Row(stored, (own,)) for stored, own in names.items()]


def fused_rows(stored: str, own: str, kinds: Iterable[str], reshape: Reshape) -> list[Row]:
    """Rows for a fused projection: ``own`` with ``*`` for q, k and v, and one row a kind (``weight``, ``bias``)."""
    return [Row(f"{stored}.{k}", tuple(f"{own}.{k}".replace("*", c) for c in "qkv"), reshape) for k in kinds]


def per_layer(rows: Iterable[Row], layer: int) -> list[Row]:
    """The rows with ``{i}`` replaced by a layer's number."""
    return [
        Row(r.stored.replace("{i}", str(layer)), tuple(o.replace("{i}", str(layer)) for o in r.own), r.reshape)
        for r in rows
    ]


def whole_name(own: str) -> str:
    """The tensor that a name of the model is a part of, or is."""
    return own.partition("[")[0]


def part_of(tensor: Tensor, own: str) -> Tensor:
    """The part of a model's tensor that a name means: ``x[3]``, ``x[8:16]`` along the first axis, or all; a view."""
    _, _, part = own.partition("[")
    if not part:
        return tensor
    first, to, last = part.removesuffix("]").partition(":")
    return tensor[int(first) : int(last)] if to else tensor[int(first)]


def parts_of(state: Mapping[str, Tensor], names: Iterable[str]) -> dict[str, Tensor]:
    """The model's tensors under the names that a table uses; what no name mentions stays whole."""
    found = {own: part_of(state[whole_name(own)], own) for own in names if whole_name(own) in state}
    mentioned = {whole_name(own) for own in found}
    return found | {name: tensor for name, tensor in state.items() if name not in mentioned}


def listed(keys: Sequence[str], most: int = 40) -> str:
    """Names for an error, the first `most` of them."""
    more = f" and {len(keys) - most} more" if len(keys) > most else ""
    return ", ".join(keys[:most]) + more
