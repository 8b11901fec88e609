"""Other mixing layers for a model of the same size: its heads in other groupings, latent attention, hybrids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from regard.masks import Causal
from regard.mixers.kda import KimiDeltaAttention
from regard.mixers.latent import LatentSizes, MultiHeadLatentAttention
from regard.mixers.softmax import MultiHeadAttention

__all__ = ["HYBRID", "OWN", "Heads", "alternatives", "heads_of"]

OWN, HYBRID = "its attention in every layer", "hybrid 3:1 with KDA"
PERIOD = 4  # three layers with a state, one of attention


@dataclass(frozen=True)
class Heads:
    """Width, number of heads, and channels of a head: what alternatives of the same size keep."""

    dim: int
    heads: int
    head_dim: int

    @property
    def groups(self) -> int:
        """Key heads of grouped-query attention: 8, or the largest divisor of the heads below."""
        return max(n for n in range(1, min(8, self.heads) + 1) if self.heads % n == 0)

    def attention(self, kv_heads: int) -> nn.Module:
        """Causal softmax attention with so many key heads."""
        return MultiHeadAttention(self.dim, self.heads, kv_heads=kv_heads, head_dim=self.head_dim, mask=Causal())

    def latent(self, sizes: LatentSizes) -> nn.Module:
        """Causal latent attention."""
        return MultiHeadLatentAttention(self.dim, self.heads, sizes, mask=Causal())

    def state(self) -> nn.Module:
        """Kimi Delta Attention with a matrix of a head's size squared for every head."""
        return KimiDeltaAttention(self.dim, self.heads, key_dim=self.head_dim)


def heads_of(mixers: Sequence[nn.Module]) -> tuple[Heads, nn.Module | None]:
    """The heads of a stack's attention, and a layer of it; of its states (and None) where there is no attention.

    Of latent attention the heads' value channels count: multi-head attention of DeepSeek-V2's dimensions has heads of
    128, without the 64 rotated channels beside them.
    """
    for layer in mixers:
        if isinstance(layer, MultiHeadAttention):
            return Heads(layer.dim, layer.heads, layer.head_dim), layer
        if isinstance(layer, MultiHeadLatentAttention):
            return Heads(layer.dim, layer.heads, layer.sizes.value_dim), layer
    first = mixers[0]
    dim, heads = (getattr(first, name, None) for name in ("dim", "heads"))
    if not isinstance(dim, int):
        raise TypeError(f"layer: expected a layer of regard.nn, got {type(first).__name__}")
    heads = heads if isinstance(heads, int) else max(1, dim // 128)
    size = getattr(first, "head_dim", getattr(first, "value_dim", None))
    return Heads(dim, heads, size if isinstance(size, int) else max(1, dim // heads)), None


def alternatives(mixers: Sequence[nn.Module]) -> dict[str, list[nn.Module]]:
    """Arrangements of as many layers by name, on the meta device.

    Multi-head, grouped-query and multi-query attention without windows; latent attention (with the stack's own sizes,
    or DeepSeek-V2's 512 + 64); the stack's own attention in every layer, where only some have it; and in every fourth
    layer, where all have it, with Kimi Delta Attention of as many heads in the others.
    """
    how, own = heads_of(mixers)
    count = len(mixers)
    sizes = LatentSizes(512, how.head_dim, 64, how.head_dim)
    if isinstance(own, MultiHeadLatentAttention):
        sizes = own.sizes
    kv_heads = {"multi-head": how.heads, f"grouped-query, {how.groups} key heads": how.groups, "multi-query": 1}
    with torch.device("meta"):
        found = {name: [how.attention(n)] * count for name, n in kv_heads.items()}
        found[f"latent, {sizes.rank} + {sizes.rope_dim}"] = [how.latent(sizes)] * count
        full = how.attention(how.groups) if own is None else own
        if own is not None and any(type(layer) is not type(own) for layer in mixers):
            found[OWN] = [own] * count
        state = how.state()
    found[HYBRID] = [full if (i + 1) % PERIOD == 0 else state for i in range(count)]
    return found
