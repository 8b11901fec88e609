"""Backends: who can run a call, in which order they are asked, and why one says no.

There are five operations (`attention`, `recurrence`, `scan`, `selective_scan`, `short_conv`), each with its own record
of a call, and a backend may know one of them or several. For an operation, a backend is a module with three functions,
of which the first two read only metadata (device, dtype, shapes, kinds of mask and bias), so that choosing traces under
``torch.compile``:

- ``reject(call) -> str | None``: why it cannot run the call, in one sentence.
- ``defer(call) -> str | None``: why it would rather not, though it can; it still runs when asked for by name.
- ``run(call)``: the work, in the compute dtype: (out, log-sum-exp[, what that lost by rounding]) of attention before a
  sink takes its share, (out, last state) of the others.

The choice never depends on the batch size.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from regard.backends import chunked, flex, native, reference, sdpa
from regard.backends.call import AttentionCall
from regard.backends.native import library
from regard.backends.native import states as native_states
from regard.backends.recurrent import chunked as chunked_states
from regard.backends.recurrent import reference as reference_states
from regard.backends.recurrent.call import RecurrenceCall, ScanCall, SelectiveScanCall, ShortConvCall, StateCall
from regard.errors import BackendUnsupported
from regard.names import not_among

__all__ = [
    "AttentionCall",
    "Backend",
    "Explanation",
    "RecurrenceCall",
    "ScanCall",
    "SelectiveScanCall",
    "ShortConvCall",
    "Verdict",
    "count_backends",
    "dispatch",
    "explain_call",
    "names",
    "register",
    "run",
    "select",
    "use_backend",
    "without_kernels",
]

Call = AttentionCall | StateCall


class Backend(Protocol):
    """What a backend of one operation offers: a module, or an object with these three."""

    def reject(self, call: Any, /) -> str | None: ...
    def defer(self, call: Any, /) -> str | None: ...
    def run(self, call: Any, /) -> tuple[Tensor, ...]: ...


_MATRICES = {"native": native_states, "chunked": chunked_states, "reference": reference_states}
# who knows an operation, and in which order they are asked on a device; "" stands for every device without a line
_BACKENDS: dict[str, dict[str, Backend]] = {
    "attention": {"native": native, "sdpa": sdpa, "flex": flex, "chunked": chunked, "reference": reference},
    "recurrence": dict(_MATRICES),
    "scan": dict(_MATRICES),
    "selective_scan": dict(_MATRICES),
    "short_conv": dict(_MATRICES),
}
_ORDER: dict[str, dict[str, tuple[str, ...]]] = {
    "attention": {
        "cpu": ("native", "sdpa", "chunked", "flex", "reference"),
        "cuda": ("sdpa", "flex", "chunked", "native", "reference"),
        "": ("sdpa", "chunked", "flex", "native", "reference"),
    },
    **{
        operation: {"cpu": ("native", "chunked", "reference"), "": ("chunked", "native", "reference")}
        for operation in ("recurrence", "scan", "selective_scan", "short_conv")
    },
}

_log = logging.getLogger("regard")
_said: set[tuple[str, str]] = set()
_local = threading.local()  # not a ContextVar: torch.compile cannot read those in a full graph


def without_kernels() -> str | None:
    """Why there are no CPU kernels here, in one sentence, or None where there are."""
    return library.REASON


def names(operation: str | None = None) -> tuple[str, ...]:
    """The names of the backends of an operation, or of all of them."""
    if operation is not None:
        return tuple(_BACKENDS[operation])
    return tuple(dict.fromkeys(name for known in _BACKENDS.values() for name in known))


def register(
    operation: str, name: str, backend: Backend, devices: str | Iterable[str], before: str = "chunked"
) -> None:
    """Add a backend for one operation, asked on `devices` before the one named `before`; by name it runs anywhere.

    `backend` is a module or object with the three functions above. Calls in other operations say that it has none.

    Raises ValueError for an unknown operation, a name that is taken, and a `before` that does not know the operation;
    TypeError for a name that is no text, a backend without the three functions, and devices that are no names.
    """
    if operation not in _BACKENDS:
        raise ValueError(f"operation: expected one of {', '.join(_BACKENDS)}, got {operation!r}")
    if not isinstance(name, str) or not name.isidentifier():
        error = ValueError if isinstance(name, str) else TypeError
        raise error(f"name: expected letters, digits and underscores, as in 'triton', got {name!r}")
    if name in _BACKENDS[operation]:
        raise ValueError(f"name: expected one that {operation} has not yet, got {name!r}")
    missing = [one for one in ("reject", "defer", "run") if not callable(getattr(backend, one, None))]
    if missing:
        raise TypeError(f"backend: expected functions reject, defer and run, got none named {', '.join(missing)}")
    if before not in _BACKENDS[operation]:
        raise ValueError(f"before: expected one of {', '.join(_BACKENDS[operation])}, got {before!r}")
    devices = (devices,) if isinstance(devices, str) else tuple(devices)
    if not all(isinstance(device, str) and device for device in devices):
        raise TypeError(f"devices: expected names of kinds of devices, as in ('cuda',), got {devices!r}")
    orders = {kind: _asked(operation, kind) for kind in dict.fromkeys((*_ORDER[operation], *devices))}
    for kind, order in orders.items():
        place = order.index(before) if kind in devices else len(order)
        _ORDER[operation][kind] = (*order[:place], name, *order[place:])
    _BACKENDS[operation][name] = backend


def _current() -> str | None:
    name: str | None = getattr(_local, "name", None)
    return name


def _known(name: str) -> str:
    if name not in names():
        raise ValueError(f"backend: {not_among(name, names())}")
    return name


@contextlib.contextmanager
def use_backend(name: str | None) -> Iterator[None]:
    """Inside the block, calls that name no backend use `name` or raise `BackendUnsupported`.

    None cancels the choice of a block around this one.

    >>> import torch, regard
    >>> q = torch.randn(1, 2, 5, 8)
    >>> with regard.use_backend("reference"):
    ...     out = regard.attention(q, q, q)
    """
    outer = _current()
    _local.name = None if name is None else _known(name)
    try:
        yield
    finally:
        _local.name = outer


@contextlib.contextmanager
def count_backends() -> Iterator[Counter[str]]:
    """Inside the block, count how many calls each backend ran (in eager mode).

    >>> import torch, regard
    >>> q = torch.randn(1, 2, 5, 8)
    >>> with count_backends() as counts:
    ...     out = regard.attention(q, q, q, backend="chunked")
    >>> dict(counts)
    {'chunked': 1}
    """
    outer: Counter[str] | None = getattr(_local, "counts", None)
    counts: Counter[str] = Counter()
    _local.counts = counts
    try:
        yield counts
    finally:
        _local.counts = outer


@dataclass(frozen=True)
class Verdict:
    """One backend's answer to a call."""

    name: str
    reason: str | None  # why it does not run it; None for the one that does and for those that could
    chosen: bool


