"""`accelerate`: the recurrent layers of a transformers model by regard's kernels, without changing the model's code.

A transformers layer looks its plain-torch kernels up by name in its own file. `accelerate` gives the layers of one
model a ``forward`` that is the same code with other functions behind these names; undoing it takes that away again.
"""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from regard.gates import softplus_step
from regard.mixers.parts import l2_normalized
from regard.ops.recurrence import recurrence
from regard.ops.scan import scan
from regard.transitions import Decay, Delta

__all__ = ["NAME", "Acceleration", "accelerate"]

NAME = "regard"  # of the attention implementation that `regard.integrations.transformers` registers


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
    **_: Any,
) -> tuple[Tensor, Tensor | None]:
    """Gated DeltaNet and KDA, as transformers calls them: (B, T, H, D), `g` with an axis of channels for KDA.

    Its plain code reads past the borders in `cu_seqlens`; here each document starts from an empty state.
    """
    if use_qk_l2norm_in_kernel:
        query, key = l2_normalized(query), l2_normalized(key)
    q, k, v, decay, strength = (x.transpose(1, 2) for x in (query, key, value, g, beta))
    ids = None
    if cu_seqlens is not None:
        slots = torch.arange(query.shape[1], device=query.device)
        ids = torch.searchsorted(cu_seqlens.to(slots.dtype), slots, right=True).expand(query.shape[0], -1)
    out, state = recurrence(q, k, v.to(q.dtype), Delta(strength, decay), state=initial_state, segments=ids)
    return out.transpose(1, 2), state if output_final_state else None


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
    **_: Any,
) -> Any:
    """Mamba-2's state-space duality: x (B, T, H, P), dt (B, T, H), B and C (B, T, G, N), states (B, H, P, N)."""
    if dt_softplus:
        step = softplus_step(dt, dt_bias, dt_limit)
    else:
        step = (dt if dt_bias is None else dt + dt_bias).float().clamp(*dt_limit)
    x = hidden_states.float()
    state = None if initial_states is None else initial_states.transpose(-1, -2)
    q, k, v = (each.transpose(1, 2) for each in (C.float(), B.float(), x * step.unsqueeze(-1)))
    out, state = recurrence(q, k, v, Decay((step * A.float()).transpose(1, 2)), state=state, scale=1.0)
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


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "torch_chunk_gated_delta_rule": _delta_rule,
    "torch_recurrent_gated_delta_rule": _delta_rule,
    "chunk_kimi_delta_attention": _delta_rule,
    "recurrent_kimi_delta_attention": _delta_rule,
    "mamba2_chunk_scan": _chunk_scan,
}
METHODS = {"_rnn_scan": _linear_scan}


class Acceleration:
    """The layers that `accelerate` changed; `undo` gives them back, as does leaving a ``with`` block."""

    def __init__(self, layers: dict[str, nn.Module], attention: tuple[Any, str] | None) -> None:
        self._layers, self._attention = layers, attention

    @property
    def layers(self) -> tuple[str, ...]:
        """Their names in the model."""
        return tuple(self._layers)

    def undo(self) -> None:
        """Run transformers' own code again; doing it twice does nothing."""
        for layer in self._layers.values():
            for name in ("forward", *METHODS):
                layer.__dict__.pop(name, None)
        if self._attention is not None:
            model, kind = self._attention
            model.set_attn_implementation(kind)
        self._layers, self._attention = {}, None

    def __enter__(self) -> Acceleration:
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()

    def __repr__(self) -> str:
        return f"Acceleration({len(self._layers)} layers)"


def accelerate(model: nn.Module) -> Acceleration:
    """Run Gated DeltaNet, KDA, Mamba-2 and RG-LRU layers of a transformers model by regard's `recurrence` and `scan`.

    Softmax attention beside them goes to `regard.attention`, where the model asks its configuration for an attention
    function. Weights, caches and results stay (logits to rounding), training included. Single steps of Mamba-2 stay
    with transformers, whose state is updated in place.

    Args:
        model: a transformers model, or any module that holds such layers.

    Returns:
        an `Acceleration`: ``undo()`` it, or use it in a ``with`` block.

    Raises:
        ValueError: the model has no such layer, is accelerated already, or keeps such a layer's weights elsewhere
            (accelerate's offloading).

    >>> accelerate(torch.nn.Linear(2, 2))
    Traceback (most recent call last):
    ...
    ValueError: model: found no recurrent layer of transformers in Linear
    """
    changes: list[tuple[str, nn.Module, str, Any]] = []
    for name, layer in model.named_modules():
        for method, function in METHODS.items():
            if hasattr(type(layer), method):
                changes.append((name, layer, method, types.MethodType(function, layer)))
        plain = inspect.unwrap(type(layer).forward)
        swapped = {n: f for n, f in FUNCTIONS.items() if n in getattr(plain, "__globals__", {})}
        used = set(swapped) & set(plain.__code__.co_names)
        if used:
            if any(hasattr(part, "_hf_hook") for part in layer.modules()):
                raise ValueError(f"model: the weights of {name} are offloaded; load the model whole first")
            rebuilt = types.FunctionType(
                plain.__code__, plain.__globals__ | swapped, plain.__name__, plain.__defaults__, plain.__closure__
            )
            rebuilt.__kwdefaults__ = plain.__kwdefaults__
            changes.append((name, layer, "forward", types.MethodType(rebuilt, layer)))
    if not changes:
        raise ValueError(f"model: found no recurrent layer of transformers in {type(model).__name__}")
    for name, layer, attribute, _ in changes:
        if attribute in layer.__dict__:
            raise ValueError(f"model: {name} was changed already (accelerated, or wrapped by another library)")
    attention = None
    if _asks_for_attention(model):
        attention = model, _config(model)._attn_implementation
        model.set_attn_implementation(NAME)  # type: ignore[operator]  # a PreTrainedModel's
    for _, layer, attribute, value in changes:
        layer.__dict__[attribute] = value
    return Acceleration({name: layer for name, layer, _, _ in changes}, attention)


def _asks_for_attention(model: nn.Module) -> bool:
    """Whether the model's code asks its configuration for an attention function, and for another one now."""
    known = hasattr(sys.modules.get(type(model).__module__), "ALL_ATTENTION_FUNCTIONS")
    return known and hasattr(model, "set_attn_implementation") and _config(model)._attn_implementation != NAME


def _config(model: nn.Module) -> Any:
    return model.config
