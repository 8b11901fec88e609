"""`regard.attention` against the plain formula, and every backend against the reference."""

import itertools

import numpy as np
import pytest
import torch
from attention_calls import BATCH, BIASES, EAGER, KEEP, MASKS, Q_HEADS, SINK, STARTS, WIDE, K, Q, close, inputs, made
from oracles.softmax_attention import softmax_attention

import regard
from regard.backends import chunked, dropout
from regard.biases import Alibi, RelativeBuckets
from regard.coordinates import Coordinates
from regard.errors import BackendUnsupported
from regard.masks import Band, Causal, Dilated, KeyLengths, KeyPadding, Prefix, Segments, Window


@pytest.fixture
def small_tiles(monkeypatch):
    """Tiles of 4 rows by 3 columns, so that a few tokens cross many of them."""
    for name, size in (("ROWS", 4), ("COLUMNS", 3), ("FEW", 3)):
        monkeypatch.setattr(chunked, name, size)


def named(arguments: dict) -> str:
    return ", ".join(f"{name}={value}" for name, value in arguments.items() if value is not None)


# ---- the formula -----------------------------------------------------------------------------------------------------


def expected(q, k, v, *, mask=None, bias=None, sink=None, q_start=None, **rest):
    sizes = (q.shape[2], k.shape[2])
    starts = None
    if q_start is not None:
        starts = [int(n) for n in q_start] if isinstance(q_start, torch.Tensor) else [q_start] * BATCH
    truth = None if mask is None else mask.dense(*sizes, batch=BATCH, heads=Q_HEADS, q_start=q_start)
    values = None
    if bias is not None:
        coordinates = Coordinates(BATCH, Q_HEADS, *sizes, sizes[1] - sizes[0] if q_start is None else q_start)
        values = bias.scores(coordinates.indices(), WIDE).expand(BATCH, Q_HEADS, *sizes)
    truth = None if truth is None else truth.expand(BATCH, Q_HEADS, *sizes)

    def row(b: int, i: int) -> int:
        return i - (sizes[1] - sizes[0] if starts is None else starts[b])

    return softmax_attention(
        *(x.numpy() for x in (q, k, v)),
        allowed=None if truth is None else lambda b, h, i, j: bool(truth[b, h, row(b, i), j]),
        bias=None if values is None else lambda b, h, i, j: float(values[b, h, row(b, i), j]),
        sink=None if sink is None else sink.numpy(),
        q_start=starts,
        **rest,
    )


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("bias", BIASES)
@pytest.mark.parametrize("mask", MASKS)
def test_every_backend_is_the_formula(mask, bias):
    q, k, v = inputs()
    for softcap, sink, q_start in itertools.product((None, 2.0), (None, SINK), STARTS):
        options = {"mask": MASKS[mask], "bias": BIASES[bias], "softcap": softcap, "sink": sink, "q_start": q_start}
        out, weights, lse = map(torch.from_numpy, expected(q, k, v, **options))
        for backend in EAGER:
            try:
                close(regard.attention(q, k, v, backend=backend, **options), out)
            except BackendUnsupported:
                assert backend == "sdpa"
            if backend == "sdpa":
                continue
            both = regard.attention(q, k, v, backend=backend, return_lse=True, **options)
            close(both[0], out)
            close(both[1], lse)
            looked = regard.attention_weights(q, k, v, backend=backend, **options)
            for got, want in zip(looked, (out, weights, lse), strict=True):
                close(got, want)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize(("q_len", "k_len"), [(1, 9), (9, 9), (9, 4), (1, 1)])
def test_other_lengths_and_scales(q_len, k_len):
    q, k, v = inputs(q_len, k_len)
    for scale, mask in itertools.product((None, 1.0, 0.2, -0.5), (None, Causal(), Window(2))):
        out, _, lse = map(torch.from_numpy, expected(q, k, v, scale=scale, mask=mask))
        for backend in EAGER:
            close(regard.attention(q, k, v, scale=scale, mask=mask, backend=backend), out)
        close(regard.attention(q, k, v, scale=scale, mask=mask, return_lse=True)[1], lse)


