"""BERT: the bidirectional post-norm encoder (Devlin et al. 2018, arXiv:1810.04805)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from torch import nn

from regard.mixers.parts import Projections, Scores
from regard.models.blocks import Embedding, PostNorm
from regard.models.config import Config
from regard.models.encoder import Encoder, FirstTokenPooler
from regard.models.feedforward import ACTIVATIONS, MLP, activation
from regard.models.layouts.base import Layout, Plan
from regard.models.layouts.shared.options import read_eps
from regard.models.layouts.shared.rows import BOTH, module_rows
from regard.models.tables import Ignored, per_layer
from regard.nn import MultiHeadAttention
from regard.positions import LearnedPositions

__all__ = ["BERT"]

OUTER = {
    "bert.embeddings.word_embeddings": "embedding.tokens",
    "bert.embeddings.position_embeddings": "embedding.places",
    "bert.embeddings.token_type_embeddings": "embedding.types",
}
LAYER = "bert.encoder.layer.{i}"
LAYERS = {
    "attention.self.query": "mixer.q_proj",
    "attention.self.key": "mixer.k_proj",
    "attention.self.value": "mixer.v_proj",
    "attention.output.dense": "mixer.o_proj",
    "attention.output.LayerNorm": "mixer_norm",
    "intermediate.dense": "ff.up_proj",
    "output.dense": "ff.down_proj",
    "output.LayerNorm": "ff_norm",
}


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


def _bert(c: Config) -> Plan:
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
        eps=read_eps(c, 1e-12, "layer_norm_eps"),
        places=c.count("max_position_embeddings", 512),
        types=c.count("type_vocab_size", 2),
        scores=Scores(dropout=c.dropout("attention_probs_dropout_prob", 0.1)),
        dropout=c.dropout("hidden_dropout_prob", 0.1),
    )
    rows = module_rows(OUTER) + module_rows({"bert.embeddings.LayerNorm": "embedding.norm"}, BOTH)
    pooler = c.holds("bert.pooler.dense.weight")
    rows += module_rows({"bert.pooler.dense": "pooler.dense"} if pooler else {}, BOTH)
    table = module_rows({f"{LAYER}.{theirs}": f"layers.{{i}}.{ours}" for theirs, ours in LAYERS.items()}, BOTH)
    rows += [row for i in range(layers) for row in per_layer(table, i)]
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
