"""What may be asked to be continued, as token ids; anything else is refused by the argument's name."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor

from regard.models.decoder import Decoder

__all__ = ["Prompt", "is_id", "items", "token_rows"]

Prompt = str | Sequence[int] | Tensor


def items(name: str, value: object, expected: str) -> tuple[Any, ...]:
    """The values of an argument that takes several; ValueError names it where it cannot hold any."""
    if not isinstance(value, Iterable):
        raise ValueError(f"{name}: expected {expected}, got {value!r}")
    return tuple(value)


def is_id(value: object) -> bool:
    """Whether a value is a whole number that can stand for a token."""
    return isinstance(value, int) and not isinstance(value, bool)


def _is_list(value: object) -> TypeGuard[Sequence[Any]]:
    """Whether a value is a sequence of items, rather than a text or bytes."""
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray, memoryview))


def token_rows(model: Decoder, prompts: Prompt | Sequence[Prompt], name: str) -> list[list[int]]:
    """The ids of each prompt; ``name`` is the argument's, for errors."""
    if not isinstance(model, Decoder):
        raise TypeError(f"model: expected a Decoder, got {type(model).__name__}")
    if isinstance(prompts, Tensor):
        many: list[Prompt] = list(prompts) if prompts.dim() == 2 else [prompts]
    elif _is_list(prompts) and any(isinstance(p, (str, Tensor)) or _is_list(p) for p in prompts):
        many = list(prompts)
    else:
        many = [prompts] if not _is_list(prompts) or len(prompts) else []  # type: ignore[list-item]
    if not many:
        raise ValueError(f"{name}: expected at least one prompt, got none")
    return [_token_row(model, p, name) for p in many]


def _token_row(model: Decoder, prompt: Prompt, name: str) -> list[int]:
    if isinstance(prompt, Tensor):
        if prompt.dim() != 1 or prompt.is_floating_point() or prompt.is_complex() or prompt.dtype == torch.bool:
            raise ValueError(
                f"{name}: expected a tensor of integers (T,) for a prompt, got {prompt.dtype} of {tuple(prompt.shape)}"
            )
        ids = [int(i) for i in prompt.tolist()]
    elif isinstance(prompt, str):
        ids = model.tokenizer.encode(prompt)
    elif _is_list(prompt):
        ids = list(prompt)
        if odd := [i for i in ids if not is_id(i)]:
            raise TypeError(f"{name}: expected a text, token ids or a tensor for a prompt, got a list with {odd[0]!r}")
    else:
        raise TypeError(f"{name}: expected a text, token ids or a tensor for a prompt, got {prompt!r}")
    if ids:
        return ids
    if model.origin is not None and not isinstance(model.origin.tokenizer, str) and model.tokenizer.bos_id is not None:
        return [model.tokenizer.bos_id]
    raise ValueError(f"{name}: expected at least one token a prompt, got none, and none is known that begins a text")
