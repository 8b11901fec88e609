"""Falcon: parallel blocks, one or a few key/value heads, rotary or ALiBi (Almazrouei et al. 2023, arXiv:2311.16867)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from regard.biases import Bias, alibi_slopes
from regard.checks import pick
from regard.coordinates import TileIndices
from regard.mixers.parts import Projections, Scores
from regard.models.blocks import Parallel, PreNorm
from regard.models.config import Config
from regard.models.feedforward import ACTIVATIONS, MLP, activation
from regard.models.layouts.base import Layout, Plan
from regard.models.layouts.shared.options import Sizes, read_eps
from regard.models.layouts.shared.parts import AttentionPart, Part
from regard.models.layouts.shared.rotary import rotary_from_config
from regard.models.layouts.shared.rows import BOTH, FF, MIXER, ROTARY_BUFFER, kinds, module_rows
from regard.models.layouts.shared.stacks import PRE_NORM, Layer, Names, Stack, Wiring
from regard.models.tables import FusedQKV, fused_rows

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
            raise ValueError(f"slopes: expected {heads}, one a query head, got {self.head_count()}")

    def head_count(self) -> int:
        return self.slopes.shape[0]


LAYER = "transformer.h.{i}"


def _mlp(dim: int, hidden: int, act: str, bias: bool) -> nn.Module:
    return MLP(dim, hidden, activation(act), bias=bias)


def _wiring(c: Config, new: bool, mixer_dropout: float, ff_dropout: float) -> Wiring:
    """Parallel blocks with one norm, or two, or sequential ones."""
    count = c.get("num_ln_in_parallel_attn")
    if count not in (None, 1, 2):
        raise c.error("num_ln_in_parallel_attn", count, "1, 2 or null")
    if not c.flag("parallel_attn", True):
        if new:
            raise c.error("parallel_attn", False, "true with new_decoder_architecture")
        return Wiring(partial(PreNorm, mixer_dropout=mixer_dropout, ff_dropout=ff_dropout), PRE_NORM.norms)
    if count == 2 and not new:
        raise c.error("num_ln_in_parallel_attn", count, "1 or null without new_decoder_architecture")
    two = new and count in (None, 2)
    norms = {"ln_attn": "norm", "ln_mlp": "ff_norm"} if two else {"input_layernorm": "norm"}
    return Wiring(partial(Parallel, ff_dropout=ff_dropout), norms)


def _falcon(c: Config) -> Plan:
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
    alibi, bias = c.flag("alibi", False), c.flag("bias", False)
    for name in ("rope_parameters", "rope_scaling", "rope_theta") if alibi else ():
        c.get(name)  # stated even where ALiBi takes their place
    dropout = c.dropout("attention_dropout")
    attention = AttentionPart(
        Sizes(c.count("vocab_size", 65024), dim, layers, heads, kv_heads, head_dim),
        Projections(bias=bias),
        # attention_dropout acts on the weights with ALiBi only, and behind the attention of sequential blocks
        Scores(dropout=dropout if alibi else 0.0),
        bias=RoundedAlibi(alibi_slopes(heads), head_dim**-0.5) if alibi else None,
        rotary=None if alibi else rotary_from_config(c, head_dim),
    )
    qkv = FusedQKV(heads, kv_heads, head_dim, groups=kv_heads)
    mixer_rows = fused_rows(f"{LAYER}.self_attention.query_key_value", f"{MIXER}.*_proj", kinds(bias), qkv)
    mixer_rows += module_rows({f"{LAYER}.self_attention.dense": f"{MIXER}.o_proj"}, kinds(bias))
    mlp = {f"{LAYER}.mlp.dense_h_to_4h": f"{FF}.up_proj", f"{LAYER}.mlp.dense_4h_to_h": f"{FF}.down_proj"}
    hidden, act = c.count("ffn_hidden_size", 4 * dim), c.name("activation", "gelu", ACTIVATIONS)
    ff = Part(partial(_mlp, dim, hidden, act, bias), module_rows(mlp, kinds(bias)))
    layer = Layer(Part(attention, mixer_rows), ff, _wiring(c, new, dropout, c.dropout("hidden_dropout")))
    norm = partial(nn.LayerNorm, dim, read_eps(c, 1e-5, "layer_norm_epsilon"))
    names = Names(LAYER, "transformer.word_embeddings", "transformer.ln_f", norm_tensors=BOTH)
    stack = Stack(attention.sizes.vocab, dim, norm, [layer] * layers, names)
    return stack.plan(tied=c.flag("tie_word_embeddings", True))


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
