"""What may be asked to be continued, as token ids; anything else is refused by the argument's name."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from regard.mixers.base import floating
from regard.models.decoder import Decoder
from regard.models.encoder_decoder import EncoderDecoder
from regard.models.tokenizer import GENERATION

__all__ = ["Prompt", "Source", "is_id", "items", "padded", "prompts_of", "token_rows"]

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


@dataclass(frozen=True)
class Source:
    """What an encoder reads: a tensor of ids (B, S) or of features (B, …), and which tokens are real."""

    encoder: nn.Module
    tensor: Tensor
    keep: Tensor | None = None

    @torch.no_grad()
    def read(self) -> Tensor:
        """What the encoder makes of it: (B, S, context dim)."""
        hidden: Tensor = self.encoder(self.tensor, keep=self.keep)
        return hidden


def prompts_of(
    model: Decoder | EncoderDecoder, prompts: Prompt | Sequence[Prompt], start: Sequence[int] | None, name: str
) -> tuple[list[list[int]], Source | None]:
    """The ids that a decoder continues in each row and, for one with an encoder, what that reads."""
    if isinstance(model, EncoderDecoder):
        source = _source(model, prompts, name)
        return [_first_ids(model, start) for _ in range(source.tensor.shape[0])], source
    rows = token_rows(model, prompts, name)
    if start is not None:
        raise ValueError(f"start: expected None for a Decoder, which continues the {name} themselves, got {start!r}")
    return rows, None


def _source(model: EncoderDecoder, prompts: Prompt | Sequence[Prompt], name: str) -> Source:
    device = floating(model).device
    if isinstance(prompts, Tensor) and prompts.is_floating_point():
        return Source(model.encoder, (prompts if prompts.dim() > 2 else prompts[None]).to(device))
    features = [p for p in prompts if isinstance(p, Tensor) and p.is_floating_point()] if _is_list(prompts) else []
    if not features or len(features) < len(prompts):
        return Source(model.encoder, *padded(token_rows(model, prompts, name), device, left=False))
    if len({p.shape for p in features}) > 1:
        raise ValueError(f"{name}: expected features of one shape, got {[tuple(p.shape) for p in features]}")
    return Source(model.encoder, torch.stack(features).to(device))


def _first_ids(model: EncoderDecoder, start: Sequence[int] | None) -> list[int]:
    """What every text starts with: the given ids, or the checkpoint's."""
    if start is not None:
        if not _is_list(start) or not len(start) or not all(is_id(i) for i in start):
            raise ValueError(f"start: expected token ids, at least one, or None for the checkpoint's, got {start!r}")
        return list(start)
    stated = None
    if model.origin is not None:
        option = "decoder_start_token_id"
        stated = model.origin.extras.get(GENERATION, {}).get(option, model.origin.config.get(option))
    if not is_id(stated):
        raise ValueError(
            "start: expected the token ids that a text starts with, for this model states no decoder_start_token_id,"
            f" got {start!r}"
        )
    return [stated]  # type: ignore[list-item]


def padded(rows: list[list[int]], device: torch.device, *, left: bool = True) -> tuple[Tensor, Tensor | None]:
    """Ids ``(B, T)``, the shorter rows padded in front or behind, and which tokens are real (``None``: all)."""
    longest = max(map(len, rows))
    filler = [[0] * (longest - len(row)) for row in rows]
    both = zip(filler, rows, strict=True) if left else zip(rows, filler, strict=True)
    ids = torch.tensor([a + b for a, b in both], device=device)
    if not any(filler):
        return ids, None
    lengths, place = (
        torch.tensor([len(row) for row in rows], device=device)[:, None],
        torch.arange(longest, device=device),
    )
    return ids, place >= longest - lengths if left else place < lengths


def token_rows(model: Decoder | EncoderDecoder, prompts: Prompt | Sequence[Prompt], name: str) -> list[list[int]]:
    """The ids of each prompt; ``name`` is the argument's, for errors."""
    if not isinstance(model, (Decoder, EncoderDecoder)):
        raise TypeError(f"model: expected a Decoder or an EncoderDecoder, got {type(model).__name__}")
    if isinstance(prompts, Tensor):
        many: list[Prompt] = list(prompts) if prompts.dim() == 2 else [prompts]
    elif _is_list(prompts) and any(isinstance(p, (str, Tensor)) or _is_list(p) for p in prompts):
        many = list(prompts)
    else:
        many = [prompts] if not _is_list(prompts) or len(prompts) else []  # type: ignore[list-item]
    if not many:
        raise ValueError(f"{name}: expected at least one prompt, got none")
    return [_token_row(model, p, name) for p in many]


def _token_row(model: Decoder | EncoderDecoder, prompt: Prompt, name: str) -> list[int]:
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
