"""The native kernels: strides, unread keys, odd sizes, and the same bits whatever stands beside a row."""

from pathlib import Path

import pytest
import torch
from attention_calls import BATCH, Q_HEADS, K, inputs, made
from native_calls import agrees, near, needs_native, results

import regard
from regard import masks
from regard.biases import Dense
from regard.masks import (
    Band,
    Causal,
    KeyLengths,
    KeyPadding,
    Segments,
    Window,
)

ROOT = Path(__file__).parents[2]
pytestmark = needs_native


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
    """Scores of thousands that float32 holds exactly: all that could be off is the log-sum-exp they are weighed by."""
    q, k = (made(1, heads, n, 16).mul(2).round() for heads, n in ((4, q_len), (2, 90)))
    q, k, v = (x.float() for x in (q * 16, k * 16, made(1, 2, 90, 16)))
    want = results("reference", *(x.double() for x in (q, k, v)), mask=Causal(), scale=0.25)
    assert want[1].abs().max() > 2000
    for one, exact in zip(results("native", q, k, v, mask=Causal(), scale=0.25), want, strict=True):
        near(one.detach(), exact.detach(), 1e-5)


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
