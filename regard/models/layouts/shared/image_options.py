"""Options that families of image models state the same way, and how their files store places."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.models.config import Config, is_count

__all__ = ["PlacesOnGrid", "read_counts", "read_labels"]


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


def read_counts(c: Config, name: str, default: tuple[int, ...], *, length: int | None = None) -> tuple[int, ...]:
    """A list of positive integers, one a stage."""
    given = c.get(name, default)
    given = default if given is None else given
    fine = isinstance(given, (list, tuple)) and 0 < len(given) <= 64 and all(is_count(n) for n in given)
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
