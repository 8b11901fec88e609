"""Additive and multiplicative attention over an encoder's states: what the contract and the golden cases leave open."""

import pytest
import torch

from regard.masks import KeyPadding
from regard.nn import AdditiveAttention, LocalAlignment, LuongAttention
from regard.ops import additive as ops


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


def test_scores_are_the_formula_however_many_are_held_at_once(monkeypatch):
    q, k, w = drawn(2, 3, 5, 4).requires_grad_(), drawn(2, 3, 7, 4).requires_grad_(), drawn(4).requires_grad_()
    want = torch.tanh(q[:, :, :, None] + k[:, :, None]) @ w
    for at_once in (1 << 20, 100, 1):
        monkeypatch.setattr(ops, "AT_ONCE", at_once)
        found = ops.additive_scores(q, k, w)
        torch.testing.assert_close(found, want)
        grads = (torch.autograd.grad(y.sin().sum(), (q, k, w), retain_graph=True) for y in (found, want))
        for got, right in zip(*grads, strict=True):
            torch.testing.assert_close(got, right)
    assert torch.autograd.gradgradcheck(ops.additive_scores, (q[:1, :1], k[:1, :1], w))


def test_a_new_additive_layer_averages():
    context = drawn(2, 9, 6)
    y = AdditiveAttention(4, context_dim=6).double()(drawn(2, 3, 4), context)
    torch.testing.assert_close(y, context.mean(1, keepdim=True).expand_as(y))


@pytest.mark.parametrize("score", ["dot", "general", "concat"])
@pytest.mark.parametrize("local", [None, LocalAlignment(2), LocalAlignment(2, "monotonic")])
def test_every_score_in_steps_with_the_context_written_once(score, local):
    layer = LuongAttention(6, score=score, local=local).double()
    x, context = drawn(2, 5, 6), drawn(2, 9, 6)
    keep = torch.arange(9) < torch.tensor([[9], [4]])
    whole = layer(x, context, keep=keep)
    cache = layer.init_cache(2, 9)
    steps = [layer(x[:, :2], context, keep=keep, cache=cache)]
    steps += [layer(x[:, t : t + 1], cache=cache) for t in range(2, 5)]
    torch.testing.assert_close(torch.cat(steps, 1), whole)
    M, V = layer.mixing(x, context, keep=keep)
    torch.testing.assert_close(M @ V, layer.mixed(x, context, keep=keep))


def test_a_query_with_nothing_near_reads_nothing():
    layer = LuongAttention(6, local=LocalAlignment(1, "monotonic"), state=False).double()
    y = layer(drawn(1, 6, 6), drawn(1, 3, 6))
    assert (y[:, 4:] == 0).all() and (y[:, :4] != 0).all()
    nothing = layer(drawn(1, 2, 6), drawn(1, 3, 6), mask=KeyPadding(torch.zeros(1, 3, dtype=torch.bool)))
    assert (nothing == 0).all()


def test_weights_of_predicted_places_are_not_normalised_again():
    layer = LuongAttention(6, local=LocalAlignment(2)).double()
    M, _ = layer.mixing(drawn(1, 5, 6), drawn(1, 20, 6))
    assert (M.sum(-1) < 1).all() and ((M > 0).sum(-1) <= 5).all()


@pytest.mark.parametrize(
    ("words", "make"),
    [
        ("score: expected 'dot'", lambda: LuongAttention(6, score="cosine")),
        ("context_dim: expected dim=6", lambda: LuongAttention(6, context_dim=4, score="dot")),
        ("kind: expected 'monotonic'", lambda: LocalAlignment(2, "near")),
        ("reach: expected an int of at least 1", lambda: LocalAlignment(0)),
        (r"weight: expected \(4,\)", lambda: ops.additive_scores(drawn(1, 1, 2, 4), drawn(1, 1, 2, 4), drawn(3))),
        (r"k: expected \(B, H, Tk, n\)", lambda: ops.additive_scores(drawn(1, 1, 2, 4), drawn(1, 1, 2, 3), drawn(4))),
    ],
)
def test_errors_name_the_argument(words, make):
    with pytest.raises(ValueError, match=words):
        make()
