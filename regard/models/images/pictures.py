"""Pictures as tensors, as models were trained: scaled, cut out of the middle or padded, colours normalised.

x = (colour factor - mean) / std,  shorter side = shortest edge, unless the longer one would pass the longest edge
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.checks import describe
from regard.models.config import Config, is_count, naming

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["Colours", "PaddedImages", "Preprocessing", "fitted", "open_picture", "pillow"]

# Of a processor's options: what its training, its annotations and its file format are.
INERT = frozenset(
    {
        "data_format",
        "disable_grouping",
        "do_convert_annotations",
        "do_convert_rgb",
        "do_reduce_labels",
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

    if not Path(path).is_file():
        raise FileNotFoundError(f"images: expected files of pictures, got no file: {path}")
    try:
        with image.open(path) as read:
            turned: Image = ImageOps.exif_transpose(read)
            return turned.convert("RGB")
    except (image.UnidentifiedImageError, image.DecompressionBombError, OSError, SyntaxError) as e:
        raise OSError(f"images: expected a picture, got a file that Pillow cannot read: {path}") from e


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
class Colours:
    """``(colour factor - mean) / std`` of colours from 0 to 255: red, green and blue, or one number each for grey."""

    mean: tuple[float, ...] = (0.485, 0.456, 0.406)
    std: tuple[float, ...] = (0.229, 0.224, 0.225)
    factor: float = 1 / 255

    @property
    def mode(self) -> str:
        """Pillow's name of the colours."""
        return "L" if len(self.mean) == 1 else "RGB"

    def __call__(self, image: Image) -> Tensor:
        """A picture as (channels, height, width) in float32."""
        image = image.convert(self.mode)
        raw = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
        colours = raw.view(image.height, image.width, -1).permute(2, 0, 1)
        mean, std = (torch.tensor(n)[:, None, None] for n in (self.mean, self.std))
        return ((colours.double() * self.factor).float() - mean) / std


