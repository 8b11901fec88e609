"""Mega: gated attention of one head, whose queries and keys come from a moving average.

    X' = norm(X),  V = silu(W_v X'),  M = EMA(X'),  [u, z, r, h] = W M,   Z = silu(z), R = silu(r)
    Q = Z g_0 + b_0,  K = Z g_1 + b_1,   O = f(Q K^T + bias) V,   Y = X + sigmoid(u) (silu(h + W_h (R O)) - X)

Ma, Zhou, Kong, He, Gui, Neubig, May, Zettlemoyer 2022, arXiv:2209.10655, section 3.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.biases import RelativeTable
from regard.caches import KVCache, KVView
from regard.checks import describe, is_factory, is_part, whole
from regard.masks import Causal, KeyPadding, Mask
from regard.mixers.attention_parts import hide_unread
from regard.mixers.base import Record, Traits, check_tokens, floating, no_context
from regard.mixers.costs import attention_macs, causal_pairs
from regard.mixers.damped_ema import DampedEMA
from regard.mixers.unpacked import Unpacked
from regard.ops.attention import attention, attention_weights
from regard.ops.checks import without_autocast
from regard.tokens import TokenLayout, resolve_tokens, takes_token_layout

__all__ = ["MegaAttention", "MegaPlaces", "MegaSizes", "records"]

Weights = Literal["softmax", "laplace", "relu2"]


@dataclass(frozen=True)
class MegaSizes:
    """Widths of a Mega layer: averages per channel, the shared representation, the values; and the reaches, if any.

    `chunk`: attention stays within chunks of so many tokens, while the moving average runs through; None for no chunks.
    `truncation`: the moving average reads so many tokens, the token itself included; None for all.
    """

    states: int = 16
    key_dim: int = 128
    value_dim: int = 256
    chunk: int | None = None
    truncation: int | None = None

    def __post_init__(self) -> None:
        for name in ("states", "key_dim", "value_dim"):
            whole(name, getattr(self, name), 1)
        for name in ("chunk", "truncation"):
            if getattr(self, name) is not None:
                whole(name, getattr(self, name), 1)


class MegaPlaces(nn.Module):
    """A learned number for each distance up to `length`: ``forward()`` is (2 length - 1), of j - i.

    kind "simple": a table; "rotary": ``(R_i a) . (R_j b)`` of two vectors of `dim` numbers, turned by their positions.
    """

    def __init__(self, length: int, kind: Literal["simple", "rotary"] = "simple", dim: int = 128) -> None:
        super().__init__()
        self.length, self.kind = whole("length", length, 1), kind
        if kind not in ("simple", "rotary"):
            raise ValueError(f"kind: expected 'simple' or 'rotary', got {kind!r}")
        if kind == "rotary" and whole("dim", dim, 2) % 2:
            raise ValueError(f"dim: expected an even number, got {dim}")
        self.table = nn.Parameter(torch.empty(2 * length - 1)) if kind == "simple" else None
        self.first = nn.Parameter(torch.empty(dim)) if kind == "rotary" else None
        self.second = nn.Parameter(torch.empty(dim)) if kind == "rotary" else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Starts the numbers anew, from N(0, 0.02^2)."""
        for parameter in (self.table, self.first, self.second):
            if parameter is not None:
                nn.init.normal_(parameter, std=0.02)

    def forward(self) -> Tensor:
        if self.table is not None:
            return self.table
        assert self.first is not None and self.second is not None
        half = len(self.first) // 2
        wide = torch.promote_types(self.first.dtype, torch.float32)
        (a1, a2), (b1, b2) = (one.to(wide).split(half) for one in (self.first, self.second))
        rates = torch.exp(torch.arange(half, device=a1.device, dtype=wide) * (-math.log(10000.0) / half))
        turn = torch.arange(1 - self.length, self.length, device=a1.device)[:, None] * rates  # of b by j - i
        cos, sin = turn.cos(), turn.sin()
        table: Tensor = (a1 * (b1 * cos - b2 * sin) + a2 * (b2 * cos + b1 * sin)).sum(1)
        return table


