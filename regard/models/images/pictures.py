"""Pictures as tensors, as detectors were trained: sides scaled, colours normalised, a batch padded and its pixels kept.

x = (colour factor - mean) / std,  shorter side = shortest edge, unless the longer one would pass the longest edge
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.checks import describe
from regard.models.config import Config, naming

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["PaddedImages", "Preprocessing", "fitted", "open_picture", "pillow"]

# Of a processor's options: what its training, its annotations and its file format are.
INERT = frozenset(
    {
        "data_format",
        "disable_grouping",
        "do_convert_annotations",
        "do_convert_rgb",
        "feature_extractor_type",
        "format",
        "image_processor_type",
        "input_data_format",
        "processor_class",
        "return_segmentation_masks",
        "return_tensors",
    }
)


def pillow() -> Any:
    """The module ``PIL.Image``; an error that names the extra where it is missing."""
    try:
        import PIL.Image
    except ModuleNotFoundError as e:
        raise ModuleNotFoundError("pictures need the package pillow: pip install 'regard[images]'", name="PIL") from e
    return PIL.Image


def open_picture(path: str | Path) -> Image:
    """A picture of a file in red, green and blue, turned as its camera says.

    Raises:
        FileNotFoundError, OSError: for a file that is not there, or is no picture.
    """
    image = pillow()
    from PIL import ImageOps

    try:
        with image.open(path) as read:
            turned: Image = ImageOps.exif_transpose(read)
            return turned.convert("RGB")
    except image.UnidentifiedImageError as e:
        raise OSError(f"{path}: expected a picture, got a file that Pillow cannot read") from e


def fitted(size: tuple[int, int], shortest: int, longest: int | None = None) -> tuple[int, int]:
    """(height, width) with the shorter side `shortest`, or less where the longer one would pass `longest`.

    >>> fitted((480, 640), 800, 1333), fitted((100, 400), 800, 1333)
    ((800, 1066), (333, 1333))
    """
    least, most = min(size), max(size)
    exact = float(shortest)
    if longest is not None and most / least * shortest > longest:
        exact = longest * least / most
    side = round(exact)
    if least == side:
        return size
    other = int(exact * most / least)
    return (side, other) if size[0] <= size[1] else (other, side)


class PaddedImages(NamedTuple):
    """``pixels (B, 3, Y, X)``, ``keep (B, Y, X)`` and the pictures' own (height, width)."""

    pixels: Tensor
    keep: Tensor
    sizes: list[tuple[int, int]]


@dataclass(frozen=True)
class Preprocessing:
    """How pictures become a batch.

    Args:
        shortest, longest: the edges that sides are scaled to, with their ratio kept.
        exact: (height, width) instead, whatever the ratio.
        mean, std: of the colours from 0 to 1.
        factor: of the colours from 0 to 255.
        resample: the number of Pillow's filter.
        resized: whether pictures are scaled at all.
    """

    shortest: int = 800
    longest: int | None = 1333
    exact: tuple[int, int] | None = None
    mean: tuple[float, ...] = (0.485, 0.456, 0.406)
    std: tuple[float, ...] = (0.229, 0.224, 0.225)
    factor: float = 1 / 255
    resample: int = 2
    resized: bool = True

    @classmethod
    def read(cls, values: Mapping[str, Any], source: str) -> Preprocessing:
        """From what a ``preprocessor_config.json`` of DETR holds; ``{}`` is the published preparation.

        Raises CheckpointError for an option that is unknown or has another meaning."""
        with naming(source):
            c = Config(values, source, {"pad_and_return_pixel_mask": "do_pad"})
            edges = _edges(c)
            c.only("do_pad", (True, None), "batches are padded")
            c.only("pad_size", (None,), "padded to the largest of a batch")
            scaled, normed = c.flag("do_rescale", True), c.flag("do_normalize", True)
            factor = c.amount("rescale_factor", cls.factor)
            mean, std = _colours(c, "image_mean", cls.mean), _colours(c, "image_std", cls.std)
            if not all(std):
                raise c.error("image_std", std, "numbers other than 0")
            resample = c.get("resample", cls.resample)
            if resample not in range(6) or isinstance(resample, bool):
                raise c.error("resample", resample, "the number of one of Pillow's filters, 0 to 5")
            resized = c.flag("do_resize", True)
            c.close(INERT)
        return cls(
            **edges,
            mean=mean if normed else (0.0, 0.0, 0.0),
            std=std if normed else (1.0, 1.0, 1.0),
            factor=factor if scaled else 1.0,
            resample=resample,
            resized=resized,
        )

    def size(self, given: tuple[int, int]) -> tuple[int, int]:
        """(height, width) of a prepared picture."""
        if not self.resized:
            return given
        return self.exact if self.exact is not None else fitted(given, self.shortest, self.longest)

    def __call__(self, images: Sequence[Image]) -> PaddedImages:
        """A batch in float32, padded with zeros on the right and below."""
        if not images:
            raise ValueError("images: expected one picture or more, got none")
        tensors, sizes = [], []
        for n, image in enumerate(images):
            if not hasattr(image, "convert"):
                raise TypeError(f"images[{n}]: expected a picture of Pillow's, got {describe(image)}")
            sizes.append((image.height, image.width))
            tensors.append(self._tensor(image.convert("RGB")))
        height, width = (max(t.shape[axis] for t in tensors) for axis in (1, 2))
        pixels, keep = [], torch.zeros(len(tensors), height, width, dtype=torch.bool)
        for n, tensor in enumerate(tensors):
            rows, columns = tensor.shape[1:]
            pixels.append(F.pad(tensor, (0, width - columns, 0, height - rows)))
            keep[n, :rows, :columns] = True
        return PaddedImages(torch.stack(pixels), keep, sizes)

    def _tensor(self, image: Image) -> Tensor:
        height, width = self.size((image.height, image.width))
        if (height, width) != (image.height, image.width):
            image = image.resize((max(width, 1), max(height, 1)), pillow().Resampling(self.resample))
        raw = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
        colours = raw.view(image.height, image.width, 3).permute(2, 0, 1) * self.factor
        mean, std = (torch.tensor(n)[:, None, None] for n in (self.mean, self.std))
        return (colours - mean) / std


def _colours(c: Config, name: str, default: tuple[float, ...]) -> tuple[float, ...]:
    given = c.get(name, default)
    given = default if given is None else given
    fine = isinstance(given, (list, tuple)) and len(given) == 3
    if not fine or any(isinstance(n, bool) or not isinstance(n, (int, float)) for n in given):
        raise c.error(name, given, "three numbers, of red, green and blue")
    return tuple(float(n) for n in given)


def _edges(c: Config) -> dict[str, Any]:
    """From ``size``: edges, a height and a width, or (in old files) a number beside ``max_size``."""
    given, most = c.get("size"), c.get("max_size", 1333)
    if given is None:
        return {}
    if isinstance(given, int) and not isinstance(given, bool):
        given = {"shortest_edge": given, "longest_edge": most}
    fine = isinstance(given, dict) and all(n is None or (isinstance(n, int) and n > 0) for n in given.values())
    known = {name: n for name, n in given.items() if n is not None} if fine else {}
    if set(known) == {"height", "width"}:
        return {"exact": (known["height"], known["width"])}
    if "shortest_edge" not in known or set(known) - {"shortest_edge", "longest_edge"}:
        raise c.error("size", given, "shortest_edge with longest_edge or without, or height and width")
    return {"shortest": known["shortest_edge"], "longest": known.get("longest_edge")}
