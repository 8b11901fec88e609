"""The layers, and the parts that they are built from."""

from regard.mixers.delta_net import DeltaNet
from regard.mixers.gated_delta_net import GatedDeltaNet
from regard.mixers.gla import GatedLinearAttention, GLADecay
from regard.mixers.kda import KDAGates, KimiDeltaAttention
from regard.mixers.lightning import LightningAttention
from regard.mixers.parts import GatedRMSNorm, Projections, RelativePositionBias, RMSNorm, Scores
from regard.mixers.retention import Retention
from regard.mixers.softmax import MultiHeadAttention
from regard.nn.convert import from_torch

__all__ = [
    "DeltaNet",
    "GLADecay",
    "GatedDeltaNet",
    "GatedLinearAttention",
    "GatedRMSNorm",
    "KDAGates",
    "KimiDeltaAttention",
    "LightningAttention",
    "MultiHeadAttention",
    "Projections",
    "RMSNorm",
    "RelativePositionBias",
    "Retention",
    "Scores",
    "from_torch",
]
