"""What `torch.utils.flop_counter` is told of the native operators.

torch copies its formulas when a counter is made, and importing its module brings in Triton, where that is installed. So
the module is never imported here: operators tell those counters that are there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

__all__ = ["add", "tell"]

_FORMULAS: dict[Any, Callable[..., int]] = {}  # by operator, as torch's own table


def add(name: str, flops: Callable[..., int]) -> None:
    """From now on counters know ``regard::<name>``: `flops` takes its arguments; two for each multiply-accumulate."""

    def formula(*arguments: Any, out_val: Any = None, **_: Any) -> int:
        return flops(*arguments)

    _FORMULAS[getattr(torch.ops.regard, name)] = formula
    tell()


def tell() -> None:
    """Give the formulas to torch's table and to the counters that are counting; none that stands there is replaced."""
    if torch.compiler.is_compiling() or "torch.utils.flop_counter" not in sys.modules:
        return
    module = sys.modules["torch.utils.flop_counter"]
    counters = (getattr(mode, "counter", None) for mode in _get_current_dispatch_mode_stack())
    tables = [one.flop_registry for one in counters if isinstance(one, module.FlopCounterMode)]
    for table in (module.flop_registry, *tables):
        for operator, formula in _FORMULAS.items():
            table.setdefault(operator, formula)
