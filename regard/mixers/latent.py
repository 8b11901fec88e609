"""Multi-head latent attention: all heads' keys and values are read from one short vector a token.

    c_t = norm(W_c x_t),   r_t = rot_t(W_r x_t)                       the latent, and a key part that all heads share
    k_s^h = [W_k^h c_s ; r_s],   v_s^h = W_v^h c_s
    q_t^h = [a_t^h ; rot_t(b_t^h)],   [a ; b] = W_q x_t   or   W_qb norm(W_qa x_t)
    o_t^h = sum_s softmax_s(q_t^h . k_s^h scale) v_s^h,   scale = (nope + rope)^-1/2
    y_t = W_o [o_t^1; ...; o_t^H],   or W_o ([o_t^1; ...; o_t^H] * sigmoid(W_g x_t))

Only (c, r) is remembered. Since ``a . W_k c = (W_k^T a) . c``, the same result needs no keys and values of heads:

    q'_t^h = [W_k^h^T a_t^h ; rot_t(b_t^h)],   o_t^h = W_v^h sum_s softmax_s(q'_t^h . [c_s ; r_s] scale) c_s

which is multi-query attention over the latents. Each call takes the form that costs less. DeepSeek-AI 2024,
arXiv:2405.04434, sec. 2.1; without rotation: Kimi team 2025, arXiv:2510.26692; the gate is Kimi K3's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from regard.caches import KVView, LatentCache
from regard.checks import describe, is_part, whole
from regard.masks import Causal, Mask
from regard.mixers.attention_parts import attention_traits, hide_unread, read_mask, window_words
from regard.mixers.base import Record, Traits, check_tokens, floating, is_plain
from regard.mixers.costs import causal_pairs, keys_read, window_of
from regard.mixers.latent_parts import LatentProjections, LatentSizes
from regard.mixers.parts import Scores, merge_heads, split_heads
from regard.ops.attention import attention, attention_weights
from regard.positions import Rotary, YarnScaling
from regard.tokens import TokenLayout, resolve_tokens, takes_token_layout

__all__ = ["LatentProjections", "LatentSizes", "MultiHeadLatentAttention", "records"]


class MultiHeadLatentAttention(nn.Module):
    """Multi-head latent attention (MLA); ``(B, T, dim)`` in and out.

    Args:
        dim: width of the tokens.
        heads: H.
        sizes: `LatentSizes`.
        projections: `LatentProjections`: biases, output gate, norms.
        scores: `Scores`: scale, softcap, sinks, dropout. The scale is ``key_dim ** -0.5`` by default, in both forms,
            times ``score_factor`` where the rotary part has a `YarnScaling`.
        mask: the layer's own pattern, such as ``Causal()``; a mask given at the call is ANDed on.
        rotary: turns the last `rope_dim` query channels and the shared key channels; None leaves them as they are.

    Parameters: ``q_proj``, or ``q_a_proj q_a_norm q_b_proj`` (per head [nope, rope]); ``kv_a_proj`` (rows: latent,
    shared key), ``kv_a_norm``, ``kv_b_proj`` (per head [key, value]); ``gate_proj``, ``o_proj``, ``sink``.

    The cache holds ``rank + rope_dim`` elements a token: normed latent and rotated key. `form` is ``"expanded"`` or
    ``"absorbed"`` to force one, None for the cheaper one, chosen from the numbers of queries and keys alone.

    Cost per head and row, with n = nope_dim + value_dim: ``Tk rank n + Tq Tk (n + rope_dim)`` multiplications expanded,
    ``Tq rank n + Tq Tk (2 rank + rope_dim)`` absorbed. Raises ValueError for sizes below 1 and a wider rotary part.

    >>> import torch, regard
    >>> layer = MultiHeadLatentAttention(64, 8, LatentSizes(16, 8, 4, 8), mask=regard.masks.Causal())
    >>> cache = layer.init_cache(batch=1, capacity=10)
    >>> layer(torch.randn(1, 10, 64), cache=cache).shape, cache.latent.shape
    (torch.Size([1, 10, 64]), torch.Size([1, 1, 10, 20]))
    """

    counted_by_form = ("kv_b_proj",)  # `prefill_macs` and `step_macs` count it: its use depends on the form

    def __init__(
        self,
        dim: int,
        heads: int,
        sizes: LatentSizes,
        *,
        projections: LatentProjections | None = None,
        scores: Scores | None = None,
        mask: Mask | None = None,
        rotary: Rotary | None = None,
    ) -> None:
        super().__init__()
        self.dim, self.heads = whole("dim", dim, 1), whole("heads", heads, 1)
        if not isinstance(sizes, LatentSizes):
            raise TypeError(f"sizes: expected LatentSizes, got {describe(sizes)}")
        is_part("projections", projections, LatentProjections)
        is_part("scores", scores, Scores)
        is_part("mask", mask, Mask)
        is_part("rotary", rotary, Rotary)
        if rotary is not None and rotary.dim > sizes.rope_dim:
            raise ValueError(f"rotary: expected at most rope_dim={sizes.rope_dim} channels, got {rotary.dim}")
        p = projections or LatentProjections()
        self.sizes, self.scores, self.mask, self.rotary = sizes, scores or Scores(), mask, rotary
        self.form: str | None = None
        queries, values = heads * sizes.key_dim, heads * sizes.value_dim
        if sizes.q_rank is None:
            self.q_proj = nn.Linear(dim, queries, bias=False)
        else:
            self.q_a_proj = nn.Linear(dim, sizes.q_rank, bias=p.bias)
            self.q_a_norm = p.norm(sizes.q_rank)
            self.q_b_proj = nn.Linear(sizes.q_rank, queries, bias=False)
        self.kv_a_proj = nn.Linear(dim, sizes.per_token, bias=p.bias)
        self.kv_a_norm = p.norm(sizes.rank)
        self.kv_b_proj = nn.Linear(sizes.rank, heads * (sizes.nope_dim + sizes.value_dim), bias=False)
        self.gate = p.gate
        self.gate_proj = nn.Linear(dim, heads if p.gate == "head" else values, bias=False) if p.gate else None
        self.o_proj = nn.Linear(values, dim, bias=p.bias)
        self.sink = nn.Parameter(torch.empty(heads)) if self.scores.sink else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Starts the layer's own parameters anew; its parts have the same method."""
        if self.sink is not None:
            nn.init.zeros_(self.sink)

    @property
    def scale(self) -> float:
        """The factor on the scores, in both forms."""
        if self.scores.scale is not None:
            return self.scores.scale
        scaling = None if self.rotary is None else self.rotary.scaling
        sharper = scaling.score_factor if isinstance(scaling, YarnScaling) else 1.0
        return float(self.sizes.key_dim**-0.5) * sharper

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
        cache: LatentCache | None = None,
    ) -> Tensor:
        """The mixed tokens (B, T, dim). See the class for the arguments' meanings; a context is refused."""
        given: dict[str, Any] = {"keep": keep, "positions": positions, "segments": segments}
        x, q, view, options = self._read(x, context, mask=mask, cache=cache, **given)
        y = self._write(x, self._mix(q, view, options))
        if cache is not None:
            cache.commit(*view.fresh)
        return y

    def mixed(self, x: Tensor, context: Tensor | None = None, **arguments: Any) -> Tensor:
        """What the layer mixes (B, H, T, value_dim), before gate and output projection; a cache stays as it is."""
        return self._mix(*self._read(x, context, **arguments)[1:])

    def mixing(self, x: Tensor, context: Tensor | None = None, **arguments: Any) -> tuple[Tensor, Tensor]:
        """(M (B, H, Tq, Tk), V (B, H, Tk, value_dim)): the weights before dropout, and the heads' values."""
        _, q, view, options = self._read(x, context, **arguments)
        k, v = self._expanded(view)
        _, weights, _ = attention_weights(q, k, v, **options)
        return weights, hide_unread(weights, v)

    def absorbs(self, queries: int, keys: int) -> bool:
        """Whether a call with so many queries and keys takes the absorbed form; never a matter of the batch.

        That form reads the weight of ``kv_b_proj`` and does not call it, so an adapter in its place, or a hook on it,
        leaves the expanded form alone."""
        if self.form not in (None, "expanded", "absorbed"):
            raise ValueError(f"form: expected 'expanded', 'absorbed' or None, got {self.form!r}")
        readable = is_plain(self.kv_b_proj, nn.Linear) and self.kv_b_proj.bias is None
        if self.form == "absorbed" and not readable:
            raise ValueError(
                "form: 'absorbed' reads kv_b_proj.weight alone; expected a plain Linear without bias and hooks there,"
                f" got {type(self.kv_b_proj).__name__}; form=None calls it"
            )
        if self.form is not None or not readable:
            return self.form == "absorbed"
        return self.sizes.absorbed_cost(queries, keys) < self.sizes.expanded_cost(queries, keys)

    def init_cache(
        self, batch: int, capacity: int, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None
    ) -> LatentCache:
        """An empty cache for `batch` rows of `capacity` tokens."""
        like = floating(self.kv_a_proj, self)
        sizes = self.sizes.rank, self.sizes.rope_dim
        return LatentCache(batch, capacity, *sizes, dtype or like.dtype, device or like.device)

    @property
    def traits(self) -> Traits:
        """What the layer promises."""
        return attention_traits("latent", self.mask)

    def label(self) -> str:
        """The layer in a few words."""
        words = [f"latent attention, {self.heads} heads, {self.sizes.rank} + {self.sizes.rope_dim}"]
        return ", ".join(words + ["gated"] * bool(self.gate) + window_words(window_of(self)))

    def prefill_macs(self, tokens: int) -> int:
        """Multiply-accumulates between `tokens` tokens, each of which reads those before it; with ``kv_b_proj``."""
        return self._macs(tokens, tokens, causal_pairs(tokens, window_of(self)))

    def step_macs(self, cached: int) -> int:
        """The same for one token, which reads `cached` tokens, itself included."""
        return self._macs(1, cached, keys_read(cached, window_of(self)))

    def _macs(self, queries: int, keys: int, pairs: int) -> int:
        """A window bounds the pairs; the expanded form still forms the keys and values of every latent."""
        cost = self.sizes.absorbed_cost if self.absorbs(queries, keys) else self.sizes.expanded_cost
        return self.heads * cost(queries, keys, pairs)

    def extra_repr(self) -> str:
        parts = {"mask": self.mask, "rotary": self.rotary, "gate": self.gate}
        given = (f"{name}={part}" for name, part in parts.items() if part is not None)
        return ", ".join([f"{self.dim}, {self.heads} heads, {self.sizes}", *given])

    # ---- the steps of a call ---------------------------------------------------------------------------------------

    def _read(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        mask: Mask | Tensor | None = None,
        cache: LatentCache | None = None,
        **given: Any,
    ) -> tuple[Tensor, Tensor, KVView, dict[str, Any]]:
        """x with 0 at padding, queries (B, H, T, key_dim), the latents they read, the rest of the attention call.

        Nothing is changed."""
        check_tokens(self, "x", x, self.dim)
        if context is not None:
            raise ValueError("context: MultiHeadLatentAttention mixes one sequence and takes no context")
        if cache is not None and not isinstance(cache, LatentCache):
            raise TypeError(f"cache: expected what init_cache gives, or None, got {describe(cache)}")
        if cache is not None and cache.rank != self.sizes.rank:
            raise ValueError(f"cache: made for latents of rank {cache.rank}, got a layer with {self.sizes.rank}")
        sizes = (x.shape[0], x.shape[1], x.device)
        layout = resolve_tokens(*sizes, **given) if cache is None else cache.resolve_tokens(*sizes, **given)
        x = layout.real(x)
        latent, shared = self.kv_a_proj(x)[:, None].split((self.sizes.rank, self.sizes.rope_dim), -1)
        latent = torch.cat((self.kv_a_norm(latent), self._turned(shared, layout.positions)), -1)
        if cache is None:
            view = KVView(latent, latent[..., : self.sizes.rank], 0, layout.keep, layout.segments, (latent, layout))
        else:
            view = cache.extend(latent, layout)
        q = self.q_proj(x) if self.sizes.q_rank is None else self.q_b_proj(self.q_a_norm(self.q_a_proj(x)))
        q = split_heads(q, self.heads)
        if self.rotary is not None:
            plain, turning = q.split((self.sizes.nope_dim, self.sizes.rope_dim), -1)
            q = torch.cat((plain, self._turned(turning, layout.positions)), -1)
        options: dict[str, Any] = {
            **self.scores.arguments(),
            "scale": self.scale,
            "sink": self.sink,
            "q_start": 0 if cache is None else cache.length,
            "mask": read_mask(self.mask, mask, view, x),
        }
        return x, q, view, options

    def _turned(self, x: Tensor, positions: Tensor) -> Tensor:
        return x if self.rotary is None else self.rotary(x, positions)

    def _expanded(self, view: KVView) -> tuple[Tensor, Tensor]:
        """The keys (B, H, Tk, key_dim) and values (B, H, Tk, value_dim) of every head."""
        made = split_heads(self.kv_b_proj(view.v[:, 0]), self.heads)
        plain, v = made.split((self.sizes.nope_dim, self.sizes.value_dim), -1)
        shared = view.k[..., self.sizes.rank :].to(plain.dtype).expand(-1, self.heads, -1, -1)
        return torch.cat((plain, shared), -1), v

    def _mix(self, q: Tensor, view: KVView, options: dict[str, Any]) -> Tensor:
        options = options | {"dropout_p": self.scores.dropout if self.training else 0.0}
        if self.absorbs(q.shape[2], view.k.shape[2]):
            return self._absorbed(q, view, options)
        out: Tensor = attention(q, *self._expanded(view), **options)
        return out

    def _absorbed(self, q: Tensor, view: KVView, options: dict[str, Any]) -> Tensor:
        """What the heads mix (B, H, T, value_dim), read from the latents themselves by one key head."""
        to_key, to_value = self.kv_b_proj.weight.view(self.heads, -1, self.sizes.rank).split(
            (self.sizes.nope_dim, self.sizes.value_dim), 1
        )
        plain, turned = q.split((self.sizes.nope_dim, self.sizes.rope_dim), -1)
        inner = torch.einsum("bhtn,hnr->bhtr", plain, to_key)
        mixed = attention(torch.cat((inner, turned), -1), view.k, view.v, **options)
        return torch.einsum("bhtr,hvr->bhtv", mixed, to_value)

    def _write(self, x: Tensor, out: Tensor) -> Tensor:
        if self.gate_proj is not None:
            gate = torch.sigmoid(self.gate_proj(x))
            out = out * split_heads(gate, self.heads)  # one number per head, or one per channel
        y: Tensor = self.o_proj(merge_heads(out))
        return y


