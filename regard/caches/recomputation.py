"""Activation checkpointing runs a call again during the backward pass, when the cache has moved on: it is refused."""

from __future__ import annotations

import sys

# functions and no modules of torch: a compiler passes over code that holds neither those nor tensors
from torch._C._autograd import (
    _pop_saved_tensors_default_hooks,
    _push_saved_tensors_default_hooks,
    _top_saved_tensors_default_hooks,
)

from regard.errors import CacheError

__all__ = ["refuse_recomputation"]


def refuse_recomputation() -> None:
    """Raise `CacheError` where the call will be run again, or is, by activation checkpointing.

    The second run would read what the first one stored, and store it twice. Compiled code is looked at when it is
    traced; what was traced elsewhere runs unchecked inside a checkpoint that is not reentrant.
    """
    if _is_run_again():
        raise CacheError(
            "cache: expected a call outside torch.utils.checkpoint, got one that the backward pass would run again on"
            " a cache that has changed; checkpoint without a cache, or keep the call's activations. Nothing was changed"
        )


def _is_run_again() -> bool:
    return _under_hooks() or _under_function()


# What torch.compiler.assume_constant_result does, without importing the compiler.
_is_run_again._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _under_hooks() -> bool:
    """Whether one of the hooks on saved tensors is a checkpoint's: its mode without reentrant backward passes."""
    taken = []
    try:  # only the top of the stack can be seen, so it is lifted off and put back
        while (pair := _top_saved_tensors_default_hooks(True)) is not None:
            if pair[0].__module__ == "torch.utils.checkpoint":
                return True
            _pop_saved_tensors_default_hooks()
            taken.append(pair)
    finally:
        for pair in reversed(taken):
            _push_saved_tensors_default_hooks(*pair)
    return False


def _under_function() -> bool:
    """Whether a checkpoint's autograd function is running: the reentrant mode, which others have copied by name.

    Its forward pass runs without gradients; that it will have a backward pass shows in what its node leads to.
    """
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name in ("forward", "backward") and code.co_varnames[:1] == ("ctx",):
            node = frame.f_locals["ctx"]
            if "Checkpoint" in type(node).__name__ and node.next_functions:
                return True
        frame = frame.f_back  # type: ignore[assignment]
    return False
