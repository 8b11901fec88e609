"""Jamba: seven layers of Mamba with inner norms, one of attention; experts in every other layer (arXiv:2403.19887)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import nn

from regard.masks import Causal
from regard.mixers.parts import MambaConfig, RMSNorm, Scores
from regard.models.config import Config
from regard.models.layouts.base import Layout, Plan
from regard.models.layouts.llama import Shape, attention_rows, read_shape
from regard.models.layouts.stacks import Dense, Experts, Part, Stack, from_zero, layers_of, routing_of, silu_of
from regard.models.tables import Row, Squeezed, same
from regard.nn import Mamba, MultiHeadAttention

__all__ = ["JAMBA"]


@dataclass(frozen=True)
class _Attention:
    shape: Shape
    scores: Scores

    def __call__(self) -> nn.Module:
        s = self.shape
        return MultiHeadAttention(
            s.dim, s.heads, kv_heads=s.kv_heads, head_dim=s.head_dim, scores=self.scores, mask=Causal()
        )


@dataclass(frozen=True)
class _Mamba:
    dim: int
    width: int
    state: int
    rank: int
    eps: float
    shell: MambaConfig

    def __call__(self) -> nn.Module:
        norm = partial(RMSNorm, eps=self.eps)
        return Mamba(self.dim, width=self.width, state_dim=self.state, rank=self.rank, norm=norm, shell=self.shell)

    def rows(self, stored: str, own: str = "layers.{i}.mixer") -> list[Row]:
        """Its table."""
        kinds = ("weight", "bias") if self.shell.bias else ("weight",)
        names = {name: name for name in ("A_log", "D", "x_proj.weight", "dt_proj.weight", "dt_proj.bias")}
        names |= {f"{theirs}_layernorm.weight": f"{ours}_norm.weight" for theirs, ours in NORMED.items()}
        names |= {f"{name}_proj.{k}": f"{name}_proj.{k}" for name in ("in", "out") for k in kinds}
        names |= {"conv1d.bias": "conv.bias"} if self.shell.conv_bias else {}
        rows = same({f"{stored}.{theirs}": f"{own}.{ours}" for theirs, ours in names.items()})
        return [*rows, Row(f"{stored}.conv1d.weight", (f"{own}.conv.weight",), Squeezed(1))]


NORMED = {"dt": "dt", "b": "B", "c": "C"}


def _mamba(c: Config, dim: int, eps: float) -> _Mamba:
    rank = -(-dim // 16) if c.get("mamba_dt_rank", "auto") in ("auto", None) else c.count("mamba_dt_rank", 1)
    shell = MambaConfig(
        conv_size=c.count("mamba_d_conv", 4),
        conv_bias=c.flag("mamba_conv_bias", True),
        bias=c.flag("mamba_proj_bias", False),
    )
    c.only("mamba_inner_layernorms", (True, None))
    return _Mamba(dim, c.count("mamba_expand", 2) * dim, c.count("mamba_d_state", 16), rank, eps, shell)


def _every(c: Config, what: str, layers: int, period: int, offset: int, kinds: tuple[str, str]) -> list[str]:
    """One layer of every so many is of the second kind."""
    period, offset = c.count(f"{what}_layer_period", period), from_zero(c, f"{what}_layer_offset", offset)
    if offset >= period:
        raise c.error(f"{what}_layer_offset", offset, f"less than {what}_layer_period={period}")
    return [kinds[i % period == offset] for i in range(layers)]


def _jamba(c: Config, has: Callable[[str], bool]) -> Plan:
    s = read_shape(c, vocab=65536, dim=4096, layers=32, heads=32, kv_heads=8, head_dim=None)
    act, eps = silu_of(c), c.number("rms_norm_eps", 1e-6, least=0.0)
    attention, mamba = _Attention(s, Scores(dropout=c.dropout("attention_dropout"))), _mamba(c, s.dim, eps)
    mixers: dict[str, Part] = {
        "attention": (attention, attention_rows(bias=False)),
        "mamba": (mamba, mamba.rows("model.layers.{i}.mamba")),
    }
    stored, hidden = "model.layers.{i}.feed_forward", c.count("intermediate_size", 14336)
    dense = Dense(s.dim, hidden, act)
    ffs: dict[str, Part] = dict.fromkeys(("dense", "sparse"), (dense, dense.rows(stored)))  # one expert is no choice
    if c.count("num_experts", 16) > 1:
        moe = Experts(s.dim, hidden, act, routing_of(c, "num_experts", 16, 2))
        ffs["sparse"] = moe, moe.rows(stored, router="router")
    kinds = _every(c, "attn", s.layers, 8, 4, ("mamba", "attention"))
    parts = layers_of(mixers, kinds, ffs, _every(c, "expert", s.layers, 2, 1, ("dense", "sparse")))
    stack = Stack(s.vocab, s.dim, partial(RMSNorm, s.dim, eps), parts)
    tied = c.flag("tie_word_embeddings", False)
    return stack.plan(("input_layernorm", "pre_ff_layernorm"), tied=tied, last="model.final_layernorm.weight")


JAMBA = Layout(
    "jamba",
    "JambaForCausalLM",
    _jamba,
    prefix="model.",
    synonyms={"num_local_experts": "num_experts"},
    # how other software computes
    inert=frozenset(
        {
            "calc_logits_for_entire_prompt",
            "n_ctx",
            "num_experts_per_tok",
            "num_logits_to_keep",
            "use_associative_scan",
            "use_mamba_kernels",
            "use_mambapy",
        }
    ),
)
