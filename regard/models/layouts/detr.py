"""DETR with a ResNet, named as transformers or as timm names it (Carion et al. 2020, arXiv:2005.12872)."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from torch import nn

from regard.models.blocks import PostNorm
from regard.models.config import Config
from regard.models.feedforward import ACTIVATIONS, MLP, activation
from regard.models.images.detr import DETR, LearnedPlaces, PlacedAttention, QueryBlock, SinePlaces
from regard.models.images.matching import SetLoss, Weights
from regard.models.images.resnet import RESNETS, ResNet, ResNetShape
from regard.models.layouts.base import Layout, Plan
from regard.models.layouts.shared.bart_like import ATTENTION, ENDS, bart_start
from regard.models.layouts.shared.image_options import read_counts, read_labels
from regard.models.layouts.shared.rows import BOTH, WEIGHT, module_rows
from regard.models.tables import Ignored, Row

__all__ = ["DETR_LAYOUT"]

SYNONYMS = {
    "d_model": "hidden_size",
    "encoder_layers": "num_hidden_layers",
    "encoder_attention_heads": "num_attention_heads",
    "init_std": "initializer_range",
}
# Losses of masks, a head that a segmenter has; layers left out in training; what was once copied from BART.
INERT = frozenset(
    {
        "mask_loss_coefficient",
        "dice_loss_coefficient",
        "encoder_layerdrop",
        "decoder_layerdrop",
        "init_xavier_std",
        "classifier_dropout",
        "use_pretrained_backbone",
    }
)
BACKBONE = "model.backbone.conv_encoder.model."
NORM = ("weight", "bias", "running_mean", "running_var")


@dataclass(frozen=True)
class _Named:
    """A ResNet and what the file calls its parts."""

    shape: ResNetShape
    timm: bool

    def rows(self) -> list[Row]:
        if self.timm:
            return self._part("conv1", "bn1", "stem") + [
                row
                for i, depth in enumerate(self.shape.depths)
                for n in range(depth)
                for row in self._timm_block(f"layer{i + 1}.{n}", f"stages.{i}.{n}", i, n)
            ]
        stem = "embedder.embedder"
        return self._part(f"{stem}.convolution", f"{stem}.normalization", "stem") + [
            row
            for i, depth in enumerate(self.shape.depths)
            for n in range(depth)
            for row in self._block(f"encoder.stages.{i}.layers.{n}", f"stages.{i}.{n}", i, n)
        ]

    def _part(self, conv: str, norm: str, own: str) -> list[Row]:
        rows = module_rows({f"{BACKBONE}{conv}": f"backbone.{own}.conv"}, WEIGHT)
        return rows + module_rows({f"{BACKBONE}{norm}": f"backbone.{own}.norm"}, NORM)

    def _convolutions(self) -> int:
        return 3 if self.shape.bottleneck else 2

    def _has_shortcut(self, i: int, n: int) -> bool:
        before = (self.shape.stem, *self.shape.widths)[i]
        return n == 0 and (before != self.shape.widths[i] or self.shape.strides[i] != 1)

    def _block(self, stored: str, own: str, i: int, n: int) -> list[Row]:
        names = {f"layer.{k}": f"layers.{k}" for k in range(self._convolutions())}
        names |= {"shortcut": "shortcut"} if self._has_shortcut(i, n) else {}
        pairs = [(f"{stored}.{theirs}", f"{own}.{ours}") for theirs, ours in names.items()]
        return [r for at, to in pairs for r in self._part(f"{at}.convolution", f"{at}.normalization", to)]

    def _timm_block(self, stored: str, own: str, i: int, n: int) -> list[Row]:
        parts = [(f"conv{k + 1}", f"bn{k + 1}", f"layers.{k}") for k in range(self._convolutions())]
        parts += [("downsample.0", "downsample.1", "shortcut")] if self._has_shortcut(i, n) else []
        return [
            r for conv, norm, to in parts for r in self._part(f"{stored}.{conv}", f"{stored}.{norm}", f"{own}.{to}")
        ]


def _backbone(c: Config) -> _Named:
    """The backbone that the options state, in any of the ways that released files do."""
    dilated, channels = c.flag("dilation", False), c.count("num_channels", 3)
    given, name = c.table("backbone_config"), c.get("backbone")
    by_timm, more = (
        c.flag("use_timm_backbone", not given),
        Config(c.table("backbone_kwargs"), f"{c.source}: backbone_kwargs"),
    )
    options = Config(given, f"{c.source}: backbone_config", most=c.most)
    kind = options.name("model_type", "timm_backbone" if by_timm else "resnet", ("resnet", "timm_backbone"))
    if kind == "resnet":
        if name is not None:
            raise c.error("backbone", name, "null beside a backbone_config")
        if dilated:
            raise c.error("dilation", dilated, "false, for only timm's backbones are dilated")
        more.close()
        shape = _resnet(options)
        options.close(("stage_names", "out_indices", "chunk_size_feed_forward"))
        return _Named(shape, timm=False)
    if given and name is not None and options.get("backbone") not in (None, name):
        raise c.error("backbone", name, f"{options.get('backbone')!r}, as backbone_config says")
    name = options.name("backbone", "resnet50" if name is None else name, RESNETS)
    options.only("features_only", (True, None), "maps, not classes")
    for one in (options, more):
        one.only("num_channels", (channels, None))
        one.only("in_chans", (channels, None))
        one.only("output_stride", (16 if dilated else 32, None), "16 with dilation, 32 without")
        _last(one, "out_indices", ([4], [1, 2, 3, 4], (4,), (1, 2, 3, 4)))
    more.close()
    options.close(("stage_names", "out_features", "use_pretrained_backbone", "freeze_batch_norm_2d"))
    shape = replace(RESNETS[name], channels=channels)
    if dilated:
        shape = replace(shape, strides=(1, 2, 2, 1), dilations=(1, 1, 1, 2))
    return _Named(shape, timm=True)


def _last(c: Config, option: str, accepted: Collection[object]) -> None:
    given = c.get(option)
    if given is not None and given not in accepted:
        raise c.error(option, given, "the last stage's map")


def _resnet(c: Config) -> ResNetShape:
    """A ResNet of transformers' options."""
    depths = read_counts(c, "depths", (3, 4, 6, 3))
    room = c.most.get("num_hidden_layers", sum(depths))
    if sum(depths) > room:
        raise c.error("depths", depths, f"at most {room} blocks, the most that there is room for")
    widths = read_counts(c, "hidden_sizes", (256, 512, 1024, 2048), length=len(depths))
    bottleneck = c.name("layer_type", "bottleneck", ("basic", "bottleneck")) == "bottleneck"
    if bottleneck and any(n % 4 for n in widths):
        raise c.error("hidden_sizes", widths, "multiples of 4 for bottlenecks")
    last = f"stage{len(depths)}"
    named = c.get("out_features")
    if named is not None and (not isinstance(named, (list, tuple)) or not named or named[-1] != last):
        raise c.error("out_features", named, f"a list that ends with {last!r}, whose map the detector reads")
    return ResNetShape(
        widths,
        depths,
        bottleneck=bottleneck,
        stem=c.count("embedding_size", 64),
        channels=c.count("num_channels", 3),
        act=c.name("hidden_act", "relu", ACTIVATIONS),
        strides=(2 if c.flag("downsample_in_first_stage", False) else 1, *[2] * (len(depths) - 1)),
        dilations=(1,) * len(depths),
        stride_first=c.flag("downsample_in_bottleneck", False) and bottleneck,
    )


