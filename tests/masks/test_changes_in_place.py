"""Masks whose tensors change in place: the next call reads what they hold then."""

import pytest
import torch

import regard
from regard.backends import without_kernels
from regard.masks import Blocks, Buckets, Causal, Dense, Edges, Global, KeyLengths, KeyPadding, Prefix, Segments

T = 300


def _ids() -> torch.Tensor:
    return torch.arange(T) // 100


MAKERS = {
    "lengths": (lambda t: KeyLengths(t), torch.tensor([120, 7]), lambda t: t.add_(1)),
    "prefix": (lambda t: Causal() | Prefix(t), torch.tensor([120, 7]), lambda t: t.add_(30)),
    "padding": (
        lambda t: Causal() & KeyPadding(t),
        torch.ones(2, T, dtype=torch.bool),
        lambda t: t[:, :150].fill_(False),
    ),
    "segments": (lambda t: Segments(t), _ids(), lambda t: t.copy_(torch.arange(T) // 60)),
    "buckets": (lambda t: Buckets(t, t), _ids(), lambda t: t.copy_(torch.arange(T) % 7)),
    "dense": (lambda t: Dense(t), torch.rand(T, T) > 0.5, lambda t: t.logical_not_()),
    "blocks": (lambda t: Blocks(t, 100), torch.eye(3) > 0, lambda t: t[0].fill_(True)),
    "global": (lambda t: Global(t), torch.arange(T) < 3, lambda t: t[200:].fill_(True)),
    "edges": (lambda t: Edges(t), torch.tensor([[0, 5, 200], [4, 5, 290]]), lambda t: t.add_(3)),
    "nested": (lambda t: ~(Causal() & KeyLengths(t)).shifted(2), torch.tensor([120, 7]), lambda t: t.add_(20)),
}
HOW = {
    "in place": lambda t, change: change(t),
    "through data": lambda t, change: change(t.data),
    "through numpy": lambda t, change: change(torch.from_numpy(t.numpy())),
}


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", MAKERS)
def test_the_next_call_reads_the_new_values(name, how):
    make, start, change = MAKERS[name]
    held = start.clone()
    mask = make(held)
    q, k = torch.randn(2, 2, T, 4), torch.randn(2, 2, T, 4)
    for backend in ("native", "chunked", "reference", None):
        if backend == "native" and without_kernels():
            continue
        for _ in range(2):
            HOW[how](held, change)
            fresh = make(held.clone())
            want = regard.attention(q, k, k, mask=fresh, backend="reference")
            got = regard.attention(q, k, k, mask=mask, backend=backend)
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
            layout = mask.block_layout(T, T, 64, batch=2)
            assert torch.equal(layout, fresh.block_layout(T, T, 64, batch=2))
            assert torch.equal(mask.dense(T, T, batch=2), fresh.dense(T, T, batch=2))
    with torch.inference_mode():
        held = start.clone()
        mask = make(held)
        for _ in range(2):
            HOW[how](held, change)
            got, want = (regard.attention(q, k, k, mask=one) for one in (mask, make(held.clone())))
            torch.testing.assert_close(got, want)


def test_a_change_before_the_backward_pass():
    """The gradient is that of the forward pass, or an error says why there is none."""
    q = torch.randn(2, 2, T, 4, requires_grad=True)
    for backend in ("native", "chunked", "reference"):
        if backend == "native" and without_kernels():
            continue
        lengths = torch.tensor([120, 7])
        out = regard.attention(q, q, q, mask=KeyLengths(lengths), backend=backend)
        (want,) = torch.autograd.grad(out.sum(), q, retain_graph=True)
        lengths += 1
        if backend == "chunked":  # it reads the mask again
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                out.sum().backward()
        else:
            torch.testing.assert_close(torch.autograd.grad(out.sum(), q)[0], want, rtol=0, atol=0)


def test_a_cache_and_growing_lengths():
    """As one decodes with a buffer of keys and the lengths beside it."""
    q, k = torch.randn(2, 2, 1, 4), torch.randn(2, 2, 40, 4)
    lengths = torch.tensor([3, 9])
    mask = KeyLengths(lengths)
    for _ in range(5):
        lengths += 1
        got = regard.attention(q, k, k, mask=mask)
        for row, length in enumerate(lengths.tolist()):
            alone = regard.attention(q[row : row + 1], *[k[row : row + 1, :, :length]] * 2)
            torch.testing.assert_close(got[row : row + 1], alone)
