"""What a preset is, and a model without memory for its weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from regard.models.config import SIZE
from regard.models.layouts import Layout, layout_of
from regard.models.model import Model, Origin

__all__ = ["MOST", "Preset", "skeleton"]

MOST = {
    "num_hidden_layers": 4096,
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4096),
    SIZE: 2**24,
}
"""Bounds on what options may state where no file's tensors bound them: every layer and expert is built, and rotary
frequencies are formed."""


@dataclass(frozen=True)
class Preset:
    """A released model's options, as its ``config.json`` states them.

    Args:
        name: what the command line calls it.
        release: what its authors call it.
        source: authors, year, arXiv id.
        parameters, active: as the release states them: all, and those that one token uses.
        config: the options.
        note: what differs from the release, or is not certain.
        partial: whether parts of the model are left out.
        layout: of a release that has none in `regard.models.LAYOUTS`.

    >>> from regard.models.presets import preset
    >>> preset("DeepSeek-V2").build().layers[0].init_cache(1, 100, device="meta").latent.shape
    torch.Size([1, 1, 100, 576])
    """

    name: str
    release: str
    source: str
    parameters: str
    config: Mapping[str, Any]
    active: str | None = None
    note: str = ""
    partial: bool = False
    layout: Layout | None = None

    def build(self) -> Model:
        """The model on the meta device: every part with its shapes, without memory."""
        return skeleton(self.config, self.name, self.layout)


def skeleton(config: Mapping[str, Any], source: str, layout: Layout | None = None) -> Model:
    """The model that options describe, on the meta device: every part with its shapes, without memory.

    It is built as `regard.load` builds it before it reads weights, in evaluation mode.

    Args:
        config: what a ``config.json`` holds.
        source: what errors call it.
        layout: of the family; by default the one that ``model_type`` names.

    Raises:
        CheckpointError: naming an option that is unknown, or whose value is not supported.

    >>> model = skeleton({"model_type": "llama", "num_hidden_layers": 2}, "mine")
    >>> len(model.layers), model.layers[0].mixer.q_proj.weight.device.type
    (2, 'meta')
    """
    family = layout_of(config, source) if layout is None else layout
    plan = family.read(config, source, lambda name: False, most=MOST)
    with torch.device("meta"):
        model = plan.make()
    model.origin = Origin(family, config, "this model has no weights, and no tokenizer")
    return model.eval()
