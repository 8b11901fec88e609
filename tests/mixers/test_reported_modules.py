"""Failures that users of attention implementations reported: module paths, options, positions."""

import itertools

import pytest
import torch
from recipes import WIDE, close, drawn, leaves, made, paths

import regard
from regard.biases import Alibi, Dense, alibi_slopes
from regard.errors import BackendUnsupported
from regard.masks import Causal, Global, Prefix, Segments, Window
from regard.nn import MultiHeadAttention, Scores
from regard.positions import LearnedPositions, Rotary


@pytest.mark.parametrize("length", [1, 6])
def test_H15_one_answer_however_the_module_is_run(length):
    """An odd number of heads, no biases, a mask per head and padding at once."""
    layer = drawn(MultiHeadAttention(12, 3, scores=Scores(dropout=0.0)))
    x = made(2, length, 12)
    mask = made(2, 3, length, length) > -1
    mask[..., 0] = True
    keep = torch.arange(length)[None] < torch.tensor([[length], [max(1, length - 2)]])
    answers = []
    for training, grad in itertools.product((True, False), (True, False)):
        layer.train(training)
        with torch.set_grad_enabled(grad):
            answers += [layer(x, mask=mask, keep=keep), layer(x, mask=mask & keep[:, None, None])]
            weights, values = layer.mixing(x, mask=mask, keep=keep)
            answers.append(layer(x, mask=mask, keep=keep))  # asking for the weights changed nothing
        close(weights.sum(-1), torch.ones(2, 3, length, dtype=WIDE))
        assert (weights[~(mask & keep[:, None, None])] == 0).all()
        mixed = (weights @ values).transpose(1, 2).flatten(2)
        answers.append(layer.o_proj(mixed))
    for answer in answers[1:]:  # what stands at padding means nothing, with `keep` not even the queries there
        close(answer[keep], answers[0][keep])


def test_H15_weights_are_those_before_dropout():
    layer = drawn(MultiHeadAttention(12, 3, scores=Scores(dropout=0.5))).train()
    weights, _ = layer.mixing(made(2, 6, 12))
    close(weights.sum(-1), torch.ones(2, 3, 6, dtype=WIDE))


@pytest.mark.parametrize("hidden", [slice(1, 6), slice(0, 1), slice(2, 4)], ids=["most", "first", "middle"])
def test_H16_a_padded_length_survives(hidden):
    layer = drawn(MultiHeadAttention(8, 2, rotary=None))
    x, keep = made(3, 6, 8), torch.ones(3, 6, dtype=torch.bool)
    keep[:, hidden] = False
    for training in (True, False):
        layer.train(training)
        out = layer(x, keep=keep)
        assert out.shape == (3, 6, 8)
        close(out[keep], layer(x[keep].view(3, -1, 8)).flatten(0, 1))


def test_H17_the_cap_comes_after_the_scale_and_before_the_mask():
    q, k = torch.tensor([4.0]).view(1, 1, 1, 1), torch.tensor([0.0, 2.0]).view(1, 1, 2, 1)
    v = torch.tensor([0.0, 1.0]).view(1, 1, 2, 1)
    capped = {backend: out.item() for backend, out in paths(q, k, v, scale=1.0, softcap=5.0)}
    assert "sdpa" not in capped
    assert all(value == pytest.approx(0.990130, abs=1e-6) for value in capped.values())
    for _, out in paths(q, k, v, scale=1.0):
        assert out.item() == pytest.approx(0.999665, abs=1e-6)
    for mask in (torch.tensor([[True, False]]), Prefix(1)):
        for _, out in paths(q, k, v, scale=1.0, softcap=5.0, mask=mask):
            assert out.item() == 0.0
    with pytest.raises(BackendUnsupported, match="softcap"):
        regard.attention(q, k, v, softcap=5.0, backend="sdpa")


