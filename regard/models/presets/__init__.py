"""Released models with their published dimensions, built without memory for weights."""

from __future__ import annotations

from regard.models.presets import hybrids, latent, softmax
from regard.models.presets.base import Preset, skeleton
from regard.names import not_among

__all__ = ["PRESETS", "Preset", "preset", "skeleton"]

PRESETS: dict[str, Preset] = {item.name: item for item in (*softmax.PRESETS, *latent.PRESETS, *hybrids.PRESETS)}
"""Every preset, by its name."""


def preset(name: str) -> Preset:
    """The preset of that name, in letters of either case; ValueError lists the names there are.

    >>> preset("Llama-2-70B").config["num_key_value_heads"]
    8
    """
    found = PRESETS.get(name.lower()) if isinstance(name, str) else None
    if found is None:
        raise ValueError(f"name: {not_among(name, PRESETS)}")
    return found
