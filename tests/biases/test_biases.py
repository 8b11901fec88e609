"""Biases: published slopes and buckets, values on positions, gradients, sums."""

import math

import pytest
import torch

import regard
from regard.biases import Alibi, Bias, ClassTable, Dense, RelativeBuckets, RelativeTable, alibi_slopes, relative_bucket
from regard.coordinates import Coordinates
from regard.masks import Causal

WIDE = torch.float64


def made(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=WIDE)


# ---- published numbers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("heads", "exponents"),
    [
        (1, [-8]),
        (2, [-4, -8]),
        (3, [-4, -8, -2]),
        (8, [-1, -2, -3, -4, -5, -6, -7, -8]),
        (12, [-1, -2, -3, -4, -5, -6, -7, -8, -0.5, -1.5, -2.5, -3.5]),
        (16, [-0.5 * h for h in range(1, 17)]),
    ],
)
def test_slopes_as_published(heads, exponents):
    want = torch.tensor([2.0**exponent for exponent in exponents], dtype=WIDE)
    torch.testing.assert_close(alibi_slopes(heads), want, rtol=1e-15, atol=0)


def test_slopes_in_mpts_order():
    """For no power of two: every other slope of the next one, from the second; then the rest; cut."""
    want = [2.0**-e for e in (2, 4, 6, 8, 1)]
    assert alibi_slopes(5, order="mpt").tolist() == want
    halved = [2.0**-e for e in (1, 2, 3, 4, 0.5)]
    torch.testing.assert_close(alibi_slopes(5, order="mpt", max_bias=4).tolist(), halved, rtol=1e-15, atol=0)
    assert torch.equal(alibi_slopes(8, order="mpt"), alibi_slopes(8))


def test_buckets_both_ways():
    table = {0: 0, -1: 1, 1: 17, -7: 7, -8: 8, 8: 24, -12: 9, -16: 10, 32: 28, 64: 30, -127: 15, 128: 31, 5000: 31}
    assert relative_bucket(torch.tensor(list(table)), 32).tolist() == list(table.values())


def test_buckets_of_a_decoder():
    table = {0: 0, -15: 15, -16: 16, -17: 16, -32: 21, -64: 26, -127: 31, -128: 31, -9999: 31, 1: 0, 500: 0}
    assert relative_bucket(torch.tensor(list(table)), 32, bidirectional=False).tolist() == list(table.values())


def test_buckets_of_other_tables():
    offsets = torch.arange(-30, 31)
    for bidirectional in (True, False):
        found = relative_bucket(offsets, 8, bidirectional=bidirectional, max_distance=20)
        want = [bucket_by_formula(int(n), 8, bidirectional, 20) for n in offsets]
        assert found.tolist() == want


def bucket_by_formula(offset: int, buckets: int, bidirectional: bool, max_distance: int) -> int:
    first = 0
    if bidirectional:
        buckets //= 2
        first, distance = (buckets if offset > 0 else 0), abs(offset)
    else:
        distance = max(-offset, 0)
    exact = buckets // 2
    if distance < exact:
        return first + distance
    far = math.log(distance / exact) / math.log(max_distance / exact) * (buckets - exact)
    return first + min(buckets - 1, exact + math.floor(far))


def test_grid_table_index():
    """Two axes, row-major: (dy + H - 1) * (2 W - 1) + dx + W - 1 with dy, dx = query minus key."""
    height, width = 2, 3
    table = torch.arange((2 * height - 1) * (2 * width - 1), dtype=WIDE)[:, None]
    found = RelativeTable(table, (height, width)).dense(height * width)[0, 0]
    for i in range(height * width):
        for j in range(height * width):
            dy, dx = i // width - j // width, i % width - j % width
            assert found[i, j] == (dy + height - 1) * (2 * width - 1) + dx + width - 1
    line = RelativeTable(torch.arange(7, dtype=WIDE)[:, None], (4,)).dense(4)[0, 0]
    assert torch.equal(line, torch.arange(4)[:, None] - torch.arange(4)[None] + 3)


def test_class_table_index():
    """The grid's own rows, then (class token, grid), (grid, class token), (class token, class token)."""
    table = torch.arange(18, dtype=WIDE)[:, None]
    found = ClassTable(table, (2, 3)).dense(7)[0, 0]
    assert torch.equal(found[1:, 1:], RelativeTable(table[:15], (2, 3)).dense(6)[0, 0])
    assert found[0, 0] == 17 and (found[0, 1:] == 15).all() and (found[1:, 0] == 16).all()