def _objective(c: Config) -> SetLoss:
    def weight(name: str, default: float) -> float:
        return c.number(name, default, least=0.0)

    cost = Weights(weight("class_cost", 1.0), weight("bbox_cost", 5.0), weight("giou_cost", 2.0))
    loss = Weights(1.0, weight("bbox_loss_coefficient", 5.0), weight("giou_loss_coefficient", 2.0))
    return SetLoss(cost, loss, weight("eos_coefficient", 0.1))


def _detr(c: Config) -> Plan:
    c.only("is_encoder_decoder", (True, None), "an encoder and a decoder")
    c.only("scale_embedding", (False, None), "features as they are")
    backbone, objective = _backbone(c), _objective(c)
    dim, queries, classes = c.count("hidden_size", 256), c.count("num_queries", 100), read_labels(c)
    layers = c.count("num_hidden_layers", 6), c.count("decoder_layers", 6)
    heads = {"num_attention_heads": c.count("num_attention_heads", 8)}
    heads["decoder_attention_heads"] = c.count("decoder_attention_heads", 8)
    for option, count in heads.items():
        if dim % count:
            raise c.error(option, count, f"a divisor of d_model={dim}")
    hidden = c.count("encoder_ffn_dim", 2048), c.count("decoder_ffn_dim", 2048)
    act, inner = c.name("activation_function", "relu", ACTIVATIONS), c.dropout("activation_dropout", 0.0)
    dropout, weights = c.dropout("dropout", 0.1), c.dropout("attention_dropout", 0.0)
    learned = c.name("position_embedding_type", "sine", ("learned", "sine")) == "learned"
    if dim % (2 if learned else 4):
        raise c.error("hidden_size", dim, f"a multiple of {2 if learned else 4}, for places of two axes")
    between = c.flag("auxiliary_loss", False)

    def ff(width: int) -> nn.Module:
        part = activation(act)
        return MLP(dim, width, nn.Sequential(part, nn.Dropout(inner)) if inner else part)

    def mixer(count: int) -> nn.Module:
        return PlacedAttention(dim, count, dropout=weights)

    def encoding(i: int) -> nn.Module:
        norms = (nn.LayerNorm(dim), nn.LayerNorm(dim))
        part = mixer(heads["num_attention_heads"])
        return PostNorm(part, ff(hidden[0]), *norms, mixer_dropout=dropout, ff_dropout=dropout)

    def decoding(i: int) -> nn.Module:
        count = heads["decoder_attention_heads"]
        norms = (nn.LayerNorm(dim), nn.LayerNorm(dim), nn.LayerNorm(dim))
        return QueryBlock(mixer(count), mixer(count), ff(hidden[1]), norms, dropout=dropout)

    def make() -> DETR:
        model = DETR(
            ResNet(backbone.shape),
            nn.Conv2d(backbone.shape.widths[-1], dim, 1),
            LearnedPlaces(dim) if learned else SinePlaces(dim),
            [encoding] * layers[0],
            [decoding] * layers[1],
            queries,
            classes,
            norm_between=between,
        )
        model.objective = objective
        return model

    rows = backbone.rows() + _outer_rows(learned)
    for stack, count, table in (("encoder", layers[0], _encoder_names()), ("decoder", layers[1], _decoder_names())):
        for i in range(count):
            named = {f"model.{stack}.layers.{i}.{theirs}": f"{stack}.{i}.{own}" for theirs, own in table.items()}
            rows += module_rows(named, BOTH)
    return Plan(make, rows)