def test_uniform_and_one_hot():
    v = made(1, 1, 5, 4)
    close(
        regard.attention(torch.zeros(1, 1, 2, 3, dtype=WIDE), made(1, 1, 5, 3), v), v.mean(2, True).expand(1, 1, 2, 4)
    )
    k = torch.eye(5, dtype=WIDE)[None, None]
    close(regard.attention(k[:, :, 3:4], k, v, scale=1e4), v[:, :, 3:4])


def test_sums_over_numpy_agree_with_a_published_number():
    """The oracle itself, once, against numbers worked out by hand: two keys, scores 0 and ln 3."""
    q, k, v = (
        np.ones((1, 1, 1, 1)),
        np.array([0.0, np.log(3)]).reshape(1, 1, 2, 1),
        np.array([4.0, 8.0]).reshape(1, 1, 2, 1),
    )
    out, weights, lse = softmax_attention(q, k, v)
    assert np.allclose(weights, [0.25, 0.75]) and np.allclose(out, 7.0) and np.allclose(lse, np.log(4))
    out, weights, _ = softmax_attention(q, k, v, sink=np.array([np.log(4)]))
    assert np.allclose(weights, [0.125, 0.375]) and np.allclose(out, 3.5)


# ---- gradients -------------------------------------------------------------------------------------------------------


def gradients(backend, q, k, v, *, bias=None, sink=None, seed=5, lse=True, **options):
    """[out, lse, the gradients of q, k, v, of the bias's tensors, of the sink] for fixed cotangents of out and lse."""
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    if bias is not None:
        tensors = [t.detach().clone().requires_grad_() for t in bias.tensors()]
        bias, leaves = bias.with_tensors(tensors), leaves + tensors
    if sink is not None:
        sink = sink.detach().clone().requires_grad_()
        leaves.append(sink)
    torch.manual_seed(seed)
    out, log_sum = regard.attention(*leaves[:3], bias=bias, sink=sink, backend=backend, return_lse=True, **options)
    finite = torch.where(log_sum == -torch.inf, 0.0, log_sum)
    loss = (out * made(*out.shape)).sum() + (finite * made(*log_sum.shape)).sum() * lse
    grads = torch.autograd.grad(loss, leaves, allow_unused=True)
    return [out, log_sum, *(torch.zeros_like(x) if g is None else g for g, x in zip(grads, leaves, strict=True))]


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("bias", BIASES)
@pytest.mark.parametrize("mask", MASKS)
def test_gradients_agree_with_the_reference(mask, bias):
    q, k, v = inputs()
    for softcap, sink, p, q_start in itertools.product((None, 2.0), (None, SINK), (0.0, 0.4), STARTS[::2]):
        options = {"mask": MASKS[mask], "bias": BIASES[bias], "softcap": softcap, "sink": sink}
        options |= {"dropout_p": p, "q_start": q_start}
        want, got = (gradients(backend, q, k, v, **options) for backend in ("reference", "chunked"))
        for one, other in zip(got, want, strict=True):
            assert other.isfinite().all() or other is want[1], named(options)
            close(one, other)


def test_gradients_of_the_reference_are_right():
    """Finite differences, with a row that may attend to nothing, a sink, a cap and grouped heads."""
    q, k, v = inputs(4, 5)
    truth = made(1, 1, 4, 5) > -0.3
    truth[..., 2, :] = False
    table, sink = made(8, Q_HEADS), made(Q_HEADS)

    def call(q, k, v, table, sink):
        bias = RelativeBuckets(table, max_distance=9)
        options = {"mask": truth, "bias": bias, "sink": sink, "softcap": 3.0, "backend": "reference"}
        out, lse = regard.attention(q, k, v, return_lse=True, **options)
        return out, torch.where(lse == -torch.inf, 0.0, lse)

    leaves = tuple(x.clone().requires_grad_() for x in (q[:1], k[:1], v[:1], table, sink))
    assert torch.autograd.gradcheck(call, leaves)