# ---- values and gradients --------------------------------------------------------------------------------------------

BATCH, HEADS, Q, K = 2, 3, 5, 6
BIASES: dict[str, Bias] = {
    "alibi": Alibi(HEADS),
    "symmetric alibi": Alibi(made(HEADS), symmetric=True),
    "buckets": RelativeBuckets(made(8, HEADS), bidirectional=True, max_distance=20),
    "decoder buckets": RelativeBuckets(made(8, HEADS), bidirectional=False, max_distance=20),
    "grid": RelativeTable(made(15, HEADS), (2, 3)),
    "class token and grid": ClassTable(made(18, HEADS), (2, 3)),
    "number": Dense(made()),
    "dense (Tq, Tk)": Dense(made(Q, K)),
    "dense (Tq, 1)": Dense(made(Q, 1)),
    "dense (1, H, 1, Tk)": Dense(made(1, HEADS, 1, K)),
    "dense (B, 1, Tq, Tk)": Dense(made(BATCH, 1, Q, K)),
    "dense (B, H, Tq, Tk)": Dense(made(BATCH, HEADS, Q, K)),
}
BIASES |= {f"{name} + alibi": bias + Alibi(HEADS) for name, bias in BIASES.items()}


def test_alibi_is_slope_times_distance():
    found = Alibi(4).dense(3, 5)
    assert found.shape == (1, 4, 3, 5)
    for h, r, j in ((0, 0, 0), (1, 2, 4), (3, 1, 0), (2, 0, 4)):
        assert found[0, h, r, j] == alibi_slopes(4)[h] * (j - (2 + r))
    assert (found[0, :, 2, :4] < found[0, :, 2, 1:]).all()  # the further the key, the less it weighs
    near = (torch.arange(5)[:, None] - torch.arange(5)).abs()
    assert torch.equal(Alibi(4, symmetric=True).dense(5)[0], -alibi_slopes(4).view(4, 1, 1) * near)


