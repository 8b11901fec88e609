"""A user's rule for scores: the same on every backend, gradients of what it reads, caches, and what it refuses."""

import pytest
import torch

import regard
from regard.biases import Alibi, Formula
from regard.coordinates import Coordinates
from regard.masks import Causal, Predicate, Window
from regard.nn import MultiHeadAttention


def rule(b, h, i, j, rate, place):
    return -rate[h] * (i - j).abs().sqrt() + place[j] * (b + 1)


def operands(dtype: torch.dtype, q_len: int = 70, k_len: int = 90) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    shapes = ((2, 3, q_len, 8), (2, 3, k_len, 8), (2, 3, k_len, 8), (3,), (k_len,))
    return [torch.randn(s, generator=g, dtype=torch.float64).to(dtype).requires_grad_() for s in shapes]


def by(backend, q, k, v, rate, place, bias=None):
    bias = Formula(rule, (rate, place)) + Alibi(3) if bias is None else bias
    out = regard.attention(q, k, v, bias=bias, mask=Causal(), backend=backend)
    return [out, *torch.autograd.grad(out.float().sin().sum(), (q, k, v, rate, place))]


@pytest.mark.parametrize("backend", ["chunked", "sdpa", "native"])
def test_every_backend_agrees_with_the_tensor_written_out(backend):
    exact = backend != "native"
    if not exact and regard.backends.without_kernels():
        pytest.skip("the kernels are not built")
    given = operands(torch.float64 if exact else torch.float32)
    *_, rate, place = given
    i, j = torch.arange(20, 90)[:, None], torch.arange(90)
    written = torch.stack([rule(torch.tensor(b), torch.arange(3)[:, None, None], i, j, rate, place) for b in range(2)])
    want = by("reference", *given, bias=regard.biases.Dense(written) + Alibi(3))
    tolerance = 1e-10 if exact else 2e-4
    for one, other in zip(by(backend, *given), want, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


def test_gradients_on_a_tile():
    """`accumulate` against finite differences, with a parameter that is not read."""
    a, unread = torch.rand(3, dtype=torch.float64), torch.rand(2, dtype=torch.float64)
    indices = Coordinates(1, 3, 4, 5, 1).indices()
    grad = torch.randn(1, 3, 4, 5, dtype=torch.float64)

    def total(a):
        return (
            Formula(lambda b, h, i, j, a, _: a[h] ** 2 * (i - j), (a, unread)).scores(indices, a.dtype) * grad
        ).sum()

    out = [torch.zeros_like(a), torch.zeros_like(unread)]
    Formula(lambda b, h, i, j, a, _: a[h] ** 2 * (i - j), (a, unread)).accumulate(indices, grad, out)
    step = torch.eye(3, dtype=torch.float64) * 1e-6
    want = torch.stack([(total(a + s) - total(a - s)) / 2e-6 for s in step])
    torch.testing.assert_close(out[0], want, rtol=1e-7, atol=1e-7)
    assert not out[1].any()


def test_a_layer_decodes_with_one_in_a_window():
    layer = MultiHeadAttention(12, 3, mask=Window(4), bias=Formula(lambda b, h, i, j: (h + 1.0) * (j % 5))).double()
    x = torch.randn(2, 11, 12, dtype=torch.float64)
    cache = layer.init_cache(2, 11)
    parts = torch.cat([layer(part, cache=cache) for part in x.split([3, 1, 1, 6], 1)], 1)
    torch.testing.assert_close(parts, layer(x), rtol=1e-12, atol=1e-12)


def test_a_compiled_call():
    q, k, v, rate, place = operands(torch.float64)

    def call(rate):
        return regard.attention(q, k, v, bias=Formula(rule, (rate, place)))

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)(rate)
    torch.testing.assert_close(compiled, call(rate))
    (found,) = torch.autograd.grad(compiled.sum(), rate)
    torch.testing.assert_close(found, torch.autograd.grad(call(rate).sum(), rate)[0])


@pytest.mark.parametrize(
    ("words", "make"),
    [
        ("fn: expected a function", lambda: Formula(3)),
        ("parameters: expected float tensors", lambda: Formula(rule, (torch.arange(3),))),
        ("Formula.fn: expected a float tensor", lambda: Formula(lambda b, h, i, j: i >= j).dense(3)),
        ("Formula.fn: expected a float tensor", lambda: Formula(lambda b, h, i, j: 1.0).dense(3)),
    ],
)
def test_errors_name_the_argument(words, make):
    with pytest.raises(TypeError, match=words):
        make()


def test_it_is_drawn_and_moved():
    bias = Formula(lambda b, h, i, j, a: a * (i - j), (torch.ones(()),))
    assert bias.dense(2).tolist() == [[[[0.0, -1.0], [1.0, 0.0]]]]
    assert bias.to("meta").parameters[0].is_meta
    assert bias.shifted(3).dense(2)[0, 0, 0, 1] == -1.0


@pytest.mark.parametrize("shape", [(1, 1, 8, 64), (8,), (3, 1, 64, 64), (1, 1, 1, 64, 64)])
@pytest.mark.parametrize("backend", [None, "chunked", "reference", "sdpa"])
def test_a_result_of_another_shape_is_refused(shape, backend):
    q = torch.randn(2, 2, 64, 8)
    with pytest.raises(ValueError, match=r"Formula\.fn: expected a result that broadcasts to"):
        regard.attention(q, q, q, bias=Formula(lambda b, h, i, j: torch.zeros(shape)), backend=backend)
    with pytest.raises(ValueError, match=r"Predicate\.fn: expected a result that broadcasts to"):
        regard.attention(q, q, q, mask=Predicate(lambda b, h, i, j: torch.ones(shape).bool()), backend=backend)
