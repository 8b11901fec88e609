"""The native kernels against the definition in float64, and what a shared library must keep to."""

import itertools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from attention_calls import BATCH, BIASES, MASKS, Q_HEADS, SINK, STARTS, K, Q, inputs, made

import regard
from regard import masks
from regard.backends.native import library
from regard.backends.native.operands import operands_of
from regard.biases import Alibi, Dense, RelativeBuckets, RelativeTable
from regard.errors import BackendUnsupported
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
from regard.ops.attention import _call

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.skipif(library.REASON is not None, reason=f"native not built: {library.REASON}")
LOW = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}  # of a result's own size


def near(got: torch.Tensor, want: torch.Tensor, tolerance: float) -> None:
    """Within `tolerance` of the largest entry (at least 1), with infinities in the same places."""
    finite = want.isfinite()
    assert torch.equal(got.isfinite(), finite)
    size = max(float(want[finite].abs().max()), 1.0) if finite.any() else 1.0
    torch.testing.assert_close(got.double(), want, rtol=0, atol=tolerance * size)


def results(backend, q, k, v, *, bias=None, sink=None, lse=True, **options):
    """[out, lse, gradients of q, k, v, of the bias's tensors, of the sink] for fixed cotangents of out and lse."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    if bias is not None:
        tensors = [t.detach().requires_grad_() for t in bias.tensors()]
        bias, leaves = bias.with_tensors(tensors), leaves + tensors
    if sink is not None:
        sink = sink.detach().requires_grad_()
        leaves.append(sink)
    torch.manual_seed(5)
    out, log_sum = regard.attention(*leaves[:3], bias=bias, sink=sink, backend=backend, return_lse=True, **options)
    finite = torch.where(log_sum == -torch.inf, 0.0, log_sum)
    loss = (out * made(*out.shape)).sum() + (finite * made(*log_sum.shape)).sum() * lse
    grads = torch.autograd.grad(loss, leaves, allow_unused=True)
    return [out, log_sum, *(torch.zeros_like(x) if g is None else g for g, x in zip(grads, leaves, strict=True))]


def agrees(q, k, v, dtype=torch.float32, tolerance=None, **options):
    """Native results on `dtype` equal the definition on the same rounded numbers in float64."""
    low = [x.to(dtype) for x in (q, k, v)]
    want = results("reference", *(x.double() for x in low), **options)
    got = results("native", *low, **options)
    assert got[0].dtype == dtype and got[1].dtype == torch.float32
    for one, other in zip(got, want, strict=True):
        near(one.detach(), other.detach(), tolerance or LOW[dtype])
    return got


# ---- every option ----------------------------------------------------------------------------------------------------

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
    ).moved(2),
    "moved ids": Segments(torch.arange(K + 2) // 4).moved(2) & (Causal() | Prefix(4).moved(2)),
}
OTHER_BIASES = {
    **BIASES,
    "table": RelativeTable(made(31, Q_HEADS), (16,)),
    "grid": RelativeTable(made(35, Q_HEADS), (3, 4)) + Dense(made(Q, 1)),
    "number": Dense(made(1)[0]) + Alibi(Q_HEADS, symmetric=True),
    "masking": Dense(torch.where(made(BATCH, 1, Q, K) > 0.3, -torch.inf, made(BATCH, 1, Q, K))),
    "moved": RelativeBuckets(made(8, Q_HEADS), max_distance=20).moved(3) + Dense(made(Q, K + 3)).moved(3),
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
        starts = (None, torch.tensor([2, 3])) if bias not in ("table", "grid") else (None, 1)
        for q_start in starts:
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


# ---- memory, unread keys, sizes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_strides(dtype):
    fused = made(BATCH, K, 3, Q_HEADS, 8).to(dtype)
    strided = {
        "fused": tuple(fused[:, :, n].transpose(1, 2) for n in range(3)),
        "last axis strided": tuple(made(BATCH, Q_HEADS, 8, K).to(dtype).mT for _ in range(3)),
        "every other": tuple(made(BATCH, Q_HEADS, K, 16).to(dtype)[..., ::2] for _ in range(3)),
        "expanded heads": tuple(made(BATCH, 1, K, 8).to(dtype).expand(-1, Q_HEADS, -1, -1) for _ in range(3)),
        "expanded tokens": tuple(made(BATCH, Q_HEADS, 1, 8).to(dtype).expand(-1, -1, K, -1) for _ in range(3)),
        "one channel": tuple(made(BATCH, Q_HEADS, K, 5).to(dtype)[..., 2:3] for _ in range(3)),
        "odd offset": tuple(made(BATCH, Q_HEADS, K, 9).to(dtype)[..., 1:] for _ in range(3)),
    }
    truth = (made(K, 1, 1, BATCH) > -1).permute(3, 1, 2, 0).expand(BATCH, 1, K, K)
    bias = Dense(made(K, Q_HEADS).T[None, :, None, :])
    for tensors in strided.values():
        before = [x.clone() for x in tensors]
        got = results("native", *tensors, mask=truth, bias=bias)
        assert all(torch.equal(x, y) for x, y in zip(tensors, before, strict=True))
        for one, other in zip(
            got, results("native", *(x.contiguous() for x in tensors), mask=truth, bias=bias), strict=True
        ):
            assert torch.equal(one, other)
    with torch.no_grad():  # the output lies as the queries do
        out = regard.attention(*strided["fused"], backend="native")
        assert out.transpose(1, 2).is_contiguous()
        assert torch.equal(out, regard.attention(*(x.contiguous() for x in strided["fused"]), backend="native"))


@pytest.mark.parametrize("junk", [torch.nan, torch.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_nobody_reads_may_hold_anything(junk, dtype):
    for length in (9, 150):
        q, k, v = (made(BATCH, heads, length, 8).to(dtype) for heads in (4, 2, 2))
        keep = made(BATCH, length) > 0
        at = torch.arange(length)
        cases = [
            (KeyPadding(keep), ~keep),
            (Causal() & KeyPadding(keep), ~keep),
            (KeyLengths(torch.tensor([4, 7])), at >= torch.tensor([[4], [7]])),
            (masks.Dense(keep[:, None, None]), ~keep),
            (Segments(torch.zeros(length, dtype=torch.long), (~keep).long()), ~keep),
        ]
        for rows in (slice(None), slice(-1, None), slice(-3, None)):
            for mask, unread in [*cases, (Window(2), (at < length - q[:, :, rows].shape[2] - 1).expand(BATCH, -1))]:
                if rows != slice(None) and isinstance(mask, Segments):
                    continue
                got = []
                for fill in (0.0, junk):
                    dirty = [torch.where(unread[:, None, :, None], torch.tensor(fill, dtype=dtype), x) for x in (k, v)]
                    got.append(results("native", q[:, :, rows], *dirty, mask=mask))
                for clean, one in zip(*got, strict=True):
                    assert torch.equal(clean, one)
                for grad in got[1][3:]:
                    assert (grad.transpose(1, 2)[unread] == 0).all()


@pytest.mark.parametrize("q_len", [1, 3, 40])
def test_gradients_keep_their_accuracy_where_scores_are_large(q_len):
    """Logits of thousands: weights recomputed from a rounded log-sum-exp would be off by their size times 1e-7."""
    for softcap, bias in ((None, None), (None, Dense(made(1, 4, 1, 90) * 3e3)), (3e3, Alibi(4))):
        q, k, v = (made(1, heads, n, 16) * size for heads, n, size in ((4, q_len, 30), (2, 90, 30), (2, 90, 1)))
        low = [x.float() for x in (q, k, v)]
        want = results("reference", *(x.double() for x in low), softcap=softcap, bias=bias, mask=Causal())
        plain = results("reference", *low, softcap=softcap, bias=bias, mask=Causal())
        got = results("native", *low, softcap=softcap, bias=bias, mask=Causal())
        for one, rough, exact in zip(*([x.detach() for x in each] for each in (got, plain, want)), strict=True):
            size = max(float(exact.abs().max()), 1.0)
            assert (one - exact).abs().max() <= 3 * (rough - exact).abs().max() + 1e-5 * size


def test_rows_that_may_attend_to_nothing_are_0():
    q, k, v = made(1, 2, 70, 8), made(1, 2, 80, 8), made(1, 2, 80, 8)
    truth = made(70, 80) > 0
    truth[3], truth[64:66] = False, False
    out, lse, dq, *_ = agrees(q, k, v, mask=truth, sink=made(2))
    for row in (3, 64, 65):
        assert (out[:, :, row] == 0).all() and (lse[:, :, row] == -torch.inf).all() and (dq[:, :, row] == 0).all()
    for mask in (Band(-100, None), KeyLengths(0)):
        out, lse, *grads = agrees(q, k, v, mask=mask)
        assert (out == 0).all() and (lse == -torch.inf).all() and all((g == 0).all() for g in grads)


@pytest.mark.parametrize("sizes", [(0, 3, 4, 2, 2), (2, 0, 4, 2, 2), (2, 4, 0, 2, 2), (2, 3, 4, 0, 2), (2, 3, 4, 2, 0)])
def test_empty_sizes(sizes):
    batch, q_len, k_len, dk, dv = sizes
    q, k, v = made(batch, 4, q_len, dk), made(batch, 2, k_len, dk), made(batch, 2, k_len, dv)
    for mask in (None, Causal(), torch.ones(q_len, k_len) > 0, KeyPadding(torch.ones(batch, k_len) > 0)):
        agrees(q, k, v, mask=mask, sink=made(4), bias=Dense(made(1, 4, q_len, k_len)))


def test_only_what_is_wanted():
    q, k, v = (x.float() for x in inputs())
    whole = results("native", q, k, v, mask=Causal())[2:]
    for wanted in range(3):
        leaves = [x.clone().requires_grad_(n == wanted) for n, x in enumerate((q, k, v))]
        out, lse = regard.attention(*leaves, mask=Causal(), return_lse=True, backend="native")
        loss = (out * made(*out.shape)).sum() + (lse * made(*lse.shape)).sum()
        (grad,) = torch.autograd.grad(loss, leaves[wanted])
        assert torch.equal(grad, whole[wanted])
    out, lse = regard.attention(q.requires_grad_(), k, v, mask=Causal(), return_lse=True, backend="native")
    (grad,) = torch.autograd.grad(lse.sum(), q)  # no gradient of the output at all
    _, want = regard.attention(q, k, v, mask=Causal(), return_lse=True, backend="reference")
    near(grad, torch.autograd.grad(want.sum(), q)[0].double(), 2e-5)


# ---- the same bits ---------------------------------------------------------------------------------------------------


def shapes(length):
    """A prefill and a decode step of grouped heads."""
    yield tuple(made(3, heads, length, 16) for heads in (4, 2, 2))
    yield made(3, 4, 1, 16), *(made(3, 2, length, 16) for _ in range(2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("length", [50, 700])
def test_a_row_has_the_same_bits_in_any_batch_and_on_any_number_of_threads(dtype, length):
    keep = made(3, length) > -1
    for own in shapes(length):
        q, k, v = (x.to(dtype) for x in own)
        for mask in (Causal(), Window(40), KeyPadding(keep), KeyLengths(torch.tensor([length, 9, length // 2]))):
            whole = results("native", q, k, v, mask=mask)[:5]
            threads = torch.get_num_threads()
            torch.set_num_threads(2)
            try:
                assert all(map(torch.equal, whole, results("native", q, k, v, mask=mask)[:5]))
            finally:
                torch.set_num_threads(threads)
            for row in range(3):
                part = slice(row, row + 1)
                alone = mask
                if isinstance(mask, KeyPadding):
                    alone = KeyPadding(keep[part])
                elif isinstance(mask, KeyLengths):
                    alone = KeyLengths(mask.n[part])
                with torch.no_grad():
                    out, lse = regard.attention(
                        q[part], k[part], v[part], mask=alone, return_lse=True, backend="native"
                    )
                assert torch.equal(out, whole[0][part]) and torch.equal(lse, whole[1][part])
    own = [torch.cat([x, x.flip(0)]) for x in (q, k, v)]
    got = results("native", *own, mask=Causal(), lse=False)
    want = results("native", *own, mask=Causal(), lse=False)
    assert all(map(torch.equal, got, want))


def test_the_cache_buffer_s_capacity_changes_no_bit():
    q, k, v = made(2, 4, 1, 16).float(), made(2, 2, 3000, 16).float(), made(2, 2, 3000, 16).float()
    for length in (5, 700, 1300):
        outs = [
            regard.attention(q, *(x[:, :, :size] for x in (k, v)), mask=KeyLengths(length), q_start=0, backend="native")
            for size in (length, length + 1, 2000, 3000)
        ]
        assert all(torch.equal(outs[0], out) for out in outs[1:])


def test_dropout_draws_the_reference_s_bits():
    q, k = torch.zeros(2, 3, 70, 4), torch.zeros(2, 3, 90, 4)
    v = torch.eye(90).expand(2, 3, -1, -1)  # the output is the row of kept weights
    for p in (0.1, 0.5, 0.9, 1.0):
        rows = []
        for backend in ("native", "reference"):
            torch.manual_seed(3)
            rows.append(regard.attention(q, k, v, dropout_p=p, backend=backend) != 0)
        assert torch.equal(*rows)
        assert (p == 1.0) == (not rows[0].any())


def test_a_mask_used_in_inference_and_under_fake_tensors_can_be_trained_with():
    q, k, v = (x.float() for x in inputs())
    mask = Causal() & KeyPadding(torch.ones(BATCH, K) > 0)
    with torch.inference_mode():
        first = regard.attention(q, k, v, mask=mask, backend="native")
    plain = Causal()
    with torch._subclasses.FakeTensorMode() as mode:
        fake = [mode.from_tensor(x) for x in (q, k, v)]
        assert regard.attention(*fake, mask=plain, backend="native").shape == first.shape
    agrees(q.double(), k.double(), v.double(), mask=mask)
    agrees(q.double(), k.double(), v.double(), mask=plain)


# ---- derivatives, compilation ----------------------------------------------------------------------------------------


def test_second_derivatives_go_through_the_definition():
    q, k, v = (x[:1, :2] for x in inputs(4, 5))
    slopes = made(2)

    def twice(dtype, backend):
        leaves = [x.to(dtype).requires_grad_() for x in (q, k, v, slopes)]
        out = regard.attention(*leaves[:3], mask=Window(3), bias=Alibi(leaves[3]), softcap=3.0, backend=backend)
        grads = torch.autograd.grad(out.square().sum(), leaves, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in grads), leaves)

    for got, want in zip(twice(torch.float32, "native"), twice(torch.float64, "reference"), strict=True):
        near(got, want, 1e-4)


@pytest.mark.filterwarnings("ignore:`torch.jit.script")  # torch's own, on the first jvp
def test_transforms_are_refused_by_name():
    q, k, v = (x.float() for x in inputs())
    for text, call in (
        ("vmap", lambda: torch.func.vmap(lambda q: regard.attention(q, k, v, backend="native"))(q[None])),
        ("transforms", lambda: torch.func.grad(lambda q: regard.attention(q, k, v, backend="native").sum())(q)),
        ("jvp", lambda: torch.func.jvp(lambda q: regard.attention(q, k, v, backend="native"), (q,), (q,))),
    ):
        with pytest.raises(BackendUnsupported, match=text):
            call()
    with pytest.raises(BackendUnsupported, match="float64"):
        regard.attention(*(x.double() for x in (q, k, v)), backend="native")


CALLS = [
    {},
    {
        "mask": Causal() & KeyPadding(made(2, 9) > 0),
        "bias": Alibi(made(4)) + Dense(made(1, 4, 1, 9)),
        "softcap": 3.0,
        "dropout_p": 0.3,
    },
    {
        "mask": (Causal() | Prefix(torch.tensor([2, 3])))
        & Segments(torch.arange(9) // 4)
        & masks.Dense(made(7, 9) > 0)
        & KeyLengths(8)
    },
]


@pytest.mark.parametrize("options", CALLS, ids=["plain", "biased", "masked"])
def test_opcheck(options):
    q, k, v = (made(2, heads, n, d).float() for heads, n, d in ((4, 7, 8), (2, 9, 8), (2, 9, 5)))
    names = ("mask", "bias", "scale", "softcap", "sink")
    call = _call(q, k, v, *(options.get(name) for name in names), options.get("dropout_p", 0.0), None, True)
    plain = operands_of(call)
    trained = {name: getattr(plain, name) for name in ("q", "k", "v", "bias", "relative")}
    leaves = {name: x.detach().requires_grad_() for name, x in trained.items() if x is not None}
    torch.library.opcheck(torch.ops.regard.attention_forward.default, (*plain._replace(**leaves), True))
    torch.library.opcheck(torch.ops.regard.attention_forward.default, (*plain, False))
    out, lse, low = torch.ops.regard.attention_forward(*plain, True)
    backward = torch.ops.regard.attention_backward.default
    wanted = [x is not None for x in trained.values()]
    torch.library.opcheck(backward, (torch.randn_like(out), torch.randn_like(lse), out, lse, low, *plain, wanted))
    torch.library.opcheck(
        backward, (torch.randn_like(out), None, out, lse, low, *plain, [False, True, False, False, False])
    )


def test_compiled_in_one_graph_and_exported():
    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.slopes = torch.nn.Parameter(made(4).float())

        def forward(self, q, k, v):
            return regard.attention(q, k, v, mask=Window(20), bias=Alibi(self.slopes), softcap=3.0, backend="native")

    def inputs(length):
        return tuple(made(2, heads, length, 8).float().requires_grad_() for heads in (4, 2, 2))

    layer = Layer()
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    length = torch.export.Dim("length", min=2, max=512)
    exported = torch.export.export(layer, inputs(12), dynamic_shapes=[{2: length}] * 3)
    assert "regard.attention_forward" in str(exported.graph)
    for size in (12, 33, 50):
        own = inputs(size)
        leaves = (*own, layer.slopes)
        want = layer(*own)
        torch.testing.assert_close(exported.module()(*own), want)
        got = compiled(*own)
        torch.testing.assert_close(got, want)
        for one, other in zip(*(torch.autograd.grad(out.square().sum(), leaves) for out in (got, want)), strict=True):
            torch.testing.assert_close(one, other)


# ---- the library -----------------------------------------------------------------------------------------------------


def child(code: str, **environment: str) -> str:
    """What a fresh process prints."""
    process = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | environment, cwd=ROOT, capture_output=True, text=True
    )
    assert process.returncode == 0, process.stderr
    return process.stdout.strip()


def test_the_structs_are_those_of_the_header():
    header = (ROOT / "csrc" / "regard.h").read_text(encoding="utf-8")
    structs = {"regard_attention": (library.CALL, library.OPTIONS), "regard_attention_grad": (library.GRAD,)}
    for which, (name, records) in enumerate(structs.items()):
        body = re.search(rf"typedef struct {name} {{(.*?)\n}} {name};", header, re.S)[1]
        fields = []
        for line in re.sub(r"//.*", "", body).split(";"):
            for piece in line.split(","):
                if found := re.search(r"(\w+)(\[\d\])?$", piece.strip()):
                    fields.append(found[1])
        assert fields == [field for record in records for field in record.names]
        assert library.LIBRARY.regard_struct_size(which) == sum(record.size for record in records)


def test_there_is_one_openmp_runtime_and_it_follows_torch():
    code = """
