"""The layer of multi-head softmax attention; `regard.mixers.softmax` lists its variants.

Q = x W_q,  K = c W_k,  V = c W_v (c = x or a context),   Y = concat_h(softmax(Q_h K_g(h)^T s + …) V_g(h)) W_o,
g(h) = h // (H / Hkv)
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from regard.biases import Bias
from regard.caches import KVCache, KVView, WindowCache
from regard.checks import describe, is_part, whole
from regard.masks import Mask
from regard.masks.base import reach
from regard.mixers.attention_parts import attention_traits, context_tokens, hide_unread, read_mask, window_words
from regard.mixers.base import Traits, check_tokens, floating
from regard.mixers.costs import attention_macs, causal_pairs, keys_read, window_of
from regard.mixers.parts import Projections, Scores, merge_heads, split_heads
from regard.ops.attention import attention, attention_weights
from regard.positions import Rotary
from regard.tokens import TokenLayout, resolve_tokens, takes_token_layout

__all__ = ["MultiHeadAttention"]


class MultiHeadAttention(nn.Module):
    """Softmax attention with its projections, self or cross, with any grouping of heads; ``(B, T, dim)`` in and out.

    Args:
        dim: width of the tokens.
        heads: query heads H.
        kv_heads: key and value heads, a divisor of `heads`; `heads` by default (MHA), 1 is MQA, between is GQA.
        head_dim: size of a head; ``dim // heads`` by default.
        projections: `Projections`: biases, output gate, q/k norm, clipping, context width.
        scores: `Scores`: scale, softcap, sinks, dropout (in training only).
        mask: the layer's own pattern, such as ``Causal()`` or ``Window(128)``; a mask given at the call is ANDed on.
        bias: a `regard.biases` object, or a module whose ``forward()`` gives one (a learned table, shared between
            layers or not).
        rotary: a `regard.positions.Rotary` that turns queries and keys by their positions.

    Parameters: ``q_proj k_proj v_proj o_proj`` (heads contiguous), ``gate_proj``, ``q_norm k_norm``, ``sink``.

    With a context, keys and values come from it, nothing is rotated, and queries stand at slots 0, 1, …, so any split
    of x into calls gives the same result. Masks and biases count slots, padding included.

    >>> import torch, regard
    >>> layer = MultiHeadAttention(64, 8, kv_heads=2, mask=regard.masks.Causal(), rotary=regard.positions.Rotary(8))
    >>> layer(torch.randn(2, 10, 64)).shape
    torch.Size([2, 10, 64])
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        projections: Projections | None = None,
        scores: Scores | None = None,
        mask: Mask | None = None,
        bias: Bias | nn.Module | None = None,
        rotary: Rotary | None = None,
    ) -> None:
        super().__init__()
        self.dim, self.heads = whole("dim", dim, 1), whole("heads", heads, 1)
        self.kv_heads = self.heads if kv_heads is None else whole("kv_heads", kv_heads, 1)
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads: expected a divisor of heads={heads}, got {kv_heads}")
        if head_dim is None and dim % heads:
            raise ValueError(f"heads: expected a divisor of dim={dim}, got {heads} (or give head_dim)")
        self.head_dim = dim // heads if head_dim is None else whole("head_dim", head_dim, 1)
        is_part("projections", projections, Projections)
        is_part("scores", scores, Scores)
        is_part("mask", mask, Mask)
        is_part("rotary", rotary, Rotary)
        if bias is not None and not isinstance(bias, (Bias, nn.Module)):
            raise TypeError(f"bias: expected a Bias, a module that gives one, or None, got {describe(bias)}")
        p = self.projections = projections or Projections()
        self.scores = scores or Scores()
        self.mask, self.bias, self.rotary = mask, bias, rotary
        q_width, kv_width = self.heads * self.head_dim, self.kv_heads * self.head_dim
        self.context_dim = dim if p.context_dim is None else p.context_dim  # of what keys and values are made from
        self.q_proj = nn.Linear(dim, q_width, bias=p.bias)
        self.k_proj = nn.Linear(self.context_dim, kv_width, bias=p.bias if p.key_bias is None else p.key_bias)
        self.v_proj = nn.Linear(self.context_dim, kv_width, bias=p.bias)
        self.gate_proj = nn.Linear(dim, q_width, bias=p.bias) if p.gate else None
        self.o_proj = nn.Linear(q_width, dim, bias=p.bias if p.out_bias is None else p.out_bias) if p.out else None
        whole_width = p.norm_over == "all"
        self.q_norm = p.norm(q_width if whole_width else self.head_dim) if p.norm is not None else None
        self.k_norm = p.norm(kv_width if whole_width else self.head_dim) if p.norm is not None else None
        self.sink = nn.Parameter(torch.empty(self.heads)) if self.scores.sink else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Starts the layer's own parameters anew; its parts have the same method."""
        if self.sink is not None:
            nn.init.zeros_(self.sink)

    @takes_token_layout
    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        mask: Mask | Tensor | None = None,
        keep: Tensor | None = None,
        positions: Tensor | TokenLayout | None = None,
        segments: Tensor | None = None,
        cache: KVCache | WindowCache | None = None,
    ) -> Tensor:
        """The mixed tokens (B, T, dim). See the class for the arguments' meanings."""
        x, q, view, options = self._read(
            x, context, mask=mask, keep=keep, positions=positions, segments=segments, cache=cache
        )
        y = self._write(x, self._mix(q, view, options))
        if cache is not None and (context is not None or cache.context):
            cache.commit_context(x.shape[1], *view.fresh)
        elif cache is not None:
            cache.commit(*view.fresh)
        return y

    def mixed(self, x: Tensor, context: Tensor | None = None, **arguments: Any) -> Tensor:
        """What the layer mixes (B, H, T, D), before gate and output projection; a cache stays as it is."""
        return self._mix(*self._read(x, context, **arguments)[1:])

    def mixing(self, x: Tensor, context: Tensor | None = None, **arguments: Any) -> tuple[Tensor, Tensor]:
        """(M (B, H, Tq, Tk), V (B, H, Tk, D)): the weights before dropout and what they mix; a cache stays as it is."""
        _, q, view, options = self._read(x, context, **arguments)
        _, weights, _ = attention_weights(q, view.k, view.v, **options)
        return weights, hide_unread(weights, view.v.repeat_interleave(self.heads // self.kv_heads, 1))

    @property
    def traits(self) -> Traits:
        """What the layer promises."""
        context = self.projections.context_dim is not None
        return attention_traits("softmax", self.mask, bias=self.bias is not None, context=context)

    def label(self) -> str:
        """The layer in a few words."""
        kind = {1: "multi-query", self.heads: "multi-head"}.get(self.kv_heads, "grouped-query")
        words = [f"{kind} attention, {self.heads} heads of {self.head_dim}"]
        words += [f"{self.kv_heads} key heads"] if kind == "grouped-query" else []
        return ", ".join(words + window_words(window_of(self)))

    def prefill_macs(self, tokens: int) -> int:
        """Multiply-accumulates between `tokens` tokens, each of which reads those before it."""
        return attention_macs(self.heads, self.head_dim, self.head_dim, causal_pairs(tokens, window_of(self)))

    def step_macs(self, cached: int) -> int:
        """The same for one token, which reads `cached` tokens, itself included."""
        return attention_macs(self.heads, self.head_dim, self.head_dim, keys_read(cached, window_of(self)))

    def extra_repr(self) -> str:
        shape = f"{self.dim}, {self.heads} heads of {self.head_dim}, {self.kv_heads} key heads"
        parts = {"mask": self.mask, "bias": self.bias if isinstance(self.bias, Bias) else None, "rotary": self.rotary}
        return ", ".join([shape, *(f"{name}={part}" for name, part in parts.items() if part is not None)])

    def init_cache(
        self, batch: int, capacity: int, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None
    ) -> KVCache | WindowCache:
        """An empty cache for `batch` rows: a ring if the own pattern bounds the distance, else `capacity` tokens.

        A context is kept whole, whatever the pattern."""
        like = floating(self.k_proj, self)
        where = (self.kv_heads, self.head_dim, self.head_dim, dtype or like.dtype, device or like.device)
        window = reach(self.mask) if self.mask is not None and self.context_dim == self.dim else None
        return KVCache(batch, capacity, *where) if window is None else WindowCache(batch, max(window, 0) + 1, *where)

    # ---- the steps of a call ---------------------------------------------------------------------------------------

    def _read(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        mask: Mask | Tensor | None = None,
        keep: Tensor | None = None,
        positions: Tensor | TokenLayout | None = None,
        segments: Tensor | None = None,
        cache: KVCache | WindowCache | None = None,
    ) -> tuple[Tensor, Tensor, KVView, dict[str, Any]]:
        """x without what padding holds, its queries, the keys and values they read, and the rest of the call.

        Nothing is changed."""
        check_tokens(self, "x", x, self.dim)
        if cache is not None and not isinstance(cache, (KVCache, WindowCache)):
            raise TypeError(f"cache: expected what init_cache gives, or None, got {describe(cache)}")
        crossing = context is not None or (cache is not None and cache.context)
        if crossing:
            q, start = self._queries(x, None), cache.asked if cache is not None else 0
            view = self._read_context(x, q, context, keep=keep, segments=segments, cache=cache)
        else:
            given: dict[str, Any] = {"keep": keep, "positions": positions, "segments": segments}
            batch, tokens, _ = x.shape
            layout = (
                resolve_tokens(batch, tokens, x.device, **given)
                if cache is None
                else cache.resolve_tokens(batch, tokens, x.device, **given)
            )
            x = layout.real(x)
            q, (k, v) = self._queries(x, layout.positions), self._keys(x, layout.positions)
            view = KVView.alone(k, v, layout) if cache is None else cache.extend(k, v, layout)
            start = (0 if cache is None else cache.length) - view.first
        options: dict[str, Any] = {
            **self.scores.arguments(),
            "sink": self.sink,
            "q_start": start,
        }
        options["mask"] = read_mask(self.mask, mask, view, x)
        bias = self.bias() if isinstance(self.bias, nn.Module) else self.bias
        options["bias"] = None if bias is None else bias.shifted(view.first).with_padding(view.keep).to(x.device)
        return x, q, view, options

    def _mix(self, q: Tensor, view: KVView, options: dict[str, Any]) -> Tensor:
        dropout = self.scores.dropout if self.training else 0.0
        out: Tensor = attention(q, view.k, view.v, dropout_p=dropout, **options)
        return out

    def _read_context(
        self,
        x: Tensor,
        q: Tensor,
        context: Tensor | None,
        *,
        keep: Tensor | None,
        segments: Tensor | None,
        cache: KVCache | WindowCache | None,
    ) -> KVView:
        """The context that queries `q` of tokens `x` read, all of it: its tokens are no segment's."""
        layout = context_tokens(self, x, context, self.context_dim, keep=keep, segments=segments, cache=cache)
        if context is None:
            k = v = q.new_zeros(x.shape[0], self.kv_heads, 0, self.head_dim)
        else:
            k, v = self._keys(layout.real(context), None)
        view = KVView.alone(k, v, layout) if cache is None else cache.extend(k, v, layout)
        return dataclasses.replace(view, segments=None)

    def _queries(self, x: Tensor, positions: Tensor | None) -> Tensor:
        return self._turned(self.q_proj(x), self.heads, self.q_norm, positions)

    def _keys(self, x: Tensor, positions: Tensor | None) -> tuple[Tensor, Tensor]:
        k = self._turned(self.k_proj(x), self.kv_heads, self.k_norm, positions)
        return k, split_heads(self._clipped(self.v_proj(x)), self.kv_heads)

    def _turned(self, x: Tensor, heads: int, norm: nn.Module | None, positions: Tensor | None) -> Tensor:
        x = self._clipped(x)
        if norm is not None and self.projections.norm_over == "all":
            x = norm(x)
        x = split_heads(x, heads)
        if norm is not None and self.projections.norm_over == "head":
            x = norm(x)
        return x if self.rotary is None or positions is None else self.rotary(x, positions)

    def _clipped(self, x: Tensor) -> Tensor:
        return x if self.projections.clip is None else x.clamp(-self.projections.clip, self.projections.clip)

    def _write(self, x: Tensor, out: Tensor) -> Tensor:
        out = merge_heads(out)
        if self.gate_proj is not None:
            out = out * torch.sigmoid(self.gate_proj(x))
        return out if self.o_proj is None else self.o_proj(out)
