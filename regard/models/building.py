"""Models that start from nothing: a decoder of the catalogue's mechanisms, and any family from its options."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from regard.checks import describe
from regard.errors import CheckpointError
from regard.models.checkpoints import DTYPES, dtype_of, place, read_options, read_origin, stated_dtype, torch_device
from regard.models.decoder import Decoder
from regard.models.files import Asked, is_file, is_folder
from regard.models.initialisation import initialise
from regard.models.layouts import CATALOGUE, Layout, layout_of
from regard.models.layouts.catalogue import Parts
from regard.models.model import Model, Origin
from regard.models.presets import PRESETS, preset
from regard.models.presets.base import MOST

__all__ = ["decoder", "from_config"]


def decoder(
    vocab: int,
    dim: int,
    layers: Sequence[str | Callable[[int], nn.Module]],
    *,
    heads: int | None = None,
    hidden: int | None = None,
    tied: bool = True,
    std: float = 0.02,
) -> Decoder:
    """A decoder of mechanisms by their names in the catalogue, with weights to train from.

    Every block is pre-norm with RMS norms and has a gated feed-forward part with SiLU. Softmax mechanisms are causal
    and rotate queries and keys where they have no other positions, with the sizes that their sources published (a
    window of 4096 tokens, Griffin's of 2048, a soft cap of 50); layers of HGRN share one table of lower bounds. The
    weights are those of `regard.models.initialise`.

    A model of names alone can be written by ``save`` and read by `regard.load`.

    Args:
        vocab: tokens of the vocabulary.
        dim: width of the residual stream.
        layers: one entry a block, from the first: a name (``regard list`` shows them), or a factory that is called with
            the layer's number and gives any layer with the common signature.
        heads: of every named mechanism, a divisor of `dim`; ``dim // 64`` by default, at least one.
        hidden: inner width of the feed-forward parts; 8/3 of `dim` by default, rounded up to a multiple of 8.
        tied: the head reads the embedding's table; otherwise it has a matrix of its own.
        std: the standard deviation that matrices and tables start with.

    Raises:
        ValueError, TypeError: naming the argument: for a name that is not known, or whose mechanism is not causal or
            reads a context, and for sizes that do not fit together.

    >>> model = decoder(256, 64, ["gated_deltanet", "gated_deltanet", "gated_deltanet", "gqa"] * 2, heads=4)
    >>> model(torch.tensor([[1, 2, 3]])).shape
    torch.Size([1, 3, 256])
    """
    parts = Parts.of(vocab, dim, layers, heads, hidden, tied, std)
    model = parts.make()
    if all(not tensor.is_meta for tensor in model.parameters()):  # none are, but under torch.device("meta")
        initialise(model, std=std)
    config = parts.config()
    if config is not None:
        model.origin = Origin(CATALOGUE, config, "this model was made without one")
    return model


def from_config(
    config: Mapping[str, Any] | str | Path,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> Model:
    """A model of a published family with weights to train from: its options are enough, no file of weights is read.

    Parameters have the names and shapes that `regard.load` gives them; the model is in training mode, and ``save``
    writes a folder that `regard.load` and transformers read. Weights start as `regard.models.initialise` says, with the
    ``initializer_range`` of the options.

    Args:
        config: what a ``config.json`` holds, the name of a preset (`regard.models.presets`), or a folder with a
            ``config.json``, whose tokenizer comes along.
        dtype: of the parameters; ``None`` for what the options say, or float32. The few that a family keeps in float32
            beside float16 or bfloat16 stay so.
        device: where the parameters go; default the CPU. On ``"meta"`` they are shapes without memory.

    Raises:
        CheckpointError: for an unknown family or option, a value that is not supported, and a preset with parts left
            out, which cannot be trained.
        ValueError, TypeError: for a name that is no preset and no folder, and arguments of a wrong kind.

    >>> small = {"model_type": "llama", "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48}
    >>> model = from_config({**small, "num_hidden_layers": 2, "num_attention_heads": 4})
    >>> model(torch.tensor([[1, 5, 9]])).shape
    torch.Size([1, 3, 97])
    """
    if dtype is not None and dtype not in DTYPES:
        raise TypeError(
            f"dtype: expected one of {', '.join(map(str, DTYPES))}, or None for the options', got {dtype!r}"
        )
    target = torch_device(device)
    origin, source = _origin(config)
    layout = origin.layout
    assert isinstance(layout, Layout)
    asked = Asked(lambda name: None)  # parts such as BERT's pooler: as transformers makes them
    plan = layout.read(origin.config, source, asked, most=MOST)
    kind = dtype or stated_dtype(origin.config, source) or torch.float32
    start = layout.start(origin.config, source)
    with torch.device("meta"):
        model = plan.make()
    for name, tensor in model.state_dict(keep_vars=True).items():
        place(model, name, torch.empty_like(tensor, dtype=dtype_of(model, layout, kind, name), device=target))
    model.origin = Origin(layout, origin.config, origin.tokenizer, origin.end_ids, origin.extras, asked.answers)
    if target.type != "meta":
        initialise(model, **start)
    return model


def _origin(config: object) -> tuple[Origin, str]:
    """The family and its options, and what errors call these."""
    if isinstance(config, Mapping):
        return Origin(layout_of(config, "config"), dict(config), "this model was made without one"), "config"
    if not isinstance(config, (str, Path)):
        raise TypeError(f"config: expected options, a preset's name or a folder, got {describe(config)}")
    path = Path(config)
    if is_folder(path) and (is_file(path / "config.json") or str(config).lower() not in PRESETS):
        return read_origin(path, *read_options(path)), str(path / "config.json")
    if isinstance(config, Path) or str(config).lower() not in PRESETS:
        raise ValueError(
            f"config: expected options, a folder with config.json, or one of {', '.join(PRESETS)}, got {str(config)!r}"
        )
    found = preset(str(config))
    if found.partial:
        raise CheckpointError(f"config: expected a preset of a whole model, got {found.name}: {found.note}")
    layout = found.layout or layout_of(found.config, found.name)
    return Origin(layout, found.config, "this model was made without one"), found.name
