"""The layers, and the parts that they are built from.

Written by `make docs` from the `__all__` of the catalogue's files: edit those, or tools/make_docs.py.
"""

from regard.mixers.additive import AdditiveAttention
from regard.mixers.bigbird import BigBird, BlockPlan
from regard.mixers.delta_net import DeltaNet
from regard.mixers.disentangled import DisentangledAttention, RelativeEmbeddings, log_buckets
from regard.mixers.ema import DampedEMA, ExponentialMovingAverage
from regard.mixers.gated_delta_net import GatedDeltaNet
from regard.mixers.gla import GatedLinearAttention, GLADecay
from regard.mixers.graph_attention import GraphAttention, GraphAttentionV2
from regard.mixers.graph_layer import GraphOptions, edge_matrix, with_self_loops
from regard.mixers.graph_transformer import EdgeGraphTransformer, GraphTransformer
from regard.mixers.griffin import GriffinRecurrent
from regard.mixers.gsa import GatedSlotAttention
from regard.mixers.hgrn import HGRN, ForgetBounds
from regard.mixers.hyena import Hyena, HyenaFilter
from regard.mixers.image_windows import GridAttention, LogPlaces, PlaceTable, ShiftedWindowAttention
from regard.mixers.kda import KDAGates, KimiDeltaAttention
from regard.mixers.kernel_linear import LinearAttention, LinearCrossAttention
from regard.mixers.latent import LatentProjections, LatentSizes, MultiHeadLatentAttention
from regard.mixers.lightning import LightningAttention
from regard.mixers.linformer import LengthProjection, Linformer
from regard.mixers.longformer import Longformer
from regard.mixers.luong import LocalAlignment, LuongAttention
from regard.mixers.mamba1 import Mamba
from regard.mixers.mamba2 import Mamba2
from regard.mixers.mega import MegaAttention, MegaPlaces, MegaSizes
from regard.mixers.multi_token import MultiTokenAttention, TokenKernels
from regard.mixers.parts import GatedRMSNorm, MambaConfig, Projections, RelativePositionBias, RMSNorm, Scores
from regard.mixers.performer import Performer
from regard.mixers.reformer import HashedAttention
from regard.mixers.retention import Retention
from regard.mixers.rwkv6 import RWKV6
from regard.mixers.softmax import MultiHeadAttention, griffin_attention
from regard.mixers.softmax_relatives import DifferentialAttention, ForgettingAttention, StickBreakingAttention
from regard.nn.convert import from_torch
from regard.nn.swapping import SwapReport, swap, unswap
from regard.nn.torch_attention import TorchMultiheadAttention

__all__ = [
    "AdditiveAttention",
    "BigBird",
    "BlockPlan",
    "DampedEMA",
    "DeltaNet",
    "DifferentialAttention",
    "DisentangledAttention",
    "EdgeGraphTransformer",
    "ExponentialMovingAverage",
    "ForgetBounds",
    "ForgettingAttention",
    "GLADecay",
    "GatedDeltaNet",
    "GatedLinearAttention",
    "GatedRMSNorm",
    "GatedSlotAttention",
    "GraphAttention",
    "GraphAttentionV2",
    "GraphOptions",
    "GraphTransformer",
    "GridAttention",
    "GriffinRecurrent",
    "HGRN",
    "HashedAttention",
    "Hyena",
    "HyenaFilter",
    "KDAGates",
    "KimiDeltaAttention",
    "LatentProjections",
    "LatentSizes",
    "LengthProjection",
    "LightningAttention",
    "LinearAttention",
    "LinearCrossAttention",
    "Linformer",
    "LocalAlignment",
    "LogPlaces",
    "Longformer",
    "LuongAttention",
    "Mamba",
    "Mamba2",
    "MambaConfig",
    "MegaAttention",
    "MegaPlaces",
    "MegaSizes",
    "MultiHeadAttention",
    "MultiHeadLatentAttention",
    "MultiTokenAttention",
    "Performer",
    "PlaceTable",
    "Projections",
    "RMSNorm",
    "RWKV6",
    "RelativeEmbeddings",
    "RelativePositionBias",
    "Retention",
    "Scores",
    "ShiftedWindowAttention",
    "StickBreakingAttention",
    "SwapReport",
    "TokenKernels",
    "TorchMultiheadAttention",
    "edge_matrix",
    "from_torch",
    "griffin_attention",
    "log_buckets",
    "swap",
    "unswap",
    "with_self_loops",
]
