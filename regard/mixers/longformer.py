"""Longformer: a window around every token, and a few global tokens with projections of their own.

    local i:   y_i = sum_j softmax_j(q_i . k_j / sqrt(D)) v_j      over |i - j| <= w and every global j
    global i:  y_i = sum_j softmax_j(q'_i . k'_j / sqrt(D)) v'_j   over all j; q', k', v' are the global projections

Beltagy, Peters, Cohan 2020, arXiv:2004.05150.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from regard.caches import KVView
from regard.checks import describe, is_part, whole
from regard.coordinates import can_read
from regard.masks import Band, Global, KeyPadding, Mask, Segments
from regard.mixers.attention_parts import hide_unread, read_mask
from regard.mixers.base import Record, Traits, check_tokens, is_plain, no_context
from regard.mixers.costs import attention_macs
from regard.mixers.parts import Scores, merge_heads, split_heads
from regard.ops.attention import attention, attention_weights
from regard.tokens import TokenLayout, resolve_tokens, takes_token_layout

__all__ = ["Longformer", "records"]


class Longformer(nn.Module):
    """Window attention with global tokens, bidirectional; ``(B, T, dim)`` in and out for any T.

    Args:
        dim: width of the tokens.
        heads: heads H.
        reach: tokens on either side that a local token reads (the published ``attention_window`` is twice that).
        globals_at: places that are global in every call, such as 0 for a token that stands for the whole text; a place
            is the number of real tokens before it in its segment. A call's `global_tokens` take their place.
        scores: `Scores`: scale, softcap, dropout (in training only).
        bias: biases of all projections.

    Parameters: ``q_proj k_proj v_proj o_proj`` and ``q_global_proj k_global_proj v_global_proj``. A local token reads a
    global one by the *ordinary* projections; a global token reads everything by the global ones, and its ordinary
    result is dropped. What padding asks is 0 before the output projection. The causal form has no global tokens: it is
    ``MultiHeadAttention(mask=Window(w))``, or ``Dilated``. Raises ValueError and TypeError for tensors that do not fit.
    Cost 4 T (2 reach + 1 + g) H D FLOPs for g global tokens, and 4 g T H D; memory linear in T.

    >>> layer = Longformer(64, 8, reach=16, globals_at=(0,))
    >>> layer(torch.randn(2, 100, 64)).shape
    torch.Size([2, 100, 64])
    """

    takes_global_tokens = True  # what an encoder of such layers asks, to hand `global_tokens` on

    def __init__(
        self,
        dim: int,
        heads: int,
        reach: int,
        *,
        globals_at: Sequence[int] = (),
        scores: Scores | None = None,
        bias: bool = True,
    ) -> None:
        super().__init__()
        self.dim, self.heads, self.reach = whole("dim", dim, 1), whole("heads", heads, 1), whole("reach", reach, 0)
        if dim % heads:
            raise ValueError(f"heads: expected a divisor of dim={dim}, got {heads}")
        self.head_dim, self.globals_at = dim // heads, tuple(whole("globals_at", place, 0) for place in globals_at)
        is_part("scores", scores, Scores)
        self.scores = scores or Scores()
        if self.scores.sink:
            raise ValueError("scores: expected none with sinks, which the layer does not have")
        self.q_proj, self.q_global_proj = nn.Linear(dim, dim, bias=bias), nn.Linear(dim, dim, bias=bias)
        self.k_proj, self.k_global_proj = nn.Linear(dim, dim, bias=bias), nn.Linear(dim, dim, bias=bias)
        self.v_proj, self.v_global_proj = nn.Linear(dim, dim, bias=bias), nn.Linear(dim, dim, bias=bias)
        self.o_proj = nn.Linear(dim, dim, bias=bias)

    @property
    def traits(self) -> Traits:
        """What the layer promises."""
        return Traits("softmax", causal=False, cached=False, counts_slots=True)

    @takes_token_layout
    def forward(
        self,
        x: Tensor,
        context: None = None,
        *,
        global_tokens: Tensor | None = None,
        mask: Mask | Tensor | None = None,
        keep: Tensor | None = None,
        positions: Tensor | TokenLayout | None = None,
        segments: Tensor | None = None,
    ) -> Tensor:
        """The mixed tokens (B, T, dim); `global_tokens` is bool (B, T), True where a token is global."""
        no_context(self, context)
        given: dict[str, Any] = {"mask": mask, "keep": keep, "positions": positions, "segments": segments}
        y: Tensor = self.o_proj(merge_heads(self.mixed(x, global_tokens=global_tokens, **given)))
        return y

    def mixed(self, x: Tensor, **arguments: Any) -> Tensor:
        """What the layer mixes (B, H, T, D), before the output projection."""
        x, layout, flags, mask = self._read(x, **arguments)
        options: dict[str, Any] = {**self.scores.arguments(), "dropout_p": self.scores.dropout if self.training else 0}
        q, k, v = self._heads(x, "")
        out = attention(q, k, v, mask=self._local(flags, mask, layout, x), **options)
        if flags is not None:
            out = self._with_globals(x, layout, flags, mask, out, options)
        return out if layout.keep is None else torch.where(layout.keep[:, None, :, None], out, 0.0)

    def mixing(self, x: Tensor, **arguments: Any) -> tuple[Tensor, Tensor]:
        """(M (B, H, T, 2 T), V (B, H, 2 T, D)): the ordinary values' weights, then those of the global values."""
        x, layout, flags, mask = self._read(x, **arguments)
        rows = torch.zeros(x.shape[:2], dtype=torch.bool, device=x.device) if flags is None else flags
        real = torch.ones_like(rows) if layout.keep is None else layout.keep
        parts = []
        for name, own, asks in (("", self._local(flags, mask, layout, x), ~rows), ("_global", None, rows)):
            q, k, v = self._heads(x, name)
            read = own if name == "" else self._everything(mask, layout, x)
            weights = attention_weights(q, k, v, mask=read, **self.scores.arguments())[1]
            weights = torch.where((asks & real)[:, None, :, None], weights, 0.0)
            parts.append((weights, hide_unread(weights, v)))
        return torch.cat([M for M, _ in parts], 3), torch.cat([V for _, V in parts], 2)

    def label(self) -> str:
        """The layer in a few words."""
        return f"Longformer, {self.heads} heads of {self.head_dim}, {self.reach} tokens on either side"

    def prefill_macs(self, tokens: int) -> int:
        """Multiply-accumulates between `tokens` tokens, with the global ones that every call has."""
        wide = min(2 * self.reach + 1 + len(self.globals_at), tokens) + min(len(self.globals_at), tokens)
        return attention_macs(self.heads, self.head_dim, self.head_dim, tokens * wide)

    def extra_repr(self) -> str:
        return f"{self.dim}, {self.heads} heads of {self.head_dim}, reach={self.reach}, globals_at={self.globals_at}"

    # ---- the steps of a call -----------------------------------------------------------------------------------------

    def _read(
        self,
        x: Tensor,
        *,
        global_tokens: Tensor | None = None,
        mask: Mask | Tensor | None = None,
        keep: Tensor | None = None,
        positions: Tensor | TokenLayout | None = None,
        segments: Tensor | None = None,
    ) -> tuple[Tensor, TokenLayout, Tensor | None, Mask | Tensor | None]:
        """(tokens without what padding holds, their layout, which are global or None for none, the call's mask)."""
        check_tokens(self, "x", x, self.dim)
        batch, tokens, _ = x.shape
        layout = resolve_tokens(batch, tokens, x.device, keep=keep, positions=positions, segments=segments)
        flags = global_tokens
        if flags is not None:
            if not isinstance(flags, Tensor) or flags.dtype != torch.bool or flags.shape != (batch, tokens):
                raise ValueError(f"global_tokens: expected bool ({batch}, {tokens}), got {describe(flags)}")
        elif self.globals_at:
            places = layout.positions if layout.counts is None else (layout.counts - 1).clamp(min=0)
            flags = (places[..., None] == torch.tensor(self.globals_at, device=x.device)).any(-1).expand(batch, -1)
        if flags is not None and layout.keep is not None:
            flags = flags & layout.keep
        return layout.real(x), layout, flags, mask

    def _heads(self, x: Tensor, kind: str) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (split_heads(getattr(self, f"{name}{kind}_proj")(x), self.heads) for name in "qkv")
        return q, k, v

    def _local(self, flags: Tensor | None, mask: Mask | Tensor | None, layout: TokenLayout, x: Tensor) -> Mask | None:
        """The window, and every global token."""
        window = Band(self.reach, self.reach)
        view = KVView(x, x, 0, layout.keep, layout.segments, ())
        return read_mask(window if flags is None else window | Global(flags), mask, view, x)

    def _everything(self, mask: Mask | Tensor | None, layout: TokenLayout, x: Tensor) -> Mask | None:
        return read_mask(None, mask, KVView(x, x, 0, layout.keep, layout.segments, ()), x)

    def _with_globals(
        self,
        x: Tensor,
        layout: TokenLayout,
        flags: Tensor,
        mask: Mask | Tensor | None,
        out: Tensor,
        options: dict[str, Any],
    ) -> Tensor:
        """`out` with the rows of global tokens replaced."""
        if mask is not None or not can_read(flags):  # a mask counts slots, and a compiler cannot count global tokens
            q, k, v = self._heads(x, "_global")
            rows = attention(q, k, v, mask=self._everything(mask, layout, x), **options)
            return torch.where(flags[:, None, :, None], rows, out)
        count = int(flags.sum(1).amax()) if flags.numel() else 0
        at = flags.to(torch.uint8).argsort(dim=1, descending=True, stable=True)[:, :count]  # (B, g), global ones first
        asking = x.gather(1, at[..., None].expand(-1, -1, self.dim))
        q = split_heads(self.q_global_proj(asking), self.heads)
        read: Mask | None = None if layout.keep is None else KeyPadding(layout.keep)
        if layout.segments is not None:
            own = Segments(layout.segments.gather(1, at), layout.segments)
            read = own if read is None else read & own
        if self._folds(count, options):
            rows = self._folded(q, x, read, options)
        else:
            k, v = (split_heads(proj(x), self.heads) for proj in (self.k_global_proj, self.v_global_proj))
            rows = attention(q, k, v, mask=read, **options)
        index = at[:, None, :, None].expand(-1, self.heads, -1, self.head_dim)
        rows = torch.where(flags.gather(1, at)[:, None, :, None], rows, out.gather(2, index))
        return out.scatter(2, index, rows)

    def _folds(self, count: int, options: dict[str, Any]) -> bool:
        """Whether so few tokens ask that it costs less to project what they ask than all tokens' keys and values.

        That form reads the weights and does not call the maps, so an adapter in their place leaves the other alone."""
        plain = is_plain(self.k_global_proj, nn.Linear) and is_plain(self.v_global_proj, nn.Linear)
        few = 2 * count * self.heads <= self.dim
        return plain and few and not options["dropout_p"] and self.scores.softcap is None

    def _folded(self, q: Tensor, x: Tensor, read: Mask | None, options: dict[str, Any]) -> Tensor:
        """``softmax(q (x W_k)^T) x W_v`` as ``(softmax((q W_k^T) x^T) x) W_v``: the tokens are keys and values."""
        keys, values = (p.weight.unflatten(0, (self.heads, -1)) for p in (self.k_global_proj, self.v_global_proj))
        asked = q @ keys  # (B, H, g, dim)
        tokens = x.to(asked.dtype)[:, None]
        scale = self.head_dim**-0.5 if self.scores.scale is None else self.scores.scale
        rows: Tensor = attention(asked, tokens, tokens, mask=read, **{**options, "scale": scale})
        rows = rows @ values.transpose(1, 2)
        if self.v_global_proj.bias is not None:  # the weights of a row sum to 1
            rows = rows + self.v_global_proj.bias.view(self.heads, 1, -1).to(rows.dtype)
        if self.k_global_proj.bias is not None and torch.is_grad_enabled():
            # It moves all scores of a query alike, which changes no weight: its gradient is 0.
            rows = rows + 0.0 * self.k_global_proj.bias.sum().to(rows.dtype)
        return rows


records = (
    Record(
        name="longformer",
        summary="Longformer: a window on either side, and global tokens with projections of their own",
        source="Beltagy et al. 2020, arXiv:2004.05150",
        build=lambda dim, heads: Longformer(dim, heads, 2, globals_at=(0, 3)),
    ),
)
