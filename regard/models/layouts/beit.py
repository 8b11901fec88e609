"""BEiT: relative places of a class token and a grid, scaled branches, the mean of the patches.

Bao et al. 2021, arXiv:2106.08254.
"""

from __future__ import annotations

from torch import nn

from regard.mixers.parts import Projections
from regard.models.config import Config
from regard.models.images.blocks import ChannelScale, ImageBlock
from regard.models.images.vit import ClassPlaces, FirstTokens, ImageEncoder, MeanPooler, PatchAttention
from regard.models.layouts.base import Plan
from regard.models.layouts.shared.image_options import read_labels
from regard.models.layouts.shared.rows import BOTH, MIXER, module_rows
from regard.models.layouts.shared.vit_like import (
    HIDDEN,
    ImageLayout,
    layer_rows,
    read_class,
    read_scores,
    token_rows,
    vit_sizes,
)
from regard.models.tables import Ignored, Row

__all__ = ["BEIT"]

PREFIX, TABLE = "beit.", "relative_position_bias.relative_position_bias_table"


def _beit(c: Config) -> Plan:
    sizes = vit_sizes(c)
    dropout, scores = c.dropout("hidden_dropout_prob", 0.0), read_scores(c, "attention_probs_dropout_prob")
    placed = c.flag("use_absolute_position_embeddings", False)
    own, shared = c.flag("use_relative_position_bias", False), c.flag("use_shared_relative_position_bias", False)
    if (own or shared) and sizes.grid[0] != sizes.grid[1]:
        raise c.error("image_size", c.get("image_size"), "a square grid of patches beside relative places")
    start, skipped = c.number("layer_scale_init_value", 0.1), c.dropout("drop_path_rate", 0.1)
    if skipped == 1:
        raise c.error("drop_path_rate", skipped, "a probability below 1")
    mean, classes = c.flag("use_mean_pooling", True), read_labels(c)
    head_dim = None if c.get("head_dim") is None else c.count("head_dim", 64)
    pooler_norm = f"{PREFIX}pooler.layernorm.weight"
    found = read_class(c, {"BeitForImageClassification": "classifier.weight", "BeitModel": pooler_norm})
    headed = found == "BeitForImageClassification"
    pooled = headed or not mean or c.holds(pooler_norm)

    def layer(i: int) -> nn.Module:
        mixer = PatchAttention(
            sizes.dim,
            sizes.heads,
            head_dim=head_dim,
            projections=Projections(bias=True),
            scores=scores,
            key_bias=False,
            places=ClassPlaces(sizes.heads, sizes.grid) if own else None,
        )
        scales = (ChannelScale(sizes.dim, start), ChannelScale(sizes.dim, start)) if start > 0 else None
        return ImageBlock(
            mixer,
            sizes.ff(),
            sizes.norm(),
            sizes.norm(),
            skipped=skipped * i / max(sizes.layers - 1, 1),
            scales=scales,
            mixer_dropout=dropout,
            ff_dropout=dropout,
        )

    def make() -> ImageEncoder:
        pooler = MeanPooler(sizes.norm(), skip=1) if mean else FirstTokens()
        return ImageEncoder(
            sizes.embedding(tokens=1, placed=placed, dropout=dropout),
            [layer] * sizes.layers,
            None if mean else sizes.norm(),
            pooler if pooled else None,
            nn.Linear(sizes.dim, classes) if headed else None,
            places=ClassPlaces(sizes.heads, sizes.grid) if shared else None,
        )

    ends = {f"{PREFIX}pooler.layernorm": "pooler.norm"} if mean and pooled else {}
    ends |= {} if mean else {f"{PREFIX}layernorm": "norm"}
    ends |= {"classifier": "classifier"} if headed else {}
    more = {f"attention.attention.{TABLE}": f"{MIXER}.places.table"} if own else {}
    if start > 0:
        more |= {"lambda_1": "layers.{i}.mixer_scale.weight", "lambda_2": "layers.{i}.ff_scale.weight"}
    rows = token_rows(PREFIX, sizes, ("cls_token",), placed=placed) + module_rows(ends, BOTH)
    rows += [Row(f"{PREFIX}encoder.{TABLE}", ("places.table",))] if shared else []
    return Plan(make, rows + layer_rows(PREFIX, sizes.layers, bias=True, key_bias=False, more=more))


BEIT = ImageLayout(
    "beit",
    "BeitForImageClassification",
    _beit,
    prefix=PREFIX,
    ignored=(
        Ignored("*.relative_position_index", "old files store which row of a table each pair of places reads"),
        Ignored(f"{PREFIX}embeddings.mask_token", HIDDEN),
    ),
    # Heads of segmentation, maps of a backbone, and visual words of pre-training: none is part of this model.
    inert=frozenset(
        {
            "add_fpn",
            "auxiliary_channels",
            "auxiliary_concat_input",
            "auxiliary_loss_weight",
            "auxiliary_num_convs",
            "out_features",
            "out_indices",
            "pool_scales",
            "reshape_hidden_states",
            "segmentation_indices",
            "semantic_loss_ignore_index",
            "stage_names",
            "use_auxiliary_head",
            "use_mask_token",
            "vocab_size",
        }
    ),
    bare="BeitModel",
)
