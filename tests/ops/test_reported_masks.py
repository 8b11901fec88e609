"""Failures that users of attention implementations reported: masks and alignment."""

import pytest
import torch
from recipes import WIDE, close, drawn, leaves, made, mixer, paths, step_by_step

import regard
from regard.caches import WindowCache
from regard.masks import Causal, KeyLengths, KeyPadding, Window
from regard.nn import MultiHeadAttention

DTYPES = [(torch.float64, 1e-11), (torch.float32, 1e-5), (torch.bfloat16, 3e-2), (torch.float16, 4e-3)]


def dead_row_masks():
    """(mask, its live rows, Tq, Tk): a last row that sees nothing, and three first rows that see only padding."""
    seen = torch.tensor([[j <= i and i < 5 for j in range(10)] for i in range(6)])
    keep = torch.tensor([[False] * 3 + [True] * 3])
    yield seen, slice(0, 5), 6, 10
    yield seen[None, None], slice(0, 5), 6, 10
    yield Causal() & KeyPadding(keep), slice(3, 6), 6, 6


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES, ids=str)
def test_H01_rows_that_may_attend_to_nothing(dtype, tolerance):
    for mask, live, q_len, k_len in dead_row_masks():
        q, k, v = made(1, 2, q_len, 8), made(1, 2, k_len, 8), made(1, 2, k_len, 8)
        truth = mask if isinstance(mask, torch.Tensor) else mask.dense(q_len, k_len)[0, 0]
        own = leaves(q.to(dtype), k.to(dtype), v.to(dtype))
        alone = leaves(*(x.detach().to(WIDE) for x in own))
        kept = truth.reshape(q_len, k_len)[live]

        def twice(q, k, v, mask, **options):
            return regard.attention(regard.attention(q, k, v, mask=mask, **options), k, v, mask=mask, **options)

        want = twice(alone[0][:, :, live], *alone[1:], kept, backend="reference")
        expected = torch.autograd.grad(want.sum(), alone)
        for backend, once in paths(*own, mask=mask):
            out = twice(*own, mask, backend=backend)
            dead = [row for row in range(q_len) if row not in range(q_len)[live]]
            assert (once[:, :, dead] == 0).all() and (out[:, :, dead] == 0).all()
            close(out[:, :, live], want.to(dtype), tolerance)
            grads = torch.autograd.grad(out[:, :, live].sum(), own)
            assert (grads[0][:, :, dead] == 0).all()
            for grad, exact in zip(grads, expected, strict=True):
                assert grad.isfinite().all()
                torch.testing.assert_close(grad.double(), exact, rtol=4 * tolerance, atol=8 * tolerance)


def test_H01_stacked_layers_survive_left_padding():
    keep = torch.tensor([[False] * 3 + [True] * 3])
    layers = [drawn(MultiHeadAttention(8, 2, mask=Causal())) for _ in range(2)]
    (x,) = leaves(made(1, 6, 8))
    y = x
    for layer in layers:
        y = layer(y, keep=keep)
    y[:, 3:].sum().backward()
    (short,) = leaves(x[:, 3:])
    z = short
    for layer in layers:
        z = layer(z)
    close(y[:, 3:], z)
    z_grad = torch.autograd.grad(z.sum(), [short, *layers[0].parameters()])
    assert y.isfinite().all() and (x.grad[:, :3] == 0).all()
    for grad, want in zip([x.grad[:, 3:], *(p.grad for p in layers[0].parameters())], z_grad, strict=True):
        close(grad, want)


@pytest.mark.parametrize("junk", [torch.nan, torch.inf])
def test_H02_what_stands_behind_the_mask(junk):
    q, k, v = made(1, 1, 2, 4), made(1, 1, 2, 4), made(1, 1, 2, 4)
    short = leaves(q, k[:, :, :1], v[:, :, :1])
    want = regard.attention(*short)
    expected = torch.autograd.grad(want.square().sum(), short)
    k[..., 1, :] = v[..., 1, :] = junk
    masks = [KeyPadding(torch.tensor([[True, False]])), KeyLengths(1), torch.tensor([[True, False]])]
    for mask in masks:
        own = leaves(q, k, v)
        for _, out in paths(*own, mask=mask):
            close(out, want)
            dq, dk, dv = torch.autograd.grad(out.square().sum(), own)
            close(dq, expected[0])
            for got, one in ((dk, expected[1]), (dv, expected[2])):
                close(got[:, :, :1], one)
                assert (got[:, :, 1] == 0).all()
    layer = drawn(MultiHeadAttention(4, 2))
    context = made(1, 3, 4)
    context[:, 2] = junk
    got = layer(made(1, 2, 4), context, keep=torch.tensor([[True, True, False]]))
    close(got, layer(made(1, 2, 4), context[:, :2]))


