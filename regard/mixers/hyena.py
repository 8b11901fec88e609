"""The Hyena operator: long convolutions with filters that a small network makes, between gates of the data.

    [x_0, ..., x_{N-1}, v] = conv3(W u),   v <- h_o * (v x_i) + d_o v x_i  for i = N - 1 ... 1,   y = W_o (x_0 v)
    h(t) = MLP(features of t) exp(-t |delta|)

Poli et al. 2023, arXiv:2302.10866, sections 3.1 to 3.3.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
from torch import Tensor, nn

from regard.caches import KVCache, KVView
from regard.checks import describe, is_part, whole
from regard.coordinates import has_values, plain_tensors
from regard.mixers.base import Record, Traits, check_tokens, floating, no_context
from regard.mixers.unpacked import Unpacked
from regard.ops.checks import without_autocast
from regard.ops.convolutions import short_conv
from regard.ops.long_conv import long_conv, toeplitz
from regard.tokens import TokenLayout, resolve_tokens, takes_token_layout

__all__ = ["Hyena", "HyenaFilter", "records"]


class HyenaFilter(nn.Module):
    """Filters of any length up to `length`, from a network of sines: ``forward(T)`` is (channels, T).

    Args:
        channels: how many filters.
        length: the longest sequence, by which times are measured: a shorter filter is the first part of the longest.
        width: of the network.
        features: of the time, an odd number: the time itself, and sines and cosines.
        frequency: that the sines start with; each layer's is learned.
        fast, slow: how fast filters fade, as shares of the length after which they are at `floor`.

    Parameters: ``maps.*`` and ``frequencies`` (layers, width); buffers ``places`` (length, features), ``times`` and
    ``rates``. Raises ValueError and TypeError for sizes out of range.

    >>> HyenaFilter(6, 100)(40).shape
    torch.Size([6, 40])
    """

    places: Tensor
    times: Tensor
    rates: Tensor

    def __init__(
        self,
        channels: int,
        length: int,
        *,
        width: int = 64,
        features: int = 3,
        frequency: float = 1.0,
        fast: float = 0.3,
        slow: float = 1.5,
        floor: float = 1e-2,
    ) -> None:
        super().__init__()
        self.channels, self.length = whole("channels", channels, 1), whole("length", length, 1)
        if whole("features", features, 3) % 2 == 0:
            raise ValueError(f"features: expected an odd number, got {features}")
        self.frequency, self.edges = float(frequency), (math.log(floor) / slow, math.log(floor) / fast)
        sizes = [features, width, width, width]
        self.maps = nn.ModuleList([nn.Linear(a, b) for a, b in itertools.pairwise(sizes)])
        self.last = nn.Linear(width, channels, bias=False)
        self.frequencies = nn.Parameter(torch.empty(len(self.maps), width))
        self.register_buffer("places", torch.empty(length, features))
        self.register_buffer("times", torch.empty(length))
        self.register_buffer("rates", torch.empty(channels))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Starts the frequencies anew, and writes the features of the times."""
        nn.init.constant_(self.frequencies, self.frequency)
        if not has_values(self.places):
            return
        with plain_tensors():
            times = torch.linspace(0, 1, self.length, dtype=torch.float64)
            bands = (self.places.shape[1] - 1) // 2
            waves = torch.linspace(1e-4, bands - 1, bands, dtype=torch.float64)
            angles = 2 * math.pi * torch.arange(self.length)[:, None] / self.length * waves
            places = torch.cat([times[:, None], angles.cos(), -angles.sin()], 1)
            rates = torch.linspace(*self.edges, self.channels, dtype=torch.float64)
        self.places.copy_(places)
        self.times.copy_(times)
        self.rates.copy_(rates)

    def forward(self, tokens: int) -> Tensor:
        if tokens > self.length:
            raise ValueError(f"tokens: expected at most {self.length}, the filter's length, got {tokens}")
        hidden = self.places[:tokens]
        for linear, frequency in zip(self.maps, self.frequencies, strict=True):
            hidden = torch.sin(frequency * linear(hidden))
        window = torch.exp(-self.times[:tokens, None] * self.rates.abs())
        filters: Tensor = (self.last(hidden) * window).T
        return filters


