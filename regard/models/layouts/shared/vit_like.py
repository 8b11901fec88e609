"""What the vision transformers share: sizes, the stack of blocks, the names of ViT's files, and how they are saved."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from torch import nn

from regard.mixers.parts import Scores
from regard.models.config import Config
from regard.models.encoder import FirstTokenPooler
from regard.models.feedforward import ACTIVATIONS, MLP, activation
from regard.models.images.patches import PatchTokens, TokenPlaces
from regard.models.layouts.base import Layout
from regard.models.layouts.shared.image_options import PlacesOnGrid
from regard.models.layouts.shared.options import read_eps
from regard.models.layouts.shared.rows import BOTH, MIXER, kinds, module_rows
from regard.models.model import Model
from regard.models.tables import Row, Viewed, per_layer
from regard.models.writing import write_folder

__all__ = [
    "HIDDEN",
    "ImageLayout",
    "ViTSizes",
    "layer_rows",
    "read_class",
    "read_pooler",
    "read_scores",
    "token_rows",
    "vit_sizes",
]

HIDDEN = "pre-training by hidden patches; the model ends at the classes"
REST = {
    "attention.output.dense": f"{MIXER}.o_proj",
    "intermediate.dense": "layers.{i}.ff.up_proj",
    "output.dense": "layers.{i}.ff.down_proj",
    "layernorm_before": "layers.{i}.mixer_norm",
    "layernorm_after": "layers.{i}.ff_norm",
}


@dataclass(frozen=True)
class ViTSizes:
    """What every vision transformer states."""

    dim: int
    layers: int
    heads: int
    hidden: int
    channels: int
    image: tuple[int, int]
    patch: tuple[int, int]
    act: str
    eps: float

    @property
    def grid(self) -> tuple[int, int]:
        """(rows, columns) of patches; what is left over is not read."""
        return self.image[0] // self.patch[0], self.image[1] // self.patch[1]

    def embedding(self, *, tokens: int = 0, placed: bool = True, dropout: float = 0.0) -> PatchTokens:
        """Patches behind learned tokens, with learned places or without."""
        return PatchTokens(
            self.channels,
            self.dim,
            self.patch,
            image=self.image,
            tokens=tokens,
            places=TokenPlaces(self.grid, self.dim, tokens=tokens) if placed else None,
            dropout=dropout,
        )

    def norm(self) -> nn.LayerNorm:
        return nn.LayerNorm(self.dim, self.eps)

    def ff(self) -> MLP:
        return MLP(self.dim, self.hidden, activation(self.act))


def vit_sizes(c: Config, *, act: str = "gelu", eps: float = 1e-12) -> ViTSizes:
    """The sizes, with those of the B/16 model as defaults."""
    dim, heads = c.count("hidden_size", 768), c.count("num_attention_heads", 12)
    if dim % heads:
        raise c.error("num_attention_heads", heads, f"a divisor of hidden_size={dim}")
    sizes = ViTSizes(
        dim,
        c.count("num_hidden_layers", 12),
        heads,
        c.count("intermediate_size", 3072),
        c.count("num_channels", 3),
        c.pair("image_size", 224),
        c.pair("patch_size", 16),
        c.name("hidden_act", act, ACTIVATIONS),
        read_eps(c, eps, "layer_norm_eps"),
    )
    if 0 in sizes.grid:
        raise c.error("patch_size", c.get("patch_size", 16), f"at most image_size={sizes.image}")
    return sizes


def read_class(c: Config, classes: Mapping[str, str]) -> str | None:
    """The class that a model has: of those, each with a tensor, that the file holds, the one that the options name.

    Where they name none of them it is the first that is held, or None. A model from options alone may hold all.
    """
    held = [name for name, tensor in classes.items() if c.holds(tensor)]
    named = c.get("architectures")
    named = named if isinstance(named, list) else []
    return next((name for name in held if name in named), held[0] if held else None)


def read_scores(c: Config, option: str) -> Scores:
    """Dropout of the weights."""
    return Scores(dropout=c.dropout(option, 0.0))


def read_pooler(c: Config, dim: int) -> Callable[[], nn.Module]:
    """The pooler of a ViT or DeiT without classes: a map of the class token, and its activation."""
    out = dim if c.get("pooler_output_size") in (None, 0) else c.count("pooler_output_size", dim)
    act = c.name("pooler_act", "tanh", ACTIVATIONS)
    return lambda: FirstTokenPooler(dim, out=out, act=activation(act))


def token_rows(prefix: str, sizes: ViTSizes, names: tuple[str, ...], *, placed: bool = True) -> list[Row]:
    """Rows of patches, of the learned tokens before them (by their names in the file), and of the places of all."""
    stored = f"{prefix}embeddings."
    rows = module_rows({f"{stored}patch_embeddings.projection": "embedding.proj"}, BOTH)
    flat = Viewed((1, 1, sizes.dim))
    rows += [Row(f"{stored}{name}", (f"embedding.tokens[{n}]",), flat) for n, name in enumerate(names)]
    if placed:
        own = ("embedding.places.tokens", "embedding.places.grid.weight")
        rows.append(Row(f"{stored}position_embeddings", own, PlacesOnGrid(sizes.grid, len(names))))
    return rows


def layer_rows(prefix: str, layers: int, *, bias: bool, key_bias: bool, more: Mapping[str, str]) -> list[Row]:
    """Rows of ViT's layers; `more` has further tensors of a layer, by their whole names."""
    stored = f"{prefix}encoder.layer.{{i}}."
    qkv = f"{stored}attention.attention."
    table = module_rows({f"{qkv}query": f"{MIXER}.q_proj", f"{qkv}value": f"{MIXER}.v_proj"}, kinds(bias))
    table += module_rows({f"{qkv}key": f"{MIXER}.k_proj"}, kinds(bias and key_bias))
    table += module_rows({stored + theirs: own for theirs, own in REST.items()}, BOTH)
    table += [Row(stored + theirs, (own,)) for theirs, own in more.items()]
    return [row for i in range(layers) for row in per_layer(table, i)]


@dataclass(frozen=True)
class ImageLayout(Layout):
    """A family of vision transformers; a folder names the class that its model has.

    Args:
        bare: the class of a model without a classifier; it is written without the prefix.
        distilled: the class of one with a classifier for the distillation token.
    """

    bare: str = ""
    distilled: str = ""

    def save(self, model: Model, folder: str | Path) -> None:
        assert model.origin is not None
        head = getattr(model, "classifier", None)
        name = self.bare if head is None else self.distilled if hasattr(head, "teacher") else self.architecture
        written = copy.copy(model)
        written.origin = replace(model.origin, layout=replace(self, architecture=name, headless=head is None))
        write_folder(written, folder)
