"""`scan` and `selective_scan` in blocks of tokens, in plain torch: any device, differentiable.

A scan walks all blocks at once, token by token: inside each, ``y`` from a zero state and the running product of
``a``; the blocks' ends are then a shorter scan, and ``y_t + (product up to t) * (state before the block)`` is the
answer. So it takes about ``C + T / C`` steps of O(T d) work in all. Products of numbers at most 1 cannot overflow.

The selective scan's state is d times N numbers, so it goes block after block, and a block is computed again in the
backward pass instead of being kept: memory O(C d N + T d).

A compiled graph unrolls these loops: it is made anew for another length, and a graph with a free length cannot be
exported from this form, which torch says as it refuses (the CPU kernels' operators can).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from regard.backends.recurrent.call import ScanCall, SelectiveScanCall

__all__ = ["blocked_scan", "blocked_selective_scan"]

BLOCK = 64  # tokens


def blocked_scan(call: ScanCall) -> tuple[Tensor, Tensor]:
    """(y, last state), both in the compute dtype."""
    dtype = call.compute_dtype
    a = torch.exp(call.log_a.to(dtype))
    if call.segment_starts is not None:
        a = torch.where(call.segment_starts.view(*call.segment_starts.shape, *[1] * (a.ndim - 2)), 0.0, a)
    return _scan(a, call.x.to(dtype), call.first_state())


def blocked_selective_scan(call: SelectiveScanCall) -> tuple[Tensor, Tensor]:
    """(y, last state), both in the compute dtype."""
    dtype, state, tokens = call.compute_dtype, call.first_state(), call.x.shape[1]
    pieces = [each.to(dtype).split(BLOCK, 1) for each in (call.x, call.dt, call.B, call.C)]
    segment_starts = (
        [None] * -(-tokens // BLOCK) if call.segment_starts is None else call.segment_starts.split(BLOCK, 1)
    )
    again = call.wants_grad and not call.transformed
    A = call.A.to(dtype)  # once: the blocks' gradients add up in the compute dtype
    outs = []
    for x, dt, B, C, begins in zip(*pieces, segment_starts, strict=True) if tokens else ():
        arguments = (x, dt, A, B, C, state, begins)
        out, state = _again(*arguments) if again else _block(*arguments)
        outs.append(out)
    out = torch.cat(outs, 1) if outs else call.x.to(dtype)
    return out if call.D is None else out + call.D.to(dtype) * call.x.to(dtype), state


def _scan(a: Tensor, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """``y_t = a_t y_{t-1} + x_t`` with a in [0, 1] broadcasting against x (B, T, ...)."""
    tokens = x.shape[1]
    a = a.expand(-1, tokens, *a.shape[2:])
    if tokens <= BLOCK:
        outs = []
        for t in range(tokens):
            state = a[:, t] * state + x[:, t]
            outs.append(state)
        return torch.stack(outs, 1) if outs else x, state
    blocks = -(-tokens // BLOCK)
    x, a = (
        F.pad(each, [0, 0] * (each.ndim - 2) + [0, blocks * BLOCK - tokens], value=fill).unflatten(1, (blocks, BLOCK))
        for each, fill in ((x, 0.0), (a, 1.0))
    )
    inside, product = [x[:, :, 0]], [a[:, :, 0]]
    for t in range(1, BLOCK):
        inside.append(a[:, :, t] * inside[-1] + x[:, :, t])
        product.append(product[-1] * a[:, :, t])
    ends, last = _scan(product[-1], inside[-1], state)
    before = torch.cat((state[:, None], ends[:, :-1]), 1)
    y = torch.stack([part + all_a * before for part, all_a in zip(inside, product, strict=True)], 2)
    return y.flatten(1, 2)[:, :tokens], last


def _again(*arguments: Tensor | None) -> tuple[Tensor, Tensor]:
    """`_block`, computed once more in the backward pass."""
    found: tuple[Tensor, Tensor] = checkpoint(_block, *arguments, use_reentrant=False, preserve_rng_state=False)
    return found


def _block(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, state: Tensor, segment_starts: Tensor | None
) -> tuple[Tensor, Tensor]:
    a = torch.exp(dt.unsqueeze(-1) * A)
    if segment_starts is not None:
        a = torch.where(segment_starts[..., None, None], 0.0, a)
    h, last = _scan(a, (dt * x).unsqueeze(-1) * B.unsqueeze(-2), state)
    return (h @ C.unsqueeze(-1)).squeeze(-1), last
