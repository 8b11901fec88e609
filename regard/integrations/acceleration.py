"""`accelerate`: the recurrent layers of a transformers model by regard's kernels, without changing the model's code.

A transformers layer looks its plain-torch kernels up by name in its own file. `accelerate` gives the layers of one
model a ``forward`` that is the same code with other functions behind these names; undoing it takes that away again.
"""

from __future__ import annotations

import inspect
import sys
import types
from typing import Any

from torch import nn

from regard.integrations.substitutes import BESIDE, FUNCTIONS, METHODS, few_experts, has_plain_experts

__all__ = ["NAME", "Acceleration", "accelerate"]

NAME = "regard"  # of the attention implementation that `regard.integrations.transformers` registers


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
    """Run Gated DeltaNet, KDA, Mamba-2 and RG-LRU layers of a transformers model by regard's operations.

    They are `recurrence`, `scan` and `short_conv`. Softmax attention beside such layers goes to `regard.attention`,
    where the model asks its configuration for an attention function, and experts so few and small that sorting tokens
    costs more than all of them are computed at once. Weights, caches and results stay (logits to rounding), training
    included. Single steps of Mamba-2 stay with transformers, whose state is updated in place. Documents packed by
    ``cu_seq_lens_q`` stay apart where transformers' layer passes their borders on (Gated DeltaNet's does, KDA's not).

    Args:
        model: a transformers model, or any module that holds such layers.

    Returns:
        an `Acceleration`: ``undo()`` it, or use it in a ``with`` block.

    Raises:
        ValueError: the model has no such layer, is accelerated already, or keeps such a layer's weights elsewhere
            (accelerate's offloading).

    >>> import torch
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
        if used - BESIDE:
            if any(hasattr(part, "_hf_hook") for part in layer.modules()):
                raise ValueError(f"model: the weights of {name} are offloaded; load the model whole first")
            rebuilt = types.FunctionType(
                plain.__code__, plain.__globals__ | swapped, plain.__name__, plain.__defaults__, plain.__closure__
            )
            rebuilt.__kwdefaults__ = plain.__kwdefaults__
            changes.append((name, layer, "forward", types.MethodType(rebuilt, layer)))
    if not changes:
        raise ValueError(f"model: found no recurrent layer of transformers in {type(model).__name__}")
    for name, layer in model.named_modules():
        if has_plain_experts(layer):
            changes.append((name, layer, "forward", types.MethodType(few_experts, layer)))
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
