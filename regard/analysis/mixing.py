"""Y = M X: the mixing matrix of a layer, exactly."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

__all__ = ["mixing_matrix"]


def mixing_matrix(layer: nn.Module, x: Tensor, **arguments: Any) -> tuple[Tensor, Tensor]:
    """(M, V) with ``M @ V`` what the layer mixes, before norm, gate and output projection.

    M is ``(B, G, Tq, Tk)`` for G heads (or channels), V ``(B, G, Tk, D)``; before dropout; differentiable. `arguments`
    are the layer's own (mask, keep, positions, segments, context, cache); a cache is left as it is. O(Tq Tk) memory.

    Raises TypeError for a module that has no ``mixing`` method.

    >>> import torch, regard
    >>> layer = regard.nn.MultiHeadAttention(8, 2, mask=regard.masks.Causal())
    >>> M, V = mixing_matrix(layer, torch.randn(1, 4, 8))
    >>> M.shape, (M @ V).shape, bool((M.triu(1) == 0).all())
    (torch.Size([1, 2, 4, 4]), torch.Size([1, 2, 4, 4]), True)
    """
    mixing = getattr(layer, "mixing", None)
    if mixing is None:
        raise TypeError(f"layer: expected a layer with a mixing method, got {type(layer).__name__}")
    matrix, values = mixing(x, **arguments)
    return matrix, values
