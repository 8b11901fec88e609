"""Latent attention as configuration files state it, and its table."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from torch import nn

from regard.masks import Causal
from regard.mixers.parts import Scores
from regard.models.config import Config
from regard.models.layouts.shared.parts import Part
from regard.models.layouts.shared.rows import MIXER
from regard.models.tables import one_to_one
from regard.nn import LatentProjections, LatentSizes, MultiHeadLatentAttention
from regard.positions import Rotary

__all__ = ["FOLLOWING", "LatentPart", "interleaved", "read_latent"]

FOLLOWING = frozenset({"head_dim", "qk_head_dim"})
"""Options that other software writes down, and that follow from the others."""


@dataclass(frozen=True)
class LatentPart:
    """Causal latent attention; the norms inside keep their own eps, whatever the options say of the others."""

    dim: int
    heads: int
    sizes: LatentSizes
    projections: LatentProjections
    scores: Scores
    rotary: Rotary | None

    def __call__(self) -> nn.Module:
        return MultiHeadLatentAttention(
            self.dim,
            self.heads,
            self.sizes,
            projections=self.projections,
            scores=self.scores,
            mask=Causal(),
            rotary=self.rotary,
        )

    def part(self, stored: str = "model.layers.{i}.self_attn", *, out: str = "o_proj", gate: str = "g_proj") -> Part:
        """With its table, under the file's names."""
        compressed = self.sizes.q_rank is not None
        names = {"kv_a_proj_with_mqa": "kv_a_proj", "kv_a_layernorm": "kv_a_norm", "kv_b_proj": "kv_b_proj"}
        names |= {"q_a_proj": "q_a_proj", "q_a_layernorm": "q_a_norm", "q_b_proj": "q_b_proj"} if compressed else {}
        names |= {} if compressed else {"q_proj": "q_proj"}
        names |= {out: "o_proj"} | ({gate: "gate_proj"} if self.projections.gate else {})
        found = {f"{stored}.{theirs}.weight": f"{MIXER}.{ours}.weight" for theirs, ours in names.items()}
        if self.projections.bias:
            biased = ("q_a_proj", "kv_a_proj", "o_proj")
            found |= {f"{stored}.{a}.bias": f"{MIXER}.{b}.bias" for a, b in names.items() if b in biased}
        return Part(self, one_to_one(found))


def read_latent(
    c: Config, *, dim: int, heads: int, q_rank: int | None = None, gate: str | None = None, rotary: Rotary | None
) -> LatentPart:
    """The sizes that the options state; `q_rank` is the family's default."""
    if c.get("num_key_value_heads") not in (None, heads):
        raise c.error("num_key_value_heads", c.get("num_key_value_heads"), f"num_attention_heads={heads}, or null")
    given = c.get("q_lora_rank", q_rank)
    sizes = LatentSizes(
        rank=c.count("kv_lora_rank", 512),
        nope_dim=c.count("qk_nope_head_dim", 128),
        rope_dim=c.count("qk_rope_head_dim", 64),
        value_dim=c.count("v_head_dim", 128),
        q_rank=None if given is None else c.count("q_lora_rank", 1536),
    )
    bias = c.flag("attention_bias", False)
    scores = Scores(dropout=c.dropout("attention_dropout"))
    return LatentPart(dim, heads, sizes, LatentProjections(bias=bias, gate=gate), scores, rotary)


def interleaved(rotary: Rotary) -> Rotary:
    """The same, turning pairs of neighbouring channels."""
    return dataclasses.replace(rotary, style="interleaved")
