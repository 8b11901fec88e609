"""Bloom: ALiBi, a norm behind the embedding, query/key/value fused head by head (BigScience 2022, arXiv:2211.05100)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import nn

from regard.biases import Alibi, Bias
from regard.masks import Causal
from regard.mixers.parts import Projections, Scores
from regard.models.blocks import Embedding, NormedResidual, PreNorm
from regard.models.config import Config
from regard.models.decoder import Decoder
from regard.models.feedforward import MLP, activation
from regard.models.layouts.base import Layout, Plan
from regard.models.tables import FusedQKV, Row, expand, fused, same
from regard.nn import MultiHeadAttention

__all__ = ["BLOOM", "TIED", "both"]

BOTH = ("weight", "bias")
TIED = ("transformer.word_embeddings.weight", "lm_head.weight")


def both(names: dict[str, str], kinds: tuple[str, ...] = BOTH) -> list[Row]:
    """Rows for modules: each pair of names with every kind of tensor appended."""
    return same({f"{stored}.{k}": f"{own}.{k}" for stored, own in names.items() for k in kinds})


@dataclass(frozen=True)
class _Parts:
    vocab: int
    dim: int
    layers: int
    heads: int
    eps: float
    bias: Bias
    scores: Scores
    dropout: float
    block: type[PreNorm]

    def norm(self) -> nn.LayerNorm:
        return nn.LayerNorm(self.dim, self.eps)

    def layer(self, i: int) -> nn.Module:
        mixer = MultiHeadAttention(
            self.dim, self.heads, projections=Projections(bias=True), scores=self.scores, mask=Causal(), bias=self.bias
        )
        ff = MLP(self.dim, 4 * self.dim, activation("gelu_new"))
        return self.block(mixer, ff, self.norm(), self.norm(), mixer_dropout=self.dropout, ff_dropout=self.dropout)

    def decoder(self, tied: bool) -> Decoder:
        embedding = Embedding(nn.Embedding(self.vocab, self.dim), norm=self.norm())
        head = None if tied else nn.Linear(self.dim, self.vocab, bias=False)
        return Decoder(embedding, [self.layer] * self.layers, self.norm(), head)


def _bloom(c: Config, has: Callable[[str], bool]) -> Plan:
    vocab, dim = c.count("vocab_size", 250880), c.count("hidden_size", 64)
    layers, heads = c.count("num_hidden_layers", 2), c.count("num_attention_heads", 8)
    if dim % heads:
        raise c.error("num_attention_heads", heads, f"a divisor of hidden_size={dim}")
    if c.flag("slow_but_exact", False) and c.count("pretraining_tp", 1) > 1:
        raise c.error("slow_but_exact", True, "false: with pretraining_tp above 1 it leaves out biases")
    tied = c.flag("tie_word_embeddings", True)
    parts = _Parts(
        vocab=vocab,
        dim=dim,
        layers=layers,
        heads=heads,
        eps=c.number("layer_norm_epsilon", 1e-5, least=0.0),
        bias=Alibi(heads),
        scores=Scores(dropout=c.dropout("attention_dropout")),
        dropout=c.dropout("hidden_dropout"),
        block=NormedResidual if c.flag("apply_residual_connection_post_layernorm", False) else PreNorm,
    )
    per_head = FusedQKV(heads, heads, dim // heads, groups=heads)
    layer = "transformer.h.{i}"
    per_layer = fused(f"{layer}.self_attention.query_key_value", "layers.{i}.mixer.*_proj", BOTH, per_head)
    per_layer += both(
        {
            f"{layer}.self_attention.dense": "layers.{i}.mixer.o_proj",
            f"{layer}.mlp.dense_h_to_4h": "layers.{i}.ff.up_proj",
            f"{layer}.mlp.dense_4h_to_h": "layers.{i}.ff.down_proj",
            f"{layer}.input_layernorm": "layers.{i}.mixer_norm",
            f"{layer}.post_attention_layernorm": "layers.{i}.ff_norm",
        }
    )
    rows = both({"transformer.word_embeddings_layernorm": "embedding.norm", "transformer.ln_f": "norm"})
    rows += same({"transformer.word_embeddings.weight": "embedding.tokens.weight"})
    rows += [] if tied else same({"lm_head.weight": "head.weight"})
    rows += [row for i in range(layers) for row in expand(per_layer, i)]
    return Plan(partial(parts.decoder, tied), rows, TIED if tied else ())


BLOOM = Layout(
    "bloom",
    "BloomForCausalLM",
    _bloom,
    prefix="transformer.",
    synonyms={"n_head": "num_attention_heads", "n_layer": "num_hidden_layers", "n_embed": "hidden_size"},
    # How training split its sums, fused its kernels and padded its data; the formulas are the same.
    inert=frozenset(
        {
            "attention_softmax_in_fp32",
            "bias_dropout_fusion",
            "masked_softmax_fusion",
            "n_inner",
            "offset_alibi",
            "seq_length",
            "skip_bias_add",
            "skip_bias_add_qkv",
        }
    ),
)
