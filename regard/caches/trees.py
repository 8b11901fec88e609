"""Caches as pytrees: their tensors are the leaves, named; all else stands in the structure.

So `torch.utils._pytree`, `torch.export` and `torch.compile` take caches apart and put them together again. A structure
holds the number of tokens seen, so an exported step is one for caches of that length.
"""

from __future__ import annotations

import json
from typing import Any

from torch import Tensor
from torch.serialization import add_safe_globals
from torch.utils import _pytree
from torch.utils._pytree import GetAttrKey

from regard.tokens import HISTORY_TENSORS, TokenHistory

__all__ = ["register"]


def register(cls: type[Any]) -> None:
    """Make a class of caches known to torch as a pytree."""
    own = cls.__module__.startswith("regard.caches.")
    if own:  # plain data, which torch.load reads back with weights_only, and so torch.export.load
        add_safe_globals([cls])
    room = "regard.caches" if own else cls.__module__
    _pytree.register_pytree_node(
        cls,
        _flatten,
        lambda children, context: _unflatten(cls, children, context),
        serialized_type_name=f"{room}.{cls.__qualname__}",
        to_dumpable_context=json.dumps,
        from_dumpable_context=_from_text,
        flatten_with_keys_fn=_flatten_with_keys,
    )


def _flatten(cache: Any) -> tuple[list[Any], Any]:
    names = cache.tensor_names
    facts = {key: value for key, value in cache.__dict__.items() if key not in names and key != "history"}
    return [*(getattr(cache, name) for name in names), cache.history], (names, facts)


def _flatten_with_keys(cache: Any) -> tuple[list[tuple[Any, Any]], Any]:
    children, context = _flatten(cache)
    return [(GetAttrKey(name), child) for name, child in zip((*context[0], "history"), children, strict=True)], context


def _unflatten(cls: type[Any], children: Any, context: Any) -> Any:
    names, facts = context
    *tensors, history = children
    cache = object.__new__(cls)
    cache.__dict__.update(facts)
    for name, tensor in zip(names, tensors, strict=True):
        setattr(cache, name, tensor)
    # a map over the leaves may have changed the rows or the device, so the history's are theirs
    view = next((tensor for tensor in tensors if isinstance(tensor, Tensor)), None)
    if view is not None and isinstance(history, TokenHistory):
        history.batch, history.device = view.shape[0], view.device
    cache.history = history
    return cache


def _from_text(text: str) -> Any:
    names, facts = json.loads(text)
    return tuple(names), {key: tuple(value) if isinstance(value, list) else value for key, value in facts.items()}


def _flatten_history(history: TokenHistory) -> tuple[list[Any], int]:
    return [getattr(history, name) for name in HISTORY_TENSORS], history.size


def _unflatten_history(children: Any, size: int) -> TokenHistory:
    history = TokenHistory(0, size, None)
    for name, tensor in zip(HISTORY_TENSORS, children, strict=True):
        setattr(history, name, tensor)
    return history


add_safe_globals([TokenHistory])
_pytree.register_pytree_node(
    TokenHistory,
    _flatten_history,
    _unflatten_history,
    serialized_type_name="regard.tokens.TokenHistory",
    flatten_with_keys_fn=lambda history: (
        [(GetAttrKey(name), getattr(history, name)) for name in HISTORY_TENSORS],
        history.size,
    ),
)
