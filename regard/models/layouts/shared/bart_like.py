"""BART's encoder-decoder, whose options and tensor names other families share (Lewis et al. 2019, arXiv:1910.13461).

They differ in the encoder's mixer and in where the norms stand.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from regard.masks import Causal
from regard.mixers.parts import Projections, Scores
from regard.models.blocks import Embedding, LogitsBias, PostNorm, PreNorm
from regard.models.config import Config
from regard.models.cross import CrossPostNorm, CrossPreNorm
from regard.models.decoder import Decoder
from regard.models.encoder import Encoder
from regard.models.encoder_decoder import EncoderDecoder
from regard.models.feedforward import ACTIVATIONS, MLP, activation
from regard.models.layouts.base import Plan
from regard.models.layouts.shared.rows import BOTH, kinds, module_rows
from regard.models.tables import Ignored, Row, Shared, Squeezed, per_layer
from regard.nn import MultiHeadAttention
from regard.positions import LearnedPositions

__all__ = ["HEADS", "INERT", "SYNONYMS", "BartLike", "StackSizes", "bart_start", "stack_sizes"]

HEADS = "a task's head; the model ends at the logits of words"
# Where texts start, heads of tasks, and layers that are left out in training.
INERT = frozenset({"decoder_start_token_id", "classifier_dropout", "classif_dropout", "encoder_layerdrop"}) | {
    "decoder_layerdrop"
}
SYNONYMS = {
    "d_model": "hidden_size",
    "encoder_layers": "num_hidden_layers",
    "encoder_attention_heads": "num_attention_heads",
    "attention_probs_dropout_prob": "attention_dropout",
    "init_std": "initializer_range",
}
ENDS = {"fc1": "ff.up_proj", "fc2": "ff.down_proj", "final_layer_norm": "ff_norm"}
ATTENTION = {"q_proj": "q_proj", "k_proj": "k_proj", "v_proj": "v_proj", "out_proj": "o_proj"}
TOKENS = "embedding.tokens.weight"


def bart_start(config: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Normal matrices and tables of the width that ``init_std`` states."""
    return {"std": Config(config, source, SYNONYMS).amount("initializer_range", 0.02), "depth_scaled": False}


@dataclass(frozen=True)
class StackSizes:
    """The sizes of one of the two stacks."""

    dim: int
    layers: int
    heads: int
    hidden: int
    places: int


def stack_sizes(
    c: Config,
    stack: str,
    *,
    layers: int,
    places: str,
    default_places: int,
    dim: int = 1024,
    heads: int = 16,
    hidden: int = 4096,
) -> StackSizes:
    """The sizes of the ``"encoder"`` or the ``"decoder"``; `places` names the option for its positions."""
    own = {"encoder": ("num_hidden_layers", "num_attention_heads")}
    count, head_count = own.get(stack, (f"{stack}_layers", f"{stack}_attention_heads"))
    dim, heads = c.count("hidden_size", dim), c.count(head_count, heads)
    if dim % heads:
        raise c.error(head_count, heads, f"a divisor of d_model={dim}")
    hidden = c.count(f"{stack}_ffn_dim", hidden)
    return StackSizes(dim, c.count(count, layers), heads, hidden, c.count(places, default_places))


