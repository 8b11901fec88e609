"""SigLIP's vision transformer: no class token; one learned query pools the patches.

Zhai et al. 2023, arXiv:2303.15343.

Of a whole SigLIP, ``siglip``, the part that reads images is loaded, with a classifier where the file has one.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from torch import nn

from regard.mixers.parts import Projections
from regard.models.blocks import PreNorm
from regard.models.config import Config
from regard.models.images.vit import AttentionPooler, ImageEncoder, MeanPooler
from regard.models.layouts.base import Plan
from regard.models.layouts.shared.image_options import PlacesOnGrid, read_labels
from regard.models.layouts.shared.rows import BOTH, MIXER, module_rows
from regard.models.layouts.shared.vit_like import ImageLayout, read_class, read_scores, vit_sizes
from regard.models.model import Model
from regard.models.tables import FusedQKV, Ignored, Row, Viewed, fused_rows, per_layer
from regard.nn import MultiHeadAttention

__all__ = ["SIGLIP", "SIGLIP_VISION"]

PREFIX = "vision_model."
LAYER = {
    "self_attn.q_proj": f"{MIXER}.q_proj",
    "self_attn.k_proj": f"{MIXER}.k_proj",
    "self_attn.v_proj": f"{MIXER}.v_proj",
    "self_attn.out_proj": f"{MIXER}.o_proj",
    "layer_norm1": "layers.{i}.mixer_norm",
    "layer_norm2": "layers.{i}.ff_norm",
    "mlp.fc1": "layers.{i}.ff.up_proj",
    "mlp.fc2": "layers.{i}.ff.down_proj",
}
OUTER = {
    "embeddings.patch_embedding": "embedding.proj",
    "post_layernorm": "norm",
}
HEAD = {
    "attention.out_proj": "attention.o_proj",
    "layernorm": "norm",
    "mlp.fc1": "ff.up_proj",
    "mlp.fc2": "ff.down_proj",
}


def _vision(c: Config, classes: int | None = None) -> Plan:
    """The part that reads images; with classes, scores of the patches' mean."""
    sizes = vit_sizes(c, act="gelu_pytorch_tanh", eps=1e-6)
    scores, pooled = read_scores(c, "attention_dropout"), c.flag("vision_use_head", True) and classes is None

    def layer(i: int) -> nn.Module:
        mixer = MultiHeadAttention(sizes.dim, sizes.heads, projections=Projections(bias=True), scores=scores)
        return PreNorm(mixer, sizes.ff(), sizes.norm(), sizes.norm())

    def make() -> ImageEncoder:
        pooler: nn.Module | None = None
        if classes is not None:
            pooler = MeanPooler()
        elif pooled:
            reading = Projections(bias=True, context_dim=sizes.dim)
            attention = MultiHeadAttention(sizes.dim, sizes.heads, projections=reading)
            pooler = AttentionPooler(sizes.dim, attention, sizes.ff(), sizes.norm())
        head = None if classes is None else nn.Linear(sizes.dim, classes)
        return ImageEncoder(sizes.embedding(), [layer] * sizes.layers, sizes.norm(), pooler, head)

    rows = module_rows({PREFIX + stored: own for stored, own in OUTER.items()}, BOTH)
    places = PlacesOnGrid(sizes.grid, leading=False)
    rows.append(Row(f"{PREFIX}embeddings.position_embedding.weight", ("embedding.places.grid.weight",), places))
    table = module_rows({f"{PREFIX}encoder.layers.{{i}}.{theirs}": own for theirs, own in LAYER.items()}, BOTH)
    rows += [row for i in range(sizes.layers) for row in per_layer(table, i)]
    if classes is not None:
        return Plan(make, rows + module_rows({"classifier": "classifier"}, BOTH))
    if pooled:
        rows.append(Row(f"{PREFIX}head.probe", ("pooler.probe",), Viewed((1, 1, sizes.dim))))
        rows += module_rows({f"{PREFIX}head.{theirs}": f"pooler.{own}" for theirs, own in HEAD.items()}, BOTH)
        qkv = FusedQKV(sizes.heads, sizes.heads, sizes.dim // sizes.heads, groups=1)
        fused = fused_rows(f"{PREFIX}head.attention.in_proj", "pooler.attention.*_proj", BOTH, qkv)
        rows += [replace(row, stored=row.stored.replace("in_proj.", "in_proj_")) for row in fused]
    return Plan(make, rows)


def _siglip(c: Config) -> Plan:
    vision = Config(c.table("vision_config"), f"{c.source}: vision_config", most=c.most)
    classes = read_labels(c)
    found = read_class(c, {"SiglipForImageClassification": "classifier.weight", "SiglipModel": "logit_scale"})
    plan = _vision(vision, None if found != "SiglipForImageClassification" else classes)
    vision.only("model_type", ("siglip_vision_model", None))
    vision.close()
    return plan


@dataclass(frozen=True)
class _Whole(ImageLayout):
    """Of a SigLIP without classes only the part that reads images is kept, so only that is written."""

    def save(self, model: Model, folder: str | Path) -> None:
        assert model.origin is not None
        if getattr(model, "classifier", None) is not None:
            return super().save(model, folder)
        given = model.origin.config.get("vision_config")
        config = dict(given if isinstance(given, Mapping) else {})
        written = copy.copy(model)
        written.origin = replace(model.origin, layout=SIGLIP_VISION, config=config)
        return SIGLIP_VISION.save(written, folder)


OLD = Ignored("*embeddings.position_ids", "old files store the numbers 0, 1, 2, ...")
SIGLIP_VISION = ImageLayout(
    "siglip_vision_model", "SiglipVisionModel", _vision, prefix=PREFIX, ignored=(OLD,), bare="SiglipVisionModel"
)
SIGLIP = _Whole(
    "siglip",
    "SiglipForImageClassification",
    _siglip,
    prefix=PREFIX,
    ignored=(
        OLD,
        Ignored("text_model.*", "the part that reads texts"),
        Ignored("logit_scale", "it compares images with texts"),
        Ignored("logit_bias", "it compares images with texts"),
        Ignored(f"{PREFIX}head.*", "beside a classifier, which reads the patches' mean"),
    ),
    inert=frozenset({"initializer_factor", "text_config"}),  # the factor is of a start in training,
)