class Hyena(nn.Module):
    """The Hyena operator, causal; ``(B, T, dim)`` in and out, for up to `length` tokens.

    Args:
        dim: width of the tokens.
        length: the longest sequence.
        order: N, gates; order 2 has one long convolution.
        filters: a `HyenaFilter` of ``(order - 1) dim`` channels and `length`; the default one of these sizes.

    Parameters: ``in_proj`` ((N + 1) dim), ``short_filter short_bias``, ``filters.*``, ``skip`` ((N - 1) dim) and
    ``out_proj``. A later token cannot touch earlier results, not even their rounding (`regard.ops.long_conv`). Padding
    and other packed sequences take no part. There is no finite state: a cache keeps what the short convolution reads,
    and a step computes with all of it. Raises ValueError and TypeError for sizes and tensors that do not fit, and for
    more tokens than `length`. Cost O(N dim T log^2 T).

    >>> Hyena(16, 128)(torch.randn(2, 100, 16)).shape
    torch.Size([2, 100, 16])
    """

    def __init__(self, dim: int, length: int, *, order: int = 2, filters: HyenaFilter | None = None) -> None:
        super().__init__()
        self.dim, self.length, self.order = whole("dim", dim, 1), whole("length", length, 1), whole("order", order, 2)
        is_part("filters", filters, HyenaFilter)
        channels = (order - 1) * dim
        if filters is not None and (filters.channels, filters.length) != (channels, length):
            raise ValueError(f"filters: expected {channels} channels of length {length}, got {filters.channels}")
        self.in_proj, self.out_proj = nn.Linear(dim, (order + 1) * dim), nn.Linear(dim, dim)
        self.short_filter = nn.Parameter(torch.empty((order + 1) * dim, 3))
        self.short_bias = nn.Parameter(torch.empty((order + 1) * dim))
        self.filters = HyenaFilter(channels, length) if filters is None else filters
        self.skip = nn.Parameter(torch.empty(channels))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Starts the short filter and the skips anew."""
        edge = 3**-0.5
        nn.init.uniform_(self.short_filter, -edge, edge)
        nn.init.uniform_(self.short_bias, -edge, edge)
        nn.init.normal_(self.skip)

    @property
    def traits(self) -> Traits:
        """What the layer promises."""
        return Traits("convolution", causal=True, cached=True, off_kernels="its long convolution is torch's own FFT")

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
        """The mixed tokens (B, T, dim)."""
        no_context(self, context)
        given: dict[str, Any] = {"mask": mask, "keep": keep, "positions": positions, "segments": segments}
        view, tokens = self._read(x, cache=cache, **given)
        y: Tensor = self.out_proj(self._mix(view, tokens).squeeze(-1).transpose(1, 2))
        if cache is not None:
            cache.commit(*view.fresh)
        return y

    def mixed(self, x: Tensor, **arguments: Any) -> Tensor:
        """What the layer mixes (B, dim, T, 1), a channel a head, before the output projection."""
        return self._mix(*self._read(x, **arguments))

    def mixing(self, x: Tensor, **arguments: Any) -> tuple[Tensor, Tensor]:
        """(M (B, dim, T, Tk), V (B, dim, Tk, 1)): per channel ``D_x0 T_h D_x1 ...``, of gates and of filters."""
        view, tokens = self._read(x, **arguments)
        apart, rows = self._apart(view)
        *gates, v = self._streams(rows)
        length = rows.shape[1]
        matrix = torch.eye(length, device=x.device, dtype=v.dtype)
        for o, gate in enumerate(reversed(gates[1:])):
            kernel, skip = self._filter(o, length, v.dtype)
            shifts = toeplitz(kernel, length) + torch.diag_embed(skip[:, None].expand(-1, length))
            matrix = shifts @ (gate.transpose(1, 2).unsqueeze(-1) * matrix)
        matrix = gates[0].transpose(1, 2).unsqueeze(-1) * matrix
        values = v.transpose(1, 2).unsqueeze(-1)
        if apart is not None:
            matrix, values = apart.columns(apart.together(matrix)), apart.together(values)
        return matrix[:, :, matrix.shape[2] - tokens :], values

    def init_cache(
        self, batch: int, capacity: int, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None
    ) -> KVCache:
        """An empty cache for `batch` rows of up to `capacity` tokens: what the short convolution reads."""
        like = floating(self.in_proj, self)
        where = dtype or like.dtype, device or like.device
        return KVCache(batch, capacity, 1, (self.order + 1) * self.dim, 0, *where)

    def label(self) -> str:
        """The layer in a few words."""
        return f"Hyena of order {self.order}, filters of {self.length} tokens"

    def prefill_macs(self, tokens: int) -> int:
        """Multiply-accumulates between `tokens` tokens, of the long convolutions by FFT (about 5 n log2 n / 2 each)."""
        size = 2 * max(tokens, 2)
        return (self.order - 1) * self.dim * int(7.5 * size * math.log2(size))

    def step_macs(self, cached: int) -> int:
        """The same for one token, which computes with all that is cached."""
        return self.prefill_macs(cached)

    def extra_repr(self) -> str:
        return f"{self.dim}, length={self.length}, order={self.order}"

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
            raise ValueError(f"mask: expected None, a convolution has none; got {describe(mask)}")
        if cache is not None and not isinstance(cache, KVCache):
            raise TypeError(f"cache: expected what init_cache gives, or None, got {describe(cache)}")
        given: dict[str, Any] = {"keep": keep, "positions": positions, "segments": segments}
        resolve: Any = resolve_tokens if cache is None else cache.resolve_tokens
        layout: TokenLayout = resolve(x.shape[0], x.shape[1], x.device, **given)
        projected = self.in_proj(layout.real(x))[:, None]
        nothing = projected[..., :0]
        return (
            KVView.alone(projected, nothing, layout) if cache is None else cache.extend(projected, nothing, layout)
        ), x.shape[1]

    def _apart(self, view: KVView) -> tuple[Unpacked | None, Tensor]:
        """(where sequences went, what the short convolution reads of each (n, T, C), 0 behind them)."""
        batch, _, seen, _ = view.k.shape
        apart = Unpacked.of(view.keep, view.segments, batch, seen)
        return apart, (view.k if apart is None else apart.apart(view.k))[:, 0]

    def _streams(self, rows: Tensor) -> list[Tensor]:
        """x_0 ... x_{N-1} and v, (n, T, dim) each, in float32 at least."""
        y = short_conv(rows, self.short_filter.to(rows.dtype), self.short_bias.to(rows.dtype))[0]
        return list(y.to(torch.float64 if y.dtype == torch.float64 else torch.float32).split(self.dim, 2))

    def _filter(self, o: int, tokens: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The o-th filter (dim, T) and its skips (dim)."""
        part = slice(o * self.dim, (o + 1) * self.dim)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        return self.filters(tokens)[part].to(wide), self.skip[part].to(wide)

    def _mix(self, view: KVView, tokens: int) -> Tensor:
        apart, rows = self._apart(view)
        *gates, v = self._streams(rows)
        with without_autocast(v):
            for o, gate in enumerate(reversed(gates[1:])):
                kernel, skip = self._filter(o, rows.shape[1], v.dtype)
                gated = v * gate
                v = long_conv(gated, kernel) + skip * gated
            out = (v * gates[0]).to(rows.dtype).transpose(1, 2).unsqueeze(-1)
        if apart is not None:
            out = apart.together(out)
        return out[:, :, out.shape[2] - tokens :]


records = (
    Record(
        name="hyena",
        summary="Hyena: a long implicit convolution between gates of the data",
        source="Poli et al. 2023, arXiv:2302.10866",
        build=lambda dim, heads: Hyena(dim, 64),
    ),
    Record(
        name="hyena_order3",
        summary="Hyena of order 3: two long convolutions",
        source="Poli et al. 2023, arXiv:2302.10866",
        build=lambda dim, heads: Hyena(dim, 64, order=3),
    ),
)
