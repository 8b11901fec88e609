"""The cache of latent attention: one short vector a token."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from regard.caches.base import Cache, KVView
from regard.caches.keys import appended
from regard.checks import whole
from regard.tokens import Slots, TokenLayout

__all__ = ["LatentCache"]


class LatentCache(Cache):
    """What latent attention keeps of up to `capacity` tokens: B · capacity · (rank + rope_dim) elements, no heads.

    `latent` (B, 1, capacity, rank + rope_dim): the normed latent, then the rotated key part that all heads share. As
    keys all of it is read, as values its first `rank` channels. Raises `CacheFull` before anything changes.
    """

    tensor_names = ("latent",)

    def __init__(
        self, batch: int, capacity: int, rank: int, rope_dim: int, dtype: torch.dtype, device: Any = None
    ) -> None:
        super().__init__(batch, whole("capacity", capacity, 0), device)
        self.capacity, self.rank = capacity, rank
        self.latent = torch.zeros(batch, 1, capacity, rank + rope_dim, dtype=dtype, device=device)

    def _can_crop(self, n: int) -> None:
        """Earlier tokens are all still there."""

    def extend(self, latent: Tensor, layout: TokenLayout) -> KVView:
        """What a call with new latents (B, 1, T, rank + rope_dim) reads, the new ones last; nothing is changed yet."""
        self.room_for(latent.shape[2])
        if latent.shape[3] != self.latent.shape[3]:
            raise ValueError(f"cache: made for latents of {self.latent.shape[3]}, got a layer with {latent.shape[3]}")
        if latent.device != self.latent.device:
            raise ValueError(f"cache: it is on {self.latent.device}, got latents on {latent.device}")
        joined = appended(self.latent, latent, self.length)
        return KVView(joined, joined[..., : self.rank], 0, *self._marks(0, layout, latent), (latent, layout))

    def commit(self, latent: Tensor, layout: TokenLayout) -> None:
        """Store the new latents: the call has succeeded."""
        Slots(self.latent, 2).write(self.length, latent.detach())
        self.history.write(self.length, layout, latent.shape[2])
        self.length += latent.shape[2]
