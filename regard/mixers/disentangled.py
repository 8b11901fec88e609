"""DeBERTa's disentangled attention: contents and relative places meet in terms of their own.

    A_ij = (Qc_i . Kc_j  +  Qc_i . Kr_d(i,j)  +  Kc_j . Qr_d(i,j)) / sqrt(D (1 + number of position terms))
           content          content to position  position to content
    Kr = P W_kr,   Qr = P W_qr,   d(i, j) = clip(bucket(i - j), -span, span - 1) + span,   P: (2 span, dim)

The paper prints d(j, i) in the last term; its code, and every released checkpoint, uses d(i, j) in both.
He, Liu, Gao, Chen 2020, arXiv:2006.03654, equations 4 and 5; buckets: He, Gao, Chen 2021, arXiv:2111.09543.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from regard.biases import Dense
from regard.caches import KVView
from regard.checks import is_part, norm_eps, whole
from regard.masks import Mask
from regard.mixers.attention_parts import hide_unread, read_mask
from regard.mixers.base import Record, Traits, check_tokens, no_context
from regard.mixers.costs import attention_macs
from regard.mixers.parts import Scores, merge_heads, split_heads
from regard.ops.attention import attention, attention_weights
from regard.ops.relative import relative_scores
from regard.tokens import TokenLayout, resolve_tokens, takes_token_layout

__all__ = ["DisentangledAttention", "RelativeEmbeddings", "log_buckets", "records"]

TERMS = ("content to position", "position to content")


def log_buckets(distance: Tensor, buckets: int, max_distance: int) -> Tensor:
    """Distances as they are up to ``buckets / 2``, beyond it in steps that grow with them: odd, int64.

    ``sign(r) (ceil(log(|r| / mid) / log((max_distance - 1) / mid) (mid - 1)) + mid)`` with ``mid = buckets / 2``, in
    float32 as the released code computes it.

    >>> log_buckets(torch.tensor([-511, 20, 128, 200, 300]), 256, 512).tolist()
    [-255, 20, 128, 169, 207]
    """
    mid = buckets // 2
    size = torch.where((distance < mid) & (distance > -mid), mid - 1, distance.abs())
    steps = torch.log(size / mid) / torch.log(torch.tensor((max_distance - 1) / mid)) * (mid - 1)
    far = (torch.ceil(steps) + mid) * distance.sign()
    return torch.where(size <= mid, distance, far.long())


class RelativeEmbeddings(nn.Module):
    """The table P of relative places, which layers share: ``forward()`` is (2 span, dim), `index` finds its rows.

    Args:
        dim: width of the rows.
        span: rows on either side; distances beyond it use the last one.
        max_distance: with it distances are put into `log_buckets`, `span` of them; None keeps them.
        norm: epsilon of a layer norm over the rows; None for none.
        dropout: of the rows, in training, anew in every layer.

    Raises ValueError and TypeError for numbers out of range.

    >>> RelativeEmbeddings(16, 4).index(3, 3).tolist()
    [[4, 3, 2], [5, 4, 3], [6, 5, 4]]
    """

    def __init__(
        self, dim: int, span: int, *, max_distance: int | None = None, norm: float | None = None, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.dim, self.span = whole("dim", dim, 1), whole("span", span, 1)
        self.max_distance = None if max_distance is None else whole("max_distance", max_distance, span)
        self.rows = nn.Parameter(torch.empty(2 * span, dim))
        self.norm = None if norm is None else nn.LayerNorm(dim, norm_eps(norm))
        if not 0.0 <= dropout <= 1.0:
            raise ValueError(f"dropout: expected a number in [0, 1], got {dropout}")
        self.dropout = dropout
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Starts the table anew, from N(0, 0.02^2) as published."""
        nn.init.normal_(self.rows, std=0.02)

    def forward(self) -> Tensor:
        rows = self.rows if self.norm is None else self.norm(self.rows)
        return nn.functional.dropout(rows, self.dropout, self.training) if self.dropout and self.training else rows

    def relative(self, q_len: int, k_len: int, device: torch.device | None = None) -> Tensor:
        """``bucket(i - j)`` (Tq, Tk), the queries being the last of the keys' slots."""
        distance = torch.arange(k_len - q_len, k_len, device=device)[:, None] - torch.arange(k_len, device=device)
        return distance if self.max_distance is None else log_buckets(distance, self.span, self.max_distance)

    def index(self, q_len: int, k_len: int, device: torch.device | None = None) -> Tensor:
        """The row (Tq, Tk) of every pair."""
        return (self.relative(q_len, k_len, device) + self.span).clamp(0, 2 * self.span - 1)


