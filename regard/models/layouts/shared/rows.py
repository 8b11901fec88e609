"""Rows of tables that many families share; ``{i}`` stands for the layer's number."""

from __future__ import annotations

from collections.abc import Mapping

from regard.models.tables import Ignored, Row, Squeezed, one_to_one

__all__ = ["BOTH", "FF", "MIXER", "ROTARY_BUFFER", "SEVERAL_AHEAD", "WEIGHT", "conv_rows", "kinds", "module_rows"]

MIXER, FF = "layers.{i}.mixer", "layers.{i}.ff"
"""A model's names of the two parts of a layer."""
WEIGHT, BOTH = ("weight",), ("weight", "bias")
ROTARY_BUFFER = Ignored("*rotary_emb.inv_freq", "old files store the rotary frequencies, which follow from the options")
SEVERAL_AHEAD = "a module that predicts several tokens ahead; this decoder predicts the next one"


def kinds(bias: bool) -> tuple[str, ...]:
    """The tensors of a linear map with or without a bias."""
    return BOTH if bias else WEIGHT


def module_rows(names: Mapping[str, str], kinds: tuple[str, ...] = WEIGHT) -> list[Row]:
    """Rows for modules: each pair ``file: model`` with every kind of tensor appended."""
    return one_to_one({f"{stored}.{k}": f"{own}.{k}" for stored, own in names.items() for k in kinds})


def conv_rows(stored: str, widths: Mapping[str, int]) -> list[Row]:
    """One convolution over [q, k, v] that is stored in parts; `widths` are their channels, by their names."""
    rows, first = [], 0
    for name, width in widths.items():
        part = f"{MIXER}.conv.weight[{first}:{first + width}]"
        rows.append(Row(f"{stored}.{name}.weight", (part,), Squeezed(1)))
        first += width
    return rows