def test_sdpa_gradients():
    q, k, v = inputs()
    for mask in ("none", "causal", "padded", "lengths, one of them 0", "by head"):
        leaves = [[x.clone().requires_grad_() for x in (q, k, v)] for _ in range(2)]
        outs = [
            regard.attention(*own, mask=MASKS[mask], backend=name)
            for own, name in zip(leaves, ("reference", "sdpa"), strict=True)
        ]
        close(*outs)
        grads = [
            torch.autograd.grad((out * made(*out.shape)).sum(), own) for own, out in zip(leaves, outs, strict=True)
        ]
        for one, other in zip(*grads, strict=True):
            close(one, other)


def test_only_what_is_wanted():
    q, k, v = inputs()
    for wanted in range(3):
        leaves = [x.clone().requires_grad_(place == wanted) for place, x in enumerate((q, k, v))]
        out = regard.attention(*leaves, mask=Causal(), backend="chunked")
        (grad,) = torch.autograd.grad(out.square().sum(), leaves[wanted])
        whole = [x.clone().requires_grad_() for x in (q, k, v)]
        (want,) = torch.autograd.grad(
            regard.attention(*whole, mask=Causal(), backend="reference").square().sum(), whole[wanted]
        )
        close(grad, want)


@pytest.mark.usefixtures("small_tiles")
def test_second_derivatives():
    q, k, v = (x[:1, :2].clone().requires_grad_() for x in inputs(4, 5))
    sink = SINK[:2].clone().requires_grad_()

    def call(q, k, v, sink):
        return regard.attention(q, k, v, mask=Window(3), bias=Alibi(2), softcap=3.0, sink=sink, backend="chunked")

    assert torch.autograd.gradgradcheck(call, (q, k, v, sink))


# ---- packing ---------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("inner", [None, Causal(), Window(2), Causal() | Prefix(1), Band(1, 1), Dilated(2, 2)], ids=str)
def test_packed_is_separate(inner):
    q_lengths, k_lengths = [3, 0, 4, 1, 2], [5, 2, 4, 0, 2]
    q, k, v = made(1, 4, 10, 4), made(1, 2, 13, 4), made(1, 2, 13, 3)
    packed = Segments.from_lengths(q_lengths, k_lengths)
    cotangent = made(1, 4, 10, 3)

    def loss(q, k, v, mask, backend, start=0):
        out = regard.attention(q, k, v, mask=mask, bias=Alibi(4), softcap=4.0, backend=backend)
        return out, (out * cotangent[:, :, start : start + out.shape[2]]).sum()

    apart = [x.clone().requires_grad_() for x in (q, k, v)]
    outs, total, i, j = [], torch.zeros((), dtype=WIDE), 0, 0
    for a, b in zip(q_lengths, k_lengths, strict=True):
        own = (apart[0][:, :, i : i + a], *(x[:, :, j : j + b] for x in apart[1:]))
        out, part = loss(*own, inner, "reference", i)
        outs, total, i, j = [*outs, out], total + part, i + a, j + b
    want = torch.autograd.grad(total, apart)
    for backend in ("reference", "chunked"):
        together = [x.clone().requires_grad_() for x in (q, k, v)]
        out, total = loss(*together, packed if inner is None else inner & packed, backend)
        close(out, torch.cat(outs, 2))
        for got, one in zip(torch.autograd.grad(total, together), want, strict=True):
            close(got, one)


