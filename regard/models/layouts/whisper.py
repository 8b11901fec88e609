"""Whisper: an encoder of log-mel spectrograms, a decoder of text (Radford et al. 2022, arXiv:2212.04356).

The model takes what a feature extractor makes of 30 seconds of sound, ``source=features`` (B, mel bins, frames).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.checks import describe
from regard.masks import Causal
from regard.mixers.parts import Projections, Scores
from regard.models.blocks import Embedding, PreNorm
from regard.models.config import Config
from regard.models.cross import CrossPreNorm
from regard.models.decoder import Decoder
from regard.models.encoder import Encoder
from regard.models.encoder_decoder import EncoderDecoder
from regard.models.feedforward import ACTIVATIONS, MLP, activation
from regard.models.layouts.base import Layout, Plan
from regard.models.layouts.shared.bart_like import ATTENTION, ENDS, INERT, SYNONYMS, StackSizes, bart_start, stack_sizes
from regard.models.layouts.shared.rows import BOTH, WEIGHT, module_rows
from regard.models.tables import Row, one_to_one, per_layer
from regard.nn import MultiHeadAttention
from regard.positions import LearnedPositions, sinusoidal

__all__ = ["WHISPER", "MelEmbedding"]

SIZES = {"dim": 384, "heads": 6, "hidden": 1536}
PROJECTIONS = Projections(bias=True, key_bias=False)


class MelEmbedding(nn.Module):
    """``gelu(conv2(gelu(conv1(features)))) + places``: two frames of a spectrogram become one token.

    Both convolutions are three frames wide, the second steps by two; the places are fixed sines and cosines.

    Args:
        bins: mel bins of a frame.
        dim: width of a token.
        places: tokens of a spectrogram, half of its frames.
        dropout: of the tokens, in training.

    Raises:
        ValueError: for features that are not (B, bins, 2 places).

    >>> MelEmbedding(10, 8, places=20)(torch.zeros(1, 10, 40)).shape
    torch.Size([1, 20, 8])
    """

    places: Tensor

    def __init__(self, bins: int, dim: int, places: int, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.conv1 = nn.Conv1d(bins, dim, 3, padding=1)
        self.conv2 = nn.Conv1d(dim, dim, 3, stride=2, padding=1)
        self.dropout = dropout
        self.register_buffer("places", torch.empty(places, dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Forms the sines and cosines: their wavelengths end at 10000, which is one frequency further than usual."""
        half = self.places.shape[1] // 2
        base = 10000.0 ** (half / max(half - 1, 1))
        if not self.places.is_meta:
            with torch.no_grad():
                self.places.copy_(sinusoidal(self.places.shape[0], 2 * half, base=base, style="half"))

    def forward(self, features: Tensor) -> Tensor:
        bins, frames = self.conv1.in_channels, 2 * self.places.shape[0]
        if features.dim() != 3 or tuple(features.shape[1:]) != (bins, frames) or not features.is_floating_point():
            expected = f"a float tensor (B, {bins}, {frames}), mel bins and frames"
            raise ValueError(f"features: expected {expected}, got {describe(features)}")
        x = F.gelu(self.conv1(features.to(self.conv1.weight.dtype)))
        x = F.gelu(self.conv2(x)).transpose(1, 2)
        return F.dropout(x + self.places.to(x.dtype), self.dropout, self.training)


def _sizes(c: Config, stack: str, places: str, default: int) -> StackSizes:
    return stack_sizes(c, stack, layers=4, places=places, default_places=default, **SIZES)


