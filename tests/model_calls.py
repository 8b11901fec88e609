"""What a call of any model needs beside ids, so that every part of it takes part."""

from typing import Any

import torch
from torch import Tensor

from regard.models import EncoderDecoder, Model
from regard.models.images import DETR, ImageEncoder, SwinTransformer
from regard.models.layouts.whisper import MelEmbedding
from regard.nn import Longformer


def read_by(model: Model, ids: Tensor) -> Tensor:
    """The ids, or as many images for a model of images, in its parameters' dtype."""
    if not isinstance(model, (DETR, ImageEncoder, SwinTransformer)):
        return ids
    like = next(model.parameters())
    rows, columns = model.embedding.image if isinstance(model, ImageEncoder) else (18, 24)
    one = torch.linspace(-9, 9, 3 * rows * columns, device=like.device).sin().to(like.dtype)
    one = one.view(1, 3, rows, columns)
    return one.expand(len(ids), -1, -1, -1)


def beside(model: Model, ids: Tensor) -> dict[str, Any]:
    """A source for an encoder's part, and a global token where layers have such."""
    flags = torch.zeros(ids.shape, dtype=torch.bool)
    flags[:, 0] = True
    some = any(isinstance(part, Longformer) for part in model.modules())
    if not isinstance(model, EncoderDecoder):
        return {"global_tokens": flags} if some else {}
    source = ids
    if isinstance(model.encoder.embedding, MelEmbedding):
        first = model.encoder.embedding
        bins, frames = first.conv1.in_channels, 2 * first.places.shape[0]
        source = torch.linspace(-9, 9, bins * frames).sin().view(1, bins, frames).expand(len(ids), -1, -1)
    return {"source": source, "source_global": flags} if some else {"source": source}


def cache_of(model: Model, batch: int, capacity: int) -> Any:
    """A cache of `model` that also holds what `beside` gives an encoder-decoder to read: 20 places at most."""
    return model.init_cache(batch, capacity, **({"source": 20} if isinstance(model, EncoderDecoder) else {}))
