"""Names that a user may have mistyped; without torch."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["nearest", "not_among"]


def nearest(name: object, known: Iterable[str]) -> str | None:
    """The known name that was probably meant.

    >>> nearest("causl", ["causal", "window"]), nearest("xyz", ["causal"])
    ('causal', None)
    """
    exact = {one.lower(): one for one in known}
    found = difflib.get_close_matches(name.lower(), exact, 1) if isinstance(name, str) else []
    return exact[found[0]] if found else None


def not_among(name: object, known: Iterable[str]) -> str:
    """How an error says that a name is none of those known, and which of them was probably meant.

    >>> not_among("causl", ["causal", "window"])
    "expected one of causal, window, got 'causl'; did you mean 'causal'?"
    """
    names = list(known)
    meant = nearest(name, names)
    return f"expected one of {', '.join(names)}, got {name!r}" + (f"; did you mean {meant!r}?" if meant else "")
