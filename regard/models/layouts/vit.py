"""ViT and DeiT: vision transformers with a class token, and one with a second token that learns from a teacher.

Dosovitskiy et al. 2020, arXiv:2010.11929; Touvron et al. 2020, arXiv:2012.12877.
"""

from __future__ import annotations

from torch import nn

from regard.mixers.parts import Projections
from regard.models.blocks import PreNorm
from regard.models.config import Config
from regard.models.images.vit import DistilledClassifier, FirstTokens, ImageEncoder
from regard.models.layouts.base import Plan
from regard.models.layouts.shared.image_options import read_labels
from regard.models.layouts.shared.rows import BOTH, module_rows
from regard.models.layouts.shared.vit_like import (
    HIDDEN,
    ImageLayout,
    layer_rows,
    read_class,
    read_pooler,
    read_scores,
    token_rows,
    vit_sizes,
)
from regard.models.tables import Ignored
from regard.nn import MultiHeadAttention

__all__ = ["DEIT", "VIT"]


ENDS = ("ForImageClassificationWithTeacher", "ForImageClassification", "Model")


def _plan(c: Config, kind: str, names: tuple[str, ...]) -> Plan:
    """A model with these learned tokens; which head it has is for the file to say."""
    sizes, prefix = vit_sizes(c), f"{kind.lower()}."
    bias, dropout = c.flag("qkv_bias", True), c.dropout("hidden_dropout_prob", 0.0)
    scores, classes = read_scores(c, "attention_probs_dropout_prob"), read_labels(c)
    head_dim = None if c.get("head_dim") is None else c.count("head_dim", 64)
    pooler = read_pooler(c, sizes.dim)
    heads = {"ForImageClassification": "classifier.weight", "Model": f"{prefix}pooler.dense.weight"}
    if len(names) > 1:
        heads = {"ForImageClassificationWithTeacher": "distillation_classifier.weight", **heads}
    found = read_class(c, {kind + end: tensor for end, tensor in heads.items()})
    distilled, headed, pooled = (found == kind + end for end in ENDS)

    def layer(i: int) -> nn.Module:
        projections = Projections(bias=bias, out_bias=True)
        mixer = MultiHeadAttention(sizes.dim, sizes.heads, head_dim=head_dim, projections=projections, scores=scores)
        return PreNorm(mixer, sizes.ff(), sizes.norm(), sizes.norm(), mixer_dropout=dropout, ff_dropout=dropout)

    def make() -> ImageEncoder:
        embedding = sizes.embedding(tokens=len(names), dropout=dropout)
        head: tuple[nn.Module | None, nn.Module | None] = (pooler() if pooled else None, None)
        if distilled:
            head = FirstTokens(2), DistilledClassifier(sizes.dim, classes)
        elif headed:
            head = FirstTokens(), nn.Linear(sizes.dim, classes)
        return ImageEncoder(embedding, [layer] * sizes.layers, sizes.norm(), *head)

    ends = {f"{prefix}layernorm": "norm"}
    if distilled:
        ends |= {"cls_classifier": "classifier.labels", "distillation_classifier": "classifier.teacher"}
    elif headed:
        ends |= {"classifier": "classifier"}
    elif pooled:
        ends |= {f"{prefix}pooler.dense": "pooler.dense"}
    rows = token_rows(prefix, sizes, names) + module_rows(ends, BOTH)
    return Plan(make, rows + layer_rows(prefix, sizes.layers, bias=bias, key_bias=True, more={}))


def _vit(c: Config) -> Plan:
    return _plan(c, "ViT", ("cls_token",))


def _deit(c: Config) -> Plan:
    return _plan(c, "DeiT", ("cls_token", "distillation_token"))


def _ignored(prefix: str) -> tuple[Ignored, ...]:
    return (
        Ignored(f"{prefix}pooler.*", "beside a classifier, which reads the class token itself"),
        Ignored(f"{prefix}embeddings.mask_token", HIDDEN),
        Ignored("decoder.*", HIDDEN),
    )


# What a decoder of hidden patches cuts; dimensions of a mask of patches.
INERT = frozenset({"encoder_stride"})
VIT = ImageLayout(
    "vit",
    "ViTForImageClassification",
    _vit,
    prefix="vit.",
    ignored=_ignored("vit."),
    inert=INERT,
    bare="ViTModel",
)
DEIT = ImageLayout(
    "deit",
    "DeiTForImageClassification",
    _deit,
    prefix="deit.",
    ignored=_ignored("deit."),
    inert=INERT,
    bare="DeiTModel",
    distilled="DeiTForImageClassificationWithTeacher",
)
