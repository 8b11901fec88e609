"""T5, version 1.1 too, mT5, umT5: relative places in buckets, unscaled scores (Raffel et al. 2020, arXiv:1910.10683).

mT5: Xue et al. 2020, arXiv:2010.11934; umT5, whose layers have a table of their own each: Chung et al. 2023,
arXiv:2304.09151.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import nn

from regard.masks import Causal
from regard.mixers.parts import RelativePositionBias, RMSNorm, Scores
from regard.models.blocks import Embedding, PreNorm, Scaled
from regard.models.config import Config
from regard.models.cross import CrossPreNorm
from regard.models.decoder import Decoder
from regard.models.encoder import Encoder
from regard.models.encoder_decoder import EncoderDecoder
from regard.models.feedforward import ACTIVATIONS, MLP, GatedMLP, activation
from regard.models.layouts.base import Layout, Plan
from regard.models.layouts.shared.options import read_eps
from regard.models.layouts.shared.rows import module_rows
from regard.models.tables import Ignored, Row, Shared, per_layer
from regard.nn import MultiHeadAttention

__all__ = ["MT5", "T5", "UMT5"]

SYNONYMS = {
    "d_kv": "head_dim",
    "d_model": "hidden_size",
    "num_heads": "num_attention_heads",
    "num_layers": "num_hidden_layers",
}
MAPS = {f"{name}": f"{name}_proj" for name in "qkvo"}
STACKS = ("encoder", "decoder")


@dataclass(frozen=True)
class _Family:
    """Where the families differ.

    Args:
        vocab, hidden, layers, heads, act: what the options mean where they do not state it.
        scaled: whether a tied head reads hidden states divided by the root of their width.
        shared: whether the layers of a stack share one table of relative places.
    """

    vocab: int = 32128
    hidden: int = 2048
    layers: int = 6
    heads: int = 8
    act: str = "relu"
    scaled: bool = True
    shared: bool = True


@dataclass(frozen=True)
class _Parts:
    """What the layers of one checkpoint are made of."""

    dim: int
    heads: int
    head_dim: int
    hidden: int
    act: str
    gated: bool
    eps: float
    dropout: float
    buckets: int
    longest: int
    factor: float

    def norm(self) -> nn.Module:
        return RMSNorm(self.dim, self.eps)

    def ff(self) -> nn.Module:
        act = nn.Sequential(activation(self.act), nn.Dropout(self.dropout)) if self.dropout else activation(self.act)
        ff = GatedMLP(self.dim, self.hidden, act) if self.gated else MLP(self.dim, self.hidden, act, bias=False)
        _starts(ff.down_proj, self.factor * self.hidden**-0.5)
        return ff

    def bias(self, decoder: bool) -> RelativePositionBias:
        return RelativePositionBias(self.buckets, self.heads, bidirectional=not decoder, max_distance=self.longest)

    def attention(self, bias: nn.Module | None, mask: Causal | None = None) -> MultiHeadAttention:
        scores = Scores(scale=1.0, dropout=self.dropout)
        layer = MultiHeadAttention(self.dim, self.heads, head_dim=self.head_dim, scores=scores, mask=mask, bias=bias)
        # queries start as narrow as the scores, which nothing divides, need them
        _starts(layer.q_proj, self.factor * (self.dim * self.head_dim) ** -0.5)
        if layer.o_proj is not None:
            _starts(layer.o_proj, self.factor * (self.heads * self.head_dim) ** -0.5)
        return layer


def _starts(part: nn.Linear | nn.Embedding, std: float) -> None:
    """From now on a matrix starts from N(0, std^2)."""
    part.reset_parameters = partial(_draw, part, std)  # type: ignore[method-assign]


def _draw(part: nn.Linear | nn.Embedding, std: float) -> None:
    nn.init.normal_(part.weight, std=std)


def _read(c: Config, family: _Family) -> _Parts:
    proj = c.get("feed_forward_proj", family.act)
    words = proj.split("-") if isinstance(proj, str) else []
    gated = len(words) == 2 and words[0] == "gated"
    if not words or words[-1] not in ACTIVATIONS or len(words) != 1 + gated:
        raise c.error("feed_forward_proj", proj, f"gated-ACT or ACT, ACT one of {', '.join(sorted(ACTIVATIONS))}")
    act = "gelu_new" if proj == "gated-gelu" else words[-1]
    c.only("dense_act_fn", (act, None), f"what feed_forward_proj={proj} means")
    c.only("is_gated_act", (gated, None), f"what feed_forward_proj={proj} means")
    buckets, longest = c.count("relative_attention_num_buckets", 32), c.count("relative_attention_max_distance", 128)
    if buckets < 4:
        raise c.error("relative_attention_num_buckets", buckets, "at least 4")
    if longest <= buckets // 2:
        raise c.error("relative_attention_max_distance", longest, f"more than {buckets // 2}, half of the buckets")
    return _Parts(
        c.count("hidden_size", 512),
        c.count("num_attention_heads", family.heads),
        c.count("head_dim", 64),
        c.count("d_ff", family.hidden),
        act,
        gated,
        read_eps(c, 1e-6, "layer_norm_epsilon"),
        c.dropout("dropout_rate", 0.1),
        buckets,
        longest,
        c.amount("initializer_factor", 1.0),
    )


def _plan(family: _Family, c: Config) -> Plan:
    c.only("is_encoder_decoder", (True, None), "an encoder and a decoder")
    c.only("is_decoder", (False, None), "an encoder and a decoder")
    parts, vocab = _read(c, family), c.count("vocab_size", family.vocab)
    layers = c.count("num_hidden_layers", family.layers)
    counts = {"encoder": layers, "decoder": c.count("num_decoder_layers", layers)}
    tied = c.flag("tie_word_embeddings", True)
    scaled = c.flag("scale_decoder_outputs", tied) if family.scaled else False
    # An option may say tied in files whose head is apart: those of version 1.1, written anew
    apart = not (tied and scaled) and c.holds("lm_head.weight", new=not tied)
    dim, dropout = parts.dim, parts.dropout

    def tables(decoder: bool, count: int) -> list[nn.Module]:
        made = [parts.bias(decoder) for _ in range(1 if family.shared else count)]
        return [made[0]] * count if family.shared else list(made)

    def reading(bias: nn.Module, i: int) -> nn.Module:
        norms = parts.norm(), parts.norm()
        return PreNorm(parts.attention(bias), parts.ff(), *norms, mixer_dropout=dropout, ff_dropout=dropout)

    def writing(bias: nn.Module, i: int) -> nn.Module:
        own, cross = parts.attention(bias, Causal()), parts.attention(None)
        return CrossPreNorm(own, cross, parts.ff(), (parts.norm(), parts.norm(), parts.norm()), dropout=dropout)

    def last() -> nn.Module:
        return nn.Sequential(parts.norm(), nn.Dropout(dropout))

    def make() -> EncoderDecoder:
        tokens = nn.Embedding(vocab, dim)
        _starts(tokens, parts.factor)
        head = nn.Linear(dim, vocab, bias=False) if apart else None
        if head is not None:
            _starts(head, parts.factor)
        encoder, decoder = (
            [partial(block, table) for table in tables(stack == "decoder", counts[stack])]
            for stack, block in zip(STACKS, (reading, writing), strict=True)
        )
        return EncoderDecoder(
            Encoder(Embedding(tokens, dropout=dropout), encoder, last()),
            Decoder(
                Embedding(tokens, dropout=dropout),
                decoder,
                last(),
                head,
                finish=Scaled(dim**-0.5) if scaled else None,
            ),
        )

    rows = [Row("shared.weight", tuple(f"{stack}.embedding.tokens.weight" for stack in STACKS), Shared(2))]
    rows += module_rows({"lm_head": "decoder.head"} if apart else {})
    for stack in STACKS:
        rows += _stack_rows(stack, counts[stack], parts.gated, family.shared)
    copies = [f"{stack}.embed_tokens.weight" for stack in STACKS]
    return Plan(make, rows, tied=("shared.weight", *copies, *([] if apart else ["lm_head.weight"])))


def _stack_rows(stack: str, count: int, gated: bool, shared: bool) -> list[Row]:
    mixers = {"SelfAttention": ("mixer", "mixer_norm")}
    if stack == "decoder":
        mixers = {"SelfAttention": ("self_mixer", "self_norm"), "EncDecAttention": ("cross_mixer", "cross_norm")}
    block, own = f"{stack}.block.{{i}}.layer", f"{stack}.layers.{{i}}"
    names: dict[str, str] = {}
    for n, (theirs, (mixer, norm)) in enumerate(mixers.items()):
        names |= {f"{block}.{n}.{theirs}.{a}": f"{own}.{mixer}.{b}" for a, b in MAPS.items()}
        names[f"{block}.{n}.layer_norm"] = f"{own}.{norm}"
    up = {"wi_0": "gate_proj", "wi_1": "up_proj"} if gated else {"wi": "up_proj"}
    ff = f"{block}.{len(mixers)}"
    names |= {f"{ff}.DenseReluDense.{a}": f"{own}.ff.{b}" for a, b in (up | {"wo": "down_proj"}).items()}
    names[f"{ff}.layer_norm"] = f"{own}.ff_norm"
    bias = f"{mixers['SelfAttention'][0]}.bias.weight"
    stored = f"{block}.0.SelfAttention.relative_attention_bias.weight"
    table = module_rows(names) + ([] if shared else [Row(stored, (f"{own}.{bias}",))])
    rows = [row for i in range(count) for row in per_layer(table, i)]
    if shared:
        all_of = tuple(f"{stack}.layers.{i}.{bias}" for i in range(count))
        rows.append(Row(stored.replace("{i}", "0"), all_of, Shared(count)))
    return rows + module_rows({f"{stack}.final_layer_norm": f"{stack}.norm.0"})


def _start(config: Mapping[str, Any], source: str) -> dict[str, Any]:
    """The published start: each matrix by its number of inputs; queries, ends of branches and tables say theirs."""
    c = Config(config, source, SYNONYMS)
    std = c.amount("initializer_factor", 1.0) / math.sqrt(c.count("hidden_size", 512))
    return {"std": std, "depth_scaled": False}


T5 = Layout(
    "t5",
    "T5ForConditionalGeneration",
    partial(_plan, _Family()),
    ignored=(
        Ignored(
            "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",
            "files of the first release hold a table that nothing reads",
        ),
    ),
    synonyms=SYNONYMS,
    # Where texts start, heads of tasks, the lengths of texts in training, and caches.
    inert=frozenset({"classifier_dropout", "decoder_start_token_id", "n_positions", "output_past"}),
    start=_start,
)
_MANY = _Family(250112, 1024, 8, 6, "gated-gelu", scaled=False)
MT5 = replace(T5, model_type="mt5", architecture="MT5ForConditionalGeneration", plan=partial(_plan, _MANY))
UMT5 = replace(
    T5,
    model_type="umt5",
    architecture="UMT5ForConditionalGeneration",
    plan=partial(_plan, replace(_MANY, scaled=True, shared=False)),
)
