"""Objects in pictures: what a detector's answers mean, and boxes drawn into a picture.

    score = max over classes of softmax(logits),  box = (centre - size / 2, centre + size / 2) in the picture's pixels

Carion et al. 2020, arXiv:2005.12872. Pictures are Pillow's; it comes with 'regard[images]'.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple
from zlib import crc32

import torch

from regard.checks import describe
from regard.models.images.detr import DETR, pixel_boxes
from regard.models.images.matching import Detections
from regard.models.images.pictures import Preprocessing

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["Found", "detect", "draw", "found_in"]

COLOURS = ("#e6194b", "#3cb44b", "#4363d8", "#f58231", "#911eb4", "#008080", "#9a6324", "#808000")


class Found(NamedTuple):
    """One object: its name, how sure the model is (0 to 1), and (left, top, right, bottom) in pixels."""

    label: str
    score: float
    box: tuple[float, float, float, float]


def found_in(
    detections: Detections,
    sizes: Sequence[tuple[int, int]],
    names: Sequence[str] | Mapping[int, str],
    *,
    threshold: float = 0.7,
) -> list[list[Found]]:
    """What is found in each image with a score above the threshold, surest first.

    Args:
        sizes: (height, width) of the images in pixels.
        names: of the classes.

    >>> one = Detections(torch.tensor([[[9.0, 0, 0], [0, 0, 9.0]]]), torch.full((1, 2, 4), 0.5))
    >>> found = found_in(one, [(10, 20)], ["cat", "dog"])
    >>> found[0][0].label, found[0][0].box, len(found[0])
    ('cat', (5.0, 2.5, 15.0, 7.5), 1)
    """
    if not 0 <= threshold <= 1:
        raise ValueError(f"threshold: expected a probability from 0 to 1, got {threshold}")
    if len(sizes) != len(detections.logits):
        raise ValueError(f"sizes: expected {len(detections.logits)}, one an image, got {len(sizes)}")
    wide = torch.promote_types(detections.logits.dtype, torch.float32)
    scores, labels = detections.logits.detach().to(wide).softmax(-1)[..., :-1].max(-1)
    boxes = pixel_boxes(detections.boxes.detach().to(wide), sizes)
    found = []
    for image in range(len(sizes)):
        rows = [
            Found(names[int(labels[image, q])], float(scores[image, q]), (left, top, right, bottom))
            for q, (left, top, right, bottom) in enumerate(boxes[image].tolist())
            if scores[image, q] > threshold
        ]
        found.append(sorted(rows, key=lambda row: -row.score))
    return found


def detect(model: DETR, images: Sequence[Image], *, threshold: float = 0.7) -> list[list[Found]]:
    """The objects in pictures, which are prepared as the model's folder says, in one batch.

    A folder without ``preprocessor_config.json`` gets the published preparation. Boxes are in each picture's own
    pixels.

    Raises:
        TypeError: for a model that is no detector.
        CheckpointError: for a preparation that is not supported.
    """
    if not isinstance(model, DETR):
        raise TypeError(f"model: expected a detector (model_type detr), got a {type(model).__name__}")
    if not images:
        return []
    config = {} if model.origin is None else model.origin.config
    stated = {} if model.origin is None else model.origin.extras.get("preprocessor_config.json", {})
    batch = Preprocessing.read(stated, "preprocessor_config.json")(images)
    like = next(model.parameters())
    with torch.inference_mode():
        detections = model(batch.pixels.to(like), keep=batch.keep.to(like.device))
    return found_in(detections, batch.sizes, class_names(config, detections.logits.shape[-1] - 1), threshold=threshold)


def class_names(config: Mapping[str, object], number: int) -> dict[int, str]:
    """Names of classes by number, from ``id2label`` where it has them."""
    given = config.get("id2label")
    named = {str(k): str(v) for k, v in given.items()} if isinstance(given, Mapping) else {}
    return {n: named.get(str(n), f"class {n}") for n in range(number)}


def draw(image: Image, found: Sequence[Found]) -> Image:
    """A copy of a picture with boxes, each with its name and score, in a colour that follows from the name."""
    from regard.models.images.pictures import pillow

    if not hasattr(image, "convert"):
        raise TypeError(f"image: expected a picture of Pillow's, got {describe(image)}")
    pillow()
    from PIL import ImageDraw

    copy = image.convert("RGB")
    pen = ImageDraw.Draw(copy)
    width = max(1, round(min(copy.size) / 200))
    for one in reversed(found):  # the surest lie on top
        colour = COLOURS[crc32(one.label.encode()) % len(COLOURS)]  # the same in every picture
        pen.rectangle(one.box, outline=colour, width=width)
        text, (left, top) = f"{one.label} {one.score:.2f}", one.box[:2]
        size = max(10, round(min(copy.size) / 40))
        if min(copy.size) >= 100:  # smaller pictures have no room for words
            frame = pen.textbbox((max(left, 0), max(top - size - 2, 0)), text, font_size=size)
            pen.rectangle(frame, fill=colour)
            pen.text(frame[:2], text, fill="white", font_size=size)
    return copy
