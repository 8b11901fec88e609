"""Swin v1 and v2, with a classifier or without (Liu et al. 2021, arXiv:2103.14030 and arXiv:2111.09883).

v1 cuts a map that is no larger than a window into windows of its own; v2's windows are those of maps of ``image_size``
pixels, and smaller or larger images are padded to whole ones. Both as transformers computes them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from regard.models.config import Config
from regard.models.feedforward import ACTIVATIONS, MLP, activation
from regard.models.images.patches import GridPlaces
from regard.models.images.swin import (
    BranchNorm,
    PatchGrid,
    PatchMerging,
    SwinBlock,
    SwinStage,
    SwinTransformer,
    SwinV2Block,
)
from regard.models.layouts.base import Layout, Plan
from regard.models.layouts.shared.image_options import PlacesOnGrid, read_counts, read_labels
from regard.models.layouts.shared.options import read_eps
from regard.models.layouts.shared.rows import BOTH, WEIGHT, kinds, module_rows
from regard.models.tables import Ignored, Row, Viewed
from regard.nn import LogPlaces, ShiftedWindowAttention

__all__ = ["SWIN", "SWINV2"]

QKV = {"query": "q_proj", "value": "v_proj"}
REST = {
    "attention.output.dense": "mixer.o_proj",
    "intermediate.dense": "ff.up_proj",
    "output.dense": "ff.down_proj",
    "layernorm_before": "mixer_norm",
    "layernorm_after": "ff_norm",
}
HIDDEN = "pre-training by hidden patches; the model ends at the classes"
# What a decoder of hidden patches cuts, and which maps a backbone hands out: `SwinTransformer.maps` gives all.
INERT = frozenset({"encoder_stride", "out_features", "out_indices", "stage_names", "use_mask_token"})


@dataclass(frozen=True)
class _Sizes:
    """What both versions read."""

    dim: int
    depths: tuple[int, ...]
    heads: tuple[int, ...]
    window: int
    image: tuple[int, int]
    patch: tuple[int, int]

    def grid(self, stage: int) -> tuple[int, int]:
        """The map of a stage for images of the stated size."""
        rows, columns = (n // p for n, p in zip(self.image, self.patch, strict=True))
        return rows // 2**stage, columns // 2**stage


def _sizes(c: Config) -> _Sizes:
    dim, depths = c.count("embed_dim", 96), read_counts(c, "depths", (2, 2, 6, 2))
    room = c.most.get("num_hidden_layers", sum(depths))
    if sum(depths) > room:
        raise c.error("depths", depths, f"at most {room} layers, the most that there is room for")
    heads = read_counts(c, "num_heads", (3, 6, 12, 24), length=len(depths))
    for stage, count in enumerate(heads):
        if dim * 2**stage % count:
            raise c.error("num_heads", heads, f"divisors of the stages' widths, {dim} and its doubles")
    c.only("num_layers", (len(depths), None), "the length of depths")
    c.only("hidden_size", (dim * 2 ** (len(depths) - 1), None), "the width of the last stage")
    c.only("path_norm", (True, None), "a norm behind the patches")
    c.only("attention_probs_dropout_prob", (0.0, None), "windows without dropout of weights")
    return _Sizes(dim, depths, heads, c.count("window_size", 7), c.pair("image_size", 224), c.pair("patch_size", 4))


def _plan(
    c: Config,
    sizes: _Sizes,
    prefix: str,
    mixer: Callable[[int, int, bool], nn.Module],
    table: Callable[[int], list[Row]],
) -> Plan:
    """The whole model; `mixer(stage, number in it, bias)` and `table(stage)`, a mixer's rows, are the version's."""
    second = prefix == "swinv2."
    eps, biased = read_eps(c, 1e-5, "layer_norm_eps"), c.flag("qkv_bias", True)
    act, dropout = c.name("hidden_act", "gelu", ACTIVATIONS), c.dropout("hidden_dropout_prob", 0.0)
    ratio, skipped = c.amount("mlp_ratio", 4.0), c.dropout("drop_path_rate", 0.1)
    channels, classes = c.count("num_channels", 3), read_labels(c)
    if int(ratio * sizes.dim) < 1:
        raise c.error("mlp_ratio", ratio, f"at least 1/{sizes.dim}, one channel")
    if skipped == 1:
        raise c.error("drop_path_rate", skipped, "a probability below 1")
    placed = c.flag("use_absolute_embeddings", False)
    if placed and second:
        raise c.error("use_absolute_embeddings", True, "False, for transformers' Swinv2 cannot add them to its patches")
    headed = c.holds("classifier.weight")
    layers = sum(sizes.depths)

    def stage(i: int) -> SwinStage:
        dim, first = sizes.dim * 2**i, sum(sizes.depths[:i])

        def block(n: int) -> nn.Module:
            kind, norm = (SwinV2Block, BranchNorm) if second else (SwinBlock, nn.LayerNorm)
            return kind(
                mixer(i, n, biased),
                MLP(dim, int(ratio * dim), activation(act)),
                norm(dim, eps),
                norm(dim, eps),
                skipped=skipped * (first + n) / max(layers - 1, 1),
                mixer_dropout=0.0 if second else dropout,
                ff_dropout=dropout,
            )

        merge = PatchMerging(dim, norm_last=second) if i + 1 < len(sizes.depths) else None
        return SwinStage([block(n) for n in range(sizes.depths[i])], merge)

    def make() -> SwinTransformer:
        places = GridPlaces(sizes.grid(0), sizes.dim) if placed else None
        last = sizes.dim * 2 ** (len(sizes.depths) - 1)
        return SwinTransformer(
            PatchGrid(channels, sizes.dim, sizes.patch, places=places, dropout=dropout),
            [stage] * len(sizes.depths),
            nn.LayerNorm(last, eps),
            nn.Linear(last, classes) if headed else None,
        )

    outer = {
        "embeddings.patch_embeddings.projection": "embedding.proj",
        "embeddings.norm": "embedding.norm",
        "layernorm": "norm",
    }
    rows = module_rows({prefix + theirs: own for theirs, own in outer.items()}, BOTH)
    rows += module_rows({"classifier": "classifier"} if headed else {}, BOTH)
    if placed:
        own = ("embedding.places.weight",)
        rows.append(Row(f"{prefix}embeddings.position_embeddings", own, PlacesOnGrid(sizes.grid(0))))
    for i, depth in enumerate(sizes.depths):
        stored = f"{prefix}encoder.layers.{i}"
        if i + 1 < len(sizes.depths):
            rows += module_rows({f"{stored}.downsample.norm": f"stages.{i}.merge.norm"}, BOTH)
            rows += module_rows({f"{stored}.downsample.reduction": f"stages.{i}.merge.reduction"}, WEIGHT)
        shared = module_rows({f"attention.self.{t}": f"mixer.{own}" for t, own in QKV.items()}, kinds(biased))
        shared += module_rows({"attention.self.key": "mixer.k_proj"}, kinds(biased and not second))
        shared += module_rows(REST, BOTH) + table(i)
        rows += [
            Row(f"{stored}.blocks.{n}.{r.stored}", tuple(f"stages.{i}.layers.{n}.{o}" for o in r.own), r.reshape)
            for n in range(depth)
            for r in shared
        ]
    return Plan(make, rows)


def _swin(c: Config) -> Plan:
    sizes = _sizes(c)

    def mixer(stage: int, n: int, bias: bool) -> nn.Module:
        dim, shift = sizes.dim * 2**stage, sizes.window // 2 if n % 2 else 0
        return ShiftedWindowAttention(dim, sizes.heads[stage], sizes.window, shift=shift, bias=bias)

    def table(stage: int) -> list[Row]:
        return [Row("attention.self.relative_position_bias_table", ("mixer.places.table",))]

    return _plan(c, sizes, "swin.", mixer, table)


def _swinv2(c: Config) -> Plan:
    sizes = _sizes(c)
    trained = c.get("pretrained_window_sizes")
    trained = [0] * len(sizes.depths) if trained is None else trained
    if (
        not isinstance(trained, list | tuple)
        or len(trained) != len(sizes.depths)
        or any(isinstance(n, bool) or not isinstance(n, int) or n < 0 or n == 1 for n in trained)
    ):
        raise c.error("pretrained_window_sizes", trained, "0 or a window of 2 tokens or more for each stage")

    def mixer(stage: int, n: int, bias: bool) -> nn.Module:
        rows = sizes.grid(stage)[0]
        window = max(min(rows, sizes.window), 1)
        shift = sizes.window // 2 if n % 2 and rows > window else 0

        def places(heads: int) -> nn.Module:
            return LogPlaces(heads, pretrained=trained[stage] or None)

        return ShiftedWindowAttention(
            sizes.dim * 2**stage,
            sizes.heads[stage],
            window,
            shift=shift,
            places=places,
            cosine=True,
            bias=bias,
            shrinks=False,
        )

    def table(stage: int) -> list[Row]:
        stored, own = "attention.self.continuous_position_bias_mlp", "mixer.places"
        rows = module_rows({f"{stored}.0": f"{own}.first"}, BOTH) + module_rows({f"{stored}.2": f"{own}.second"})
        scale = Viewed((sizes.heads[stage], 1, 1))
        return [*rows, Row("attention.self.logit_scale", ("mixer.logit_scale",), scale)]

    return _plan(c, sizes, "swinv2.", mixer, table)


def _ignored(prefix: str) -> tuple[Ignored, ...]:
    return (
        Ignored("*.relative_position_index", "old files store which row of a table each pair of places reads"),
        Ignored("*.relative_coords_table", "old files store the offsets, which follow from the window"),
        Ignored("*.attn_mask", "old files store the masks of shifted windows, which follow from the window"),
        Ignored(f"{prefix}embeddings.mask_token", HIDDEN),
        Ignored("decoder.*", HIDDEN),
    )


SWIN = Layout("swin", "SwinForImageClassification", _swin, prefix="swin.", ignored=_ignored("swin."), inert=INERT)
SWINV2 = Layout(
    "swinv2", "Swinv2ForImageClassification", _swinv2, prefix="swinv2.", ignored=_ignored("swinv2."), inert=INERT
)