def _encoder_names() -> Mapping[str, str]:
    own = {f"self_attn.{theirs}": f"mixer.{ours}" for theirs, ours in ATTENTION.items()}
    return {**own, **ENDS, "self_attn_layer_norm": "mixer_norm"}


def _decoder_names() -> Mapping[str, str]:
    both = (("self_attn", "self_mixer"), ("encoder_attn", "cross_mixer"))
    own = {f"{at}.{theirs}": f"{to}.{ours}" for at, to in both for theirs, ours in ATTENTION.items()}
    return {**own, **ENDS, "self_attn_layer_norm": "self_norm", "encoder_attn_layer_norm": "cross_norm"}


def _outer_rows(learned: bool) -> list[Row]:
    names = {
        "model.input_projection": "neck",
        "model.decoder.layernorm": "norm",
        "class_labels_classifier": "class_head",
        **{f"bbox_predictor.layers.{i}": f"box_head.layers.{i}" for i in range(3)},
    }
    places = {f"model.position_embedding.{kind}_embeddings": f"places.{kind}s" for kind in ("row", "column")}
    tables = {"model.query_position_embeddings": "queries", **(places if learned else {})}
    return module_rows(names, BOTH) + module_rows(tables)


DETR_LAYOUT = Layout(
    "detr",
    "DetrForObjectDetection",
    _detr,
    spellings={
        f"backbone.position_embedding.{kind}_embeddings.weight": f"position_embedding.{kind}_embeddings.weight"
        for kind in ("row", "column")
    },
    synonyms=SYNONYMS,
    ignored=(Ignored("*.num_batches_tracked", "counts of a norm that no longer counts"),),
    inert=INERT,
    start=bart_start,
)