def test_H03_causal_with_fewer_queries_than_keys():
    q, k, v = made(2, 4, 8, 3), made(2, 2, 8, 3), made(2, 2, 8, 3)
    whole = regard.attention(q, k, v, mask=Causal(), backend="reference")
    for count in (1, 2, 3):
        for _, out in paths(q[:, :, -count:], k, v, mask=Causal()):
            close(out, whole[:, :, -count:])
    assert Causal().draw(2, 5) == "####.\n#####"
    for _, out in paths(q[:, :, :2], k, v, mask=Causal(), q_start=0):  # the other alignment, said in so many words
        close(out, whole[:, :, :2])


def test_H04_a_window_counts_the_query_itself():
    q, v = torch.zeros(1, 1, 6, 4, dtype=WIDE), torch.eye(6, dtype=WIDE)[None, None]
    for _, out in paths(q, q, v, mask=Window(3)):
        assert (out[0, 0] > 0).sum(-1).tolist() == [1, 2, 3, 3, 3, 3]
        close(out.sum(-1), torch.ones(1, 1, 6, dtype=WIDE))
    for _, out in paths(q[:, :, :2], q, v, mask=Window(3)):
        assert (out[0, 0] > 0).int().tolist() == [[0, 0, 1, 1, 1, 0], [0, 0, 0, 1, 1, 1]]
    for _, out in paths(made(1, 1, 6, 4), made(1, 1, 6, 4), v, mask=Window(1)):
        assert torch.equal(out, v)
    for wide in (6, 7, 100):
        plain = regard.attention(made(1, 1, 6, 4), made(1, 1, 6, 4), v, mask=Causal(), backend="reference")
        for _, out in paths(made(1, 1, 6, 4), made(1, 1, 6, 4), v, mask=Window(wide)):
            close(out, plain)
    tokens = torch.eye(6, dtype=WIDE)[None]
    for window in (1, 3, 6, 9):
        layer = mixer(6, Window(window))
        want = [[float(0 <= i - j < window) for j in range(6)] for i in range(6)]
        for splits in ([6], [1] * 6, [2, 1, 3]):
            assert (step_by_step(layer, tokens, splits)[0] > 0).double().tolist() == want


@pytest.mark.parametrize("prefill", [1, 3, 4, 5, 9])
def test_H05_a_windowed_cache_when_it_becomes_full(prefill):
    window, length = 4, 12
    layer = drawn(MultiHeadAttention(8, 2, kv_heads=1, mask=Window(window)))
    keep = torch.tensor([[True] * length, [False] * 2 + [True] * (length - 2)])
    x = made(2, length, 8)
    cache = layer.init_cache(2, length)
    assert isinstance(cache, WindowCache) and cache.k.shape[2] <= window
    start = 0
    for size in (prefill, *[1] * (length - prefill)):
        stop = start + size
        out = layer(x[:, start:stop], keep=keep[:, start:stop], cache=cache)
        want = layer(x[:, :stop], keep=keep[:, :stop])[:, start:]
        close(out[keep[:, start:stop]], want[keep[:, start:stop]])
        assert cache.length == stop and cache.k.shape[2] <= window
        start = stop


def test_H06_which_way_a_mask_points():
    keep, v = torch.tensor([True, True, True, False]), torch.eye(4, dtype=WIDE)[None, None]
    q, k = made(1, 1, 4, 3), made(1, 1, 4, 3)
    forms = [keep.expand(4, 4), keep.view(1, 1, 1, 4), KeyPadding(keep[None]), KeyLengths(torch.tensor([3]))]
    want = regard.attention(q, k[:, :, :3], v[:, :, :3], backend="reference")
    for mask in forms:
        for _, out in paths(q, k, v, mask=mask):
            assert (out[..., 3] == 0).all()
            close(out, want)
    added = torch.zeros(4, 4, dtype=WIDE).masked_fill(~keep, -torch.inf)
    for _, out in paths(q, k, v, bias=added):
        assert (out[..., 3] == 0).all()
        close(out, want)
    for wrong in (keep.int().expand(4, 4), keep.to(torch.uint8).expand(4, 4), added):
        with pytest.raises(TypeError, match="mask: expected a bool tensor"):
            regard.attention(q, k, v, mask=wrong)
    plain = regard.attention(q, k, v, backend="reference")
    for _, out in paths(q, k, v, mask=torch.ones(4, 4, dtype=torch.bool)):
        close(out, plain)
    layer, tokens = mixer(4), torch.eye(4, dtype=WIDE)[None]
    for argument in ({"mask": keep.expand(4, 4)}, {"keep": keep[None]}, {"mask": KeyPadding(keep[None])}):
        assert (layer(tokens, **argument)[..., 3] == 0).all()
        assert (layer.mixing(tokens, **argument)[0][..., 3] == 0).all()
        close(layer(tokens, **argument)[..., :3], torch.full((1, 4, 3), 1 / 3, dtype=WIDE))
    for wrong in ({"mask": keep.int().expand(4, 4)}, {"keep": keep[None].int()}):
        with pytest.raises(TypeError, match="expected a bool tensor"):
            layer(tokens, **wrong)
