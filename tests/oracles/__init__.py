"""The papers' formulas, written plainly a second time; nothing here imports `regard`.

A module of formulas of layers names in `ORACLES` those of catalogue records: ``formula(x, weights, heads)`` for one
sequence (T, dim), the layer's weights by name and the number of heads, or, for a record with a context,
``formula(x, weights, heads, context=rows)``. The layers are those that ``record.build(16, 4)`` makes.
"""

import importlib
import pkgutil
from collections.abc import Callable

import numpy as np


def oracles() -> dict[str, Callable[..., np.ndarray]]:
    """The formulas of every module, by the name of the record."""
    found: dict[str, Callable[..., np.ndarray]] = {}
    for module in pkgutil.iter_modules(__path__):
        named = getattr(importlib.import_module(f"{__name__}.{module.name}"), "ORACLES", {})
        assert not found.keys() & named.keys(), (
            f"{module.name}: {sorted(found.keys() & named.keys())} have two formulas"
        )
        found |= named
    return found
