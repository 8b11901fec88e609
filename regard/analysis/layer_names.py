"""What layers are called in tables: by their class and sizes."""

from __future__ import annotations

from torch import nn

from regard.analysis.costs import window_of
from regard.mixers.gated_delta_net import GatedDeltaNet
from regard.mixers.griffin import GriffinRecurrent
from regard.mixers.kda import KimiDeltaAttention
from regard.mixers.latent import MultiHeadLatentAttention
from regard.mixers.lightning import LightningAttention
from regard.mixers.mamba1 import Mamba
from regard.mixers.mamba2 import Mamba2
from regard.mixers.recurrent import RecurrentLayer
from regard.mixers.softmax import MultiHeadAttention
from regard.models.experts import MixtureOfExperts, Router
from regard.models.feedforward import MLP, GatedMLP

__all__ = ["feedforward_label", "mixer_label"]

NAMES: dict[type[nn.Module], str] = {
    GatedDeltaNet: "Gated DeltaNet",
    GriffinRecurrent: "RG-LRU",
    KimiDeltaAttention: "Kimi Delta Attention",
    LightningAttention: "lightning attention",
    Mamba: "Mamba",
    Mamba2: "Mamba-2",
}


def mixer_label(layer: nn.Module) -> str:
    """A layer in a few words.

    >>> import regard
    >>> mixer_label(regard.nn.MultiHeadAttention(64, 8, kv_heads=2, mask=regard.masks.Window(16)))
    'grouped-query attention, 8 heads of 8, 2 key heads, window 16'
    """
    if isinstance(layer, MultiHeadAttention):
        kind = (
            "multi-head" if layer.kv_heads == layer.heads else "multi-query" if layer.kv_heads == 1 else "grouped-query"
        )
        words = [f"{kind} attention, {layer.heads} heads of {layer.head_dim}"]
        words += [f"{layer.kv_heads} key heads"] if kind == "grouped-query" else []
        return ", ".join(words + _window(layer))
    if isinstance(layer, MultiHeadLatentAttention):
        words = [f"latent attention, {layer.heads} heads, {layer.sizes.rank} + {layer.sizes.rope_dim}"]
        return ", ".join(words + ["gated"] * bool(layer.gate) + _window(layer))
    name = NAMES.get(type(layer), type(layer).__name__)
    if isinstance(layer, RecurrentLayer):
        state = max(layer.state_shapes().values(), key=len)
        return f"{name}, {' x '.join(map(str, layer.state_shapes().get('state', state)))}"
    return name


def _window(layer: MultiHeadAttention | MultiHeadLatentAttention) -> list[str]:
    window = window_of(layer)
    return [] if window is None else [f"window {window}"]


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
