"""What `accelerate` puts in the place of transformers' plain-torch functions: their signatures, our operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.coordinates import can_read
from regard.decays import softplus_step
from regard.integrations.options import documents
from regard.mixers.parts import l2_normalized
from regard.models.experts import all_are_cheaper, at_once, down_of_all
from regard.ops.convolutions import short_conv
from regard.ops.recurrence import recurrence
from regard.ops.scan import scan
from regard.transitions import Decay, Delta

__all__ = ["BESIDE", "FUNCTIONS", "MARK", "METHODS", "few_experts", "has_plain_experts"]

MARK = "_regard_accelerates"  # in a class that `accelerate` made: the class that it stands for


def _delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Gated DeltaNet and KDA, as transformers calls them: (B, T, H, D), `g` with an axis of channels for KDA.

    Its plain code reads past the borders of packed documents; here each starts from an empty state.
    """
    if use_qk_l2norm_in_kernel:
        query, key = l2_normalized(query), l2_normalized(key)
    q, k, v, decay, strength = (x.transpose(1, 2) for x in (query, key, value, g, beta))
    ids = _documents({"cu_seq_lens_q": cu_seqlens, **options}, *query.shape[:2])
    out, state = recurrence(q, k, v.to(q.dtype), Delta(strength, decay), state=initial_state, segments=ids)
    return out.transpose(1, 2), state if output_final_state else None


def _conv(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **options: Any,
) -> Tensor:
    """The causal depthwise convolution: x (B, C, T), which with a cache begins with the tokens before; weight (C, W).

    Its plain code reads past the borders of packed documents; here no tap does.
    """
    from transformers.activations import ACT2FN

    x = hidden_states.to(weight.dtype).transpose(1, 2)
    out, _tail = short_conv(x, weight, bias, segments=_documents(options, x.shape[0], x.shape[1], before=True))
    return (out if activation is None else ACT2FN[activation](out)).to(hidden_states.dtype).transpose(1, 2)


def _documents(options: dict[str, Any], batch: int, tokens: int, before: bool = False) -> Tensor | None:
    """The numbers (B, T) of the documents that tokens are of, where a call is packed.

    With `before`, there may be columns before the call's tokens, as a cached convolution reads: of the first document.
    """
    ids, borders = options.get("seq_idx"), options.get("cu_seq_lens_q")
    if ids is None:
        return None if borders is None else documents(borders, batch, tokens, before=before)
    ids = ids.expand(batch, -1)
    return torch.cat([ids[:, :1].expand(-1, tokens - ids.shape[1]), ids], 1) if before else ids


def _chunk_scan(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    **options: Any,
) -> Any:
    """Mamba-2's state-space duality: x (B, T, H, P), dt (B, T, H), B and C (B, T, G, N), states (B, H, P, N)."""
    if dt_softplus:
        step = softplus_step(dt, dt_bias, dt_limit)
    else:
        step = (dt if dt_bias is None else dt + dt_bias).float().clamp(*dt_limit)
    x = hidden_states.float()
    state = None if initial_states is None else initial_states.transpose(-1, -2)
    q, k, v = (each.transpose(1, 2) for each in (C.float(), B.float(), x * step.unsqueeze(-1)))
    ids = _documents(options, *x.shape[:2])
    out, state = recurrence(q, k, v, Decay((step * A.float()).transpose(1, 2)), state=state, scale=1.0, segments=ids)
    out = out.transpose(1, 2).contiguous()
    if D is not None:
        out = out + D.float().unsqueeze(-1) * x
    return (out, state.transpose(-1, -2)) if return_final_states else out


def _linear_scan(
    self: nn.Module,
    hidden_states: Tensor,
    recurrent_gate: Tensor,
    reset: Tensor,
    recurrent_states: Tensor | None,
    acc_dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """RG-LRU's scan: inputs and gates (B, T, width), reset (B, T, 1), state (B, width)."""
    log_a = torch.where(reset, -torch.inf, recurrent_gate.to(acc_dtype).clamp(max=1.0).log())
    y, state = scan(log_a, hidden_states.to(acc_dtype), state=recurrent_states)
    return y.to(hidden_states.dtype), state


def has_plain_experts(layer: nn.Module) -> bool:
    """Whether a layer holds experts ``down_e(gate(gate_up_e x))`` in stacked tensors, as transformers marks them."""
    unlike = ("has_bias", "is_transposed", "has_post_expert_norm", "_is_expert_parallel")
    marks = getattr(layer, "has_gate", False) and getattr(layer, "is_concatenated", False)
    return bool(marks) and hasattr(layer, "_apply_gate") and not any(getattr(layer, name, True) for name in unlike)


def few_experts(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Experts so few and small that all of them cost less than sorting tokens; others stay with transformers."""
    if can_read(top_k_index) and all_are_cheaper(self.down_proj, top_k_index):
        experts, hidden = self.down_proj.shape[0], self.down_proj.shape[2]
        gates_first = self.gate_up_proj.unflatten(1, (2, hidden)).transpose(0, 1).flatten(0, 2)
        inner = self._apply_gate(F.linear(hidden_states, gates_first)).unflatten(-1, (experts, hidden))
        out = at_once(inner, top_k_weights, top_k_index, lambda inner, _share: down_of_all(inner, self.down_proj))
        if out is not None:
            return out
    whole: Tensor = getattr(type(self), MARK).forward(self, hidden_states, top_k_index, top_k_weights)
    return whole


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "torch_chunk_gated_delta_rule": _delta_rule,
    "torch_recurrent_gated_delta_rule": _delta_rule,
    "chunk_kimi_delta_attention": _delta_rule,
    "recurrent_kimi_delta_attention": _delta_rule,
    "mamba2_chunk_scan": _chunk_scan,
    "causal_conv1d_fn": _conv,
}
BESIDE = {"causal_conv1d_fn"}  # swapped in layers that have one of the others
METHODS = {"_rnn_scan": _linear_scan}
