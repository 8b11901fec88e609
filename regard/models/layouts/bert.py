"""BERT: the bidirectional post-norm encoder (Devlin et al. 2018, arXiv:1810.04805)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import nn

from regard.mixers.parts import Projections, Scores
from regard.models.blocks import Embedding, PostNorm
from regard.models.config import Config
from regard.models.encoder import Encoder, FirstTokenPooler
from regard.models.feedforward import ACTIVATIONS, MLP, activation
from regard.models.layouts.base import Layout, Plan
from regard.models.layouts.bloom import both
from regard.models.tables import Ignored, expand, same
from regard.nn import MultiHeadAttention
from regard.positions import LearnedPositions

__all__ = ["BERT"]


@dataclass(frozen=True)
class _Parts:
    vocab: int
    dim: int
    layers: int
    heads: int
    hidden: int
    act: str
    eps: float
    places: int
    types: int
    scores: Scores
    dropout: float

    def norm(self) -> nn.LayerNorm:
        return nn.LayerNorm(self.dim, self.eps)

    def layer(self, i: int) -> nn.Module:
        mixer = MultiHeadAttention(self.dim, self.heads, projections=Projections(bias=True), scores=self.scores)
        ff = MLP(self.dim, self.hidden, activation(self.act))
        return PostNorm(mixer, ff, self.norm(), self.norm(), mixer_dropout=self.dropout, ff_dropout=self.dropout)

    def encoder(self, pooler: bool) -> Encoder:
        embedding = Embedding(
            nn.Embedding(self.vocab, self.dim),
            places=LearnedPositions(self.places, self.dim),
            types=nn.Embedding(self.types, self.dim),
            norm=self.norm(),
            dropout=self.dropout,
        )
        return Encoder(embedding, [self.layer] * self.layers, pooler=FirstTokenPooler(self.dim) if pooler else None)


def _bert(c: Config, has: Callable[[str], bool]) -> Plan:
    dim, heads, layers = (
        c.count("hidden_size", 768),
        c.count("num_attention_heads", 12),
        c.count("num_hidden_layers", 12),
    )
    if dim % heads:
        raise c.error("num_attention_heads", heads, f"a divisor of hidden_size={dim}")
    c.only("is_decoder", (False, None), "the bidirectional encoder")
    c.only("add_cross_attention", (False, None), "the encoder alone")
    c.only("position_embedding_type", ("absolute", None))
    parts = _Parts(
        vocab=c.count("vocab_size", 30522),
        dim=dim,
        layers=layers,
        heads=heads,
        hidden=c.count("intermediate_size", 3072),
        act=c.name("hidden_act", "gelu", ACTIVATIONS),
        eps=c.number("layer_norm_eps", 1e-12, least=0.0),
        places=c.count("max_position_embeddings", 512),
        types=c.count("type_vocab_size", 2),
        scores=Scores(dropout=c.dropout("attention_probs_dropout_prob", 0.1)),
        dropout=c.dropout("hidden_dropout_prob", 0.1),
    )
    layer, own = "bert.encoder.layer.{i}", "layers.{i}"
    per_layer = both(
        {
            f"{layer}.attention.self.query": f"{own}.mixer.q_proj",
            f"{layer}.attention.self.key": f"{own}.mixer.k_proj",
            f"{layer}.attention.self.value": f"{own}.mixer.v_proj",
            f"{layer}.attention.output.dense": f"{own}.mixer.o_proj",
            f"{layer}.attention.output.LayerNorm": f"{own}.mixer_norm",
            f"{layer}.intermediate.dense": f"{own}.ff.up_proj",
            f"{layer}.output.dense": f"{own}.ff.down_proj",
            f"{layer}.output.LayerNorm": f"{own}.ff_norm",
        }
    )
    rows = same(
        {
            "bert.embeddings.word_embeddings.weight": "embedding.tokens.weight",
            "bert.embeddings.position_embeddings.weight": "embedding.places.weight",
            "bert.embeddings.token_type_embeddings.weight": "embedding.types.weight",
        }
    )
    rows += both({"bert.embeddings.LayerNorm": "embedding.norm"})
    pooler = has("bert.pooler.dense.weight")
    rows += both({"bert.pooler.dense": "pooler.dense"}) if pooler else []
    rows += [row for i in range(layers) for row in expand(per_layer, i)]
    return Plan(partial(parts.encoder, pooler), rows)


HEADS = "a task's head; the encoder ends at its last hidden state"

BERT = Layout(
    "bert",
    "BertModel",
    _bert,
    prefix="bert.",
    headless=True,
    spellings={"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"},
    ignored=(
        Ignored("*embeddings.position_ids", "old files store the numbers 0, 1, 2, ..."),
        Ignored("cls.*", f"masked words and next sentence: {HEADS}"),
        Ignored("classifier.*", HEADS),
        Ignored("qa_outputs.*", HEADS),
    ),
    # Words and heads of tasks are no part of the encoder.
    inert=frozenset({"classifier_dropout", "tie_word_embeddings"}),
)
