"""What a layout is: a family's options, parts and tensor names, as data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

import torch

from regard.models.config import SIZE, Config, naming
from regard.models.model import Model
from regard.models.tables import ComputedTensor, Ignored, Row
from regard.models.writing import write_folder

__all__ = ["Layout", "Plan", "plain_start"]


@dataclass(frozen=True)
class Plan:
    """What one checkpoint's options say.

    Args:
        make: builds the model; called once, where tensors may be placeholders without memory.
        rows: the tensors that the file must hold.
        tied: names in the file for the table that embedding and head share; empty where they are two tensors. The first
            name is the one that is written.
        computed: tensors that the file may hold besides, which follow from the options.
        headed: the class that other software loads a saved folder with, where this model has a head and its family is
            written without; empty otherwise.
    """

    make: Callable[[], Model]
    rows: list[Row]
    tied: tuple[str, ...] = ()
    computed: tuple[ComputedTensor, ...] = ()
    headed: str = ""


def plain_start(config: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Normal matrices and tables of the stated width, 0.02 by default, as most families' published code draws them."""
    std = Config(config, source).amount("initializer_range", 0.02)
    return {"std": std, "depth_scaled": False}


@dataclass(frozen=True)
class Layout:
    """A family of checkpoints.

    Args:
        model_type: what ``config.json`` calls it.
        architecture: the class that other software loads a saved folder with.
        plan: from the options to a `Plan`.
        prefix: leads the names of a file with a head, and is absent from one that was saved without it.
        headless: whether a folder is written without head and prefix, unless the plan is `headed`.
        spellings: older endings of tensor names, each with the present one.
        ignored: tensors that may stand unused, with reasons.
        synonyms: other spellings of options.
        inert: further options of the family that change nothing.
        wide: own names, as patterns, of parameters that stay in float32 in a model of float16 or bfloat16.
        wide_in_float16: further ones that do in a model of float16.
        start: from the options, and what errors call them, to how `regard.models.initialise` starts a model.
    """

    model_type: str
    architecture: str
    plan: Callable[[Config], Plan]
    prefix: str = ""
    headless: bool = False
    spellings: Mapping[str, str] = field(default_factory=dict)
    ignored: tuple[Ignored, ...] = ()
    synonyms: Mapping[str, str] = field(default_factory=dict)
    inert: frozenset[str] = frozenset()
    wide: tuple[str, ...] = ()
    wide_in_float16: tuple[str, ...] = ()
    start: Callable[[Mapping[str, Any], str], dict[str, Any]] = plain_start

    def dtype_of(self, name: str, dtype: torch.dtype) -> torch.dtype:
        """The dtype of the parameter of that own name in a model of `dtype`."""
        wide = self.wide + (self.wide_in_float16 if dtype == torch.float16 else ())
        kept = any(fnmatchcase(name, pattern) for pattern in wide)
        return torch.promote_types(dtype, torch.float32) if kept else dtype

    def read(
        self,
        config: Mapping[str, Any],
        source: str,
        has: Callable[[str], bool | None],
        shapes: Mapping[str, tuple[int, ...]] | None = None,
        most: Mapping[str, int] | None = None,
    ) -> Plan:
        """The plan of one checkpoint; every option is understood or refused.

        Args:
            source: the file that holds the options, as errors name it.
            has: whether the file has a tensor of that name, where no option says whether a part is there; it gives
                ``None`` without a file.
            shapes: of the tensors that there are; they bound the counts that the options may state. ``None``: no bound.
            most: bounds on counts where there are no tensors.

        Raises:
            CheckpointError: naming an option that is unknown, or whose value is not supported; also from the plan's
                ``make``, where options do not fit together.
        """
        with naming(source):
            options = Config(config, source, self.synonyms, most if shapes is None else bounds(shapes), has, shapes)
            plan = self.plan(options)
            options.close(self.inert)
        return replace(plan, make=partial(_made, plan.make, source))

    def save(self, model: Model, folder: str | Path) -> None:
        """Write a model of this family as a folder; see `Model.save`."""
        write_folder(model, folder)


def bounds(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    """The most that counts may be for these tensors: a layer has at least one, and no part is wider than the widest; an
    expert has one, or is a part of one.
    """
    widest = max((n for shape in shapes.values() for n in shape), default=0)
    return {
        **dict.fromkeys(("num_hidden_layers", "decoder_layers"), len(shapes)),
        **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), max(len(shapes), widest)),
        **dict.fromkeys(("hidden_size", "num_attention_heads", "decoder_attention_heads", "head_dim"), widest),
        SIZE: max(widest, 2**16),  # some may belong to parts that this file is without
    }


def _made(make: Callable[[], Model], source: str) -> Model:
    with naming(source):
        return make()