class DisentangledAttention(nn.Module):
    """Attention of contents and relative places in separate terms, bidirectional; ``(B, T, dim)`` in and out.

    Args:
        dim: width of the tokens.
        heads: heads H.
        relative: `RelativeEmbeddings`, its own or shared between layers.
        terms: "content to position" and "position to content", or one of them.
        share: the content's projections make the places' queries and keys too (``share_att_key``).
        talking: linear mixing of the heads' scores and of their weights (DeBERTa's ``talking_head``).
        scores: `Scores`: dropout (in training only); the scale is the equation's.
        key_bias: whether the maps to keys, of contents and of places, have biases; DeBERTa's first version has none.

    Parameters: ``q_proj k_proj v_proj o_proj`` and, unless shared, ``place_k_proj place_q_proj``; ``logits_mix
    weights_mix``. Places are distances of slots. Raises ValueError and TypeError for tensors that do not fit. Cost
    4 T^2 H D FLOPs, and 4 T span D H for the places; memory T^2 H for their terms, and never T^2 H D.

    >>> layer = DisentangledAttention(64, 8, RelativeEmbeddings(64, 16))
    >>> layer(torch.randn(2, 10, 64)).shape
    torch.Size([2, 10, 64])
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        relative: RelativeEmbeddings,
        *,
        terms: Sequence[str] = TERMS,
        share: bool = False,
        talking: bool = False,
        scores: Scores | None = None,
        key_bias: bool = True,
    ) -> None:
        super().__init__()
        self.dim, self.heads = whole("dim", dim, 1), whole("heads", heads, 1)
        if dim % heads:
            raise ValueError(f"heads: expected a divisor of dim={dim}, got {heads}")
        is_part("relative", relative, RelativeEmbeddings)
        if relative.dim != dim:
            raise ValueError(f"relative: expected rows of {dim} channels, got {relative.dim}")
        if not set(terms) <= set(TERMS) or len(set(terms)) != len(terms):
            raise ValueError(f"terms: expected some of {', '.join(map(repr, TERMS))}, got {tuple(terms)}")
        is_part("scores", scores, Scores)
        self.scores = scores or Scores()
        if self.scores.sink or self.scores.steps or self.scores.scale is not None:
            raise ValueError(f"scores: expected dropout alone, got {self.scores}")
        self.head_dim, self.relative, self.terms, self.share = dim // heads, relative, tuple(terms), share
        self.q_proj, self.v_proj = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.k_proj = nn.Linear(dim, dim, bias=key_bias)
        asks, answers = (term in terms and not share for term in TERMS)
        self.place_k_proj = nn.Linear(dim, dim, bias=key_bias) if asks else None
        self.place_q_proj = nn.Linear(dim, dim) if answers else None
        self.logits_mix = nn.Linear(heads, heads, bias=False) if talking else None
        self.weights_mix = nn.Linear(heads, heads, bias=False) if talking else None
        self.o_proj = nn.Linear(dim, dim)

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
        mask: Mask | Tensor | None = None,
        keep: Tensor | None = None,
        positions: Tensor | TokenLayout | None = None,
        segments: Tensor | None = None,
    ) -> Tensor:
        """The mixed tokens (B, T, dim)."""
        no_context(self, context)
        y: Tensor = self.o_proj(
            merge_heads(self.mixed(x, mask=mask, keep=keep, positions=positions, segments=segments))
        )
        return y

    def mixed(self, x: Tensor, **arguments: Any) -> Tensor:
        """What the layer mixes (B, H, T, D), before the output projection."""
        q, k, v, options = self._read(x, **arguments)
        p = self.scores.dropout if self.training else 0.0
        if self.logits_mix is None or self.weights_mix is None:
            out: Tensor = attention(q, k, v, dropout_p=p, **options)
            return out
        weights = nn.functional.dropout(self._talking(q, k, v, options), p)
        return (weights @ hide_unread(weights, v)).to(v.dtype)

    def mixing(self, x: Tensor, **arguments: Any) -> tuple[Tensor, Tensor]:
        """(M (B, H, T, T), V (B, H, T, D)); rows sum to 1 unless heads are mixed."""
        q, k, v, options = self._read(x, **arguments)
        talking = self.logits_mix is not None
        weights = self._talking(q, k, v, options) if talking else attention_weights(q, k, v, **options)[1]
        return weights, hide_unread(weights, v)

    def label(self) -> str:
        """The layer in a few words."""
        return (
            f"disentangled attention, {self.heads} heads of {self.head_dim}, {2 * self.relative.span} relative places"
        )

    def prefill_macs(self, tokens: int) -> int:
        """Multiply-accumulates between `tokens` tokens, and between them and the places."""
        places = len(self.terms) * self.heads * self.head_dim * tokens * 2 * self.relative.span
        return attention_macs(self.heads, self.head_dim, self.head_dim, tokens * tokens) + places

    # ---- the steps of a call -----------------------------------------------------------------------------------------

    def _read(
        self,
        x: Tensor,
        *,
        mask: Mask | Tensor | None = None,
        keep: Tensor | None = None,
        positions: Tensor | TokenLayout | None = None,
        segments: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, dict[str, Any]]:
        check_tokens(self, "x", x, self.dim)
        batch, tokens, _ = x.shape
        layout = resolve_tokens(batch, tokens, x.device, keep=keep, positions=positions, segments=segments)
        x = layout.real(x)
        q, k, v = (split_heads(proj(x), self.heads) for proj in (self.q_proj, self.k_proj, self.v_proj))
        scale = 1 / math.sqrt(self.head_dim * (1 + len(self.terms)))
        bias = self._places(q, k, scale)
        view = KVView(k, v, 0, layout.keep, layout.segments, ())
        options = {"mask": read_mask(None, mask, view, x), "bias": None if bias is None else Dense(bias)}
        return q, k, v, {**options, "scale": scale}

    def _places(self, q: Tensor, k: Tensor, scale: float) -> Tensor | None:
        """The terms of the places (B, H, T, T), in float32 at least."""
        if not self.terms:
            return None
        table = self.relative().to(q.dtype)
        index = self.relative.index(q.shape[2], q.shape[2], q.device)
        found: Tensor | None = None
        for term, own, shared in zip(
            TERMS, (self.place_k_proj, self.place_q_proj), (self.k_proj, self.q_proj), strict=True
        ):
            if term not in self.terms:
                continue
            places = split_heads((shared if own is None else own)(table)[None], self.heads)[0]  # (H, 2 span, D)
            if term == TERMS[0]:
                part = relative_scores(q * scale, places, index)
            else:
                part = relative_scores(k * scale, places, index.T).mT
            found = part if found is None else found + part
        return found

    def _talking(self, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Tensor:
        assert self.logits_mix is not None and self.weights_mix is not None
        bias = options["bias"]
        scores = (q @ k.mT) * options["scale"]
        scores = scores if bias is None else scores + bias.tensor.to(scores.dtype)
        scores = self.logits_mix(scores.transpose(1, -1)).transpose(1, -1)
        empty = q[..., :0]
        weights = attention_weights(empty, k[..., :0], v, bias=Dense(scores), scale=1.0, mask=options["mask"])[1]
        mixed: Tensor = self.weights_mix(weights.to(q.dtype).transpose(1, -1)).transpose(1, -1)
        return mixed


records = (
    Record(
        name="disentangled",
        summary="DeBERTa's disentangled attention: contents and relative places in terms of their own",
        source="He et al. 2020, arXiv:2006.03654",
        build=lambda dim, heads: DisentangledAttention(dim, heads, RelativeEmbeddings(dim, 3)),
    ),
    Record(
        name="disentangled_shared",
        summary="disentangled attention with logarithmic buckets and shared projections (DeBERTa-v3)",
        source="He et al. 2021, arXiv:2111.09543",
        build=lambda dim, heads: DisentangledAttention(
            dim, heads, RelativeEmbeddings(dim, 4, max_distance=6, norm=1e-7), share=True
        ),
    ),
)
