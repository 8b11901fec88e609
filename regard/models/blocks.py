"""Blocks: how a mixer, a feed-forward part and their norms are wired round the residual stream.

Each is assembled from modules. The mixer is any layer with the common signature (softmax attention, a recurrence, a
convolution); what a call brings beside ``x`` (``keep``, ``positions``, ``segments``, ``cache``, ``mask``) goes to it
alone.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.coordinates import has_values
from regard.mixers.base import floating
from regard.tokens import TokenLayout

__all__ = [
    "Block",
    "Embedding",
    "LogitsBias",
    "MixerOnly",
    "NormedResidual",
    "Parallel",
    "PostNorm",
    "PreNorm",
    "Sandwich",
    "Scaled",
    "ScaledResidual",
    "Softcap",
    "tied_table",
    "tokens_of_call",
]


class Block(nn.Module):
    """A mixer and a feed-forward part; the subclasses are the wirings. ``(B, T, dim)`` to ``(B, T, dim)``."""

    def __init__(self, mixer: nn.Module, ff: nn.Module, *, mixer_dropout: float = 0.0, ff_dropout: float = 0.0) -> None:
        super().__init__()
        self.mixer = mixer
        self.ff = ff
        self.mixer_dropout = mixer_dropout
        self.ff_dropout = ff_dropout

    def init_cache(
        self, batch: int, capacity: int, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None
    ) -> Any:
        """The mixer's cache: only mixers look at other tokens."""
        return self.mixer.init_cache(batch, capacity, dtype=dtype, device=device)  # type: ignore[operator]

    def _drop(self, y: Tensor, p: float) -> Tensor:
        return F.dropout(y, p, self.training) if p and self.training else y


class MixerOnly(nn.Module):
    """``x + mixer(norm(x))``: a layer without a feed-forward part, as Mamba's (Gu and Dao 2023, arXiv:2312.00752).

    With ``wide`` the residual stream is kept in at least float32, whatever the dtype of the parameters.
    """

    def __init__(self, mixer: nn.Module, norm: nn.Module, *, wide: bool = False) -> None:
        super().__init__()
        self.mixer = mixer
        self.norm = norm
        self.wide = wide

    def forward(self, x: Tensor, **call: Any) -> Tensor:
        dtype = floating(self.norm, self).dtype
        stream = x.to(torch.promote_types(x.dtype, torch.float32)) if self.wide else x
        out: Tensor = stream + self.mixer(self.norm(x.to(dtype)), **call)
        return out

    def init_cache(
        self, batch: int, capacity: int, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None
    ) -> Any:
        """The mixer's cache."""
        return self.mixer.init_cache(batch, capacity, dtype=dtype, device=device)  # type: ignore[operator]


class PreNorm(Block):
    """``x + mixer(norm(x))``, then ``x + ff(norm(x))`` (Xiong et al. 2020, arXiv:2002.04745)."""

    def __init__(
        self, mixer: nn.Module, ff: nn.Module, mixer_norm: nn.Module, ff_norm: nn.Module, **dropout: float
    ) -> None:
        super().__init__(mixer, ff, **dropout)
        self.mixer_norm = mixer_norm
        self.ff_norm = ff_norm

    def forward(self, x: Tensor, **call: Any) -> Tensor:
        x = x + self._drop(self.mixer(self.mixer_norm(x), **call), self.mixer_dropout)
        return x + self._drop(self.ff(self.ff_norm(x)), self.ff_dropout)


class NormedResidual(PreNorm):
    """As `PreNorm`, but added to the normed input: ``n + mixer(n)`` with ``n = norm(x)``, then the same with ``ff``."""

    def forward(self, x: Tensor, **call: Any) -> Tensor:
        x = self.mixer_norm(x)
        x = self.ff_norm(x + self._drop(self.mixer(x, **call), self.mixer_dropout))
        return x + self._drop(self.ff(x), self.ff_dropout)


class ScaledResidual(PreNorm):
    """``a n + b mixer(n)`` of the normed input ``n = norm(x)``, then the same with ``ff``, each with its own (a, b).

    MiniMax-01's (arXiv:2501.08313), after DeepNorm (Wang et al. 2022, arXiv:2203.00555).
    """

    def __init__(
        self,
        mixer: nn.Module,
        ff: nn.Module,
        mixer_norm: nn.Module,
        ff_norm: nn.Module,
        *,
        mixer_scales: tuple[float, float],
        ff_scales: tuple[float, float],
    ) -> None:
        super().__init__(mixer, ff, mixer_norm, ff_norm)
        self.mixer_scales = mixer_scales
        self.ff_scales = ff_scales

    def forward(self, x: Tensor, **call: Any) -> Tensor:
        x = self.mixer_norm(x)
        x = self.mixer_scales[0] * x + self.mixer_scales[1] * self.mixer(x, **call)
        x = self.ff_norm(x)
        out: Tensor = self.ff_scales[0] * x + self.ff_scales[1] * self.ff(x)
        return out


class Parallel(Block):
    """``x + mixer(norm(x)) + ff(ff_norm(x))``; without an ``ff_norm`` both read the one normed input.

    Wang and Komatsuzaki 2021, GPT-J.
    """

    def __init__(
        self, mixer: nn.Module, ff: nn.Module, norm: nn.Module, ff_norm: nn.Module | None = None, **dropout: float
    ) -> None:
        super().__init__(mixer, ff, **dropout)
        self.norm = norm
        self.ff_norm = ff_norm

    def forward(self, x: Tensor, **call: Any) -> Tensor:
        normed = self.norm(x)
        ff_input = normed if self.ff_norm is None else self.ff_norm(x)
        return x + self._drop(self.ff(ff_input) + self.mixer(normed, **call), self.ff_dropout)


