"""Llama, Mistral, and the parts that their relatives share.

Touvron et al. 2023 (arXiv:2302.13971), Jiang et al. 2023 (arXiv:2310.06825).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import nn

from regard.masks import Causal, Mask, Window
from regard.mixers.parts import Projections, RMSNorm, Scores
from regard.models.blocks import Embedding, PreNorm
from regard.models.config import Config
from regard.models.decoder import Decoder
from regard.models.feedforward import ACTIVATIONS, GatedMLP, activation
from regard.models.layouts.base import Layout, Plan
from regard.models.layouts.rotary import rotary_from_config
from regard.models.tables import Ignored, Row, expand, same
from regard.nn import MultiHeadAttention
from regard.positions import Rotary

__all__ = ["LLAMA", "MISTRAL", "Shape", "attention_rows", "layer_windows", "read_shape"]

ROTARY_BUFFER = Ignored("*rotary_emb.inv_freq", "old files store the rotary frequencies, which follow from the options")


@dataclass(frozen=True)
class Shape:
    """The sizes that every decoder of this kind states."""

    vocab: int
    dim: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int


def read_shape(
    c: Config, *, vocab: int, dim: int, layers: int, heads: int, kv_heads: int | None, head_dim: int | None
) -> Shape:
    """The sizes, with the family's defaults; ``None`` for what follows from the others."""
    width, count = c.count("hidden_size", dim), c.count("num_attention_heads", heads)
    own_kv = c.get("num_key_value_heads", kv_heads)
    own_head_dim = c.get("head_dim", head_dim)
    if own_head_dim is None and width % count:
        raise c.error("num_attention_heads", count, f"a divisor of hidden_size={width}, where head_dim is not given")
    shape = Shape(
        c.count("vocab_size", vocab),
        width,
        c.count("num_hidden_layers", layers),
        count,
        count if own_kv is None else c.count("num_key_value_heads", own_kv),
        width // count if own_head_dim is None else c.count("head_dim", own_head_dim),
    )
    if shape.heads % shape.kv_heads:
        raise c.error("num_key_value_heads", shape.kv_heads, f"a divisor of num_attention_heads={shape.heads}")
    return shape


def layer_windows(c: Config, layers: int, window: int | None, default: Callable[[int], str]) -> list[Mask]:
    """One mask a layer from ``layer_types``; ``sliding_attention`` sees the ``window`` latest tokens, itself too."""
    types = c.get("layer_types")
    types = [default(i) for i in range(layers)] if types is None else types
    if not isinstance(types, list) or len(types) != layers:
        raise c.error("layer_types", types, f"a list of num_hidden_layers={layers} entries")
    masks: dict[str, Mask] = {
        "full_attention": Causal(),
        "sliding_attention": Causal() if window is None else Window(window),
    }
    for name in types:
        if not isinstance(name, str) or name not in masks:
            raise c.error("layer_types", name, " or ".join(masks))
    return [masks[name] for name in types]


def attention_rows(*, bias: bool, out_bias: bool | None = None, sink: bool = False) -> list[Row]:
    """Separate projections under ``self_attn``; ``{i}`` stands for the layer."""
    kinds = dict.fromkeys("qkv", ("weight", "bias") if bias else ("weight",))
    kinds["o"] = ("weight", "bias") if (bias if out_bias is None else out_bias) else ("weight",)
    names = {
        f"model.layers.{{i}}.self_attn.{c}_proj.{k}": f"layers.{{i}}.mixer.{c}_proj.{k}"
        for c, ks in kinds.items()
        for k in ks
    }
    if sink:
        names["model.layers.{i}.self_attn.sinks"] = "layers.{i}.mixer.sink"
    return same(names)


def norm_rows(**norms: str) -> list[Row]:
    """Norm weights of a layer, the file's name to the block's."""
    return same({f"model.layers.{{i}}.{stored}.weight": f"layers.{{i}}.{own}.weight" for stored, own in norms.items()})


def gated_rows(kinds: tuple[str, ...]) -> list[Row]:
    """The gated feed-forward part under ``mlp``."""
    return same(
        {
            f"model.layers.{{i}}.mlp.{p}_proj.{k}": f"layers.{{i}}.ff.{p}_proj.{k}"
            for p in ("gate", "up", "down")
            for k in kinds
        }
    )


