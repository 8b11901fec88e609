"""The parts of latent attention: its sizes, and how queries, latents and the output are made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from regard.checks import is_factory, whole
from regard.mixers.parts import RMSNorm

__all__ = ["LatentProjections", "LatentSizes"]


@dataclass(frozen=True)
class LatentSizes:
    """The sizes of latent attention.

    Args:
        rank: of the latent that keys and values are made from (kv_lora_rank).
        nope_dim: a head's query and key channels that are made from latents and never rotate.
        rope_dim: a head's further query channels, whose key channels all heads share; 0 for none.
        value_dim: a head's value channels.
        q_rank: inner width of the queries' projection; None for one whole matrix.

    >>> LatentSizes(512, 128, 64, 128).per_token  # DeepSeek-V2
    576
    """

    rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    q_rank: int | None = None

    def __post_init__(self) -> None:
        for name, least in (("rank", 1), ("nope_dim", 1), ("rope_dim", 0), ("value_dim", 1)):
            whole(name, getattr(self, name), least)
        if self.q_rank is not None:
            whole("q_rank", self.q_rank, 1)

    @property
    def key_dim(self) -> int:
        """Channels of a head's queries and keys."""
        return self.nope_dim + self.rope_dim

    @property
    def per_token(self) -> int:
        """Elements that a cache holds of a token."""
        return self.rank + self.rope_dim

    def expanded_cost(self, queries: int, keys: int, pairs: int | None = None) -> int:
        """Multiplications per head and row when every head's keys and values are formed; `pairs` is all by default."""
        expansion = self.rank * (self.nope_dim + self.value_dim)
        met = queries * keys if pairs is None else pairs
        return keys * expansion + met * (self.key_dim + self.value_dim)

    def absorbed_cost(self, queries: int, keys: int, pairs: int | None = None) -> int:
        """Multiplications per head and row when queries and results pass through the expansion instead."""
        expansion = self.rank * (self.nope_dim + self.value_dim)
        met = queries * keys if pairs is None else pairs
        return queries * expansion + met * (self.per_token + self.rank)


@dataclass(frozen=True)
class LatentProjections:
    """How latent attention's queries, latents and output are made.

    Args:
        bias: the projections from and to the tokens' width have biases, but a whole query matrix has none.
        gate: the heads' outputs are multiplied by ``sigmoid(gate_proj(x))``: channel by channel (``"channel"``) or by
            one number per head (``"head"``); None for no gate.
        norm: a module factory; ``norm(rank)`` normalises the latent, and another the compressed queries.
    """

    bias: bool = False
    gate: str | None = None
    norm: Callable[[int], nn.Module] = RMSNorm

    def __post_init__(self) -> None:
        if self.gate not in (None, "channel", "head"):
            raise ValueError(f"gate: expected 'channel', 'head' or None, got {self.gate!r}")
        is_factory("norm", self.norm)
