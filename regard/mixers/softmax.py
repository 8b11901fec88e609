"""Multi-head softmax attention: MHA, MQA and GQA, self and cross.

    Q = x W_q,  K = c W_k,  V = c W_v (c = x or a context),   Y = concat_h(softmax(Q_h K_g(h)^T s + …) V_g(h)) W_o,
    g(h) = h // (H / Hkv)

Vaswani et al. 2017, arXiv:1706.03762 (multi-head); Shazeer 2019, arXiv:1911.02150 (multi-query); Ainslie et al. 2023,
arXiv:2305.13245 (grouped-query).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from regard.biases import Alibi, Bias
from regard.caches import KVCache, KVView, WindowCache
from regard.checks import describe, is_part, whole
from regard.masks import Causal, Mask, Window
from regard.masks.base import reach
from regard.mixers.base import Record, check_tokens, floating
from regard.mixers.parts import Projections, RMSNorm, Scores, merge_heads, read_mask, split_heads
from regard.ops.attention import attention, attention_weights
from regard.positions import Rotary
from regard.tokens import resolve_tokens

__all__ = ["MultiHeadAttention", "griffin_attention", "records"]


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
        self.k_proj = nn.Linear(self.context_dim, kv_width, bias=p.bias)
        self.v_proj = nn.Linear(self.context_dim, kv_width, bias=p.bias)
        self.gate_proj = nn.Linear(dim, q_width, bias=p.bias) if p.gate else None
        self.o_proj = nn.Linear(q_width, dim, bias=p.bias if p.out_bias is None else p.out_bias) if p.out else None
        whole_width = p.norm_over == "all"
        self.q_norm = p.norm(q_width if whole_width else self.head_dim) if p.norm is not None else None
        self.k_norm = p.norm(kv_width if whole_width else self.head_dim) if p.norm is not None else None
        self.sink = nn.Parameter(torch.zeros(self.heads)) if self.scores.sink else None

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        mask: Mask | Tensor | None = None,
        keep: Tensor | None = None,
        positions: Tensor | None = None,
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
        v = view.v.to(weights.dtype).repeat_interleave(self.heads // self.kv_heads, 1)
        read = (weights != 0).any(-2).any(1)[:, None, :, None]
        return weights, torch.where(read, v, torch.zeros((), dtype=v.dtype, device=v.device))

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
        positions: Tensor | None = None,
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
        options: dict[str, Any] = {**self.scores.arguments(), "sink": self.sink, "q_start": start}
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
        if segments is not None:
            raise ValueError("segments: with a context they have no meaning; mask the context with keep or mask")
        if context is None:
            assert cache is not None
            if keep is not None:
                raise ValueError(
                    "keep: it describes the context's tokens, and the context was written by an earlier call"
                )
            none = q.new_zeros(x.shape[0], self.kv_heads, 0, self.head_dim)
            return dataclasses.replace(
                cache.extend(none, none, cache.resolve_tokens(x.shape[0], 0, x.device)), segments=None
            )
        if cache is not None and (cache.context or cache.length):
            raise ValueError(
                "context: the cache holds one already (or a sequence); later calls pass context=None, or reset it first"
            )
        check_tokens(self, "context", context, self.context_dim, x)
        sizes = (context.shape[0], context.shape[1], context.device)
        layout = resolve_tokens(*sizes, keep=keep) if cache is None else cache.resolve_tokens(*sizes, keep=keep)
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


def griffin_attention(
    dim: int, heads: int, window: int = 2048, *, kv_heads: int = 1, head_dim: int | None = None
) -> MultiHeadAttention:
    """Griffin's local attention: one key head, the `window` latest keys, rotary positions on half of each head.

    Only the output projection has a bias. De et al. 2024, arXiv:2402.19427; its authors' code reads window + 1 keys.

    >>> layer = griffin_attention(64, 8, 16)
    >>> layer.mask, layer.kv_heads, layer.rotary.dim
    (Window(w=16), 1, 4)
    """
    size = dim // heads if head_dim is None else head_dim
    return MultiHeadAttention(
        dim,
        heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        projections=Projections(out_bias=True),
        mask=Window(window),
        rotary=Rotary(size // 2),
    )


def _heads_first(dim: int, heads: int) -> MultiHeadAttention:
    return MultiHeadAttention(dim, heads, mask=Causal(), rotary=Rotary(dim // heads))


records = (
    Record(
        name="mha",
        summary="multi-head softmax attention, causal, rotary positions",
        source="Vaswani et al. 2017, arXiv:1706.03762",
        build=_heads_first,
        causal=True,
    ),
    Record(
        name="mqa",
        summary="multi-query attention: one key and value head",
        source="Shazeer 2019, arXiv:1911.02150",
        build=lambda dim, heads: MultiHeadAttention(dim, heads, kv_heads=1, mask=Causal(), rotary=Rotary(dim // heads)),
        causal=True,
    ),
    Record(
        name="gqa",
        summary="grouped-query attention with q/k norm, half as many key heads",
        source="Ainslie et al. 2023, arXiv:2305.13245",
        build=lambda dim, heads: MultiHeadAttention(
            dim,
            heads,
            kv_heads=max(1, heads // 2),
            mask=Causal(),
            projections=Projections(norm=RMSNorm),
            rotary=Rotary(dim // heads),
        ),
        causal=True,
    ),
    Record(
        name="window",
        summary="sliding-window attention: the latest keys only, a ring cache",
        source="Beltagy et al. 2020, arXiv:2004.05150; Jiang et al. 2023, arXiv:2310.06825",
        build=lambda dim, heads: MultiHeadAttention(dim, heads, mask=Window(4), rotary=Rotary(dim // heads)),
        causal=True,
    ),
    Record(
        name="griffin_attention",
        summary="Griffin's local attention: one key head, a window, half of each head rotates",
        source="De et al. 2024, arXiv:2402.19427",
        build=lambda dim, heads: griffin_attention(dim, heads, 4),
        causal=True,
    ),
    Record(
        name="alibi",
        summary="attention with linear biases, no positions elsewhere",
        source="Press et al. 2021, arXiv:2108.12409",
        build=lambda dim, heads: MultiHeadAttention(dim, heads, mask=Causal(), bias=Alibi(heads)),
        causal=True,
    ),
    Record(
        name="sink",
        summary="attention with a learned sink logit per head",
        source="OpenAI 2025, gpt-oss; Xiao et al. 2023, arXiv:2309.17453",
        build=lambda dim, heads: MultiHeadAttention(
            dim,
            heads,
            mask=Causal(),
            scores=Scores(sink=True),
            projections=Projections(bias=True),
            rotary=Rotary(dim // heads),
        ),
        causal=True,
    ),
    Record(
        name="softcap",
        summary="attention with soft-capped scores",
        source="Gemma Team 2024, arXiv:2408.00118",
        build=lambda dim, heads: MultiHeadAttention(
            dim, heads, mask=Causal(), scores=Scores(softcap=5.0), rotary=Rotary(dim // heads)
        ),
        causal=True,
    ),
    Record(
        name="gated",
        summary="attention with a sigmoid output gate",
        source="Qiu et al. 2025, arXiv:2505.06708",
        build=lambda dim, heads: MultiHeadAttention(
            dim, heads, mask=Causal(), projections=Projections(gate=True), rotary=Rotary(dim // heads)
        ),
        causal=True,
    ),
    Record(
        name="encoder",
        summary="bidirectional multi-head attention",
        source="Vaswani et al. 2017, arXiv:1706.03762; Devlin et al. 2018, arXiv:1810.04805",
        build=lambda dim, heads: MultiHeadAttention(dim, heads, projections=Projections(bias=True)),
        causal=False,
        cached=False,
        counts_slots=False,
    ),
    Record(
        name="cross",
        summary="cross-attention: keys and values from a context, written to the cache once",
        source="Vaswani et al. 2017, arXiv:1706.03762",
        build=lambda dim, heads: MultiHeadAttention(
            dim, heads, projections=Projections(bias=True, context_dim=dim + 4)
        ),
        causal=False,
        context=True,
        counts_slots=False,
    ),
)
