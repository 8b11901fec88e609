"""Running a checked call of an operation that carries a state: what the functions and the layers share."""

from __future__ import annotations

from torch import Tensor

from regard import backends
from regard.backends import RecurrenceCall, ScanCall, SelectiveScanCall, ShortConvCall
from regard.backends.recurrent.call import StateCall
from regard.ops.checks import tied, without_autocast

__all__ = ["RecurrenceCall", "ScanCall", "SelectiveScanCall", "ShortConvCall", "run_state_call"]


def run_state_call(call: StateCall, backend: str | None = None) -> tuple[Tensor, Tensor]:
    """(the output in the dtype of q or x, the last state) of a call whose arguments are known to be right.

    The functions check theirs first. A layer makes its own decays, steps and segment starts, so it comes here directly
    and no tensor is read for a check.
    """
    like = call.lead
    with without_autocast(like):
        out, last = backends.dispatch(call, backend)
    out = out if out.numel() else tied(out, call.tensors)
    return (out if out.dtype == like.dtype else out.to(like.dtype)), last