@dataclass(frozen=True)
class Preprocessing:
    """How pictures become a batch; as published for DETR by default.

    Args:
        shortest, longest: the edges that sides are scaled to, with their ratio kept.
        exact: (height, width) instead, whatever the ratio.
        resample: the number of Pillow's filter.
        resized: whether pictures are scaled at all.
        crop: (height, width) that is cut out of the middle of a scaled picture; a smaller one gets a black frame.
        colours: what becomes of the colours.
        padded: whether pictures of several sizes make a batch, with zeros on the right and below.
    """

    shortest: int = 800
    longest: int | None = 1333
    exact: tuple[int, int] | None = None
    resample: int = 2
    resized: bool = True
    crop: tuple[int, int] | None = None
    colours: Colours = field(default_factory=Colours)
    padded: bool = True

    @classmethod
    def read(
        cls, values: Mapping[str, Any], source: str, base: Preprocessing | None = None, *, square: bool = False
    ) -> Preprocessing:
        """From what a ``preprocessor_config.json`` holds.

        Args:
            base: what holds where an option is absent; DETR's published preparation by default.
            square: whether a single number as ``size`` means both sides, not the shortest edge.

        Raises CheckpointError for an option that is unknown or has another meaning."""
        base = cls() if base is None else base
        with naming(source):
            c = Config(values, source, {"pad_and_return_pixel_mask": "do_pad"})
            edges, crop = _edges(c, base, square), None
            if base.padded:
                c.only("do_pad", (True, None), "batches are padded")
                c.only("pad_size", (None,), "padded to the largest of a batch")
            else:
                c.only("do_pad", (False, None), "pictures of one size")
                cut = _pair(c, "crop_size", base.crop)
                crop = cut if c.flag("do_center_crop", base.crop is not None) else None
                if crop is None and c.flag("do_center_crop", base.crop is not None):
                    raise c.error("crop_size", None, "a number, or a height and a width, beside do_center_crop")
            colours = _colours(c, base.colours)
            resample = c.get("resample", base.resample)
            if resample not in range(6) or isinstance(resample, bool):
                raise c.error("resample", resample, "the number of one of Pillow's filters, 0 to 5")
            resized = c.flag("do_resize", base.resized)
            c.close(INERT)
        return cls(**edges, resample=resample, resized=resized, crop=crop, colours=colours, padded=base.padded)

    def size(self, given: tuple[int, int]) -> tuple[int, int]:
        """(height, width) of a scaled picture."""
        if not self.resized:
            return given
        return self.exact if self.exact is not None else fitted(given, self.shortest, self.longest)

    def __call__(self, images: Sequence[Image]) -> PaddedImages:
        """A batch in float32.

        Raises:
            ValueError: for no pictures, and for several sizes where batches are not padded.
            TypeError: for what is no picture.
        """
        if not images:
            raise ValueError("images: expected one picture or more, got none")
        tensors, sizes = [], []
        for n, image in enumerate(images):
            if not hasattr(image, "convert"):
                raise TypeError(f"images[{n}]: expected a picture of Pillow's, got {describe(image)}")
            sizes.append((image.height, image.width))
            tensors.append(self.colours(self._cut(image.convert(self.colours.mode))))
        height, width = (max(t.shape[axis] for t in tensors) for axis in (1, 2))
        pixels, keep = [], torch.zeros(len(tensors), height, width, dtype=torch.bool)
        for n, tensor in enumerate(tensors):
            rows, columns = tensor.shape[1:]
            if not self.padded and (rows, columns) != (height, width):
                raise ValueError(
                    f"images: expected pictures that are prepared to one size, got {height} × {width} and"
                    f" {rows} × {columns}"
                )
            pixels.append(F.pad(tensor, (0, width - columns, 0, height - rows)))
            keep[n, :rows, :columns] = True
        return PaddedImages(torch.stack(pixels), keep, sizes)

    def _cut(self, image: Image) -> Image:
        """A picture, scaled and cut."""
        height, width = self.size((image.height, image.width))
        if (height, width) != (image.height, image.width):
            image = image.resize((max(width, 1), max(height, 1)), pillow().Resampling(self.resample))
        if self.crop is None:
            return image
        top, left = ((n - m) // 2 for n, m in zip((image.height, image.width), self.crop, strict=True))
        return image.crop((left, top, left + self.crop[1], top + self.crop[0]))


def _colours(c: Config, base: Colours) -> Colours:
    scaled, normed = c.flag("do_rescale", True), c.flag("do_normalize", True)
    factor = c.amount("rescale_factor", base.factor)
    mean = _numbers(c, "image_mean", base.mean)
    std = _numbers(c, "image_std", base.std)
    if not all(std):
        raise c.error("image_std", std, "numbers other than 0")
    if len(std) != len(mean):
        raise c.error("image_std", std, f"as many numbers as image_mean has, {len(mean)}")
    if not normed:
        mean, std = (0.0,) * len(mean), (1.0,) * len(mean)
    return Colours(mean, std, factor if scaled else 1.0)


def _numbers(c: Config, name: str, default: tuple[float, ...]) -> tuple[float, ...]:
    given = c.get(name, default)
    given = default if given is None else given
    fine = isinstance(given, (list, tuple)) and len(given) in (1, 3)
    if not fine or any(isinstance(n, bool) or not isinstance(n, (int, float)) for n in given):
        raise c.error(name, given, "three numbers, of red, green and blue, or one of grey")
    return tuple(float(n) for n in given)


def _pair(c: Config, name: str, default: tuple[int, int] | None) -> tuple[int, int] | None:
    """(height, width) from one number, two, or an object of both."""
    given = c.get(name)
    if given is None:
        return default
    if isinstance(given, dict) and {k for k, n in given.items() if n is not None} == {"height", "width"}:
        given = [given["height"], given["width"]]
    given = [given, given] if is_count(given) else given
    if not isinstance(given, (list, tuple)) or len(given) != 2 or not all(map(is_count, given)):
        raise c.error(name, c.get(name), "a number, or a height and a width")
    return given[0], given[1]


def _edges(c: Config, base: Preprocessing, square: bool) -> dict[str, Any]:
    """From ``size``: edges, a height and a width, or a number (in old files beside ``max_size``)."""
    given = c.get("size")
    most = c.get("max_size", 1333) if base.padded else None
    if given is None:
        return {"shortest": base.shortest, "longest": base.longest, "exact": base.exact}
    if isinstance(given, (list, tuple)) or (square and is_count(given)):
        return {"exact": _pair(c, "size", None)}
    if is_count(given):
        given = {"shortest_edge": given, "longest_edge": most}
    fine = isinstance(given, dict) and all(n is None or is_count(n) for n in given.values())
    known = {name: n for name, n in given.items() if n is not None} if fine else {}
    if set(known) == {"height", "width"}:
        return {"exact": (known["height"], known["width"])}
    if "shortest_edge" not in known or set(known) - {"shortest_edge", "longest_edge"}:
        raise c.error("size", given, "shortest_edge with longest_edge or without, or height and width")
    return {"shortest": known["shortest_edge"], "longest": known.get("longest_edge")}
