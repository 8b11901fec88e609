"""What pictures show: the classes that a model finds most probable, by their names."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn

from regard.checks import whole
from regard.models.images.detecting import class_names
from regard.models.images.preparing import preprocess
from regard.models.model import Model

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["Guess", "classify", "is_classifier"]


class Guess(NamedTuple):
    """A class and its probability, the softmax of the model's scores."""

    label: str
    probability: float


def is_classifier(model: nn.Module) -> bool:
    """Whether a model gives images scores of classes."""
    return isinstance(model, Model) and getattr(model, "classifier", None) is not None


def classify(
    model: Model, images: Image | str | Path | Sequence[Image | str | Path], *, top: int = 5
) -> list[list[Guess]]:
    """The `top` most probable classes of each picture, best first; in all, where there are fewer.

    Pictures are prepared as the model's folder says (`preprocess`); names come from ``id2label``.

    Raises:
        TypeError: for a model that gives no scores of classes; see `preprocess` for pictures.
    """
    if not is_classifier(model):
        raise TypeError(f"model: expected a classifier of images, got a {type(model).__name__} without classes")
    whole("top", top, 1)
    like = next(model.parameters())
    with torch.inference_mode():
        scores = model(preprocess(images, model).to(like))
    wide = scores.to(torch.promote_types(scores.dtype, torch.float32)).softmax(-1)
    names = class_names({} if model.origin is None else model.origin.config, wide.shape[-1])
    best = wide.topk(min(top, wide.shape[-1]), -1)
    return [
        [Guess(names[n], p) for n, p in zip(classes, probabilities, strict=True)]
        for classes, probabilities in zip(best.indices.tolist(), best.values.tolist(), strict=True)
    ]