# ---- unread keys and rows that read nothing --------------------------------------------------------------------------


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("junk", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("backend", EAGER)
def test_what_nobody_reads_may_hold_anything(backend, junk):
    q, k, v = inputs()
    cases = [
        (KeyPadding(KEEP), ~KEEP),
        (Causal() & KeyPadding(KEEP), ~KEEP),
        (KeyLengths(torch.tensor([4, 7])), torch.arange(K)[None] >= torch.tensor([[4], [7]])),
        (Window(2), (torch.arange(K) < K - Q - 1).expand(BATCH, K)),
    ]
    for mask, unread in cases:
        results = []
        for fill in (0.0, junk):
            dirty = [torch.where(unread[:, None, :, None], torch.tensor(fill, dtype=WIDE), x) for x in (k, v)]
            leaves = [x.clone().requires_grad_() for x in (q, *dirty)]
            out = regard.attention(*leaves, mask=mask, backend=backend)
            results.append([out, *torch.autograd.grad((out * made(*out.shape)).sum(), leaves)])
        for clean, got in zip(*results, strict=True):
            assert torch.equal(clean, got), mask
        for grad in results[1][2:]:
            assert (grad.transpose(1, 2)[unread] == 0).all()


# ---- dropout ---------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("small_tiles")
def test_dropout_draws_the_same_bits_on_every_backend_and_tiling(monkeypatch):
    q, k, v = inputs()
    outs = []
    for backend, sizes in (("reference", None), ("chunked", (4, 3)), ("chunked", (1, 1)), ("chunked", (128, 512))):
        if sizes is not None:
            monkeypatch.setattr(chunked, "ROWS", sizes[0])
            monkeypatch.setattr(chunked, "COLUMNS", sizes[1])
        torch.manual_seed(3)
        outs.append(regard.attention(q, k, v, dropout_p=0.5, backend=backend))
    for out in outs[1:]:
        close(out, outs[0])
    torch.manual_seed(4)
    assert not torch.allclose(regard.attention(q, k, v, dropout_p=0.5), outs[0])


def test_dropout_keeps_the_mean_and_scales_what_it_keeps():
    q, v = torch.zeros(1, 2, 64, 4), torch.ones(1, 2, 512, 1)
    k = torch.zeros(1, 2, 512, 4)
    for p in (0.1, 0.5, 0.9):
        outs = torch.stack([regard.attention(q, k, v, dropout_p=p) for _ in range(20)])
        spread = (p / (1 - p) / 512 / outs.numel()) ** 0.5
        assert abs(float(outs.mean()) - 1) < 4 * spread
    factor = dropout.dropout_factor(Coordinates(2, 3, 40, 50, 0).indices(), dropout.draw_seed(q.device), 0.25, WIDE)
    assert set(factor.unique().tolist()) == {0.0, 1 / 0.75}
    for one in (factor[0, 0], factor[0, 1], factor[1, 0]):  # rows, heads and batch rows draw apart
        assert abs(float((one == 0).double().mean()) - 0.25) < 0.05
        assert not torch.equal(one, factor[1, 2])


def test_dropout_of_nothing_and_of_everything():
    q, k, v = inputs()
    for backend in ("reference", "chunked"):
        state = torch.random.get_rng_state()
        plain = regard.attention(q, k, v, dropout_p=0.0, backend=backend)
        assert torch.equal(state, torch.random.get_rng_state())
        close(plain, regard.attention(q, k, v))
        q.requires_grad_()
        gone = regard.attention(q, k, v, dropout_p=1.0, backend=backend)
        assert (gone == 0).all()
        assert (torch.autograd.grad(gone.sum(), q)[0] == 0).all()
        q.requires_grad_(False)
        torch.manual_seed(0)
        first = regard.attention(q, k, v, dropout_p=0.5, backend=backend)
        torch.manual_seed(0)
        assert torch.equal(first, regard.attention(q, k, v, dropout_p=0.5, backend=backend))


def test_weights_are_those_before_dropout_and_looking_changes_nothing():
    q, k, v = inputs()
    torch.manual_seed(1)
    out = regard.attention(q, k, v, mask=Causal(), dropout_p=0.5)
    torch.manual_seed(1)
    looked, weights, _ = regard.attention_weights(q, k, v, mask=Causal(), dropout_p=0.5)
    assert torch.equal(out, looked)
    close(weights.sum(-1), torch.ones(BATCH, Q_HEADS, Q, dtype=WIDE))
