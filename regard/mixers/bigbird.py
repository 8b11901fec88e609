"""BigBird: blocks of tokens read their neighbours, the first and the last block, and a few random ones.

With n blocks, a query of block m reads {0, m - 1, m, m + 1, n - 1} and r random blocks of its head; the first and the
last block read everything. Zaheer et al. 2020, arXiv:2007.14062, section 2 (internal transformer construction).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from regard.checks import describe, is_part, whole
from regard.coordinates import is_recording
from regard.masks import BlockColumns, Global, KeyLengths, KeyPadding, Mask
from regard.mixers.attention_parts import hide_unread
from regard.mixers.base import Record, Traits, check_tokens, no_context
from regard.mixers.costs import attention_macs
from regard.mixers.parts import Scores, merge_heads, split_heads
from regard.mixers.unpacked import Unpacked
from regard.ops.attention import attention, attention_weights
from regard.tokens import TokenLayout, resolve_tokens, takes_token_layout

__all__ = ["BigBird", "BlockPlan", "records"]


@dataclass(frozen=True)
class BlockPlan:
    """Which blocks read which.

    Args:
        block: tokens of a block.
        random: random blocks for each query block and head, none of them read otherwise, as many as there are.
        seed: of the choice, which is the same in training and in evaluation.
        count: "tokens" counts blocks over the real tokens of each sequence, so that padding and what else is in a batch
            change nothing; "slots" counts them over the call's slots, as the published code does.
        full_until: sequences of up to so many tokens are read whole; None for the published (5 + 2 random) block.
        first_again: the first block in place of each random one, counted once more each time: what a widely used port
            does in evaluation (its index tables are zeros there).
        chosen: the random blocks themselves, int64 (heads, n - 2, random), for sequences of n blocks; None draws them.

    Raises ValueError and TypeError for numbers out of range.
    """

    block: int
    random: int = 3
    seed: int = 0
    count: Literal["tokens", "slots"] = "tokens"
    full_until: int | None = None
    first_again: bool = False
    chosen: Tensor | None = None

    def __post_init__(self) -> None:
        whole("block", self.block, 1)
        whole("random", self.random, 0)
        whole("seed", self.seed, None)
        if self.full_until is not None:
            whole("full_until", self.full_until, 0)
        if self.count not in ("tokens", "slots"):
            raise ValueError(f"count: expected 'tokens' or 'slots', got {self.count!r}")

    @property
    def reads_whole_until(self) -> int:
        """Tokens up to which everything is read."""
        return (5 + 2 * self.random) * self.block if self.full_until is None else self.full_until

    def random_blocks(self, heads: int, blocks: int) -> Tensor:
        """The random blocks (heads, blocks, random) of each query block, -1 for none.

        Distinct and never among those that are read anyway; row 1 does not draw block n - 2, nor row n - 2 block 1, as
        in the released code. (Floyd's method, over the ranks of the blocks that may be drawn.)
        """
        found = torch.full((heads, blocks, self.random), -1)
        if self.chosen is not None:
            if tuple(self.chosen.shape) != (heads, blocks - 2, self.random):
                raise ValueError(
                    f"chosen: expected ({heads}, {blocks - 2}, {self.random}) for {blocks} blocks, got"
                    f" {describe(self.chosen)}"
                )
            found[:, 1:-1] = self.chosen
            return found
        count = min(self.random, max(blocks - 5, 0))
        if count == 0:
            return found
        generator = torch.Generator().manual_seed(self.seed)
        drawn = torch.empty(heads, blocks, 0, dtype=torch.long)
        for last in range(blocks - 5 - count, blocks - 5):
            one = torch.randint(last + 1, (heads, blocks, 1), generator=generator)
            taken = (drawn == one).any(-1, keepdim=True)
            drawn = torch.cat([drawn, torch.where(taken, last, one)], -1)
        row = torch.arange(blocks).view(-1, 1)
        excluded = row + torch.tensor([-1, 0, 1])  # three of blocks 1 ... n - 2 in every row, by rising number
        excluded = torch.where(row == 1, torch.tensor([1, 2, blocks - 2]), excluded)
        excluded = torch.where(row == blocks - 2, torch.tensor([1, blocks - 3, blocks - 2]), excluded)
        drawn = drawn + 1
        for n in range(3):
            drawn = drawn + (drawn >= excluded[:, n : n + 1])
        found[..., :count] = torch.where((row > 0) & (row < blocks - 1), drawn.sort(-1).values, -1)
        return found

    def mask(self, heads: int, tokens: int) -> Mask | None:
        """The pattern of a sequence of `tokens`; None where everything is read."""
        blocks = -(-tokens // self.block)
        if tokens <= self.reads_whole_until or blocks <= 3:
            return None
        row = torch.arange(blocks).view(-1, 1)
        near = (row + torch.tensor([-1, 0, 1])).clamp(0, blocks - 1).expand(heads, -1, -1)
        if self.first_again:
            far = torch.where((row > 0) & (row < blocks - 1), blocks + torch.arange(self.random), -1)
            far = far.expand(heads, -1, -1)
        else:
            far = self.random_blocks(heads, blocks)
        ends = torch.zeros(blocks * self.block, dtype=torch.bool)
        ends[: self.block] = ends[-self.block :] = True
        once = Global(ends) & KeyLengths(len(ends))  # without the first block's copies behind the last one
        return (once if self.first_again else Global(ends)) | BlockColumns(torch.cat([near, far], -1), self.block)


class BigBird(nn.Module):
    """Block-sparse attention, bidirectional; ``(B, T, dim)`` in and out for any T, a last block may be ragged.

    Args:
        dim: width of the tokens.
        heads: heads H.
        plan: `BlockPlan`; the attribute may be replaced, for it is no part of the parameters.
        scores: `Scores`: scale, softcap, dropout (in training only).
        bias: biases of q, k and v; `out_bias` of the output, as `bias` by default.

    Parameters: ``q_proj k_proj v_proj o_proj``. What padding asks is 0 before the output projection. Raises ValueError
    and TypeError for tensors that do not fit, and for masks, which would count slots. Cost 4 T (5 + r) block H D FLOPs
    and 8 T block H D for the two blocks that read everything; memory linear in T.

    >>> layer = BigBird(64, 8, BlockPlan(block=4, random=1))
    >>> layer(torch.randn(2, 101, 64)).shape
    torch.Size([2, 101, 64])
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        plan: BlockPlan,
        *,
        scores: Scores | None = None,
        bias: bool = True,
        out_bias: bool | None = None,
    ) -> None:
        super().__init__()
        self.dim, self.heads = whole("dim", dim, 1), whole("heads", heads, 1)
        if dim % heads:
            raise ValueError(f"heads: expected a divisor of dim={dim}, got {heads}")
        is_part("plan", plan, BlockPlan)
        is_part("scores", scores, Scores)
        self.head_dim, self.plan, self.scores = dim // heads, plan, scores or Scores()
        if self.scores.sink:
            raise ValueError("scores: expected none with sinks, which the layer does not have")
        self.q_proj, self.k_proj = nn.Linear(dim, dim, bias=bias), nn.Linear(dim, dim, bias=bias)
        self.v_proj = nn.Linear(dim, dim, bias=bias)
        self.o_proj = nn.Linear(dim, dim, bias=bias if out_bias is None else out_bias)
        self._masks: dict[int, Mask | None] = {}
        self._masks_of = plan  # `plan` may be replaced

    @property
    def traits(self) -> Traits:
        """What the layer promises."""
        return Traits("softmax", causal=False, cached=False)

    @takes_token_layout
    def forward(
        self,
        x: Tensor,
        context: None = None,
        *,
        mask: None = None,
        keep: Tensor | None = None,
        positions: Tensor | TokenLayout | None = None,
        segments: Tensor | None = None,
    ) -> Tensor:
        """The mixed tokens (B, T, dim)."""
        no_context(self, context)
        mixed = self.mixed(x, mask=mask, keep=keep, positions=positions, segments=segments)
        y: Tensor = self.o_proj(merge_heads(mixed))
        return y

    def mixed(self, x: Tensor, **arguments: Any) -> Tensor:
        """What the layer mixes (B, H, T, D), before the output projection."""
        dropout = self.scores.dropout if self.training else 0.0

        def mix(q: Tensor, k: Tensor, v: Tensor, mask: Mask | None) -> Tensor:
            out: Tensor = attention(q, k, v, mask=mask, dropout_p=dropout, q_start=0, **self.scores.arguments())
            return out

        return self._apart(x, arguments, mix, self.head_dim)

    def mixing(self, x: Tensor, **arguments: Any) -> tuple[Tensor, Tensor]:
        """(M (B, H, T, T), V (B, H, T, D))."""
        tokens = x.shape[1]

        def weigh(q: Tensor, k: Tensor, v: Tensor, mask: Mask | None) -> Tensor:
            weights = attention_weights(q, k, v, mask=mask, q_start=0, **self.scores.arguments())[1]
            length, block = q.shape[2], self.plan.block
            for first in range(-(-length // block) * block, k.shape[2], block):  # copies of the first block
                again = weights[..., :block] + weights[..., first : first + block]
                weights = torch.cat([again, weights[..., block:]], -1)
            return nn.functional.pad(weights[..., :length], (0, tokens - length))

        weights = self._apart(x, arguments, weigh, tokens)
        x, layout = self._read(x, **arguments)
        v = split_heads(self.v_proj(x), self.heads)
        apart = Unpacked.of(layout.keep, layout.segments, x.shape[0], tokens)
        if apart is not None and self.plan.count == "tokens":
            weights = apart.columns(weights[..., : apart.longest])
        return weights, hide_unread(weights, v)

    def label(self) -> str:
        """The layer in a few words."""
        return f"BigBird, {self.heads} heads of {self.head_dim}, blocks of {self.plan.block}, {self.plan.random} random"

    def prefill_macs(self, tokens: int) -> int:
        """Multiply-accumulates between `tokens` tokens."""
        block, blocks = self.plan.block, -(-tokens // self.plan.block)
        if tokens <= self.plan.reads_whole_until or blocks <= 3:
            return attention_macs(self.heads, self.head_dim, self.head_dim, tokens * tokens)
        middle, ends = tokens - 2 * block, 2 * block * tokens
        pairs = ends + middle * min((5 + self.plan.random) * block, tokens)
        return attention_macs(self.heads, self.head_dim, self.head_dim, pairs)

    def extra_repr(self) -> str:
        return f"{self.dim}, {self.heads} heads of {self.head_dim}, {self.plan}"

    # ---- the steps of a call -----------------------------------------------------------------------------------------

    def _read(
        self,
        x: Tensor,
        *,
        mask: None = None,
        keep: Tensor | None = None,
        positions: Tensor | TokenLayout | None = None,
        segments: Tensor | None = None,
    ) -> tuple[Tensor, TokenLayout]:
        check_tokens(self, "x", x, self.dim)
        if mask is not None:
            raise ValueError(f"mask: expected None, blocks are counted over real tokens; got {describe(mask)}")
        batch, tokens, _ = x.shape
        layout = resolve_tokens(batch, tokens, x.device, keep=keep, positions=positions, segments=segments)
        return layout.real(x), layout

    def _apart(
        self,
        x: Tensor,
        arguments: dict[str, Any],
        mix: Callable[[Tensor, Tensor, Tensor, Mask | None], Tensor],
        width: int,
    ) -> Tensor:
        """`mix` for every sequence of the call, sequences of as many blocks together: (B, H, T, width)."""
        x, layout = self._read(x, **arguments)
        batch, tokens, _ = x.shape
        q, k, v = (split_heads(proj(x), self.heads) for proj in (self.q_proj, self.k_proj, self.v_proj))
        if layout.keep is None and layout.segments is None:
            return self._mixed(q, k, v, None, mix)
        if self.plan.count == "slots":
            if layout.segments is not None:
                raise ValueError("segments: expected None where blocks are counted over slots")
            out = self._mixed(q, k, v, layout.keep, mix)
            assert layout.keep is not None
            return torch.where(layout.keep[:, None, :, None], out, 0.0)
        if is_recording():
            raise ValueError("keep: expected None in a compiled graph: the number of blocks depends on what it holds")
        apart = Unpacked.of(layout.keep, layout.segments, batch, tokens)
        assert apart is not None
        parts = [apart.apart(one) for one in (q, k, v)]
        made: Tensor | None = None
        blocks = -(-apart.lengths // self.plan.block)
        for count in blocks.unique().tolist():
            chosen = (blocks == count).nonzero().flatten()
            longest = int(apart.lengths[chosen].max())
            real = apart.keep[chosen, :longest]
            own = [one[chosen, :, :longest] for one in parts]
            mixed = self._mixed(own[0], own[1], own[2], None if bool(real.all()) else real, mix)
            if made is None:
                made = mixed.new_zeros(len(blocks), self.heads, apart.longest, width)
            edges = (0, made.shape[3] - mixed.shape[3], 0, apart.longest - longest)
            made = made.index_copy(0, chosen, nn.functional.pad(mixed, edges))
        return apart.together(q.new_zeros(0, self.heads, 0, width) if made is None else made)

    def _mixed(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        keep: Tensor | None,
        mix: Callable[[Tensor, Tensor, Tensor, Mask | None], Tensor],
    ) -> Tensor:
        """Sequences of as many blocks, from slot 0 on."""
        tokens, block = q.shape[2], self.plan.block
        key = tokens if tokens <= self.plan.reads_whole_until else -(-tokens // block) * block
        if self._masks_of is not self.plan:
            self._masks, self._masks_of = {}, self.plan
        if key not in self._masks:
            self._masks[key] = self.plan.mask(self.heads, tokens)
        mask = self._masks[key]
        if mask is not None and self.plan.first_again and self.plan.random:
            edge = -tokens % block
            k, v = (
                torch.cat([nn.functional.pad(one, (0, 0, 0, edge)), *[one[:, :, :block]] * self.plan.random], 2)
                for one in (k, v)
            )
            keep = torch.ones(len(q), tokens, dtype=torch.bool, device=q.device) if keep is None and edge else keep
            if keep is not None:
                again = [keep[:, :block]] * self.plan.random
                keep = torch.cat([nn.functional.pad(keep, (0, edge)), *again], 1)
        if mask is not None:
            mask = mask.to(q.device)
        if keep is not None:
            mask = KeyPadding(keep) if mask is None else mask & KeyPadding(keep)
        return mix(q, k, v, mask)


records = (
    Record(
        name="bigbird",
        summary="BigBird: blocks read their neighbours, the first and last block, and random ones",
        source="Zaheer et al. 2020, arXiv:2007.14062",
        build=lambda dim, heads: BigBird(dim, heads, BlockPlan(block=1, random=1, full_until=0)),
    ),
)