@dataclass(frozen=True)
class Explanation:
    """Which backend runs a call, and why the others don't; prints as a table."""

    rows: tuple[Verdict, ...]

    @property
    def chosen(self) -> str | None:
        """The backend that runs the call."""
        return next((row.name for row in self.rows if row.chosen), None)

    def __str__(self) -> str:
        width = max(len(row.name) for row in self.rows)
        said = (
            (row.name, "runs it" if row.chosen else row.reason or "could run it; comes later in the order")
            for row in self.rows
        )
        return "\n".join(f"{name:<{width}}  {text}" for name, text in said)


def _asked(operation: str, kind: str) -> tuple[str, ...]:
    orders = _ORDER[operation]
    return orders[kind] if kind in orders else orders[""]


def _order(call: Call) -> tuple[str, ...]:
    """The backends that know the operation, in the order in which they are asked."""
    return _asked(call.operation, call.device.type)


def _reason(call: Call, name: str) -> str | None:
    """Why a backend cannot run a call."""
    backend = _BACKENDS[call.operation].get(name)
    if backend is None:
        return f"it has no {call.operation}"
    reason: str | None = backend.reject(call)
    return reason


def explain_call(call: Call, name: str | None = None) -> Explanation:
    """Every backend's answer, in the order in which they are asked."""
    name = _current() if name is None else _known(name)
    rows: list[Verdict] = []
    taken = False
    for one in _order(call):
        reason = _reason(call, one)
        if reason is None and name is None:
            reason = _BACKENDS[call.operation][one].defer(call)
        elif reason is None and one != name:
            reason = f"backend {name!r} was asked for"
        chosen = reason is None and not taken
        taken = taken or chosen
        rows.append(Verdict(one, reason, chosen))
    return Explanation(tuple(rows))


def select(call: Call, name: str | None = None) -> str:
    """The first backend that runs the call, or the one named; raises `BackendUnsupported` when that one cannot."""
    name = _current() if name is None else _known(name)
    order = _order(call)
    if name is not None:
        reason = _reason(call, name)
        if reason is not None:
            able = [one for one in order if _reason(call, one) is None]
            raise BackendUnsupported(f"backend {name!r} cannot run this call: {reason}. These can: {', '.join(able)}")
        return name
    for one in order:
        if _reason(call, one) is None and _BACKENDS[call.operation][one].defer(call) is None:
            if one == "reference":
                _note_fallback(call, one)
            if library.SURPRISING:
                _note_kernels(call)
            return one
    raise AssertionError("the reference backend runs every call")


def _note_fallback(call: Call, taken: str) -> None:
    if torch.compiler.is_compiling():
        return
    reason = _reason(call, "chunked") or "others were rejected"
    if (taken, reason) not in _said:
        _said.add((taken, reason))
        _log.info("%s falls back to the slow %s backend: %s", call.operation, taken, reason)


def _note_kernels(call: Call) -> None:
    """Say once, where a call would have run on kernels that are here but cannot be used, why they cannot."""
    reason = library.REASON or ""
    if torch.compiler.is_compiling() or ("native", reason) in _said or _reason(call, "native") != reason:
        return
    _said.add(("native", reason))
    _log.warning("slower than it could be: %s", reason)


def dispatch(call: Call, name: str | None = None) -> tuple[Tensor, Tensor]:
    """Select and run."""
    out, last = run(call, select(call, name))
    return out, last


def run(call: Call, chosen: str) -> tuple[Tensor, ...]:
    """Run the call on the backend that `select` chose; see above for what comes back."""
    if not torch.compiler.is_compiling() and getattr(_local, "counts", None) is not None:
        _local.counts[chosen] += 1
    result: tuple[Tensor, ...] = _BACKENDS[call.operation][chosen].run(call)
    return result
