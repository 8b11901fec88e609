"""Options that families of image models state the same way, and how their files store places."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.models.config import Config

__all__ = ["PlacesOnGrid", "read_counts", "read_labels", "read_pair"]


@dataclass(frozen=True)
class PlacesOnGrid:
    """Vectors of places, one after another in the file: those of the first `tokens`, then the grid's, row by row.

    In the model the grid's are a tensor of their own, (rows, columns, dim), behind that of the tokens where there are
    some. `leading` says whether the file's tensor has a first axis of size 1.
    """

    size: tuple[int, int]
    tokens: int = 0
    leading: bool = True

    def split(self, stored: Tensor) -> Sequence[Tensor]:
        count = self.tokens + self.size[0] * self.size[1]
        if stored.ndim != 2 + self.leading or tuple(stored.shape[:-1]) != ((1, count) if self.leading else (count,)):
            before = f"{self.tokens} tokens and " if self.tokens else ""
            raise ValueError(f"shape: expected a vector each for {before}{self.size}, got {tuple(stored.shape)}")
        places = stored[0] if self.leading else stored
        grid = places[self.tokens :].view(*self.size, -1)
        return (places[: self.tokens], grid) if self.tokens else (grid,)

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        *before, grid = parts
        places = torch.cat([*before, grid.flatten(0, 1)])
        return places[None] if self.leading else places


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**31


def read_pair(c: Config, name: str, default: int) -> tuple[int, int]:
    """(rows, columns) of images or patches: one number for both, or a list of two."""
    given = c.get(name, default)
    if isinstance(given, (list, tuple)):
        if len(given) != 2 or not all(_is_count(n) for n in given):
            raise c.error(name, given, "a positive integer, or two of them")
        return given[0], given[1]
    side = c.count(name, default)
    return side, side


def read_counts(c: Config, name: str, default: tuple[int, ...], *, length: int | None = None) -> tuple[int, ...]:
    """A list of positive integers, one a stage."""
    given = c.get(name, default)
    given = default if given is None else given
    fine = isinstance(given, (list, tuple)) and 0 < len(given) <= 64 and all(_is_count(n) for n in given)
    if not fine or (length is not None and len(given) != length):
        raise c.error(name, given, "a list of positive integers" + ("" if length is None else f", {length} of them"))
    return tuple(given)


def read_labels(c: Config) -> int:
    """How many classes ``id2label`` names, or ``num_labels`` says; 2 where neither is there, as transformers has it."""
    named = c.get("id2label")
    if named is None:
        return c.count("num_labels", 2)
    if not isinstance(named, dict) or not named:
        raise c.error("id2label", named, "an object of names, one a class")
    if c.get("num_labels") not in (None, len(named)):
        raise c.error("num_labels", c.get("num_labels"), f"{len(named)}, the classes of id2label")
    return len(named)