def test_H18_a_learned_sink():
    q, k, v = torch.zeros(1, 2, 1, 3, dtype=WIDE), made(1, 2, 2, 3), torch.ones(1, 2, 2, 1, dtype=WIDE)
    (sink,) = leaves(torch.zeros(2, dtype=WIDE))
    for backend, out in paths(q, k, v, sink=sink):
        close(out, torch.full((1, 2, 1, 1), 2 / 3, dtype=WIDE))
        close(torch.autograd.grad(out.sum(), sink)[0], torch.full((2,), -2 / 9, dtype=WIDE))
        _, weights, _ = regard.attention_weights(q, k, v, sink=sink, backend=backend)
        close(weights.sum(-1), torch.full((1, 2, 1), 2 / 3, dtype=WIDE))
    q, v = made(1, 2, 4, 3), made(1, 2, 2, 5)
    plain = regard.attention(q, k, v, backend="reference")
    (none,) = leaves(torch.full((2,), -torch.inf, dtype=WIDE))
    for _, out in paths(q, k, v, sink=none):
        close(out, plain)
        assert (torch.autograd.grad(out.sum(), none)[0] == 0).all()
    for _, out in paths(q, k, v, sink=torch.tensor([-torch.inf, 1.0], dtype=WIDE)):
        close(out[:, 0], plain[:, 0])
        assert (out[:, 1].abs() < plain[:, 1].abs()).all()
    layer = drawn(MultiHeadAttention(8, 2, scores=Scores(sink=True)))
    layer(made(1, 3, 8)).sum().backward()
    assert layer.sink.grad.abs().min() > 0


def test_H19_slopes_for_any_number_of_heads():
    eight = [2.0**-n for n in range(1, 9)]
    exact = {
        8: eight,
        12: [*eight, *(2.0 ** -(n + 0.5) for n in range(4))],
        3: [2.0**-4, 2.0**-8, 2.0**-2],
        1: [2.0**-8],
    }
    for heads, slopes in exact.items():
        assert alibi_slopes(heads).tolist() == pytest.approx(slopes, rel=1e-15)
        bias = Alibi(heads).dense(5)
        assert bias[0, :, 4, 2].tolist() == pytest.approx([-2 * slope for slope in slopes])
        q = torch.zeros(1, heads, 5, 2, dtype=WIDE)
        for _, out in paths(q, q, torch.eye(5, dtype=WIDE).expand(1, heads, 5, 5), mask=Causal(), bias=Alibi(heads)):
            assert (out[:, :, 4, :-1] < out[:, :, 4, 1:]).all()  # the more distant the key, the less its weight


def test_H20_the_gradient_of_an_added_bias():
    q, k, v = made(2, 3, 4, 2), made(2, 3, 5, 2), made(2, 3, 5, 2)
    masks = (None, made(4, 5) > -0.5)
    for shape, mask in itertools.product(((4, 5), (1, 3, 1, 5), (2, 1, 4, 5), ()), masks):
        (bias,) = leaves(made(*shape))
        whole = bias.detach().expand(2, 3, 4, 5).clone().requires_grad_()
        out = regard.attention(q, k, v, bias=whole, mask=mask, backend="reference")
        (every,) = torch.autograd.grad((out * made(*out.shape)).sum(), whole)
        close(every.sum(-1), torch.zeros(2, 3, 4, dtype=WIDE))  # a shift of a whole row changes nothing
        assert mask is None or (every[:, :, ~mask] == 0).all()
        for _, out in paths(q, k, v, bias=bias, mask=mask):
            (grad,) = torch.autograd.grad((out * made(*out.shape)).sum(), bias)
            assert grad.shape == bias.shape
            close(grad, every.sum_to_size(bias.shape))
        for backend in ("reference", "chunked"):
            assert torch.autograd.gradcheck(
                lambda b, mask=mask, backend=backend: regard.attention(q, k, v, bias=b, mask=mask, backend=backend),
                bias,
            )
    (bias,) = leaves(made(1, 3, 4, 4))
    layer = drawn(MultiHeadAttention(6, 3, bias=Dense(bias))).requires_grad_(False)
    (grad,) = torch.autograd.grad(layer(made(2, 4, 6)).square().sum(), bias)
    assert grad.shape == bias.shape and grad.abs().max() > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_H21_angles_do_not_follow_the_module(dtype):
    layer = MultiHeadAttention(64, 1, rotary=Rotary(64)).to(dtype)
    where = torch.tensor([255, 256, 257, 258, 4097, 32767, 131071])
    exact = where[:, None].double() * 10000.0 ** (-torch.arange(0, 64, 2, dtype=WIDE) / 64)
    cos, sin = layer.rotary.angles(where, dtype)
    for table, want in ((cos, exact.cos()), (sin, exact.sin())):
        error = (table.double() - want).abs().amax(-1)
        assert (error[:-1] <= 5e-3).all() and error[-1] <= 2e-2
    assert not torch.equal(cos[2], cos[3]) and not torch.equal(sin[2], sin[3])
    assert not list(layer.buffers())
    q, k = made(1, 1, 1, 64, seed=1).float(), made(1, 1, 1, 64, seed=2).float()
    near, far = (
        (layer.rotary(q, torch.tensor([p + 7])) * layer.rotary(k, torch.tensor([p]))).sum().item() for p in (0, 100000)
    )
    assert abs(near - far) <= 2e-2 * abs(near)


