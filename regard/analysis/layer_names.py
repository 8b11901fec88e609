"""What layers are called in tables, in a few words: mixers say it themselves (``layer.label()``)."""

from __future__ import annotations

from torch import nn

from regard.models.experts import MixtureOfExperts, Router
from regard.models.feedforward import MLP, GatedMLP

__all__ = ["feedforward_label", "mixer_label"]


def mixer_label(layer: nn.Module) -> str:
    """A layer in a few words.

    >>> import regard
    >>> mixer_label(regard.nn.MultiHeadAttention(64, 8, kv_heads=2, mask=regard.masks.Window(16)))
    'grouped-query attention, 8 heads of 8, 2 key heads, window 16'
    """
    label = getattr(layer, "label", None)
    return type(layer).__name__ if label is None else str(label())


def feedforward_label(part: nn.Module) -> str:
    """A feed-forward part in a few words.

    >>> from regard.models import GatedMLP, activation
    >>> feedforward_label(GatedMLP(8, 24, activation("silu")))
    'gated feed-forward, 24 wide'
    """
    if isinstance(part, MixtureOfExperts) and isinstance(part.router, Router):
        how = part.router.routing
        shared = "" if part.shared is None else " and a shared part"
        return f"{how.experts} experts, {how.chosen} a token{shared}"
    if isinstance(part, GatedMLP):
        return f"gated feed-forward, {part.up_proj.out_features} wide"
    if isinstance(part, MLP):
        return f"feed-forward, {part.up_proj.out_features} wide"
    return type(part).__name__
