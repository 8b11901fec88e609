"""`accelerate`: the recurrent layers of a transformers model by regard's kernels, without changing the model's code.

A transformers layer looks its plain-torch kernels up by name in its own file. `accelerate` turns the layers of one
model into a subclass of their class whose ``forward`` is the same code with other functions behind these names;
undoing it gives them their class back. So whatever goes by a layer's class, attributes and state goes on as before.
"""

from __future__ import annotations

import functools
import inspect
import operator
import sys
import types
from collections.abc import Iterator
from typing import Any

from torch import nn

from regard.integrations.options import PACKED
from regard.integrations.substitutes import BESIDE, FUNCTIONS, MARK, METHODS, few_experts, has_plain_experts

__all__ = ["NAME", "Acceleration", "accelerate", "undo"]

NAME = "regard"  # of the attention implementation that `regard.integrations.transformers` registers
KINDS = "_regard_attention"  # on a model: where its configurations are, and the attention they asked for before


class Acceleration:
    """The layers that `accelerate` changed; `undo` gives them back, as does leaving a ``with`` block."""

    def __init__(self, model: nn.Module, layers: tuple[str, ...]) -> None:
        self._model: nn.Module | None = model
        self._layers = layers

    @property
    def layers(self) -> tuple[str, ...]:
        """Their names in the model."""
        return self._layers

    def undo(self) -> None:
        """Run transformers' own code again; doing it twice does nothing."""
        if self._model is not None:
            undo(self._model)
        self._model, self._layers = None, ()

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
    included. Single steps of Mamba-2 stay with transformers, whose state is updated in place.

    The model can be saved, copied, pickled, compiled and exported as before. A copy, or one that was pickled, is
    accelerated too; `undo` takes it back.

    Packed documents that ``cu_seq_lens_q`` or ``seq_idx`` marks stay apart in all layers, where the model passes the
    marks on (Mamba-2's and RecurrentGemma's own models don't, and ignore them as before). ``position_ids`` that start
    again part them as in transformers: in softmax attention alone.

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
    changes: dict[str, tuple[nn.Module, type]] = {}
    for name, layer in model.named_modules():
        if any(MARK in vars(kind) for kind in type(layer).__mro__):
            raise ValueError(f"model: {name} was changed already (accelerated)")
        made = _accelerated(type(layer))  # type: ignore[arg-type]  # classes have a hash
        if made is not None:
            if any(hasattr(part, "_hf_hook") for part in layer.modules()):
                raise ValueError(f"model: the weights of {name} are offloaded; load the model whole first")
            changes[name] = layer, made
    if not changes:
        raise ValueError(f"model: found no recurrent layer of transformers in {type(model).__name__}")
    for name, layer in model.named_modules():
        if has_plain_experts(layer):
            changes[name] = layer, _subclass(type(layer), {"forward": few_experts})
    for name, (layer, _) in changes.items():
        if any(attribute in layer.__dict__ for attribute in ("forward", *METHODS)):
            raise ValueError(f"model: {name} was changed already (wrapped by another library)")
    asking = _asking_for_attention(model)
    if asking:
        model.__dict__[KINDS] = [(path, config._attn_implementation) for path, config in _configs(model)]
        for part in asking:
            part.set_attn_implementation(NAME)
    for layer, made in changes.values():
        layer.__class__ = made
    for layer in model.modules():
        if hasattr(layer, "is_causal"):
            layer.__dict__[PACKED] = True
    return Acceleration(model, tuple(changes))


def undo(model: nn.Module) -> None:
    """Let a model that `accelerate` changed, or a copy of one, run transformers' own code again."""
    for name, layer in model.named_modules():
        if MARK in vars(type(layer)):
            layer.__class__ = getattr(type(layer), MARK)
        elif hasattr(type(layer), MARK):
            raise ValueError(f"model: another library wrapped {name} after it was accelerated; unwrap it first")
        layer.__dict__.pop(PACKED, None)
    for path, kind in model.__dict__.pop(KINDS, ()):
        operator.attrgetter(path)(model)._attn_implementation_internal = kind


@functools.cache
def _accelerated(plain: type) -> type | None:
    """The subclass that runs a layer's code with regard's functions; None for a layer that has nothing to swap."""
    changed: dict[str, Any] = {name: function for name, function in METHODS.items() if hasattr(plain, name)}
    forward = inspect.unwrap(plain.forward) if hasattr(plain, "forward") else None
    if isinstance(forward, types.FunctionType):
        used = set(FUNCTIONS) & set(forward.__globals__) & set(forward.__code__.co_names)
        if used - BESIDE:
            changed["forward"] = _with_our_functions(forward)
    return _subclass(plain, changed) if changed else None


def _with_our_functions(plain: types.FunctionType) -> types.FunctionType:
    """The same code over a copy of its module: compilers look a function's globals up by their module's name."""
    theirs = plain.__globals__
    name = f"{__name__}_of_{theirs['__name__'].replace('.', '_')}"
    if name not in sys.modules:
        module = types.ModuleType(name)
        swapped = {each: function for each, function in FUNCTIONS.items() if each in theirs}
        module.__dict__.update({**theirs, **swapped, "__name__": name, "__spec__": None})
        sys.modules[name] = module
    made = types.FunctionType(
        plain.__code__.replace(), sys.modules[name].__dict__, plain.__name__, plain.__defaults__, plain.__closure__
    )
    made.__kwdefaults__ = plain.__kwdefaults__
    made.__qualname__, made.__module__, made.__doc__ = plain.__qualname__, name, plain.__doc__
    return made


@functools.cache
def _subclass_of(plain: type, names: tuple[tuple[str, Any], ...]) -> type:
    body = {"__module__": plain.__module__, "__qualname__": plain.__qualname__, "__doc__": plain.__doc__}
    return type(plain)(plain.__name__, (plain,), {**body, **dict(names), MARK: plain, "__reduce_ex__": _reduce})


def _subclass(plain: type, changed: dict[str, Any]) -> type:
    """A class of the same name in the place of `plain`, with these attributes; one for each class."""
    return _subclass_of(plain, tuple(sorted(changed.items())))


def _reduce(self: Any, protocol: int) -> Any:
    """As the plain class would be pickled, and accelerated when it is read."""
    plain = getattr(type(self), MARK)
    _, arguments, *state = plain.__reduce_ex__(self, max(protocol, 2))
    return _rebuild, (plain, *arguments[1:]), *state


def _rebuild(plain: type, *arguments: Any) -> Any:
    made = _accelerated(plain) or _subclass(plain, {"forward": few_experts})
    return made.__new__(made, *arguments)


def _asking_for_attention(model: nn.Module) -> list[Any]:
    """The outermost transformers models in a model whose code asks its configuration for an attention function."""
    found: list[Any] = []
    inside: set[int] = set()
    for part in model.modules():
        if id(part) in inside or not hasattr(part, "set_attn_implementation") or not hasattr(part, "config"):
            continue
        inside.update(map(id, part.modules()))
        files = {sys.modules.get(type(each).__module__) for each in part.modules()}
        if any(hasattr(file, "ALL_ATTENTION_FUNCTIONS") for file in files):
            found.append(part)
    return found


def _configs(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Every configuration of the models in a model, and where it is."""
    for name, part in model.named_modules():
        config = getattr(part, "config", None)
        if config is not None and hasattr(part, "set_attn_implementation"):
            yield from _parts(f"{name}.config".lstrip("."), config)


def _parts(path: str, config: Any) -> Iterator[tuple[str, Any]]:
    yield path, config
    for name in getattr(config, "sub_configs", {}):
        if getattr(config, name, None) is not None:
            yield from _parts(f"{path}.{name}", getattr(config, name))
