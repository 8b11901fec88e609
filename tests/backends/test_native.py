"""The native kernels against the definition in float64: every option, dtype, head size and length."""

import itertools
from pathlib import Path

import pytest
import torch
from attention_calls import BATCH, BIASES, MASKS, Q_HEADS, SINK, STARTS, K, Q, inputs, made
from native_calls import LOW, agrees, near, needs_native

import regard
from regard import masks
from regard.biases import Alibi, ClassTable, Dense, RelativeBuckets, RelativeTable
from regard.masks import (
    Band,
    Blocks,
    Causal,
    Edges,
    Global,
    KeyLengths,
    KeyPadding,
    Predicate,
    Prefix,
    Segments,
    Window,
)

ROOT = Path(__file__).parents[2]
pytestmark = needs_native

OTHER_MASKS = {
    **MASKS,
    "two intervals": Band(0, 0) | Band(-2, 3) & ~Causal(),
    "prefix and window": (Causal() | Prefix(torch.tensor([1, 3]))) & Window(4),
    "prefixes": Prefix(torch.tensor([1, 3])) | Prefix(2),
    "blocks": Blocks(made(3, 3) > 0, 3),
    "global": Causal() & (Window(2) | Global([0])),
    "edges": Edges(torch.tensor([[0, 1, 4, 5], [2, 2, 8, 4]])),
    "not": ~KeyLengths(torch.tensor([0, 4])),
    "predicate": Predicate(lambda b, h, i, j: (i + j + h) % 3 != b),
    "row and column ids": Segments(torch.arange(Q) // 2, torch.arange(K) // 3) & Segments(torch.arange(K) // 4),
    "buckets": masks.Buckets(torch.arange(Q * 2).view(2, Q) % 3, torch.arange(K) % 3),
    "moved": (
        Causal() & KeyPadding(torch.ones(BATCH, K + 2) > 0) & KeyLengths(9) & masks.Dense(made(Q, K + 2) > 0)
    ).shifted(2),
    "moved ids": Segments(torch.arange(K + 2) // 4).shifted(2) & (Causal() | Prefix(4).shifted(2)),
}
OTHER_BIASES = {
    **BIASES,
    "table": RelativeTable(made(31, Q_HEADS), (16,)),
    "grid": RelativeTable(made(35, Q_HEADS), (3, 4)) + Dense(made(Q, 1)),
    "class token": ClassTable(made(48, Q_HEADS), (3, 5)),
    "number": Dense(made(1)[0]) + Alibi(Q_HEADS, symmetric=True),
    "masking": Dense(torch.where(made(BATCH, 1, Q, K) > 0.3, -torch.inf, made(BATCH, 1, Q, K))),
    "moved": RelativeBuckets(made(8, Q_HEADS), max_distance=20).shifted(3) + Dense(made(Q, K + 3)).shifted(3),
}


@pytest.mark.parametrize("bias", BIASES)
@pytest.mark.parametrize("mask", MASKS)
def test_every_mask_and_bias(mask, bias):
    q, k, v = inputs()
    for softcap, sink, p, q_start in itertools.product((None, 2.0), (None, SINK), (0.0, 0.4), STARTS):
        options = {"softcap": softcap, "sink": sink, "dropout_p": p, "q_start": q_start}
        agrees(q, k, v, mask=MASKS[mask], bias=BIASES[bias], **options)


@pytest.mark.parametrize("dtype", LOW)
def test_other_masks_and_biases_and_dtypes(dtype):
    q, k, v = inputs()
    for mask, bias in {(mask, "dense") for mask in OTHER_MASKS} | {("causal", bias) for bias in OTHER_BIASES}:
        segment_starts = (None, torch.tensor([2, 3])) if bias not in ("table", "grid") else (None, 1)
        for q_start in segment_starts:
            try:
                agrees(q, k, v, dtype, mask=OTHER_MASKS[mask], bias=OTHER_BIASES[bias], q_start=q_start)
            except Exception as error:
                raise AssertionError((mask, bias, q_start)) from error


@pytest.mark.parametrize(("q_heads", "kv_heads"), [(1, 1), (3, 3), (6, 2), (7, 1), (12, 3)])
def test_heads(q_heads, kv_heads):
    q, k, v = (made(2, heads, 20, 8) for heads in (q_heads, kv_heads, kv_heads))
    for dtype in (torch.float32, torch.bfloat16):
        agrees(q, k, v, dtype, mask=Causal(), bias=Alibi(q_heads), sink=made(q_heads))


@pytest.mark.parametrize(
    ("dk", "dv"),
    [(1, 1), (2, 3), (7, 16), (15, 1), (16, 48), (17, 33), (64, 64), (65, 63), (96, 128), (257, 5), (5, 257)],
)
def test_head_sizes(dk, dv):
    for q_len, k_len in ((1, 70), (19, 37)):
        q, k, v = made(1, 4, q_len, dk), made(1, 2, k_len, dk), made(1, 2, k_len, dv)
        for dtype in (torch.float32, torch.bfloat16):
            agrees(q, k, v, dtype, mask=Causal())


LENGTHS = [(1, 1), (1, 5), (1, 600), (1, 1100), (2, 65), (3, 1025), (5, 5), (6, 6), (7, 15), (16, 16), (17, 31)]
LENGTHS += [(33, 129), (64, 64), (65, 63), (97, 97), (100, 3), (130, 200), (193, 577)]


@pytest.mark.parametrize(("q_len", "k_len"), LENGTHS)
def test_lengths(q_len, k_len):
    q, k, v = made(1, 2, q_len, 8), made(1, 1, k_len, 8), made(1, 1, k_len, 12)
    for mask in (
        None,
        Causal(),
        Window(5),
        Window(70),
        Band(20, 9),
        Causal() | Prefix(7),
        Band(None, 3),
        Band(-2, None),
    ):
        agrees(q, k, v, mask=mask)
    agrees(q, k, v, torch.bfloat16, mask=Causal())


@pytest.mark.parametrize("heads", [1, 2, 5, 6, 7, 16])
def test_decoding_with_values_of_whole_panels(heads):
    """Odd counts of keys, and values that are not finite in the last key that is read and past it."""
    for length, dv in ((1, 64), (31, 128), (33, 64), (1055, 192)):
        q, k, v = made(1, heads, 1, 32), made(1, 1, length + 2, 32), made(1, 1, length + 2, dv)
        v[:, :, length:] = torch.nan
        for last in (0.0, torch.inf):
            v[:, :, length - 1, 0] = last
            for dtype in (torch.float32, torch.bfloat16):
                low = [x.to(dtype) for x in (q, k, v)]
                out = regard.attention(*low, mask=KeyLengths(length), backend="native")
                want = regard.attention(*(x.double() for x in low), mask=KeyLengths(length), backend="reference")
                near(out, want, LOW[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_many_heads_on_one_latent_cache(dtype):
    """A latent cache's decode step: many query heads on one key head, whose keys are read in parts."""
    q, k = made(2, 17, 1, 576).to(dtype), made(2, 1, 4200, 576).to(dtype)
    v = k[..., :512]
    lengths = torch.tensor([4150, 3])
    for mask, first in ((KeyLengths(lengths), KeyLengths(lengths[:1])), (Window(420), Window(420))):
        with torch.no_grad():
            out, lse = regard.attention(q, k, v, mask=mask, return_lse=True, backend="native")
            alone = regard.attention(q[:1], k[:1], v[:1], mask=first, backend="native")
            want = regard.attention(*(x.double() for x in (q, k, v)), mask=mask, return_lse=True, backend="reference")
        assert torch.equal(out[:1], alone)
        near(out, want[0], LOW[dtype])
        near(lse, want[1], LOW[dtype])


def test_a_long_sequence_with_everything():
    """More tokens than any block of a kernel holds."""
    length = 1100
    q, k, v = made(1, 2, length, 20), made(1, 1, length, 20), made(1, 1, length, 12)
    keep = torch.arange(length)[None] % 7 != 3
    documents = Segments(torch.arange(length) // 300)
    dense = masks.Dense(made(1, 1, length, length) > -1)
    sparse = Causal() & (Window(64) | Global([0, 1, 500]))
    for options in (
        {"mask": Causal() & KeyPadding(keep) & documents, "bias": Alibi(2), "softcap": 3.0},
        {"mask": Window(130) & dense, "dropout_p": 0.3, "sink": made(2)},
        {"mask": sparse, "bias": RelativeBuckets(made(32, 2), bidirectional=False)},
        {"mask": KeyLengths(700), "bias": Dense(made(1, 2, 1, length))},
    ):
        agrees(q, k, v, tolerance=1e-4, **options)


@pytest.mark.parametrize("inner", [None, Causal(), Window(2), Causal() | Prefix(1), Band(1, 1)], ids=str)
@pytest.mark.parametrize("k_lengths", [None, [5, 2, 4, 0, 2], [4, 1, 5, 2, 3]])
def test_packed_rows(inner, k_lengths):
    q_lengths = [3, 0, 4, 1, 2]
    packed = Segments.from_lengths(q_lengths, k_lengths)
    q, k, v = made(1, 4, 10, 4), *(made(1, 2, sum(k_lengths or q_lengths), d) for d in (4, 3))
    mask = packed if inner is None else inner & packed
    agrees(q, k, v, mask=mask, bias=Alibi(4) + Dense(made(1, 1, 1, k.shape[2])), softcap=4.0)
