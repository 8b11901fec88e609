"""The layers, and the parts that they are built from."""

from regard.mixers.ema import DampedEMA, ExponentialMovingAverage
from regard.mixers.gla import GatedLinearAttention
from regard.mixers.griffin import GriffinRecurrent
from regard.mixers.hgrn import HGRN, ForgetBounds
from regard.mixers.mamba1 import Mamba
from regard.mixers.mamba2 import Mamba2
from regard.mixers.parts import MambaShell, Projections, RelativePositionBias, RMSNorm, Scores
from regard.mixers.softmax import MultiHeadAttention, griffin_attention
from regard.nn.convert import from_torch

__all__ = [
    "DampedEMA",
    "ExponentialMovingAverage",
    "ForgetBounds",
    "GatedLinearAttention",
    "GriffinRecurrent",
    "HGRN",
    "Mamba",
    "Mamba2",
    "MambaShell",
    "MultiHeadAttention",
    "Projections",
    "RMSNorm",
    "RelativePositionBias",
    "Scores",
    "from_torch",
    "griffin_attention",
]
