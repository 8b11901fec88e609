"""The layers, and the parts that they are built from."""

from regard.mixers.parts import Projections, RelativePositionBias, RMSNorm, Scores
from regard.mixers.softmax import MultiHeadAttention
from regard.nn.convert import from_torch

__all__ = ["MultiHeadAttention", "Projections", "RMSNorm", "RelativePositionBias", "Scores", "from_torch"]
