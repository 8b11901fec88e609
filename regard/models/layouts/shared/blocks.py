"""The block-sparse attention of the BigBird families, by their options."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from regard.mixers.parts import Projections, Scores
from regard.models.config import Config
from regard.models.layouts.shared.options import from_zero
from regard.nn import BigBird, BlockPlan, MultiHeadAttention

__all__ = ["read_block_mixer"]


def read_block_mixer(
    c: Config, dim: int, heads: int, scores: Scores, *, bias: bool, out_bias: bool
) -> Callable[[], nn.Module]:
    """The mixer of an encoder's layer, as the released code computes it in evaluation: no block is random there, and
    the first one counts again in place of each.
    """
    kind = c.name("attention_type", "block_sparse", ("block_sparse", "original_full"))
    plan = BlockPlan(c.count("block_size", 64), from_zero(c, "num_random_blocks", 3), count="slots", first_again=True)

    def make() -> nn.Module:
        if kind == "original_full":
            projections = Projections(bias=bias, out_bias=out_bias)
            return MultiHeadAttention(dim, heads, projections=projections, scores=scores)
        return BigBird(dim, heads, plan, scores=scores, bias=bias, out_bias=out_bias)

    return make
