"""BERT's encoder, whose options and tensor names other families share: they differ in the mixer of a layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

from torch import nn

from regard.mixers.parts import Scores
from regard.models.blocks import Embedding, PostNorm
from regard.models.config import Config
from regard.models.encoder import Encoder, FirstTokenPooler
from regard.models.feedforward import ACTIVATIONS, MLP, activation
from regard.models.layouts.base import Plan
from regard.models.layouts.shared.options import from_zero, read_eps
from regard.models.layouts.shared.rows import BOTH, MIXER, WEIGHT, kinds, module_rows
from regard.models.layouts.shared.words import WordsHead
from regard.models.tables import Ignored, Row, per_layer
from regard.positions import LearnedPositions

__all__ = ["HEADS", "POSITION_IDS", "BertLike", "EncoderSizes", "Extent", "bert_words", "encoder_sizes"]

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


def encoder_sizes(c: Config, *, dim: int = 768, layers: int = 12, heads: int = 12) -> EncoderSizes:
    """The sizes, BERT's by default; refuses a decoder's options."""
    dim, heads = c.count("hidden_size", dim), c.count("num_attention_heads", heads)
    if dim % heads:
        raise c.error("num_attention_heads", heads, f"a divisor of hidden_size={dim}")
    c.only("is_decoder", (False, None), "the bidirectional encoder")
    c.only("add_cross_attention", (False, None), "the encoder alone")
    c.only("position_embedding_type", ("absolute", None))
    scores = Scores(dropout=c.dropout("attention_probs_dropout_prob", 0.1))
    return EncoderSizes(dim, c.count("num_hidden_layers", layers), heads, scores)


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
class Extent:
    """How a family departs from BERT beyond the mixers of its layers.

    Args:
        places: whether the input holds absolute positions.
        types: the number of token types where the options do not state it; with 0 there is no table.
        qkv: rows of a mixer's tensors below ``attention.self``, where they are not BERT's three maps.
        rows: further tensors, by their names behind the prefix.
        first_block: what the first layer is, where it is another block than the rest.
    """

    places: bool = True
    types: int = 2
    qkv: list[Row] | None = None
    rows: list[Row] = field(default_factory=list)
    first_block: Callable[..., nn.Module] = PostNorm


@dataclass(frozen=True)
class BertLike:
    """A family's prefix and defaults.

    Args:
        prefix: leads the names of its files.
        vocab, places, hidden, eps: what the options mean where they do not state it.
        act: the activation where they do not.
        pooler: the file's name of the pooler's linear map; ``None`` where no file has one.
        words: its head of masked words.
    """

    prefix: str
    vocab: int
    places: int
    act: str
    words: WordsHead
    pooler: str | None = "pooler.dense"
    hidden: int = 3072
    eps: float = 1e-12

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
        extent: Extent | None = None,
    ) -> Plan:
        """An encoder with the given mixers.

        Args:
            bias: whether queries, keys and values have biases.
            more: further linear maps of a mixer, by their names in the file.
            first: the row of the table of positions for position 0.
            scale: what the rows of the vocabulary's table are multiplied by.
            extent: how the family departs from BERT beyond the mixers.
        """
        extent = extent or Extent()
        dim, places = sizes.dim, c.count("max_position_embeddings", self.places)
        if first >= places:
            raise c.error("max_position_embeddings", places, f"more than {first}, the rows that padding takes")
        vocab, types = c.count("vocab_size", self.vocab), from_zero(c, "type_vocab_size", extent.types)
        hidden, act = c.count("intermediate_size", self.hidden), c.name("hidden_act", self.act, ACTIVATIONS)
        eps, dropout = read_eps(c, self.eps, "layer_norm_eps"), c.dropout("hidden_dropout_prob", 0.1)
        norm = partial(nn.LayerNorm, dim, eps)
        words = self.words.read(c, dim, vocab, norm, act=act)
        pooled = self.pooler is not None and c.holds(f"{self.prefix}{self.pooler}.weight")

        def layer(i: int) -> nn.Module:
            norms = (norm() for _ in range(2))
            ff = MLP(dim, hidden, activation(act))
            block = PostNorm if i else extent.first_block
            return block(mixer(i), ff, *norms, mixer_dropout=dropout, ff_dropout=dropout)

        def make() -> Encoder:
            embedding = Embedding(
                nn.Embedding(vocab, dim),
                scale=scale,
                places=LearnedPositions(places, dim, first=first) if extent.places else None,
                types=nn.Embedding(types, dim) if types else None,
                norm=norm(),
                dropout=dropout,
            )
            pooler, head = FirstTokenPooler(dim) if pooled else None, None if words.make is None else words.make()
            return Encoder(embedding, [layer] * sizes.layers, pooler=pooler, head=head)

        there = {"tokens": True, "places": extent.places, "types": types > 0}
        own = {f"embeddings.{theirs}": f"embedding.{ours}" for theirs, ours in TABLES.items() if there[ours]}
        rows = self._rows(own) + self._rows({"embeddings.LayerNorm": "embedding.norm"}, BOTH)
        rows += self._rows({str(self.pooler): "pooler.dense"} if pooled else {}, BOTH)
        stored = "encoder.layer.{i}."
        if extent.qkv is None:
            names = QKV | dict(more or {})
            qkv = {f"{stored}attention.self.{theirs}": f"{MIXER}.{ours}" for theirs, ours in names.items()}
            table = self._rows(qkv, kinds(bias))
        else:
            table = [Row(f"{self.prefix}{stored}attention.self.{r.stored}", r.own, r.reshape) for r in extent.qkv]
        table += self._rows({stored + theirs: ours for theirs, ours in REST.items()}, BOTH)
        rows += [row for i in range(sizes.layers) for row in per_layer(table, i)]
        rows += [Row(self.prefix + row.stored, row.own, row.reshape) for row in extent.rows]
        return Plan(make, rows + words.rows, tied=words.tied, headed=words.headed)

    def _rows(self, names: Mapping[str, str], tensors: tuple[str, ...] = WEIGHT) -> list[Row]:
        return module_rows({self.prefix + stored: own for stored, own in names.items()}, tensors)
