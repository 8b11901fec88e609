"""GPT-2: learned positions, matrices stored with inputs first (Radford et al. 2019)."""

from __future__ import annotations

from functools import partial

from torch import nn

from regard.mixers.parts import Projections, Scores
from regard.models.blocks import Embedding, PreNorm
from regard.models.config import Config
from regard.models.feedforward import ACTIVATIONS, MLP, activation
from regard.models.layouts.base import Layout, Plan
from regard.models.layouts.shared.options import Sizes, read_eps
from regard.models.layouts.shared.parts import AttentionPart, Part
from regard.models.layouts.shared.rows import BOTH, FF, MIXER, module_rows
from regard.models.layouts.shared.stacks import Layer, Names, Stack, Wiring
from regard.models.tables import FusedQKV, Ignored, Row, Transposed, fused_rows, one_to_one
from regard.positions import LearnedPositions

__all__ = ["GPT2"]

LAYER = "transformer.h.{i}"
NAMES = Names(LAYER, "transformer.wte", "transformer.ln_f", norm_tensors=BOTH)
MASKS = "old files store the causal mask and what hidden scores became"


def _mlp(dim: int, hidden: int, act: str) -> nn.Module:
    return MLP(dim, hidden, activation(act))


def _embedding(places: int, dim: int, dropout: float, table: nn.Embedding) -> Embedding:
    return Embedding(table, places=LearnedPositions(places, dim), dropout=dropout)


def _scale(c: Config, head_dim: int, layers: int) -> list[float]:
    """What each layer's scores are multiplied by."""
    scale = head_dim**-0.5 if c.flag("scale_attn_weights", True) else 1.0
    by_layer = c.flag("scale_attn_by_inverse_layer_idx", False)
    return [scale / (i + 1) if by_layer else scale for i in range(layers)]


def _transposed(names: dict[str, str]) -> list[Row]:
    weights = [Row(f"{stored}.weight", (f"{own}.weight",), Transposed()) for stored, own in names.items()]
    return weights + one_to_one({f"{stored}.bias": f"{own}.bias" for stored, own in names.items()})


def _gpt2(c: Config) -> Plan:
    dim, heads, layers = (
        c.count("hidden_size", 768),
        c.count("num_attention_heads", 12),
        c.count("num_hidden_layers", 12),
    )
    if dim % heads:
        raise c.error("num_attention_heads", heads, f"a divisor of n_embd={dim}")
    c.only("add_cross_attention", (False, None), "the decoder alone")
    sizes = Sizes(c.count("vocab_size", 50257), dim, layers, heads, heads, dim // heads)
    dropout, inner = c.dropout("resid_pdrop", 0.1), c.dropout("attn_pdrop", 0.1)
    qkv = FusedQKV(heads, heads, dim // heads, groups=1)
    mixer_rows = fused_rows(f"{LAYER}.attn.c_attn", f"{MIXER}.*_proj", ("weight",), Transposed(qkv))
    mixer_rows += fused_rows(f"{LAYER}.attn.c_attn", f"{MIXER}.*_proj", ("bias",), qkv)
    mixer_rows += _transposed({f"{LAYER}.attn.c_proj": f"{MIXER}.o_proj"})
    mlp = {f"{LAYER}.mlp.c_fc": f"{FF}.up_proj", f"{LAYER}.mlp.c_proj": f"{FF}.down_proj"}
    make = partial(_mlp, dim, c.count("n_inner", 4 * dim), c.name("activation_function", "gelu_new", ACTIVATIONS))
    ff = Part(make, _transposed(mlp))
    block = partial(PreNorm, mixer_dropout=dropout, ff_dropout=dropout)
    wiring = Wiring(block, {"ln_1": "mixer_norm", "ln_2": "ff_norm"})
    stack = Stack(
        sizes.vocab,
        dim,
        partial(nn.LayerNorm, dim, read_eps(c, 1e-5, "layer_norm_epsilon")),
        [
            Layer(
                Part(AttentionPart(sizes, Projections(bias=True), Scores(scale=s, dropout=inner)), mixer_rows),
                ff,
                wiring,
            )
            for s in _scale(c, dim // heads, layers)
        ],
        NAMES,
        embedding=partial(_embedding, c.count("max_position_embeddings", 1024), dim, c.dropout("embd_pdrop", 0.1)),
        embedding_rows=module_rows({"transformer.wpe": "embedding.places"}),
    )
    return stack.plan(tied=c.flag("tie_word_embeddings", True))


GPT2 = Layout(
    "gpt2",
    "GPT2LMHeadModel",
    _gpt2,
    prefix="transformer.",
    ignored=(Ignored("*h.*.attn.bias", MASKS), Ignored("*h.*.attn.masked_bias", MASKS)),
    synonyms={
        "n_embd": "hidden_size",
        "n_head": "num_attention_heads",
        "n_layer": "num_hidden_layers",
        "n_positions": "max_position_embeddings",
    },
    # The order in which scores are formed, heads of tasks, and the trained context under another name.
    inert=frozenset({"n_ctx", "reorder_and_upcast_attn", "summary_first_dropout", "summary_proj_to_labels"})
    | {"summary_activation", "summary_type", "summary_use_proj"},
)
