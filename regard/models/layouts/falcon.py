"""Falcon: parallel blocks, one or a few key/value heads, rotary or ALiBi (Almazrouei et al. 2023, arXiv:2311.16867)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from regard.biases import Bias, alibi_slopes
from regard.checks import pick
from regard.coordinates import TileIndices
from regard.masks import Causal
from regard.mixers.parts import Projections, Scores
from regard.models.blocks import Embedding, Parallel, PreNorm
from regard.models.config import Config
from regard.models.decoder import Decoder
from regard.models.feedforward import ACTIVATIONS, MLP, activation
from regard.models.layouts.base import Layout, Plan
from regard.models.layouts.bloom import BOTH, TIED, both
from regard.models.layouts.llama import ROTARY_BUFFER
from regard.models.layouts.rotary import rotary_from_config
from regard.models.tables import FusedQKV, expand, fused, same
from regard.nn import MultiHeadAttention
from regard.positions import Rotary

__all__ = ["FALCON", "RoundedAlibi"]


@dataclass(frozen=True, eq=False)
class RoundedAlibi(Bias):
    """ALiBi as Falcon was trained with it: ``bf16(bf16(slope_h) * bf16(j)) * scale``.

    The product of slope and key slot is formed in bfloat16, and the scores are divided by ``sqrt(head_dim)`` after it
    was added, so it carries that scale too. Where the rounding falls depends on j, which counts the row's real tokens.
    """

    slopes: Tensor
    scale: float
    counted: Tensor | None = None  # (B, Tk): real tokens before each key; None: all are real

    def with_tensors(self, tensors: Sequence[Tensor]) -> RoundedAlibi:
        return RoundedAlibi(tensors[0], self.scale, self.counted)

    def with_padding(self, keep: Tensor | None) -> RoundedAlibi:
        counted = None if keep is None else (keep.cumsum(1) - 1).clamp(min=0)
        return RoundedAlibi(self.slopes, self.scale, counted)

    def _place(self, indices: TileIndices) -> Tensor:
        return indices.j if self.counted is None else pick(self.counted, indices.b, indices.col)

    def scores(self, indices: TileIndices, dtype: torch.dtype) -> Tensor:
        coarse = torch.bfloat16
        return (self.slopes.to(coarse)[indices.h] * self._place(indices).to(coarse)).to(dtype) * self.scale

    def accumulate(self, indices: TileIndices, grad: Tensor, out: Sequence[Tensor]) -> None:
        out[0].add_((grad * self._place(indices) * self.scale).sum((0, 2, 3)).to(out[0].dtype))

    def check(self, batch: int, heads: int, q_len: int, k_len: int) -> None:
        if heads != self.head_count():
            raise ValueError(f"RoundedAlibi.slopes: {self.head_count()} slopes; accepted: {heads}, one a query head")

    def head_count(self) -> int:
        return self.slopes.shape[0]


@dataclass(frozen=True)
class _Parts:
    vocab: int
    dim: int
    layers: int
    heads: int
    kv_heads: int
    hidden: int
    act: str
    eps: float
    linear_bias: bool
    scores: Scores
    rotary: Rotary | None
    bias: Bias | None
    mixer_dropout: float
    ff_dropout: float

    def norm(self) -> nn.LayerNorm:
        return nn.LayerNorm(self.dim, self.eps)

    def layer(self, norms: int, i: int) -> nn.Module:
        """A layer with one norm (parallel), two (parallel, one each), or none named here (sequential)."""
        mixer = MultiHeadAttention(
            self.dim,
            self.heads,
            kv_heads=self.kv_heads,
            projections=Projections(bias=self.linear_bias),
            scores=self.scores,
            mask=Causal(),
            bias=self.bias,
            rotary=self.rotary,
        )
        ff = MLP(self.dim, self.hidden, activation(self.act), bias=self.linear_bias)
        if not norms:
            dropout = {"mixer_dropout": self.mixer_dropout, "ff_dropout": self.ff_dropout}
            return PreNorm(mixer, ff, self.norm(), self.norm(), **dropout)
        return Parallel(mixer, ff, self.norm(), self.norm() if norms == 2 else None, ff_dropout=self.ff_dropout)

    def decoder(self, norms: int, tied: bool) -> Decoder:
        head = None if tied else nn.Linear(self.dim, self.vocab, bias=False)
        embedding = Embedding(nn.Embedding(self.vocab, self.dim))
        return Decoder(embedding, [partial(self.layer, norms)] * self.layers, self.norm(), head)


def _norms(c: Config, new: bool) -> tuple[int, dict[str, str]]:
    """How many norms a parallel block has (0 where it is sequential), and their names in the file."""
    count = c.get("num_ln_in_parallel_attn")
    if count not in (None, 1, 2):
        raise c.error("num_ln_in_parallel_attn", count, "1, 2 or null")
    if not c.flag("parallel_attn", True):
        if new:
            raise c.error("parallel_attn", False, "true with new_decoder_architecture")
        return 0, {"input_layernorm": "mixer_norm", "post_attention_layernorm": "ff_norm"}
    if count == 2 and not new:
        raise c.error("num_ln_in_parallel_attn", count, "1 or null without new_decoder_architecture")
    if new and count in (None, 2):
        return 2, {"ln_attn": "norm", "ln_mlp": "ff_norm"}
    return 1, {"input_layernorm": "norm"}


def _falcon(c: Config, has: Callable[[str], bool]) -> Plan:
    dim, heads, layers = (
        c.count("hidden_size", 4544),
        c.count("num_attention_heads", 71),
        c.count("num_hidden_layers", 32),
    )
    if dim % heads:
        raise c.error("num_attention_heads", heads, f"a divisor of hidden_size={dim}")
    head_dim = dim // heads
    new, multi_query = c.flag("new_decoder_architecture", False), c.flag("multi_query", True)
    stated = c.count("num_kv_heads", heads)
    kv_heads = stated if new else 1 if multi_query else heads
    if heads % kv_heads or (stated != heads and not new and not multi_query):
        raise c.error("num_kv_heads", stated, f"{heads} (one a head)" if not new else f"a divisor of {heads} heads")
    norms, norm_names = _norms(c, new)
    alibi, tied, bias = c.flag("alibi", False), c.flag("tie_word_embeddings", True), c.flag("bias", False)
    for name in ("rope_parameters", "rope_scaling", "rope_theta") if alibi else ():
        c.get(name)  # stated even where ALiBi takes their place
    dropout = c.dropout("attention_dropout")
    parts = _Parts(
        vocab=c.count("vocab_size", 65024),
        dim=dim,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        hidden=c.count("ffn_hidden_size", 4 * dim),
        act=c.name("activation", "gelu", ACTIVATIONS),
        eps=c.number("layer_norm_epsilon", 1e-5, least=0.0),
        linear_bias=bias,
        # attention_dropout acts on the weights with ALiBi only, and behind the attention of sequential blocks
        scores=Scores(dropout=dropout if alibi else 0.0),
        rotary=None if alibi else rotary_from_config(c, head_dim),
        bias=RoundedAlibi(alibi_slopes(heads), head_dim**-0.5) if alibi else None,
        mixer_dropout=dropout,
        ff_dropout=c.dropout("hidden_dropout"),
    )
    kinds = BOTH if bias else ("weight",)
    layer, own = "transformer.h.{i}", "layers.{i}"
    qkv = FusedQKV(heads, kv_heads, head_dim, groups=kv_heads)
    per_layer = fused(f"{layer}.self_attention.query_key_value", f"{own}.mixer.*_proj", kinds, qkv)
    linear = {
        "self_attention.dense": "mixer.o_proj",
        "mlp.dense_h_to_4h": "ff.up_proj",
        "mlp.dense_4h_to_h": "ff.down_proj",
    }
    per_layer += both({f"{layer}.{a}": f"{own}.{b}" for a, b in linear.items()}, kinds)
    per_layer += both({f"{layer}.{a}": f"{own}.{b}" for a, b in norm_names.items()})
    rows = both({"transformer.ln_f": "norm"}) + same({"transformer.word_embeddings.weight": "embedding.tokens.weight"})
    rows += [] if tied else same({"lm_head.weight": "head.weight"})
    rows += [row for i in range(layers) for row in expand(per_layer, i)]
    return Plan(partial(parts.decoder, norms, tied), rows, TIED if tied else ())


FALCON = Layout(
    "falcon",
    "FalconForCausalLM",
    _falcon,
    prefix="transformer.",
    ignored=(ROTARY_BUFFER,),
    synonyms={
        "n_embed": "hidden_size",
        "n_head": "num_attention_heads",
        "n_head_kv": "num_kv_heads",
        "n_layer": "num_hidden_layers",
    },
)