class Sandwich(Block):
    """``x + post(mixer(pre(x)))``, then the same with ``ff`` and norms of its own (Gemma 2, arXiv:2408.00118)."""

    def __init__(
        self,
        mixer: nn.Module,
        ff: nn.Module,
        mixer_norms: tuple[nn.Module, nn.Module],
        ff_norms: tuple[nn.Module, nn.Module],
    ) -> None:
        super().__init__(mixer, ff)
        self.mixer_norm, self.mixer_post_norm = mixer_norms
        self.ff_norm, self.ff_post_norm = ff_norms

    def forward(self, x: Tensor, **call: Any) -> Tensor:
        x = x + self.mixer_post_norm(self.mixer(self.mixer_norm(x), **call))
        out: Tensor = x + self.ff_post_norm(self.ff(self.ff_norm(x)))
        return out


class PostNorm(Block):
    """``norm(x + mixer(x))``, then ``norm(x + ff(x))`` (Vaswani et al. 2017, arXiv:1706.03762)."""

    def __init__(
        self, mixer: nn.Module, ff: nn.Module, mixer_norm: nn.Module, ff_norm: nn.Module, **dropout: float
    ) -> None:
        super().__init__(mixer, ff, **dropout)
        self.mixer_norm = mixer_norm
        self.ff_norm = ff_norm

    def forward(self, x: Tensor, **call: Any) -> Tensor:
        x = self.mixer_norm(x + self._drop(self.mixer(x, **call), self.mixer_dropout))
        out: Tensor = self.ff_norm(x + self._drop(self.ff(x), self.ff_dropout))
        return out


class Embedding(nn.Module):
    """What enters a stack: ``norm(scale * tokens[ids] + types[type] + places(positions))``, each term but the first
    optional.

    ``scale`` is rounded to the parameters' dtype before it multiplies, as checkpoints with scaled embeddings were
    trained.

    Args:
        tokens: the table of the vocabulary.
        scale: what the table's rows are multiplied by; ``None`` for nothing.
        places: a module from positions ``(B, T)`` to ``(B, T, dim)``.
        types: the table of token types (segments A and B of a pair of sentences).
        norm: the last step.

    Raises:
        ValueError: for an id outside the vocabulary, and where the stack has no token types and ``types`` are given.
    """

    def __init__(
        self,
        tokens: nn.Embedding,
        *,
        scale: float | None = None,
        places: nn.Module | None = None,
        types: nn.Embedding | None = None,
        norm: nn.Module | None = None,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.tokens = tokens
        self.scale = scale
        self.places = places
        self.types = types
        self.norm = norm
        self.dropout = dropout

    def forward(self, ids: Tensor, positions: Tensor, types: Tensor | None = None) -> Tensor:
        try:
            x: Tensor = self.tokens(ids)
        except (IndexError, RuntimeError):  # a quantised table raises the latter
            self._check(ids)
            raise
        if self.scale is not None:
            x = x * torch.tensor(self.scale, dtype=torch.float64).to(x.dtype)
        if self.types is not None:
            x = x + self.types(torch.zeros_like(ids) if types is None else types)
        elif types is not None:
            raise ValueError("types: expected None, for this model has no token types, got a tensor")
        if self.places is not None:
            x = x + self.places(positions)
        if self.norm is not None:
            x = self.norm(x)
        return F.dropout(x, self.dropout, self.training) if self.dropout and self.training else x

    def _check(self, ids: Tensor) -> None:
        rows = getattr(self.tokens, "num_embeddings", None)
        if rows is None or not has_values(ids) or not ids.numel():
            return
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= rows:
            raise ValueError(f"ids: expected 0 to {rows - 1}, the vocabulary, got {low} to {high}") from None


class Scaled(nn.Module):
    """``factor * x``: what a branch or the logits are multiplied by."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return self.factor * x


class LogitsBias(nn.Module):
    """``x + bias``: a number for each token of the vocabulary, a buffer that is not trained and starts at 0."""

    bias: Tensor

    def __init__(self, vocab: int) -> None:
        super().__init__()
        self.register_buffer("bias", torch.empty(vocab))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.bias.to(x.dtype)


class Softcap(nn.Module):
    """``cap * tanh(x / cap)``: bounds logits smoothly (Bello et al. 2016, arXiv:1611.09940)."""

    def __init__(self, cap: float) -> None:
        super().__init__()
        if not cap > 0:
            raise ValueError(f"cap: expected a positive number, got {cap}")
        self.cap = cap

    def forward(self, x: Tensor) -> Tensor:
        return self.cap * torch.tanh(x / self.cap)


def tied_table(embedding: nn.Module) -> Tensor:
    """The table that a tied head reads: the embedding's weight, if that is all that the embedding looks up.

    Raises:
        ValueError: where it looks up something else.
    """
    tokens: nn.Module = embedding.tokens  # type: ignore[assignment]
    if type(tokens).forward is not nn.Embedding.forward or "forward" in tokens.__dict__:
        raise ValueError(
            f"head: it is tied to embedding.tokens.weight, and embedding.tokens is a {type(tokens).__name__} that"
            " looks up something else; expected an nn.Embedding there, or a head of its own"
        )
    weight: Tensor = tokens.weight  # type: ignore[assignment]
    return weight


def tokens_of_call(layer: nn.Module, resolved: TokenLayout, segments: Tensor | None) -> dict[str, Any]:
    """What a model tells a layer of the call's tokens: the library's own layers take them resolved, once for all."""
    mixer = getattr(layer, "mixer", getattr(layer, "self_mixer", layer))
    if getattr(type(mixer).forward, "takes_token_layout", False) and "forward" not in mixer.__dict__:
        return {"positions": resolved}
    return {"keep": resolved.keep, "positions": resolved.positions, "segments": segments}
