"""torch's FlexAttention: masks and biases compiled into its kernel, where it means exactly the same."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from regard.backends.call import AttentionCall, zero_unread
from regard.coordinates import TileIndices
from regard.masks import Mask

__all__ = ["defer", "reject", "run"]


def reject(call: AttentionCall) -> str | None:
    """On a CPU: no float64, no log-sum-exp, no gradients; nowhere dropout."""
    if call.dropout_p > 0:
        return "it has no dropout"
    if call.under_derivatives:
        return "it has no forward-mode derivatives, and takes no derivative transforms (jvp, grad, jacrev)"
    if 0 in call.q.shape or 0 in call.k.shape or 0 in call.v.shape:
        return "it is not defined for empty sizes"
    if call.q.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"it takes float32, bfloat16 and float16, not {call.q.dtype}"
    if call.packing is not None:
        return "packed lengths renumber the slots, which its predicates cannot read"
    if call.mask is not None and not _traceable(call.mask):
        return "the mask's predicate cannot be compiled into its kernel"
    if call.q.device.type == "cpu":
        if call.wants_grad:
            return "it has no backward pass on a CPU"
        if call.return_lse or call.sink is not None:
            return "it does not return the log-sum-exp on a CPU, which return_lse and sinks need"
    return None


def defer(call: AttentionCall) -> str | None:
    """Its first compilation takes many seconds on a CPU."""
    if call.q.device.type == "cpu" and not torch.compiler.is_compiling():
        return "its first compilation takes 9 to 25 seconds on a CPU (it runs when asked for by name)"
    if call.q.device.type == "cpu":
        return "nothing asked for it by name"
    return None


def _traceable(mask: Mask) -> bool:
    return mask.traceable and all(_traceable(child) for child in mask.children())


@lru_cache(maxsize=1)
def _compiled() -> Any:
    from torch._dynamo import config
    from torch.nn.attention.flex_attention import flex_attention

    kernel: Any = torch.compile(flex_attention, dynamic=False)
    most = dict.fromkeys(("recompile_limit", "accumulated_recompile_limit"), 1 << 16)

    def run(*tensors: Any, **options: Any) -> Any:
        with config.patch(most):  # each kind of call is a kernel of its own; past torch's limit it would run unfused
            return kernel(*tensors, **options)

    return run


def run(call: AttentionCall) -> tuple[Tensor, Tensor]:
    """(out, lse); lse is empty on a CPU, where nobody asks for it."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    batch, q_heads, _, q_len, k_len, _ = call.sizes
    start, mask, bias, scores = call.q_start, call.mask, call.wide_bias, call.scores
    k, v = call.k, call.v
    block_mask = None
    if mask is not None:
        kinds = mask.block_layout(q_len, k_len, 128, batch=batch, heads=q_heads, q_start=start)
        rows, heads = (n if n > 1 else None for n in kinds.shape[:2])
        device = str(call.q.device)
        block_mask = create_block_mask(mask.mask_mod(start), rows, heads, q_len, k_len, device=device)
        k, v = zero_unread(mask.allows_at(call.coordinates.indices()).expand(batch, q_heads, q_len, k_len), k, v)

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        score = scores.apply(score)
        if bias is not None:
            i = q_idx + (start[b] if isinstance(start, Tensor) else start)
            score = score + bias.scores(TileIndices(b, h, i, kv_idx, q_idx, kv_idx), torch.float32)
        return score

    kernel = flex_attention if torch.compiler.is_compiling() else _compiled()
    wants_lse = call.return_lse or call.sink is not None
    options: dict[str, Any] = {"return_lse": True} if wants_lse else {}
    result = kernel(
        call.q.contiguous(),
        k.contiguous(),
        v.contiguous(),
        score_mod=score_mod if scores.steps or bias is not None else None,
        block_mask=block_mask,
        scale=scores.scale,
        enable_gqa=call.group > 1,
        **options,
    )
    out, lse = result if wants_lse else (result, call.q.new_empty(0))
    return out, lse
