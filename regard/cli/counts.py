"""Counts as a user writes them."""

from __future__ import annotations

import re

__all__ = ["tokens_of"]

UNITS = {"": 1, "k": 1024, "m": 1024**2}


def tokens_of(name: str, text: str) -> int:
    """A number of tokens: 4096, 128k (of 1024 each) or 1m (of 1024 k).

    >>> tokens_of("--context", "128k"), tokens_of("--context", "1.5k"), tokens_of("--context", "4096")
    (131072, 1536, 4096)
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([km]?)", text.strip().lower().replace("_", "").replace(",", ""))
    count = float(found[1]) * UNITS[found[2]] if found else 0.0
    if count < 1 or count != int(count) or count > 2**40:
        raise ValueError(f"{name}: expected an integer from 1 to 2^40, such as 4096 or 128k (of 1024), got {text!r}")
    return int(count)
