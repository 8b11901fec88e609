"""The layers, and the parts that they are built from."""

from regard.mixers.parts import Projections, RMSNorm, Scores
from regard.mixers.softmax import MultiHeadAttention

__all__ = ["MultiHeadAttention", "Projections", "RMSNorm", "Scores"]
