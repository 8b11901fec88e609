"""Options that families of image models state the same way."""

from __future__ import annotations

from regard.models.config import Config

__all__ = ["read_counts", "read_labels", "read_pair"]


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
