"""regard: attention mechanisms behind one contract.

``import regard`` is light: torch and the parts are loaded when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from regard import analysis, biases, caches, catalog, errors, masks, models, nn, positions
    from regard.analysis.mixing import mixing_matrix
    from regard.backends import use_backend
    from regard.models import load
    from regard.ops.attention import attention, attention_weights, explain
    from regard.ops.convolutions import short_conv
    from regard.ops.edges import edge_attention, edge_softmax, edge_sum
    from regard.ops.long_conv import long_conv
    from regard.ops.recurrence import recurrence
    from regard.ops.scan import scan, selective_scan
    from regard.transitions import Decay, Delta, GeneralizedDelta

__all__ = [
    "Decay",
    "Delta",
    "GeneralizedDelta",
    "analysis",
    "attention",
    "attention_weights",
    "biases",
    "caches",
    "catalog",
    "edge_attention",
    "edge_softmax",
    "edge_sum",
    "errors",
    "explain",
    "load",
    "long_conv",
    "masks",
    "mixing_matrix",
    "models",
    "nn",
    "positions",
    "recurrence",
    "scan",
    "selective_scan",
    "short_conv",
    "use_backend",
]
__version__ = "0.1.0"

_HOME = {
    "Decay": "regard.transitions",
    "Delta": "regard.transitions",
    "GeneralizedDelta": "regard.transitions",
    "attention": "regard.ops.attention",
    "attention_weights": "regard.ops.attention",
    "edge_attention": "regard.ops.edges",
    "edge_softmax": "regard.ops.edges",
    "edge_sum": "regard.ops.edges",
    "explain": "regard.ops.attention",
    "load": "regard.models",
    "long_conv": "regard.ops.long_conv",
    "mixing_matrix": "regard.analysis.mixing",
    "recurrence": "regard.ops.recurrence",
    "scan": "regard.ops.scan",
    "selective_scan": "regard.ops.scan",
    "short_conv": "regard.ops.convolutions",
    "use_backend": "regard.backends",
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    if name in __all__:
        return importlib.import_module(f"regard.{name}")
    raise AttributeError(f"module 'regard' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
