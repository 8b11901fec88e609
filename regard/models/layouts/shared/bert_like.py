"""BERT's encoder, whose options and tensor names other families share: they differ in the mixer of a layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from torch import nn

from regard.mixers.parts import Scores
from regard.models.blocks import Embedding, PostNorm
from regard.models.config import Config
from regard.models.encoder import Encoder, FirstTokenPooler
from regard.models.feedforward import ACTIVATIONS, MLP, activation
from regard.models.layouts.base import Plan
from regard.models.layouts.shared.options import read_eps
from regard.models.layouts.shared.rows import BOTH, MIXER, WEIGHT, kinds, module_rows
from regard.models.layouts.shared.words import WordsHead
from regard.models.tables import Ignored, Row, per_layer
from regard.positions import LearnedPositions

__all__ = ["HEADS", "POSITION_IDS", "BertLike", "EncoderSizes", "bert_words", "encoder_sizes"]

HEADS = "a task's head; the encoder ends at its last hidden state"
POSITION_IDS = Ignored("*embeddings.position_ids", "old files store the numbers 0, 1, 2, ...")
TABLES = {"word_embeddings": "tokens", "position_embeddings": "places", "token_type_embeddings": "types"}
QKV = {"query": "q_proj", "key": "k_proj", "value": "v_proj"}
REST = {
    "attention.output.dense": f"{MIXER}.o_proj",
    "attention.output.LayerNorm": "layers.{i}.mixer_norm",
    "intermediate.dense": "layers.{i}.ff.up_proj",
    "output.dense": "layers.{i}.ff.down_proj",
    "output.LayerNorm": "layers.{i}.ff_norm",
}


@dataclass(frozen=True)
class EncoderSizes:
    """What the mixers of an encoder are made of."""

    dim: int
    layers: int
    heads: int
    scores: Scores


def encoder_sizes(c: Config) -> EncoderSizes:
    """BERT's sizes, which all of these families have by default; refuses a decoder's options."""
    dim, heads = c.count("hidden_size", 768), c.count("num_attention_heads", 12)
    if dim % heads:
        raise c.error("num_attention_heads", heads, f"a divisor of hidden_size={dim}")
    c.only("is_decoder", (False, None), "the bidirectional encoder")
    c.only("add_cross_attention", (False, None), "the encoder alone")
    c.only("position_embedding_type", ("absolute", None))
    scores = Scores(dropout=c.dropout("attention_probs_dropout_prob", 0.1))
    return EncoderSizes(dim, c.count("num_hidden_layers", 12), heads, scores)


def bert_words(prefix: str, classes: tuple[str, ...]) -> WordsHead:
    """BERT's head of masked words, under the names that several families give it."""
    stored = "cls.predictions"
    return WordsHead(
        classes,
        dense=f"{stored}.transform.dense",
        norm=f"{stored}.transform.LayerNorm",
        decoder=f"{stored}.decoder",
        bias=f"{stored}.bias",
        table=f"{prefix}embeddings.word_embeddings",
    )


@dataclass(frozen=True)
class BertLike:
    """A family's prefix and defaults.

    Args:
        prefix: leads the names of its files.
        vocab, places: sizes of the tables where the options do not state them.
        act: the activation where they do not.
        pooler: the file's name of the pooler's linear map.
        words: its head of masked words.
    """

    prefix: str
    vocab: int
    places: int
    act: str
    words: WordsHead
    pooler: str = "pooler.dense"

    def plan(
        self,
        c: Config,
        sizes: EncoderSizes,
        mixer: Callable[[int], nn.Module],
        *,
        bias: bool = True,
        more: Mapping[str, str] | None = None,
        first: int = 0,
        scale: float | None = None,
    ) -> Plan:
        """An encoder with the given mixers.

        Args:
            bias: whether queries, keys and values have biases.
            more: further linear maps of a mixer, by their names in the file.
            first: the row of the table of positions for position 0.
            scale: what the rows of the vocabulary's table are multiplied by.
        """
        dim, places = sizes.dim, c.count("max_position_embeddings", self.places)
        if first >= places:
            raise c.error("max_position_embeddings", places, f"more than {first}, the rows that padding takes")
        vocab, types = c.count("vocab_size", self.vocab), c.count("type_vocab_size", 2)
        hidden, act = c.count("intermediate_size", 3072), c.name("hidden_act", self.act, ACTIVATIONS)
        eps, dropout = read_eps(c, 1e-12, "layer_norm_eps"), c.dropout("hidden_dropout_prob", 0.1)
        norm = partial(nn.LayerNorm, dim, eps)
        words = self.words.read(c, dim, vocab, norm, act=act)
        pooled = c.holds(f"{self.prefix}{self.pooler}.weight")

        def layer(i: int) -> nn.Module:
            norms = (norm() for _ in range(2))
            ff = MLP(dim, hidden, activation(act))
            return PostNorm(mixer(i), ff, *norms, mixer_dropout=dropout, ff_dropout=dropout)

        def make() -> Encoder:
            embedding = Embedding(
                nn.Embedding(vocab, dim),
                scale=scale,
                places=LearnedPositions(places, dim, first=first),
                types=nn.Embedding(types, dim),
                norm=norm(),
                dropout=dropout,
            )
            pooler, head = FirstTokenPooler(dim) if pooled else None, None if words.make is None else words.make()
            return Encoder(embedding, [layer] * sizes.layers, pooler=pooler, head=head)

        own = {f"embeddings.{theirs}": f"embedding.{ours}" for theirs, ours in TABLES.items()}
        rows = self._rows(own) + self._rows({"embeddings.LayerNorm": "embedding.norm"}, BOTH)
        rows += self._rows({self.pooler: "pooler.dense"} if pooled else {}, BOTH)
        stored = "encoder.layer.{i}."
        qkv = {
            f"{stored}attention.self.{theirs}": f"{MIXER}.{ours}" for theirs, ours in (QKV | dict(more or {})).items()
        }
        table = self._rows(qkv, kinds(bias)) + self._rows(
            {stored + theirs: ours for theirs, ours in REST.items()}, BOTH
        )
        rows += [row for i in range(sizes.layers) for row in per_layer(table, i)]
        return Plan(make, rows + words.rows, tied=words.tied, headed=words.headed)

    def _rows(self, names: Mapping[str, str], tensors: tuple[str, ...] = WEIGHT) -> list[Row]:
        return module_rows({self.prefix + stored: own for stored, own in names.items()}, tensors)
