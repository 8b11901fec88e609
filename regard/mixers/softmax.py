"""Multi-head softmax attention: MHA, MQA and GQA, self and cross; windows, biases, sinks, soft caps, gates.

The equation stands with the layer, in `regard.mixers.multi_head`. Vaswani et al. 2017, arXiv:1706.03762 (multi-head);
Shazeer 2019, arXiv:1911.02150 (multi-query); Ainslie et al. 2023, arXiv:2305.13245 (grouped-query).
"""

from __future__ import annotations

from regard.biases import Alibi
from regard.masks import Causal, Window
from regard.mixers.base import Record
from regard.mixers.multi_head import MultiHeadAttention
from regard.mixers.parts import Projections, RMSNorm, Scores
from regard.positions import Rotary

__all__ = ["MultiHeadAttention", "griffin_attention", "records"]


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
    ),
    Record(
        name="mqa",
        summary="multi-query attention: one key and value head",
        source="Shazeer 2019, arXiv:1911.02150",
        build=lambda dim, heads: MultiHeadAttention(dim, heads, kv_heads=1, mask=Causal(), rotary=Rotary(dim // heads)),
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
    ),
    Record(
        name="window",
        summary="sliding-window attention: the latest keys only, a ring cache",
        source="Beltagy et al. 2020, arXiv:2004.05150; Jiang et al. 2023, arXiv:2310.06825",
        build=lambda dim, heads: MultiHeadAttention(dim, heads, mask=Window(4), rotary=Rotary(dim // heads)),
    ),
    Record(
        name="griffin_attention",
        summary="Griffin's local attention: one key head, a window, half of each head rotates",
        source="De et al. 2024, arXiv:2402.19427",
        build=lambda dim, heads: griffin_attention(dim, heads, 4),
    ),
    Record(
        name="alibi",
        summary="attention with linear biases, no positions elsewhere",
        source="Press et al. 2021, arXiv:2108.12409",
        build=lambda dim, heads: MultiHeadAttention(dim, heads, mask=Causal(), bias=Alibi(heads)),
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
    ),
    Record(
        name="softcap",
        summary="attention with soft-capped scores",
        source="Gemma Team 2024, arXiv:2408.00118",
        build=lambda dim, heads: MultiHeadAttention(
            dim, heads, mask=Causal(), scores=Scores(softcap=5.0), rotary=Rotary(dim // heads)
        ),
    ),
    Record(
        name="gated",
        summary="attention with a sigmoid output gate",
        source="Qiu et al. 2025, arXiv:2505.06708",
        build=lambda dim, heads: MultiHeadAttention(
            dim, heads, mask=Causal(), projections=Projections(gate=True), rotary=Rotary(dim // heads)
        ),
    ),
    Record(
        name="encoder",
        summary="bidirectional multi-head attention",
        source="Vaswani et al. 2017, arXiv:1706.03762; Devlin et al. 2018, arXiv:1810.04805",
        build=lambda dim, heads: MultiHeadAttention(dim, heads, projections=Projections(bias=True)),
    ),
    Record(
        name="cross",
        summary="cross-attention: keys and values from a context, written to the cache once",
        source="Vaswani et al. 2017, arXiv:1706.03762",
        build=lambda dim, heads: MultiHeadAttention(
            dim, heads, projections=Projections(bias=True, context_dim=dim + 4)
        ),
    ),
)