def _whisper(c: Config) -> Plan:
    encoder = _sizes(c, "encoder", "max_source_positions", 1500)
    decoder = _sizes(c, "decoder", "max_target_positions", 448)
    if encoder.dim % 2:
        raise c.error("hidden_size", encoder.dim, "an even number, for sines and cosines")
    c.only("is_encoder_decoder", (True, None), "an encoder and a decoder")
    c.only("scale_embedding", (False, None), "the table as it is")
    bins, vocab = c.count("num_mel_bins", 80), c.count("vocab_size", 51865)
    act, inner = c.name("activation_function", "gelu", ACTIVATIONS), c.dropout("activation_dropout")
    scores, dropout = Scores(dropout=c.dropout("attention_dropout")), c.dropout("dropout")
    tied = c.flag("tie_word_embeddings", True)
    dim = encoder.dim

    def ff(sizes: StackSizes) -> nn.Module:
        part = activation(act)
        return MLP(dim, sizes.hidden, nn.Sequential(part, nn.Dropout(inner)) if inner else part)

    def attention(sizes: StackSizes, mask: Causal | None = None) -> nn.Module:
        return MultiHeadAttention(dim, sizes.heads, projections=PROJECTIONS, scores=scores, mask=mask)

    def reading(i: int) -> nn.Module:
        norms = nn.LayerNorm(dim), nn.LayerNorm(dim)
        return PreNorm(attention(encoder), ff(encoder), *norms, mixer_dropout=dropout, ff_dropout=dropout)

    def writing(i: int) -> nn.Module:
        own, cross = attention(decoder, Causal()), attention(decoder)
        norms = (nn.LayerNorm(dim), nn.LayerNorm(dim), nn.LayerNorm(dim))
        return CrossPreNorm(own, cross, ff(decoder), norms, dropout=dropout)

    def make() -> EncoderDecoder:
        places = LearnedPositions(decoder.places, dim)
        table = Embedding(nn.Embedding(vocab, dim), places=places, dropout=dropout)
        head = None if tied else nn.Linear(dim, vocab, bias=False)
        sound = MelEmbedding(bins, dim, encoder.places, dropout=dropout)
        return EncoderDecoder(
            Encoder(sound, [reading] * encoder.layers, nn.LayerNorm(dim)),
            Decoder(table, [writing] * decoder.layers, nn.LayerNorm(dim), head),
        )

    rows = module_rows({} if tied else {"proj_out": "decoder.head"}) + _outer_rows()
    for stack, sizes, mixers in (
        ("encoder", encoder, {"self_attn": "mixer"}),
        ("decoder", decoder, {"self_attn": "self_mixer", "encoder_attn": "cross_mixer"}),
    ):
        rows += [row for i in range(sizes.layers) for row in per_layer(_layer_rows(stack, mixers), i)]
    return Plan(make, rows, tied=("model.decoder.embed_tokens.weight", "proj_out.weight") if tied else ())


def _outer_rows() -> list[Row]:
    convs = {f"model.encoder.{name}": f"encoder.embedding.{name}" for name in ("conv1", "conv2")}
    norms = {f"model.{stack}.layer_norm": f"{stack}.norm" for stack in ("encoder", "decoder")}
    tables = {
        f"model.decoder.embed_{a}": f"decoder.embedding.{b}" for a, b in (("tokens",) * 2, ("positions", "places"))
    }
    fixed = one_to_one({"model.encoder.embed_positions.weight": "encoder.embedding.places"})
    return module_rows({**convs, **norms}, BOTH) + module_rows(tables) + fixed


def _layer_rows(stack: str, mixers: dict[str, str]) -> list[Row]:
    stored, own = f"model.{stack}.layers.{{i}}", f"{stack}.layers.{{i}}"
    rows = module_rows({f"{stored}.{a}": f"{own}.{b}" for a, b in ENDS.items()}, BOTH)
    for theirs, ours in mixers.items():
        norm = "mixer_norm" if ours == "mixer" else ours.replace("mixer", "norm")
        rows += module_rows({f"{stored}.{theirs}_layer_norm": f"{own}.{norm}"}, BOTH)
        for a, b in ATTENTION.items():
            rows += module_rows({f"{stored}.{theirs}.{a}": f"{own}.{ours}.{b}"}, WEIGHT if a == "k_proj" else BOTH)
    return rows


WHISPER = Layout(
    "whisper",
    "WhisperForConditionalGeneration",
    _whisper,
    prefix="model.",
    synonyms=SYNONYMS,
    # Where texts start, heads of tasks, what training hid of the features, and which words a decoding leaves out.
    inert=INERT
    | {
        "apply_spec_augment",
        "classifier_proj_size",
        "forced_decoder_ids",
        "median_filter_width",
        "use_weighted_layer_sum",
    }
    | {f"mask_{axis}_{kind}" for axis in ("feature", "time") for kind in ("length", "min_masks", "prob")},
    start=bart_start,
)