def outer_rows(per_layer: list[Row], layers: int, *, tied: bool) -> list[Row]:
    """The embedding, all layers, the last norm, and the head where it is its own."""
    head = {} if tied else {"lm_head.weight": "head.weight"}
    ends = same({"model.embed_tokens.weight": "embedding.tokens.weight", "model.norm.weight": "norm.weight", **head})
    return ends + [row for i in range(layers) for row in expand(per_layer, i)]


TIED = ("model.embed_tokens.weight", "lm_head.weight")


@dataclass(frozen=True)
class _Layer:
    """A pre-norm layer with grouped heads, rotary positions and a gated feed-forward part."""

    shape: Shape
    hidden: int
    act: str
    eps: float
    projections: Projections
    mlp_bias: bool
    scores: Scores
    rotary: Rotary
    mask: Mask

    def __call__(self, i: int) -> nn.Module:
        s = self.shape
        mixer = MultiHeadAttention(
            s.dim,
            s.heads,
            kv_heads=s.kv_heads,
            head_dim=s.head_dim,
            projections=self.projections,
            scores=self.scores,
            mask=self.mask,
            rotary=self.rotary,
        )
        ff = GatedMLP(s.dim, self.hidden, activation(self.act), bias=self.mlp_bias)
        return PreNorm(mixer, ff, RMSNorm(s.dim, self.eps), RMSNorm(s.dim, self.eps))


def _decoder(layer: _Layer, tied: bool) -> Decoder:
    s = layer.shape
    head = None if tied else nn.Linear(s.dim, s.vocab, bias=False)
    return Decoder(Embedding(nn.Embedding(s.vocab, s.dim)), [layer] * s.layers, RMSNorm(s.dim, layer.eps), head)


def _plan(c: Config, s: Shape, hidden: int, mask: Mask, *, attention_bias: bool, mlp_bias: bool) -> Plan:
    tied = c.flag("tie_word_embeddings", False)
    layer = _Layer(
        shape=s,
        hidden=hidden,
        act=c.name("hidden_act", "silu", ACTIVATIONS),
        eps=c.number("rms_norm_eps", 1e-6, least=0.0),
        projections=Projections(bias=attention_bias),
        mlp_bias=mlp_bias,
        scores=Scores(dropout=c.dropout("attention_dropout")),
        rotary=rotary_from_config(c, s.head_dim),
        mask=mask,
    )
    per_layer = attention_rows(bias=attention_bias) + gated_rows(("weight", "bias") if mlp_bias else ("weight",))
    per_layer += norm_rows(input_layernorm="mixer_norm", post_attention_layernorm="ff_norm")
    return Plan(partial(_decoder, layer, tied), outer_rows(per_layer, s.layers, tied=tied), TIED if tied else ())


def _llama(c: Config, has: Callable[[str], bool]) -> Plan:
    s = read_shape(c, vocab=32000, dim=4096, layers=32, heads=32, kv_heads=None, head_dim=None)
    flags = {"attention_bias": c.flag("attention_bias", False), "mlp_bias": c.flag("mlp_bias", False)}
    return _plan(c, s, c.count("intermediate_size", 11008), Causal(), **flags)


def _mistral(c: Config, has: Callable[[str], bool]) -> Plan:
    s = read_shape(c, vocab=32000, dim=4096, layers=32, heads=32, kv_heads=8, head_dim=None)
    window = c.get("sliding_window", 4096)
    if window is not None:
        window = c.count("sliding_window", 4096)
    kind = "full_attention" if window is None else "sliding_attention"
    masks = layer_windows(c, s.layers, window, lambda i: kind)
    if any(t != kind for t in c.get("layer_types") or ()):
        raise c.error("layer_types", c.get("layer_types"), f"{kind} in every layer, as sliding_window={window!r} says")
    return _plan(c, s, c.count("intermediate_size", 14336), masks[0], attention_bias=False, mlp_bias=False)


LLAMA = Layout(
    "llama",
    "LlamaForCausalLM",
    _llama,
    prefix="model.",
    ignored=(ROTARY_BUFFER,),
    inert=frozenset({"is_llama_config"}),
)
MISTRAL = Layout("mistral", "MistralForCausalLM", _mistral, prefix="model.", ignored=(ROTARY_BUFFER,))
