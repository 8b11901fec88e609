"""Whole models: blocks and stacks from parts, checkpoints of published families, generation of text."""

from regard.models.blocks import (
    Block,
    Embedding,
    LogitsBias,
    MixerOnly,
    NormedResidual,
    Parallel,
    PostNorm,
    PreNorm,
    Sandwich,
    Scaled,
    ScaledResidual,
    Softcap,
)
from regard.models.building import decoder, from_config
from regard.models.cache import ModelCache
from regard.models.checkpoints import load, save
from regard.models.conversation import Conversation
from regard.models.cross import CrossBlock, CrossCache, CrossPostNorm, CrossPreNorm
from regard.models.decoder import Decoder
from regard.models.encoder import Encoder, FirstTokenPooler
from regard.models.encoder_decoder import EncoderDecoder
from regard.models.experts import ClampedSwiGLU, GatedExperts, MixtureOfExperts, Router, Routing, StackedExperts
from regard.models.feedforward import MLP, GatedMLP, activation
from regard.models.filling import Candidate, fill
from regard.models.generate import Continuation, Generation, Statistics, Stream, generate, stream
from regard.models.initialisation import initialise
from regard.models.kept_cache import KeptCache
from regard.models.layouts import LAYOUTS, Layout
from regard.models.masked_words import MaskedWordsHead
from regard.models.model import Model, Origin
from regard.models.sampling import Sampling
from regard.models.tokenizer import TextStream, Tokenizer

__all__ = [
    "LAYOUTS",
    "MLP",
    "Block",
    "Candidate",
    "ClampedSwiGLU",
    "Continuation",
    "Conversation",
    "CrossBlock",
    "CrossCache",
    "CrossPostNorm",
    "CrossPreNorm",
    "Decoder",
    "Embedding",
    "Encoder",
    "EncoderDecoder",
    "FirstTokenPooler",
    "GatedExperts",
    "GatedMLP",
    "Generation",
    "KeptCache",
    "Layout",
    "LogitsBias",
    "MaskedWordsHead",
    "MixtureOfExperts",
    "Model",
    "ModelCache",
    "MixerOnly",
    "NormedResidual",
    "Origin",
    "Parallel",
    "PostNorm",
    "PreNorm",
    "Router",
    "Routing",
    "Sampling",
    "Sandwich",
    "Scaled",
    "ScaledResidual",
    "Softcap",
    "StackedExperts",
    "Statistics",
    "Stream",
    "TextStream",
    "Tokenizer",
    "activation",
    "decoder",
    "fill",
    "from_config",
    "generate",
    "initialise",
    "load",
    "save",
    "stream",
]
