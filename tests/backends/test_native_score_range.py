"""The native kernels over the whole range of scores: differences are formed from what is stored, in any unit."""

import math

import pytest
import torch
from attention_calls import made
from native_calls import LOW, needs_native, results

import regard
from regard.biases import Dense, RelativeTable
from regard.masks import Band, Causal, KeyLengths, KeyPadding, Segments, Window

pytestmark = needs_native
LOWEST = torch.finfo(torch.float32).min


def exact(q, k, v, **options):
    """The definition on the scores that float32 holds, the softmax and its gradients in float64."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out, lse = regard.attention(*leaves, backend="reference", return_lse=True, **options)
    return out, lse, torch.autograd.grad(out.double().mul(made(*out.shape)).sum(), leaves)


def same(q, k, v, tolerance=2e-5, **options):
    want = exact(q, k, v, **options)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out, lse = regard.attention(*leaves, backend="native", return_lse=True, **options)
    got = out, lse, torch.autograd.grad(out.double().mul(made(*out.shape)).sum(), leaves)
    with torch.no_grad():
        untracked = regard.attention(q, k, v, backend="native", **options)
    # the gradient of a score is right to float32's rounding, and is then multiplied by keys and queries
    room = (k.abs().max(), q.abs().max(), torch.tensor(1.0))
    pairs = [(got[0], want[0], 1.0), (untracked, want[0], 1.0), (got[1], want[1], 1.0)]
    pairs += [(a, b, float(r)) for a, b, r in zip(got[2], want[2], room, strict=True)]
    for a, b, least in pairs:
        a, b = a.detach().double(), b.detach().double()
        size = max(float(b[b.isfinite()].abs().max()), least, 1.0)
        torch.testing.assert_close(a, b, rtol=0, atol=tolerance * size)


def spaced(q_len, k_len, size):
    """Queries and keys of one channel whose products are exact, up to `size`, and lie far apart."""
    q = torch.ones(1, 2, q_len, 1)
    k = torch.arange(1, k_len + 1).float().view(1, 1, k_len, 1).flip(2) * (size / k_len)
    return q, k, made(1, 1, k_len, 4, dtype=torch.float32)


@pytest.mark.parametrize("scale", [1e8, 3e9, 1e10, 1e20, 1e30, 1.6e38, 3e38])
def test_large_scales_keep_their_rows(scale):
    torch.manual_seed(0)
    q, k, v = torch.rand(1, 2, 3, 4), torch.rand(1, 2, 7, 4) / 4, torch.rand(1, 2, 7, 4)  # products below 1
    with torch.no_grad():
        got, lse = regard.attention(q, k, v, scale=scale, backend="native", return_lse=True)
        # the largest product of each row takes everything
        scores = (q @ k.mT).double()
        torch.testing.assert_close(got, v.gather(2, scores.argmax(-1, keepdim=True).expand(-1, -1, -1, 4)))
        top = scores.amax(-1) * scale
        torch.testing.assert_close(lse, top.float(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("size", [1e6, 2e9, 1e10, 1e20, 1e37])
@pytest.mark.parametrize(("q_len", "k_len"), [(1, 9), (3, 7), (20, 40), (33, 1100), (40, 5000)])
def test_products_that_are_exact(q_len, k_len, size):
    q, k, v = spaced(q_len, k_len, size)
    same(q, k, v, scale=1.0)
    same(q, k, v, scale=1.0, mask=Causal(), sink=torch.tensor([0.0, -3.0]))
    same(q, k, v, scale=1.0, bias=Dense(torch.zeros(q_len, k_len)))


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize(("q_len", "k_len"), [(64, 64), (2, 64), (1, 1500)])
def test_random_rows_of_large_products(dtype, q_len, k_len):
    """Of random rows, one key takes all; a row of equal keys is their mean."""
    torch.manual_seed(0)
    size = 3e4 if dtype != torch.float16 else 2e3
    q, k = ((torch.randn(1, 1, n, 64) * size).to(dtype) for n in (q_len, k_len))
    v = torch.randn(1, 1, k_len, 8).to(dtype)
    got, lse = regard.attention(q, k, v, backend="native", return_lse=True)
    assert bool(got.isfinite().all()) and bool(lse.isfinite().all())
    best = (q.double() @ k.double().mT).argmax(-1, keepdim=True)
    torch.testing.assert_close(got, v.gather(2, best.expand(-1, -1, -1, 8)))
    equal = k[:, :, :1].expand_as(k)
    got = regard.attention(q, equal, v, backend="native")
    torch.testing.assert_close(
        got, v.float().mean(2, keepdim=True).to(dtype).expand_as(got), rtol=0, atol=4 * LOW[dtype]
    )


@pytest.mark.parametrize("value", [LOWEST, LOWEST / 1.4, LOWEST / 2, -1e38, -1e30])
@pytest.mark.parametrize("q_len", [3, 40])
def test_a_large_negative_bias_is_finite(value, q_len):
    """Rows of equal biases are means, a row of them among others, and a key of them beside others."""
    q, k = torch.zeros(1, 2, q_len, 8), torch.zeros(1, 2, 47, 8)
    v = made(1, 2, 47, 5, dtype=torch.float32)
    mean = v.mean(2, keepdim=True).expand(-1, -1, q_len, -1)
    for bias in (torch.full((q_len, 47), value), torch.full((1, 1), value), torch.full((), value)):
        torch.testing.assert_close(regard.attention(q, k, v, bias=bias, backend="native"), mean)
        same(q, k, v, bias=bias)
    one_row = torch.zeros(q_len, 47)
    one_row[1] = value
    torch.testing.assert_close(regard.attention(q, k, v, bias=one_row, backend="native"), mean)
    some_keys = torch.zeros(q_len, 47)
    some_keys[:, 10:] = value
    torch.testing.assert_close(
        regard.attention(q, k, v, bias=some_keys, backend="native"),
        v[:, :, :10].mean(2, keepdim=True).expand(-1, -1, q_len, -1),
    )
    same(q, k, v, bias=some_keys, mask=Window(30))


def test_a_large_negative_bias_by_distance():
    table = torch.zeros(19, 2)
    table[9] = LOWEST  # a distance of 0
    q, k, v = (made(1, 2, 10, 4, dtype=torch.float32) for _ in range(3))
    same(q, k, v, bias=RelativeTable(table, (10,)))
    same(q, k, v, bias=RelativeTable(torch.full((19, 2), LOWEST), (10,)))


def test_large_scores_with_a_softcap():
    q, k, v = spaced(5, 30, 1e12)
    same(q, k, v, scale=1.0, softcap=1e13)
    same(q, k, v, scale=1.0, softcap=1e20)


@pytest.mark.parametrize("size", [1.0, 1e5, 1e9, 1e12, 1e20, 1e30, 1e36])
@pytest.mark.parametrize(("q_len", "k_len"), [(3, 7), (40, 300)])
def test_gradients_of_equal_keys(q_len, k_len, size):
    """Keys that are equal get equal weights in both passes, though no float32 holds their scaled scores."""
    q = made(1, 2, q_len, 8, dtype=torch.float32) * size
    k = made(1, 1, 1, 8, dtype=torch.float32).expand(-1, -1, k_len, -1)
    v = made(1, 1, k_len, 4, dtype=torch.float32).requires_grad_()
    d_out = made(1, 2, q_len, 4, dtype=torch.float32)
    out = regard.attention(q, k, v, scale=0.3, backend="native")
    torch.testing.assert_close(out, v.mean(2, keepdim=True).expand_as(out), rtol=0, atol=1e-5)
    (d_v,) = torch.autograd.grad(out, v, d_out)
    torch.testing.assert_close(d_v, (d_out.sum((1, 2), keepdim=True) / k_len).expand_as(v), rtol=0, atol=1e-5)


# ---- gradients, against the definition in float64 --------------------------------------------------------------------

SCALE, LARGE, SMALL = torch.tensor([0.3, 1e22, 2e-36]).tolist()  # as float32 holds them
PRODUCTS = [(1e8, SCALE), (1e12, SCALE), (1e20, SCALE), (1e30, SCALE), (3e36, SCALE), (1e8, LARGE), (1e36, SMALL)]


def tied(q_len, k_len, size, dtype=torch.float32):
    """Queries of 4 heads, keys and values of 2: products are exact, up to `size`, and every key has one that ties.

    The last channel of keys is read by no query: keys that tie differ there.
    """
    step = 2.0 ** math.floor(math.log2(size / 1000))
    number = torch.arange(k_len) // 2 % 200 + 1.0
    k = torch.stack([number * step, -number * step, made(k_len).round()], -1).float()
    q = torch.stack([torch.arange(q_len) % 3 + 2.0, torch.arange(q_len) % 2 * 0.5, torch.zeros(q_len)], -1)
    q = torch.stack([q, -q, 2 * q.flip(0), q[:1].expand_as(q)])  # heads that read the largest keys, and the smallest
    q, k = q.expand(2, -1, -1, -1), torch.stack([k, k.flip(0)]).expand(2, -1, -1, -1)
    return q.to(dtype), k.to(dtype), made(2, 2, k_len, 5).to(dtype)


def as_defined(q, k, v, scale, **options):
    """Output, log-sum-exp and every gradient are those of the definition in float64."""
    want = results("reference", *(x.double() for x in (q, k, v)), scale=scale, **options)
    got = results("native", q, k, v, scale=scale, **options)
    # the gradient of a score is right to the dtype's rounding, and is then multiplied by keys and queries
    q_room, k_room = (scale * x.double().abs().amax((0, 1, 2)).clamp_min(1.0) for x in (k, q))
    rooms = [torch.tensor(1.0), torch.tensor(1.0), q_room, k_room] + [torch.tensor(1.0)] * (len(want) - 4)
    for one, other, least in zip(got, want, rooms, strict=True):
        one, other = one.detach().double(), other.detach()
        finite = other.isfinite()
        assert torch.equal(one.isfinite(), finite)
        size = torch.where(finite, other.abs(), 0.0)
        size = torch.maximum(size.amax((0, 1, 2)) if least.ndim else size.max(), least)
        error = torch.where(finite, one - other, 0.0).abs() / size
        assert float(error.max()) < LOW[q.dtype], float(error.max())
    if "dropout_p" in options:  # drawn anew
        return
    untracked = regard.attention(q, k, v, scale=scale, backend="native", **options)
    torch.testing.assert_close(untracked.double(), want[0].detach(), rtol=0, atol=3 * LOW[q.dtype])


@pytest.mark.parametrize(("size", "scale"), PRODUCTS)
@pytest.mark.parametrize(("q_len", "k_len"), [(1, 9), (3, 7), (3, 2100), (40, 300), (20, 4200)])
def test_gradients_whatever_the_scale(q_len, k_len, size, scale):
    q, k, v = tied(q_len, k_len, size)
    as_defined(q, k, v, scale)
    as_defined(q, k, v, scale, mask=Causal())
    as_defined(q, k, v, scale, mask=Window(7), dropout_p=0.3)


@pytest.mark.parametrize(("size", "scale"), PRODUCTS)
def test_gradients_whatever_the_scale_in_half_precision(size, scale):
    for lengths in ((3, 7), (40, 300)):
        as_defined(*tied(*lengths, size, torch.bfloat16), scale)
        as_defined(*tied(*lengths, size, torch.bfloat16), scale, mask=Causal())


def test_gradients_of_large_products_in_float16():
    for lengths in ((3, 7), (40, 300)):
        as_defined(*tied(*lengths, 6e4, torch.float16), SCALE, mask=Causal())


@pytest.mark.parametrize(("size", "scale"), PRODUCTS)
@pytest.mark.parametrize("q_len", [3, 40])
def test_gradients_whatever_the_scale_under_every_term(q_len, size, scale):
    k_len = 60
    q, k, v = tied(q_len, k_len, size)
    pair = (made(4, q_len, 30) * 3).round().repeat_interleave(2, -1)  # ties stay
    pair = torch.where(pair.abs() < 1, -torch.inf, pair).float()
    top = (q.double() @ k.double().repeat_interleave(2, 1).mT).amax((0, 2, 3)) * scale
    for options in (
        {"sink": top.float()},
        {"sink": torch.tensor([0.0, -3.0, 5.0, 1.0]), "mask": Window(9)},
        {"bias": Dense(pair[None])},
        {"bias": RelativeTable(torch.zeros(2 * k_len - 1, 4), (k_len,)), "mask": Causal()},
        {"softcap": 20.0, "sink": torch.tensor([18.0, 0.0, 22.0, -20.0])},
        {"mask": KeyLengths(torch.tensor([0, 33]))},
        {"mask": KeyPadding(made(2, k_len) > 0), "sink": top.float()},
        {"mask": Band(-50, -45), "q_start": 0},  # most rows attend to nothing
    ):
        as_defined(q, k, v, scale, **options)


@pytest.mark.parametrize(("size", "scale"), PRODUCTS)
def test_gradients_of_packed_rows_whatever_the_scale(size, scale):
    packed = Segments.from_lengths([20, 0, 30, 10])
    for mask in (packed, packed & Causal()):
        as_defined(*(x[:1] for x in tied(60, 60, size)), scale, mask=mask)


@pytest.mark.parametrize("q_len", [3, 40])
def test_scores_beyond_float32_take_everything(q_len):
    """Products that float32 holds, scaled beyond its range: the largest of a row still takes all."""
    q, k, v = tied(q_len, 50, 1e30)
    leaf, sink = v.requires_grad_(), torch.zeros(4)
    for options in ({}, {"sink": sink}):
        out = regard.attention(q, k, leaf, scale=1e20, backend="native", **options)[:, ::2]  # heads of large scores
        best = (q.double() @ k.double().repeat_interleave(2, 1).mT)[:, ::2]
        weights = (best == best.amax(-1, keepdim=True)).double()
        weights /= weights.sum(-1, keepdim=True)
        torch.testing.assert_close(out.double(), weights @ v.detach().double(), rtol=0, atol=1e-6)
        (dv,) = torch.autograd.grad(out.sum(), leaf)
        torch.testing.assert_close(dv.double(), weights.sum(2)[..., None].expand(-1, -1, -1, 5), rtol=0, atol=1e-5)
