"""torch's scaled_dot_product_attention, where it means exactly the same."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.backends.call import AttentionCall, zero_unread

__all__ = ["defer", "reject", "run"]

DENSE_LIMIT = 2**24  # scores; beyond that a dense mask is not worth holding


def reject(call: AttentionCall) -> str | None:
    """It has no softcap, no log-sum-exp, and its dropout draws other bits."""
    if call.scores.steps:
        return f"it has no {call.scores.steps[0]}"
    if call.under_derivatives:
        return "it has no forward-mode derivatives, and takes no derivative transforms (jvp, grad, jacrev)"
    if call.return_lse or call.sink is not None:
        return "it does not return the log-sum-exp, which return_lse and sinks need"
    if call.dropout_p > 0:
        return "its dropout is not the library's, so results would depend on the backend"
    if call.q.dtype == torch.float16 and call.q.device.type == "cpu":
        return "its float16 kernels on the CPU do not keep the sums in float32"
    if call.bias is not None and call.q.dtype != call.compute_dtype and call.q.device.type != "cpu":
        return f"its kernels would round the bias to {call.q.dtype}"
    if 0 in call.q.shape or 0 in call.k.shape or 0 in call.v.shape:
        return "it is not defined for empty sizes"
    if call.q.shape[-1] != call.v.shape[-1] and call.q.device.type != "cpu":
        return "its kernels want the same size for keys and values"
    dense = call.bias is not None or call.pattern == "other"
    if dense and call.q.shape[2] * call.k.shape[2] > DENSE_LIMIT:
        return f"it would hold the mask or bias densely, over {DENSE_LIMIT:,} entries"
    return None


def defer(call: AttentionCall) -> str | None:
    """Dense masks, trained calls and few queries run better, or are differentiable twice, elsewhere."""
    if call.bias is not None or call.pattern == "other":
        return "it would hold the mask or bias densely (it does when asked for by name)"
    if call.transformed and call.q.device.type == "cpu":
        return "vmap runs it once for every sample, and torch warns of that (it runs when asked for by name)"
    if call.wants_grad:
        return "its backward pass cannot be differentiated again (it runs when asked for by name)"
    if call.group > 1 and call.q.device.type == "cpu" and not torch.compiler.is_compiling():
        if 1 < call.q.shape[2] < 8 * call.group:
            return "with few queries it reads grouped keys once for each query head (it runs when asked for by name)"
    return None


def run(call: AttentionCall) -> tuple[Tensor, Tensor]:
    """(out, an empty lse): nobody asks for lse here."""
    q, k, v = call.q, call.k, call.v
    no_lse = q.new_empty(0)
    options: dict[str, Any] = {"scale": call.scale}
    if call.group > 1:  # a plain True: traced head counts compare to a symbol, which the kernel's schema refuses
        options["enable_gqa"] = True
    if call.bias is None and call.pattern == "causal":
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, **options), no_lse
    if call.bias is None and call.pattern == "full":
        if call.group > 1 and q.shape[2] == 1:  # a group's heads as rows: each key is read once for all of them
            rows = q.reshape(q.shape[0], k.shape[1], call.group, q.shape[3])
            out = F.scaled_dot_product_attention(rows, k, v, scale=call.scale)
            return out.reshape(*q.shape[:3], v.shape[3]), no_lse
        return F.scaled_dot_product_attention(q, k, v, **options), no_lse
    batch, q_heads, _, q_len, k_len, _ = call.sizes
    indices = call.coordinates.indices()
    extra: Tensor | None = None
    if call.mask is not None:
        extra = call.mask.allows_at(indices).expand(batch, q_heads, q_len, k_len)
        k, v = zero_unread(extra, k, v)
    if (added := call.wide_bias) is not None:
        bias = added.scores(indices, call.compute_dtype).expand(batch, q_heads, q_len, k_len)
        extra = bias if extra is None else torch.where(extra, bias, -torch.inf)  # in the compute dtype, never rounded
    return F.scaled_dot_product_attention(q, k, v, attn_mask=extra, **options), no_lse