def _sizes(dim: int, heads: int, q_rank: int | None = None) -> LatentSizes:
    """Small ones in DeepSeek-V2's spirit: a latent of half the width, half as many shared key channels as a head's."""
    head = max(2, dim // heads)
    return LatentSizes(max(1, dim // 2), head, head // 2 // 2 * 2 or 2, head, q_rank)


def _deepseek(dim: int, heads: int) -> MultiHeadLatentAttention:
    sizes = _sizes(dim, heads, max(1, dim // 2))
    rotary = Rotary(sizes.rope_dim, style="interleaved")
    return MultiHeadLatentAttention(dim, heads, sizes, mask=Causal(), rotary=rotary)


records = (
    Record(
        name="mla",
        summary="latent attention: all heads read one short vector a token and a shared rotary key",
        source="DeepSeek-AI 2024, arXiv:2405.04434",
        build=_deepseek,
    ),
    Record(
        name="mla_nope",
        summary="latent attention without positions",
        source="Kimi team 2025, arXiv:2510.26692",
        build=lambda dim, heads: MultiHeadLatentAttention(dim, heads, _sizes(dim, heads), mask=Causal()),
    ),
    Record(
        name="mla_gated",
        summary="latent attention without positions, with a sigmoid output gate",
        source="DeepSeek-AI 2024, arXiv:2405.04434; the gate is Kimi K3's",
        build=lambda dim, heads: MultiHeadLatentAttention(
            dim, heads, _sizes(dim, heads, dim // 2), projections=LatentProjections(gate="channel"), mask=Causal()
        ),
    ),
)