@pytest.mark.parametrize("kind", ["rotary", "learned", "alibi"])
def test_H22_left_padding_while_decoding(kind):
    parts = {"rotary": {"rotary": Rotary(8)}, "alibi": {"bias": Alibi(2)}, "learned": {}}[kind]
    layers = [drawn(MultiHeadAttention(16, 2, mask=Causal(), **parts)) for _ in range(2)]
    table = drawn(LearnedPositions(16, 16)) if kind == "learned" else None
    tokens = made(2, 12, 16)  # a prompt of 7 slots, then 5 steps
    keep = torch.ones(2, 12, dtype=torch.bool)
    keep[0, :4] = False  # row 0 has 3 real tokens

    def run(x, keep, splits):
        caches = [layer.init_cache(len(x), x.shape[1]) for layer in layers]
        outs, start = [], 0
        for size in splits:
            own = keep[:, start : start + size]
            where = caches[0].next_positions(len(x), size, own)
            assert all(
                int(p[k][0]) == start - int((~k0).sum()) * (start > 0)
                for p, k, k0 in zip(where, own, keep, strict=True)
            )
            y = x[:, start : start + size]
            y = y if table is None else y + table(where)
            for layer, cache in zip(layers, caches, strict=True):
                y = y + layer(y, keep=own, cache=cache)
            outs.append(y)
            start += size
        return torch.cat(outs, 1)

    both = run(tokens, keep, [7, 1, 1, 1, 1, 1])
    for row in range(2):
        real = tokens[row : row + 1, keep[row]]
        alone = run(real, torch.ones(1, real.shape[1], dtype=torch.bool), [real.shape[1] - 5, 1, 1, 1, 1, 1])
        close(both[row, keep[row]], alone[0])


def test_H23_packed_documents_do_not_leak():
    lengths, ids = (3, 4, 2), torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2, 2]])
    for own in (Causal(), Window(2), Causal() & (Window(2) | Global([0]))):
        layer = drawn(MultiHeadAttention(8, 2, mask=own, rotary=Rotary(4)))
        (x,) = leaves(made(1, 9, 8))
        other = x.detach().clone()
        other[:, :3] = 100 * made(1, 3, 8, seed=9)
        out = layer(x, segments=ids)
        assert torch.equal(out[:, 3:], layer(other, segments=ids)[:, 3:])
        (grad,) = torch.autograd.grad(out[:, 7:].sum(), x, retain_graph=True)
        assert (grad[:, :7] == 0).all() and (grad[:, 7:] != 0).any()
        if not isinstance(own, regard.masks.And):  # a global slot is counted in the row, so alone it would be another
            alone = [layer(part) for part in x.split(lengths, 1)]
            close(out, torch.cat(alone, 1))
        q, k, v = made(1, 2, 9, 4), made(1, 2, 9, 4), made(1, 2, 9, 4)
        dirty = [y.clone() for y in (q, k, v)]
        for y in dirty:
            y[:, :, :3] = 100 * made(1, 2, 3, 4, seed=9)
        for backend, clean in paths(q, k, v, mask=own & Segments(ids)):
            got = regard.attention(*dirty, mask=own & Segments(ids), backend=backend)
            assert torch.equal(clean[:, :, 3:], got[:, :, 3:])
