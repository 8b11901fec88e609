"""Masks that the kernels get as lists of tiles: forward, backward and few rows, against the definition."""

import pytest
import torch
from attention_calls import made
from native_calls import agrees, near, needs_native, results

import regard
from regard.biases import Alibi
from regard.masks import Band, Blocks, Causal, Dense, Edges, Global, KeyPadding, Predicate, Prefix, RandomBlocks, Window

pytestmark = needs_native

T = 300
MASKS = {
    "window and globals": Band(20, 20) | Global([0, 7, 290]),
    "all three": Band(9, 9) | Global([1]) | RandomBlocks(1, 32, T, heads=4),
    "by batch row": (Band(9, 9) | Global(made(2, T) > 2.0)) & KeyPadding(made(2, T) > -0.5),
    "causal": Causal() & (Window(10) | Global([0, 100])),
    "blocks by head": Blocks(made(1, 4, 5, 5) > 0.3, 64),
    "rows that see nothing": Blocks(torch.eye(10) > 0, 32) & Band(3, -1),
    "edges": Edges(torch.randint(0, T, (2, 900), generator=torch.Generator().manual_seed(0))),
    "beside a dense mask": (Band(70, 3) | Global([0])) & Dense(made(T, T) > 0),
    "with a rule": (Window(80) & Predicate(lambda b, h, i, j: (i + j + h) % 3 != b)) | Prefix(torch.tensor([2, 70])),
}


def operands(q_len: int = T, k_len: int = T, heads: tuple[int, int] = (4, 2)):
    return made(2, heads[0], q_len, 24), made(2, heads[1], k_len, 24), made(2, heads[1], k_len, 17)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MASKS)
def test_forward_and_backward(name, dtype):
    agrees(*operands(), dtype, mask=MASKS[name])


@pytest.mark.parametrize("name", ["all three", "by batch row"])
def test_with_every_other_step(name):
    sink = made(4)
    agrees(*operands(), mask=MASKS[name], bias=Alibi(4, symmetric=True), softcap=3.0, sink=sink, dropout_p=0.2)


@pytest.mark.parametrize("q_len", [2, 4, 9, 100])
@pytest.mark.parametrize("name", ["window and globals", "all three", "causal", "with a rule"])
def test_the_last_rows(name, q_len):
    q, k, v = operands(q_len, T)
    for option in ({}, {"q_start": 63}):
        agrees(q, k, v, mask=MASKS[name], **option)
    if q_len < 16:
        agrees(*operands(q_len, 5000), mask=Causal() & (Window(100) | Global([1500, 4990])))


def test_the_layout_is_taken_and_the_bits_do_not_depend_on_the_batch():
    q, k, v = (x.float() for x in operands())
    mask = MASKS["all three"]
    whole = regard.attention(q, k, v, mask=mask, backend="native")
    assert torch.equal(whole[1:], regard.attention(q[1:], k[1:], v[1:], mask=mask, backend="native"))
    known = mask._memo["native"][1]
    assert known[6] is None and known[7] is not None  # no dense form, but lists


@pytest.mark.parametrize("junk", [torch.nan, torch.inf])
def test_what_nobody_reads_may_hold_anything(junk):
    q, k, v = (x.float() for x in operands())
    mask = Blocks(torch.eye(5) > 0, 64) & Band(None, None) & ~Dense((torch.arange(T) % 64 == 5).expand(1, T))
    want = results("native", q, k, v, mask=mask)
    k, v = k.clone(), v.clone()
    k[:, :, 5::64], v[:, :, 5::64] = junk, junk
    for got, right in zip(results("native", q, k, v, mask=mask)[:3], want[:3], strict=True):
        near(got.detach(), right.detach().double(), 1e-6)


def test_differentiated_twice():
    q, k, v = (x[:1, :1, :, :3] for x in operands(heads=(1, 1)))
    leaf = q.clone().requires_grad_()
    mask = Band(9, 9) | Global([0, 150])
    found = {}
    for backend, dtype in (("native", torch.float32), ("reference", torch.float64)):
        own = leaf.detach().to(dtype).requires_grad_()
        out = regard.attention(own, k.to(dtype), v.to(dtype), mask=mask, backend=backend)
        (first,) = torch.autograd.grad(out.square().sum(), own, create_graph=True)
        (found[backend],) = torch.autograd.grad(first.square().sum(), own)
    near(found["native"], found["reference"], 1e-4)


def test_any_length():
    length = 1 << 15  # dense, this mask would be a gigabyte
    q = made(1, 1, length, 8).float()
    mask = Band(16, 16) | Global([0, length - 1]) | RandomBlocks(1, 64, length)
    with regard.backends.count_backends() as counts:
        out = regard.attention(q, q, q, mask=mask)
    assert counts["native"] == 1
    rows = torch.tensor([0, 1, 77, 20000, length - 1])
    allowed = mask.dense(1, length, q_start=0)  # row 0 sees everything
    assert allowed.all()
    for row in rows.tolist():
        seen = mask.dense(1, length, q_start=row)[0, 0, 0]
        right = (q[0, 0, row].double() @ q[0, 0, seen].double().T * 8**-0.5).softmax(-1) @ q[0, 0, seen].double()
        near(out[0, 0, row], right, 1e-5)