import re, threading, torch, regard
from regard.backends.native import library
q = torch.randn(1, 2, 64, 8)
regard.attention(q, q, q, backend="native")
print(sorted(set(re.findall(r"/\\S*lib(?:g|i)?omp\\S*", open("/proc/self/maps").read()))))
for n in (1, 2, 1):
    torch.set_num_threads(n)
    print(library.LIBRARY.regard_threads(), end=" ")
    def in_a_thread():
        regard.attention(q, q, q, backend="native")
        print(library.LIBRARY.regard_threads() == torch.get_num_threads())
    thread = threading.Thread(target=in_a_thread)
    thread.start()
    thread.join()
"""
    runtimes, *threads = child(code).splitlines()
    assert runtimes.count(".so") == 1, runtimes
    assert threads == ["1 True", "2 True", "1 True"]


def test_the_instruction_set_can_be_capped():
    code = (
        "import torch, regard; from regard.backends.native import library; print(library.ISA, library.REASON);"
        "torch.manual_seed(0); q = torch.randn(1, 2, 70, 24); mask = regard.masks.Causal();"
        "told = regard.explain(q, q, q, mask=mask); print(told.rows[0].reason);"
        "out = regard.attention(q, q, q, mask=mask, backend='native') if library.ISA else q * 0;"
        "want = regard.attention(q, q, q, mask=mask, backend='reference');"
        "print(float((out - want).abs().max()) < 1e-5)"
    )
    order = ["portable", "x86-64-v3", "x86-64-v4", "x86-64-v4+bf16"]
    seen = []
    for cap in order if library.ISA in order else ["portable", library.ISA]:
        isa, reason, right = child(code, REGARD_ISA=cap).splitlines()
        assert isa.endswith(" None") and right == "True"
        seen.append(isa.split()[0])
        assert (reason == "None") == (seen[-1] != "portable")
    assert seen[0] == "portable" and seen[-1] == library.ISA
    if library.ISA in order:
        assert all(order.index(one) <= order.index(cap) for one, cap in zip(seen, order, strict=True))
    said = child(code, REGARD_ISA="mmx").splitlines()
    assert "REGARD_ISA='mmx' names no instruction set" in said[1]


def test_a_missing_or_broken_library_is_said(tmp_path):
    code = "import torch, regard; q = torch.randn(1, 2, 5, 8); print(regard.explain(q, q, q))"
    (tmp_path / "libregard.so.1").write_bytes(b"no library")
    for path in (tmp_path / "libregard.so.1", tmp_path / "nothing.so"):
        told = child(code, REGARD_LIBRARY=str(path))
        assert "native" in told and "the kernels could not be loaded" in told and "runs it" in told


def test_the_gradient_of_a_bias_in_low_precision():
    """It sums small differences over many pairs: as close to float64 as the definition, up to a factor of two."""
    q, k, v = (torch.randn(2, 4, 200, 32).bfloat16() for _ in range(3))
    cotangent = torch.randn(2, 4, 200, 32).bfloat16()

    def gradient(backend, dtype):
        slopes = torch.linspace(0.1, 0.9, 4, dtype=dtype).requires_grad_()
        wide = [x.double() for x in (q, k, v)] if dtype is torch.float64 else (q, k, v)
        out = regard.attention(*wide, mask=Causal(), bias=Alibi(slopes), backend=backend)
        return torch.autograd.grad(out, slopes, cotangent.to(out.dtype))[0].double()

    truth = gradient("reference", torch.float64)
    plain, ours = ((gradient(name, torch.float32) - truth).abs().max() for name in ("reference", "native"))
    assert ours <= 2 * plain
