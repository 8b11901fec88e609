"""The recurrent operations by the CPU kernels of csrc/, in float32: recurrence, scans, convolution.

bfloat16 and float16 inputs are widened as they are read (float16 before); states and sums are float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from regard.backends.native import library
from regard.backends.native.state_ops import run_conv, run_recurrence, run_scan, run_selective_scan
from regard.backends.recurrent.call import RecurrenceCall, ScanCall, SelectiveScanCall, ShortConvCall, StateCall

__all__ = ["defer", "reject", "run"]


def reject(call: StateCall) -> str | None:
    """The kernels' limits."""
    if library.REASON is not None:
        return library.REASON
    if call.device.type != "cpu":
        return f"the kernels run on the CPU, not on {call.device.type}"
    if call.compute_dtype != torch.float32:
        return "the kernels compute in float32, and this call is in float64"
    if isinstance(call, RecurrenceCall) and call.read_key is not None:
        return "the kernels have no generalised delta rule"
    if call.transformed:
        return "the kernels take no function transforms (vmap, jvp, jacrev) and no forward-mode derivatives"
    return None


def defer(call: StateCall) -> str | None:
    """Whatever the kernels can run, they run."""
    return None


def run(call: StateCall) -> tuple[Tensor, Tensor]:
    """(output in the dtype of q or in float32, last state in float32)."""
    if isinstance(call, RecurrenceCall):
        return run_recurrence(call)
    if isinstance(call, ScanCall):
        return run_scan(call)
    if isinstance(call, ShortConvCall):
        return run_conv(call)
    assert isinstance(call, SelectiveScanCall)
    return run_selective_scan(call)