@pytest.mark.parametrize("name", BIASES)
def test_gradients_of_tiles_add_up(name):
    """`accumulate`, tile by tile, is autograd's gradient of the values."""
    tensors = [t.to(WIDE).clone().requires_grad_() for t in BIASES[name].tensors()]
    bias, coordinates = BIASES[name].with_tensors(tensors), Coordinates(BATCH, HEADS, Q, K, K - Q)
    weights = made(BATCH, HEADS, Q, K)
    values = bias.scores(coordinates.indices(), WIDE).expand(BATCH, HEADS, Q, K)
    want = torch.autograd.grad((values * weights).sum(), tensors)
    found = [torch.zeros_like(t) for t in tensors]
    for rows in ((0, 4), (4, Q)):
        for cols in ((0, 2), (2, K)):
            bias.accumulate(coordinates.indices(rows, cols), weights[:, :, slice(*rows), slice(*cols)], found)
    for got, expected in zip(found, want, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", BIASES)
def test_the_attention_call_reads_it(name):
    """Every backend adds what `dense` says, and gives gradients in the bias's own shape and dtype."""
    q, k, v = made(BATCH, HEADS, Q, 4), made(BATCH, HEADS, K, 4), made(BATCH, HEADS, K, 2)
    whole = BIASES[name].dense(Q, K, batch=BATCH, heads=HEADS).expand(BATCH, HEADS, Q, K)
    plain = whole.clone().requires_grad_()
    want = regard.attention(q, k, v, mask=Causal(), bias=plain, backend="reference")
    cotangent = made(*want.shape)
    (d_whole,) = torch.autograd.grad((want * cotangent).sum(), plain)
    for backend in ("reference", "chunked", "sdpa"):
        tensors = [t.clone().requires_grad_() for t in BIASES[name].tensors()]
        bias = BIASES[name].with_tensors(tensors)
        out = regard.attention(q, k, v, mask=Causal(), bias=bias, backend=backend)
        torch.testing.assert_close(out, want, rtol=1e-12, atol=1e-12)
        grads = torch.autograd.grad((out * cotangent).sum(), tensors)
        expected = torch.autograd.grad((bias.dense(Q, K, batch=BATCH, heads=HEADS) * d_whole).sum(), tensors)
        for grad, tensor, one in zip(grads, tensors, expected, strict=True):
            assert grad.shape == tensor.shape and grad.dtype == tensor.dtype
            torch.testing.assert_close(grad, one, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("name", BIASES)
def test_moved_biases_and_copies(name):
    bias = BIASES[name]
    assert bias.to("cpu") is bias
    assert all(t.device.type == "meta" for t in bias.to("meta").tensors())
    if bias.head_count() is not None:
        assert bias.head_count() == HEADS
    late = bias.shifted(2).dense(Q, K - 2, batch=BATCH, heads=HEADS, q_start=K - Q - 2).expand(BATCH, HEADS, Q, K - 2)
    assert torch.equal(late, bias.dense(Q, K, batch=BATCH, heads=HEADS).expand(BATCH, HEADS, Q, K)[..., 2:])


def test_a_low_precision_table_keeps_its_dtype_and_loses_nothing_in_sums():
    table = made(8, 2).bfloat16().requires_grad_()
    q, k = torch.zeros(1, 2, 600, 4), torch.zeros(1, 2, 600, 4)
    v = torch.randn(1, 2, 600, 4)
    for backend in ("reference", "chunked"):
        out = regard.attention(q, k, v, bias=RelativeBuckets(table, max_distance=20), backend=backend)
        (grad,) = torch.autograd.grad(out.square().sum(), table)
        wide = table.detach().double().requires_grad_()
        exact = regard.attention(
            *(x.double() for x in (q, k, v)), bias=RelativeBuckets(wide, max_distance=20), backend="reference"
        )
        (want,) = torch.autograd.grad(exact.square().sum(), wide)
        assert grad.dtype == torch.bfloat16
        torch.testing.assert_close(grad.double(), want, rtol=1e-2, atol=1e-4 * float(want.abs().max()))


def test_sums():
    a, b = Alibi(2), Dense(made(3, 3))
    assert torch.equal((a + b).dense(3), a.dense(3) + b.dense(3))
    assert torch.equal((a + b.tensor).dense(3), (a + b).dense(3))
    assert torch.equal((a + b + a).dense(3), a.dense(3) + b.dense(3) + a.dense(3))
    with pytest.raises(TypeError, match="unsupported operand"):
        a + None


def test_minus_infinity_masks():
    bias = torch.zeros(2, 3)
    bias[0] = -torch.inf
    bias[1, 2] = -torch.inf
    q, v = torch.randn(1, 1, 2, 4), torch.randn(1, 1, 3, 4)
    for backend in ("reference", "chunked", "sdpa"):
        out = regard.attention(q, v, v, bias=bias, backend=backend)
        assert (out[:, :, 0] == 0).all()
        torch.testing.assert_close(out[:, :, 1:], regard.attention(q[:, :, 1:], v[:, :, :2], v[:, :, :2]))


@pytest.mark.parametrize(
    ("error", "text", "make"),
    [
        (ValueError, "order: expected", lambda: alibi_slopes(4, order="falcon")),
        (ValueError, "heads: expected", lambda: alibi_slopes(0)),
        (ValueError, "slopes: expected", lambda: Alibi(torch.ones(2, 2))),
        (ValueError, "table: expected", lambda: RelativeBuckets(torch.ones(8))),
        (ValueError, "max_distance", lambda: RelativeBuckets(torch.ones(32, 2), max_distance=8)),
        (ValueError, "has 15 offsets", lambda: RelativeTable(torch.ones(14, 2), (2, 3))),
        (ValueError, "has 15 offsets", lambda: ClassTable(torch.ones(15, 2), (2, 3))),
        (ValueError, "has 3 rows", lambda: ClassTable(torch.ones(2, 2), (1, 1))),
        (ValueError, "have 7 slots", lambda: ClassTable(torch.ones(18, 2), (2, 3)).dense(8)),
        (ValueError, "has 6 slots", lambda: RelativeTable(torch.ones(15, 2), (2, 3)).dense(7)),
        (TypeError, "pass it as mask=", lambda: Dense(torch.ones(2, 2, dtype=torch.bool))),
        (ValueError, "3-D bias is ambiguous", lambda: Dense(torch.ones(2, 2, 2))),
        (ValueError, "expected a shape that broadcasts", lambda: Dense(torch.ones(2, 3)).dense(2, 4)),
        (ValueError, "expected 3 heads", lambda: Alibi(2).dense(4, heads=3)),
    ],
)
def test_errors_name_the_argument(error, text, make):
    with pytest.raises(error) as caught:
        make()
    assert text in str(caught.value)