class MegaAttention(nn.Module):
    """A Mega layer with its norm and its gated residual, causal or not; ``(B, T, dim)`` in and out.

    Args:
        dim: width of the tokens.
        sizes: `MegaSizes`.
        places: `MegaPlaces`, which bounds the tokens (of a chunk) that meet; None for no bias.
        weights: "softmax", scaled by ``key_dim ** -0.5``; "laplace" ``(1 + erf((s - sqrt(1/2)) sqrt(2 pi))) / 2`` or
            "relu2", whose scores are divided by the number of keys that a token may read.
        bidirectional: tokens read later ones, and the average runs both ways.
        norm: makes the norm of `dim` channels.
        norm_first: whether the norm comes before everything or after the residual.

    Parameters: ``norm``, ``ema.*``, ``v_proj mx_proj h_proj``, ``qk_weight qk_bias`` (2, key_dim), ``places.*``.
    Padding and other packed sequences take no part; chunks are counted over a sequence's own tokens. A cache keeps the
    tokens, and a step computes with all of them. Raises ValueError and TypeError for sizes and tensors that do not fit,
    and for masks. Cost 4 T min(T, chunk) (key_dim + value_dim) FLOPs beside the projections, and O(T dim states).

    >>> MegaAttention(16, MegaSizes(4, 8, 32))(torch.randn(2, 10, 16)).shape
    torch.Size([2, 10, 16])
    """

    def __init__(
        self,
        dim: int,
        sizes: MegaSizes | None = None,
        *,
        places: MegaPlaces | None = None,
        weights: Weights = "softmax",
        bidirectional: bool = False,
        norm: Any = nn.LayerNorm,
        norm_first: bool = True,
    ) -> None:
        super().__init__()
        self.dim, self.sizes = whole("dim", dim, 1), sizes or MegaSizes()
        is_part("sizes", sizes, MegaSizes)
        is_part("places", places, MegaPlaces)
        is_factory("norm", norm)
        if weights not in ("softmax", "laplace", "relu2"):
            raise ValueError(f"weights: expected 'softmax', 'laplace' or 'relu2', got {weights!r}")
        self.weights, self.bidirectional, self.norm_first = weights, bidirectional, norm_first
        key_dim, value_dim = self.sizes.key_dim, self.sizes.value_dim
        self.places = places
        self.norm = norm(dim)
        cut = self.sizes.truncation
        self.ema = DampedEMA(dim, self.sizes.states, bidirectional=bidirectional, truncation=cut)
        self.v_proj = nn.Linear(dim, value_dim)
        self.mx_proj = nn.Linear(dim, 2 * dim + key_dim + value_dim)
        self.h_proj = nn.Linear(value_dim, dim)
        self.qk_weight, self.qk_bias = nn.Parameter(torch.empty(2, key_dim)), nn.Parameter(torch.empty(2, key_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Starts the maps from the shared representation anew, as published."""
        nn.init.normal_(self.qk_weight, std=0.02)
        nn.init.zeros_(self.qk_bias)

    @property
    def traits(self) -> Traits:
        """What the layer promises."""
        causal = not self.bidirectional
        off = "" if self.weights == "softmax" else "its weights are no softmax"
        return Traits("softmax", causal=causal, cached=causal, off_kernels=off)

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
        cache: KVCache | None = None,
    ) -> Tensor:
        """The tokens after the gated residual (B, T, dim)."""
        no_context(self, context)
        given: dict[str, Any] = {"mask": mask, "keep": keep, "positions": positions, "segments": segments}
        view, tokens = self._read(x, cache=cache, **given)
        apart, rows = self._apart(view)
        q, k, v, u, gate, residual = self._parts(rows, apart)
        mixed = self._joined(self._attended(q, k, v, apart), *rows.shape[:2])
        h = F.silu(residual + self.h_proj(gate * mixed[:, 0]))
        y = rows + torch.sigmoid(u) * (h - rows)
        y = y if self.norm_first else self.norm(y)
        y = y[:, None] if apart is None else apart.together(y[:, None])
        if cache is not None:
            cache.commit(*view.fresh)
        return y[:, 0, y.shape[2] - tokens :]

    def mixed(self, x: Tensor, **arguments: Any) -> Tensor:
        """What attention mixes (B, 1, T, value_dim), before gates; a cache stays as it is."""
        view, tokens = self._read(x, **arguments)
        apart, rows = self._apart(view)
        q, k, v, *_ = self._parts(rows, apart)
        mixed = self._joined(self._attended(q, k, v, apart), *rows.shape[:2])
        mixed = mixed if apart is None else apart.together(mixed)
        return mixed[:, :, mixed.shape[2] - tokens :]

    def mixing(self, x: Tensor, context: None = None, **arguments: Any) -> tuple[Tensor, Tensor]:
        """(M (B, 1, T, Tk), V (B, 1, Tk, value_dim)): the attention's weights and values; a cache stays as it is."""
        no_context(self, context)
        view, tokens = self._read(x, **arguments)
        apart, rows = self._apart(view)
        q, k, v, *_ = self._parts(rows, apart)
        q, k, chunked, real, bias = self._chunks(q, k, v, apart)
        weights = self._weights(q, k, chunked, real, bias)
        length, chunk = rows.shape[1], q.shape[2]
        count = 1 if self.sizes.chunk is None else -(-length // chunk)
        whole_rows = weights.new_zeros(rows.shape[0], 1, count * chunk, count * chunk)
        for n, one in enumerate(weights.reshape(rows.shape[0], count, chunk, chunk).unbind(1)):
            place = slice(n * chunk, (n + 1) * chunk)
            whole_rows[:, 0, place, place] = one
        matrix, values = whole_rows[:, :, :length, :length], v[:, None]
        if apart is not None:
            matrix, values = apart.columns(apart.together(matrix)), apart.together(values)
        return matrix[:, :, matrix.shape[2] - tokens :], hide_unread(matrix, values)

    def init_cache(
        self, batch: int, capacity: int, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None
    ) -> KVCache:
        """An empty cache for `batch` rows of up to `capacity` tokens, kept as they are."""
        like = floating(self.v_proj, self)
        return KVCache(batch, capacity, 1, self.dim, 0, dtype or like.dtype, device or like.device)

    def label(self) -> str:
        """The layer in a few words."""
        near = "" if self.sizes.chunk is None else f", chunks of {self.sizes.chunk}"
        return f"Mega, {self.weights}, keys of {self.sizes.key_dim}{near}"

    def prefill_macs(self, tokens: int) -> int:
        """Multiply-accumulates between `tokens` tokens, and of the moving average."""
        chunk = tokens if self.sizes.chunk is None else min(self.sizes.chunk, tokens)
        pairs = causal_pairs(chunk, None) if not self.bidirectional else chunk * chunk
        many = -(-tokens // max(chunk, 1))
        average = 3 * tokens * self.dim * self.sizes.states
        return attention_macs(1, self.sizes.key_dim, self.sizes.value_dim, many * pairs) + average

    def step_macs(self, cached: int) -> int:
        """The same for one token, which computes with all that is cached."""
        return self.prefill_macs(cached)

    # ---- the steps of a call -----------------------------------------------------------------------------------------

    def _read(
        self,
        x: Tensor,
        *,
        mask: None = None,
        keep: Tensor | None = None,
        positions: Tensor | TokenLayout | None = None,
        segments: Tensor | None = None,
        cache: KVCache | None = None,
    ) -> tuple[KVView, int]:
        check_tokens(self, "x", x, self.dim)
        if mask is not None:
            raise ValueError(f"mask: expected None, the moving average has none; got {describe(mask)}")
        if cache is not None and not (isinstance(cache, KVCache) and not self.bidirectional):
            raise TypeError(f"cache: expected what init_cache of a causal layer gives, or None, got {describe(cache)}")
        given: dict[str, Any] = {"keep": keep, "positions": positions, "segments": segments}
        resolve: Any = resolve_tokens if cache is None else cache.resolve_tokens
        layout: TokenLayout = resolve(x.shape[0], x.shape[1], x.device, **given)
        rows = layout.real(x)[:, None]
        nothing = rows[..., :0]
        view = KVView.alone(rows, nothing, layout) if cache is None else cache.extend(rows, nothing, layout)
        return view, x.shape[1]

    def _apart(self, view: KVView) -> tuple[Unpacked | None, Tensor]:
        apart = Unpacked.of(view.keep, view.segments, view.k.shape[0], view.k.shape[2])
        return apart, (view.k if apart is None else apart.apart(view.k))[:, 0]

    def _parts(self, rows: Tensor, apart: Unpacked | None) -> tuple[Tensor, ...]:
        """(queries, keys, values, the gate of the residual, the gate of what is mixed, what joins it), (n, T, …)."""
        normed = self.norm(rows) if self.norm_first else rows
        if apart is not None:
            normed = torch.where(apart.keep[..., None], normed, 0.0)
        sizes = [self.dim, self.sizes.key_dim, self.sizes.value_dim, self.dim]
        u, z, r, residual = self.mx_proj(self.ema(normed)).split(sizes, -1)
        z = F.silu(z)
        q, k = (z * self.qk_weight[n] + self.qk_bias[n] for n in (0, 1))
        return q, k, F.silu(self.v_proj(normed)), u, F.silu(r), residual

    def _chunks(
        self, q: Tensor, k: Tensor, v: Tensor, apart: Unpacked | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
        """Queries, keys, values (n chunks, 1, C, …), which are tokens (n chunks, C) or None for all, the bias."""
        rows, length, _ = q.shape
        chunk = length if self.sizes.chunk is None else self.sizes.chunk
        count = 1 if self.sizes.chunk is None else -(-length // chunk)
        edge = count * chunk - length
        real: Tensor | None = None
        if apart is not None or edge:
            real = q.new_ones(q.shape[:2], dtype=torch.bool) if apart is None else apart.keep
            real = F.pad(real, (0, edge)).reshape(rows * count, chunk)
        q, k, v = (F.pad(one, (0, 0, 0, edge)).reshape(rows * count, 1, chunk, one.shape[-1]) for one in (q, k, v))
        return q, k, v, real, self._bias(chunk)

    def _bias(self, length: int) -> Tensor | None:
        """The numbers of distances i - j from 1 - length to length - 1."""
        if self.places is None:
            return None
        if length > self.places.length:
            raise ValueError(f"x: expected at most {self.places.length} tokens that meet, got {length}")
        middle, table = self.places.length - 1, self.places()
        numbers: Tensor = table[middle - length + 1 : middle + length].flip(0) if length else table[:0]
        return numbers

    def _attended(self, q: Tensor, k: Tensor, v: Tensor, apart: Unpacked | None) -> Tensor:
        q, k, v, real, bias = self._chunks(q, k, v, apart)
        if self.weights != "softmax":
            weights = self._weights(q, k, v, real, bias)
            return (weights @ hide_unread(weights, v)).to(v.dtype)
        out: Tensor = attention(q, k, v, **self._options(real, bias, q.shape[2]))
        return out if bias is None or len(bias) else out + bias.sum()  # nothing to add, but a gradient of zeros

    def _options(self, real: Tensor | None, bias: Tensor | None, length: int) -> dict[str, Any]:
        mask: Mask | None = None if self.bidirectional else Causal()
        if real is not None:
            mask = KeyPadding(real) if mask is None else mask & KeyPadding(real)
        table = None if bias is None or not length else RelativeTable(bias[:, None], (length,))
        return {"mask": mask, "bias": table, "q_start": 0}

    def _joined(self, mixed: Tensor, rows: int, length: int) -> Tensor:
        """Chunks one after the other (rows, 1, length, value_dim)."""
        chunk, width = mixed.shape[2:]
        if self.sizes.chunk is None:
            return mixed
        return mixed.reshape(rows, 1, -(-length // chunk) * chunk, width)[:, :, :length]

    def _weights(self, q: Tensor, k: Tensor, v: Tensor, real: Tensor | None, bias: Tensor | None) -> Tensor:
        length = q.shape[2]
        if self.weights == "softmax":
            return attention_weights(q, k, v, **self._options(real, bias, length))[1]
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        place = torch.arange(length, device=q.device)
        allowed = torch.ones(1, 1, length, length, dtype=torch.bool, device=q.device)
        if not self.bidirectional:
            allowed = allowed & (place[:, None] >= place)
        if real is not None:
            allowed = allowed & real[:, None, None]
        with without_autocast(q):
            scores = q.to(wide) @ k.to(wide).mT / allowed.sum(-1, keepdim=True).clamp(min=1)
            if bias is not None and length:
                scores = scores + bias.to(wide)[place[:, None] - place + length - 1]
            if self.weights == "relu2":
                shaped = torch.relu(scores).square()
            else:
                shaped = 0.5 * (1 + torch.erf((scores - 0.5**0.5) / ((4 * math.pi) ** -0.5 * 2**0.5)))
            found: Tensor = torch.where(allowed, shaped, 0.0)
        return found


records = (
    Record(
        name="mega",
        summary="Mega: gated attention of one head over a moving average, causal",
        source="Ma et al. 2022, arXiv:2209.10655",
        build=lambda dim, heads: MegaAttention(dim, MegaSizes(4, 8, 12), places=MegaPlaces(64)),
    ),
    Record(
        name="mega_chunked",
        summary="Mega in chunks, both ways, with Laplace weights and rotary places",
        source="Ma et al. 2022, arXiv:2209.10655",
        build=lambda dim, heads: MegaAttention(
            dim,
            MegaSizes(4, 8, 12, chunk=3),
            places=MegaPlaces(3, "rotary", 8),
            weights="laplace",
            bidirectional=True,
        ),
    ),
)
