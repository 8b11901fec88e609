"""What a call of any model needs beside ids, so that every part of it takes part."""

from typing import Any

import torch
from torch import Tensor

from regard.models import EncoderDecoder, Model
from regard.nn import Longformer


def beside(model: Model, ids: Tensor) -> dict[str, Any]:
    """A source for an encoder's part, and a global token where layers have such."""
    flags = torch.zeros(ids.shape, dtype=torch.bool)
    flags[:, 0] = True
    some = any(isinstance(part, Longformer) for part in model.modules())
    if not isinstance(model, EncoderDecoder):
        return {"global_tokens": flags} if some else {}
    return {"source": ids, "source_global": flags} if some else {"source": ids}
