"""The recurrent operations in chunks of tokens, in plain torch, on any device; see `matrices` and `vectors`."""

from __future__ import annotations

from torch import Tensor

from regard.backends.recurrent.call import RecurrenceCall, ScanCall, SelectiveScanCall, ShortConvCall, StateCall
from regard.backends.recurrent.matrices import chunked_recurrence
from regard.backends.recurrent.reference import convolution
from regard.backends.recurrent.vectors import blocked_scan, blocked_selective_scan

__all__ = ["defer", "reject", "run"]


def reject(call: StateCall) -> str | None:
    """It runs every call."""
    return None


def defer(call: StateCall) -> str | None:
    """Whatever it can run, it runs."""
    return None


def run(call: StateCall) -> tuple[Tensor, Tensor]:
    """(output, last state), both in the compute dtype."""
    if isinstance(call, RecurrenceCall):
        return call.result(chunked_recurrence(call))
    if isinstance(call, ScanCall):
        return call.result(blocked_scan(call))
    if isinstance(call, ShortConvCall):
        return call.result(convolution(call))
    assert isinstance(call, SelectiveScanCall)
    return call.result(blocked_selective_scan(call))