@dataclass(frozen=True)
class BartLike:
    """How a family wires and names its parts.

    Args:
        prefix: leads the names of its files, but for the head's.
        pre_norm: norms stand before the parts, and one more behind each stack; otherwise behind the residual sums, and
            one more behind each embedding.
        vocab: the vocabulary where the options do not state it.
        act: the activation where they do not.
        qkv: the file's names of an encoder layer's linear maps below ``self_attn``, each with its name in the mixer.
    """

    prefix: str
    pre_norm: bool
    vocab: int
    act: str
    qkv: Mapping[str, str]

    def plan(
        self,
        c: Config,
        encoder: StackSizes,
        decoder: StackSizes,
        mixer: Callable[[int], nn.Module],
        *,
        bias: bool = True,
        scale: float | None = None,
    ) -> Plan:
        """An encoder of the given mixers, and a decoder that reads all of what it makes.

        Args:
            bias: whether the linear maps of attention have biases.
            scale: what the rows of the vocabulary's table are multiplied by.
        """
        c.only("is_encoder_decoder", (True, None), "an encoder and a decoder")
        c.only("is_decoder", (False, None), "an encoder and a decoder")
        vocab = c.count("vocab_size", self.vocab)
        act, inner = c.name("activation_function", self.act, ACTIVATIONS), c.dropout("activation_dropout", 0.0)
        scores, dropout = Scores(dropout=c.dropout("attention_dropout", 0.0)), c.dropout("dropout", 0.1)
        tied = c.flag("tie_word_embeddings", True)
        apart = not tied and c.holds(f"{self.prefix}encoder.embed_tokens.weight")
        biased = c.holds("final_logits_bias")
        projections = Projections(bias=bias)
        pre = self.pre_norm

        def ff(sizes: StackSizes) -> nn.Module:
            act_part = activation(act)
            return MLP(sizes.dim, sizes.hidden, nn.Sequential(act_part, nn.Dropout(inner)) if inner else act_part)

        def reading(i: int) -> nn.Module:
            block = PreNorm if pre else PostNorm
            norms = (nn.LayerNorm(encoder.dim) for _ in range(2))
            return block(mixer(i), ff(encoder), *norms, mixer_dropout=dropout, ff_dropout=dropout)

        def writing(i: int) -> nn.Module:
            own, cross = (
                MultiHeadAttention(decoder.dim, decoder.heads, projections=projections, scores=scores, mask=mask)
                for mask in (Causal(), None)
            )
            block = CrossPreNorm if pre else CrossPostNorm
            norms = (nn.LayerNorm(decoder.dim), nn.LayerNorm(decoder.dim), nn.LayerNorm(decoder.dim))
            return block(own, cross, ff(decoder), norms, dropout=dropout)

        def embedding(tokens: nn.Embedding, sizes: StackSizes) -> Embedding:
            norm = None if pre else nn.LayerNorm(sizes.dim)
            places = LearnedPositions(sizes.places, sizes.dim)
            return Embedding(tokens, scale=scale, places=places, norm=norm, dropout=dropout)

        def make() -> EncoderDecoder:
            dim = encoder.dim
            read = nn.Embedding(vocab, dim)
            written = nn.Embedding(vocab, dim) if apart else read
            reader, writer = (nn.LayerNorm(dim) if pre else None for _ in range(2))
            return EncoderDecoder(
                Encoder(embedding(read, encoder), [reading] * encoder.layers, reader),
                Decoder(
                    embedding(written, decoder),
                    [writing] * decoder.layers,
                    writer,
                    None if tied else nn.Linear(dim, vocab, bias=False),
                    finish=LogitsBias(vocab) if biased else None,
                ),
            )

        rows = self._outer(tied, apart, biased)
        for stack, sizes, table in (
            ("encoder", encoder, self._encoder_rows(bias)),
            ("decoder", decoder, self._decoder_rows(bias)),
        ):
            named = [
                Row(f"{self.prefix}{stack}.layers.{{i}}.{r.stored}", tuple(f"{stack}.layers.{{i}}.{o}" for o in r.own))
                for r in table
            ]
            rows += [row for i in range(sizes.layers) for row in per_layer(named, i)]
        return Plan(make, rows, tied=self._tied(tied))

    def _tied(self, tied: bool) -> tuple[str, ...]:
        names = [f"{self.prefix}{name}.weight" for name in ("shared", "encoder.embed_tokens", "decoder.embed_tokens")]
        return (*names, "lm_head.weight") if tied else ()

    def _outer(self, tied: bool, apart: bool, biased: bool) -> list[Row]:
        if apart:
            names = {f"{self.prefix}{s}.embed_tokens": f"{s}.embedding.tokens" for s in ("encoder", "decoder")}
            rows = module_rows(names)
        else:
            rows = [Row(f"{self.prefix}shared.weight", (f"encoder.{TOKENS}", f"decoder.{TOKENS}"), Shared(2))]
        rows += module_rows({} if tied else {"lm_head": "decoder.head"})
        if biased:
            rows.append(Row("final_logits_bias", ("decoder.finish.bias",), Squeezed(0)))
        for stack in ("encoder", "decoder"):
            norm = f"{stack}.norm" if self.pre_norm else f"{stack}.embedding.norm"
            rows += module_rows({f"{self.prefix}{stack}.embed_positions": f"{stack}.embedding.places"})
            rows += module_rows({f"{self.prefix}{stack}.layernorm_embedding": norm}, BOTH)
        return rows

    def _encoder_rows(self, bias: bool) -> list[Row]:
        maps = {f"self_attn.{theirs}": f"mixer.{ours}" for theirs, ours in self.qkv.items()}
        return module_rows(maps, kinds(bias)) + module_rows({**ENDS, "self_attn_layer_norm": "mixer_norm"}, BOTH)

    def _decoder_rows(self, bias: bool) -> list[Row]:
        maps = {
            f"{stored}.{theirs}": f"{own}.{ours}"
            for stored, own in (("self_attn", "self_mixer"), ("encoder_attn", "cross_mixer"))
            for theirs, ours in ATTENTION.items()
        }
        norms = {"self_attn_layer_norm": "self_norm", "encoder_attn_layer_norm": "cross_norm"}
        return module_rows(maps, kinds(bias)) + module_rows({**ENDS, **norms}, BOTH)

    def ignored(self) -> tuple[Ignored, ...]:
        """Tensors that may stand unused."""
        return (
            Ignored(f"{self.prefix}shared.weight", "where nothing is tied, a table that nothing reads"),
            Ignored("classification_head.*", HEADS),
            Ignored("qa_outputs.*", HEADS),
        )
