"""The library's own CPU kernels (csrc/): float32 and bfloat16, forward and backward, O(T) memory.

float16, and bfloat16 with a trained bias, run as float32. They keep sums in float32, skip what the mask leaves empty,
and give a row the same bits whatever stands beside it in the batch, on any number of threads.
"""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.backends.call import AttentionCall
from regard.backends.native import library
from regard.backends.native.attention import attend
from regard.backends.native.operands import operands_of, unfit
from regard.backends.native.operator import Outputs

__all__ = ["defer", "reject", "run"]


def reject(call: AttentionCall) -> str | None:
    """No library, another device, float64, function transforms; masks and biases too large to write out."""
    device, dtype = call.q.device, call.q.dtype
    if device.type != "cpu":
        return f"it runs on the CPU, not on {device.type}"
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"it takes float32, bfloat16 and float16, not {dtype}"
    if call.transformed:
        return "its kernels take no function transforms (vmap, jvp, jacrev)"
    if call.under_derivatives:
        return "its kernels have no forward-mode derivatives"
    return library.REASON if library.REASON is not None else unfit(call)


def defer(call: AttentionCall) -> str | None:
    """Only where nothing but the portable kernels was built, or is allowed to run."""
    if library.ISA == "portable":
        return "only its portable kernels can run here, which are slow (they do when asked for by name)"
    return None


def _trains_bias(call: AttentionCall) -> bool:
    return call.bias is not None and any(t.requires_grad for t in call.bias.tensors())


def run(call: AttentionCall) -> tuple[Tensor, ...]:
    """(out, lse) and with a sink what lse lost by rounding: out in float32 where gradients follow or a sink, else in
    q's dtype."""
    wide = call.sink is not None  # as where gradients follow: the sink's share is taken before the result is rounded
    if call.q.dtype == torch.float32 and call.q.shape[3] and call.v.shape[3]:
        return _lost(attend(operands_of(call), wide), wide)
    q, k, v, v_dim = call.q, call.k, call.v, call.v.shape[3]
    # a trained bias gathers differences over many pairs, which the bfloat16 kernels' weights are too coarse for
    coarse = q.dtype == torch.bfloat16 and call.wants_grad and _trains_bias(call)
    if q.dtype == torch.float16 or coarse:
        q, k, v = (x.to(torch.float32) for x in (q, k, v))
    if not q.shape[3]:  # the kernels want at least one channel
        q, k = F.pad(q, (0, 1)), F.pad(k, (0, 1))
    if not v_dim:
        v = F.pad(v, (0, 1))
    if q is not call.q or v is not call.v:
        call = dataclasses.replace(call, q=q, k=k, v=v)
    out, *rest = _lost(attend(operands_of(call), wide), wide)
    return (out if v_dim else out[..., :0]), *rest


def _lost(outputs: Outputs, wide: bool) -> tuple[Tensor, ...]:
    out, lse, kept = outputs
    return (out, lse, kept[0]) if wide else (out, lse)
