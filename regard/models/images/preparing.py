"""Pictures for classifiers and encoders: scaled, cut and normalised as ``preprocessor_config.json`` says.

What a file leaves out is as transformers' processors of ViT, DeiT, SigLIP and BEiT have it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from regard.checks import describe
from regard.errors import CheckpointError
from regard.models.config import Config
from regard.models.files import is_file, is_folder, path_of, read_json
from regard.models.images.pictures import Colours, Preprocessing, open_picture
from regard.models.model import Model

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["FILE", "preparation", "preprocess"]

FILE = "preprocessor_config.json"
HALF = Colours((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
BILINEAR, BICUBIC = 2, 3


def _published(resample: int, side: int = 224, crop: tuple[int, int] | None = None) -> Preprocessing:
    return Preprocessing(exact=(side, side), resample=resample, crop=crop, colours=HALF, padded=False)


PUBLISHED = {
    "ViT": _published(BILINEAR),
    "DeiT": _published(BICUBIC, 256, (224, 224)),
    "Siglip": _published(BICUBIC),
    "Beit": _published(BICUBIC),
}
FAMILIES = {
    "vit": "ViT",
    "deit": "DeiT",
    "siglip": "Siglip",
    "siglip_vision_model": "Siglip",
    "beit": "Beit",
    "swin": "ViT",
    "swinv2": "ViT",
}


def preparation(source: Model | Mapping[str, Any] | str | Path) -> Preprocessing:
    """How pictures are prepared for a model.

    Args:
        source: the content of a ``preprocessor_config.json``; a folder that has one; or a loaded model, whose folder
            had one. For a model without, pictures are scaled to the size that its options state, and normalised as is
            usual for its family.

    Raises:
        CheckpointError: for an option that is unknown or has another meaning, and a processor that is not known.
        FileNotFoundError, TypeError: for a folder without the file, and other arguments.

    >>> preparation({"image_processor_type": "ViTImageProcessor", "size": {"height": 8, "width": 8}}).exact
    (8, 8)
    """
    if isinstance(source, (str, Path)):
        folder = path_of("source", source)
        if not is_folder(folder) or not is_file(folder / FILE):
            raise FileNotFoundError(f"source: expected a folder with {FILE}, got {folder}, which has none")
        return _read(read_json(folder / FILE), str(folder / FILE))
    if isinstance(source, Mapping):
        return _read(source, FILE)
    if not isinstance(source, Model):
        raise TypeError(f"source: expected a model, a folder, or what {FILE} holds, got {describe(source)}")
    config = {} if source.origin is None else source.origin.config
    family = FAMILIES.get(str(config.get("model_type")))
    stated = None if source.origin is None else source.origin.extras.get(FILE)
    if stated is not None:
        return _read(stated, FILE, family)
    if family is None:
        raise CheckpointError(f"source: expected a model that was loaded from a folder with {FILE}, got one without")
    options = config.get("vision_config", config)
    c = Config(options, "the model's options")
    side, grey = c.pair("image_size", 224), c.count("num_channels", 3) == 1
    colours = Colours((0.5,), (0.5,)) if grey else HALF
    return replace(PUBLISHED[family], exact=side, crop=None, colours=colours)


def _read(values: Mapping[str, Any], source: str, family: str | None = None) -> Preprocessing:
    kind = values.get("image_processor_type", values.get("feature_extractor_type"))
    if kind is not None:
        name = str(kind).removesuffix("Fast").removesuffix("Pil")
        family = name.removesuffix("ImageProcessor").removesuffix("FeatureExtractor")
        if family not in PUBLISHED:
            known = ", ".join(f"{name}ImageProcessor" for name in PUBLISHED)
            raise CheckpointError(f"{source}: image_processor_type: expected one of {known}, got {kind!r}")
    if family is None:
        raise CheckpointError(f"{source}: image_processor_type: expected a name, got none")
    return Preprocessing.read(values, source, PUBLISHED[family], square=family != "Siglip")


def preprocess(
    images: Image | str | Path | Sequence[Image | str | Path], source: Model | Mapping[str, Any] | str | Path
) -> Tensor:
    """Pictures as a batch ``(B, channels, height, width)`` in float32, for a model of images.

    Args:
        images: pictures of Pillow's or their files, one or several.
        source: the model, its folder, or what ``preprocessor_config.json`` holds; see `preparation`.

    Raises:
        ModuleNotFoundError: without Pillow, with the name of the extra.
        FileNotFoundError, OSError: for a file that is not there, or is no picture.
        ValueError, TypeError: for no pictures, other things, and pictures that would be of different sizes.

    >>> from PIL import Image
    >>> config = {"image_processor_type": "ViTImageProcessor", "size": {"height": 8, "width": 12}}
    >>> preprocess(Image.new("RGB", (30, 20), "white"), config).shape
    torch.Size([1, 3, 8, 12])
    """
    prepare = preparation(source)
    several = isinstance(images, Sequence) and not isinstance(images, str)
    given: Sequence[Any] = images if several else [images]  # type: ignore[assignment]
    return prepare([open_picture(one) if isinstance(one, (str, Path)) else one for one in given]).pixels
