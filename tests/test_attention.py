"""`regard.attention` against the plain formula, and every backend against the reference."""

import itertools
import logging

import numpy as np
import pytest
import torch
from oracles.softmax_attention import softmax_attention
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import regard
from regard import backends, masks
from regard.backends import chunked, dropout
from regard.biases import Alibi, Bias, Dense, RelativeBuckets
from regard.errors import BackendUnsupported
from regard.masks import Band, Causal, Full, KeyLengths, KeyPadding, Mask, Prefix, Segments, Window
from regard.sites import Frame

WIDE = torch.float64
EAGER = ("reference", "chunked", "sdpa")  # flex compiles for many seconds: see the slow test at the end
BATCH, Q_HEADS, KV_HEADS, Q, K, DK, DV = 2, 4, 2, 6, 9, 3, 2


@pytest.fixture
def small_tiles(monkeypatch):
    """Tiles of 4 rows by 3 columns, so that a few tokens cross many of them."""
    for name, size in (("ROWS", 4), ("COLUMNS", 3), ("FEW", 3)):
        monkeypatch.setattr(chunked, name, size)


def made(*shape: int, dtype: torch.dtype = WIDE) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=dtype)


def inputs(q_len: int = Q, k_len: int = K, dtype: torch.dtype = WIDE) -> tuple[torch.Tensor, ...]:
    shapes = (BATCH, Q_HEADS, q_len, DK), (BATCH, KV_HEADS, k_len, DK), (BATCH, KV_HEADS, k_len, DV)
    return tuple(made(*shape, dtype=dtype) for shape in shapes)


def close(got: torch.Tensor, want: torch.Tensor, tolerance: float = 1e-11) -> None:
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


KEEP = torch.tensor([[True] * 7 + [False] * 2, [False] * 3 + [True] * 6])
MASKS: dict[str, Mask | None] = {
    "none": None,
    "full": Full(),
    "causal": Causal(),
    "window": Window(3),
    "band": Band(1, 2),
    "prefix": Causal() | Prefix(2),
    "padded": Causal() & KeyPadding(KEEP),
    "documents": Causal() & Segments(torch.arange(K) // 4),
    "lengths, one of them 0": KeyLengths(torch.tensor([0, 4])),
    "dense": masks.Dense(made(BATCH, 1, Q, K) > 0.5),
    "by head": masks.Dense(made(1, Q_HEADS, Q, K) > 0),
}
BIASES: dict[str, Bias | None] = {
    "none": None,
    "alibi": Alibi(Q_HEADS),
    "buckets + alibi": RelativeBuckets(made(8, Q_HEADS), bidirectional=False, max_distance=20) + Alibi(Q_HEADS),
    "dense": Dense(made(1, Q_HEADS, 1, K)),
}
STARTS = (None, 0, torch.tensor([1, 5]))
SINK = made(Q_HEADS)


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
        frame = Frame(BATCH, Q_HEADS, *sizes, sizes[1] - sizes[0] if q_start is None else q_start)
        values = bias.scores(frame.site(), WIDE).expand(BATCH, Q_HEADS, *sizes)
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


# ---- packing ---------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("inner", [None, Causal(), Window(2), Causal() | Prefix(1), Band(1, 1)], ids=str)
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
    factor = dropout.dropout_factor(Frame(2, 3, 40, 50, 0).site(), dropout.draw_seed(q.device), 0.25, WIDE)
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


# ---- dtypes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", EAGER)
def test_low_precision_is_as_good_as_its_own_formula(dtype, backend):
    """Within twice the error of the plain formula in the same dtype, forward and gradients: sums stay in float32."""
    q, k, v = (made(2, heads, 40, 16).to(dtype) for heads in (4, 2, 2))
    cotangent = made(2, 4, 40, 16).to(dtype)

    def results(q, k, v, call):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out = call(*leaves)
        return [out, *torch.autograd.grad((out * cotangent.to(out.dtype)).sum(), leaves)]

    def plain(q, k, v):
        k, v = (x.repeat_interleave(2, 1) for x in (k, v))
        scores = (q @ k.transpose(-1, -2)) * 16**-0.5
        scores = scores.masked_fill(~Causal().dense(40), -torch.inf)
        return torch.softmax(scores, -1) @ v

    exact = results(*(x.double() for x in (q, k, v)), plain)
    rough = results(q, k, v, plain)
    try:
        ours = results(q, k, v, lambda *x: regard.attention(*x, mask=Causal(), backend=backend))
    except BackendUnsupported:
        assert (backend, dtype) == ("sdpa", torch.float16)
        return
    for got, bad, want in zip(ours, rough, exact, strict=True):
        assert got.dtype == dtype
        assert (got - want).abs().max() <= 2 * (bad - want).abs().max()


@pytest.mark.parametrize("backend", EAGER)
def test_options_are_read_in_the_compute_dtype(backend):
    """A float32 bias beside bfloat16 queries is not rounded: ALiBi over 2000 slots would be off by several."""
    q, k = (torch.zeros(1, 2, 2000, 4, dtype=torch.bfloat16) for _ in range(2))
    v = made(1, 2, 2000, 4).bfloat16()
    bias = Alibi(torch.tensor([1.0, 0.37]))
    want = regard.attention(q.double(), k.double(), v.double(), bias=bias, backend="reference")
    try:
        got = regard.attention(q, k, v, bias=bias, backend=backend)
    except BackendUnsupported:
        assert backend == "sdpa"
        return
    torch.testing.assert_close(got.double(), want, rtol=1e-2, atol=1e-2)


def test_gradients_come_back_in_their_own_dtypes():
    q, k, v = (x.float() for x in inputs())
    sink, table = (made(*shape).requires_grad_() for shape in ((Q_HEADS,), (8, Q_HEADS)))
    low = table.detach().half().requires_grad_()
    q = q.bfloat16().requires_grad_()
    for backend in ("reference", "chunked"):
        for one in (table, low):
            out, lse = regard.attention(
                q, k.bfloat16(), v.bfloat16(), bias=RelativeBuckets(one), sink=sink, backend=backend, return_lse=True
            )
            assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
            grads = torch.autograd.grad(out.float().square().sum() + lse.sum(), (q, sink, one))
            assert [g.dtype for g in grads] == [torch.bfloat16, WIDE, one.dtype]


def test_autocast_lowers_queries_keys_and_values_alone():
    q, k, v = (x.float() for x in inputs())
    bias = Dense(made(1, Q_HEADS, 1, K).float().requires_grad_())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, lse = regard.attention(q, k, v, bias=bias, return_lse=True)
        assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
        assert regard.attention(*(x.double() for x in (q, k, v))).dtype == WIDE
        mixed = regard.attention(q, k.bfloat16(), v)
        assert mixed.dtype == torch.bfloat16
    low = regard.attention(*(x.bfloat16() for x in (q, k, v)), bias=bias, return_lse=True)
    assert torch.equal(out, low[0]) and torch.equal(lse, low[1])


# ---- memory, strides, empty sizes ------------------------------------------------------------------------------------


class Largest(TorchDispatchMode):
    """The largest tensor that any operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for one in result if isinstance(result, tuple | list) else (result,):
            if isinstance(one, torch.Tensor):
                self.numel = max(self.numel, one.numel())
        return result


def test_chunked_never_holds_the_scores():
    length = 2048
    q, k, v = (torch.randn(1, 2, length, 16, requires_grad=True) for _ in range(3))
    table = torch.randn(32, 2, requires_grad=True)
    bias = RelativeBuckets(table) + Alibi(2)
    options = {"mask": Causal() & KeyLengths(torch.tensor([2000])), "bias": bias, "softcap": 9.0, "dropout_p": 0.1}
    with Largest() as largest:
        out, lse = regard.attention(q, k, v, return_lse=True, backend="chunked", **options)
        (out.sum() + lse.sum()).backward()
    tile = 2 * chunked.ROWS * max(chunked.COLUMNS, chunked.FEW // chunked.ROWS)
    assert largest.numel <= max(tile, q.numel()) < length * length / 16


def test_chunked_skips_what_the_mask_leaves_empty():
    q = torch.randn(1, 1, 2048, 8, requires_grad=True)

    def flops(mask):
        with FlopCounterMode(display=False) as counter:
            regard.attention(q, q, q, mask=mask, backend="chunked").sum().backward()
        return counter.get_total_flops()

    whole = flops(None)
    assert flops(Causal()) < 0.6 * whole
    assert flops(Window(128)) < 0.25 * whole
    assert flops(Causal() & Segments(torch.arange(2048) // 256)) < 0.25 * whole


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("backend", EAGER)
def test_any_strides(backend):
    fused = made(BATCH, K, 3, Q_HEADS, DK)
    strided = {
        "fused": tuple(fused[:, :, n].transpose(1, 2) for n in range(3)),
        "last axis strided": tuple(made(BATCH, Q_HEADS, DK, K).mT for _ in range(3)),
        "every other": tuple(made(BATCH, Q_HEADS, K, 2 * DK)[..., ::2] for _ in range(3)),
        "expanded heads": (made(BATCH, Q_HEADS, K, DK), *(made(BATCH, 1, K, DK).expand(-1, 2, -1, -1) for _ in "kv")),
        "expanded batch": tuple(made(1, 2, K, DK).expand(BATCH, -1, -1, -1) for _ in range(3)),
        "flipped": tuple(made(BATCH, Q_HEADS, K, DK).flip(2)[:, :, 1:] for _ in range(3)),
    }
    truth = (made(K, 1, 1, BATCH) > -1).permute(3, 1, 2, 0).expand(BATCH, 1, K, K)
    for name, tensors in strided.items():
        mask = truth if name != "flipped" else None
        results = []
        for own in (tensors, tuple(x.contiguous() for x in tensors)):
            before = [x.clone() for x in own]
            leaves = [x.detach().requires_grad_() for x in own]
            out = regard.attention(*leaves, mask=mask, backend=backend)
            results.append([out, *torch.autograd.grad((out * made(*out.shape)).sum(), leaves)])
            assert all(torch.equal(x, y) for x, y in zip(own, before, strict=True)), name
        for one, other in zip(*results, strict=True):
            close(one, other)


@pytest.mark.parametrize("backend", [None, "reference", "chunked"])
@pytest.mark.parametrize(
    ("batch", "q_len", "k_len", "dk", "dv"),
    [(0, 3, 4, 2, 2), (2, 0, 4, 2, 2), (2, 4, 0, 2, 2), (2, 0, 0, 2, 2), (2, 3, 4, 0, 2), (2, 3, 4, 2, 0)],
)
def test_empty_sizes(backend, batch, q_len, k_len, dk, dv):
    shapes = (batch, 4, q_len, dk), (batch, 2, k_len, dk), (batch, 2, k_len, dv)
    for mask in (
        None,
        Causal(),
        Window(2),
        torch.ones(q_len, k_len, dtype=torch.bool),
        KeyPadding(torch.ones(batch, k_len) > 0),
    ):
        leaves = [made(*shape).requires_grad_() for shape in shapes]
        sink, bias = made(4).requires_grad_(), made(1, 4, q_len, k_len).requires_grad_()
        out, lse = regard.attention(*leaves, mask=mask, sink=sink, bias=bias, return_lse=True, backend=backend)
        assert out.shape == (batch, 4, q_len, dv) and lse.shape == (batch, 4, q_len)
        if k_len == 0:
            assert (out == 0).all() and (lse == -torch.inf).all()
        for leaf, grad in zip([*leaves, bias], torch.autograd.grad(out.sum(), [*leaves, bias]), strict=True):
            assert grad.shape == leaf.shape and grad.isfinite().all()


# ---- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "text", "change"),
    [
        (TypeError, "q: expected a tensor", {"q": None}),
        (ValueError, "v: expected 4 dimensions", {"v": made(2, 9, 2)}),
        (
            TypeError,
            "q, k, v: expected one dtype, got torch.float64, torch.float32, torch.float64",
            {"k": made(2, 2, 9, 3).float()},
        ),
        (ValueError, "q, k, v: expected one device, got cpu, meta, cpu", {"k": made(2, 2, 9, 3).to("meta")}),
        (ValueError, "k: expected (2, Hkv, Tk, 3)", {"k": made(2, 2, 9, 4)}),
        (ValueError, "v: expected (2, 2, 9)", {"v": made(2, 2, 8, 2)}),
        (ValueError, "Hq=4, Hkv=3", {"k": made(2, 3, 9, 3), "v": made(2, 3, 9, 2)}),
        (ValueError, "mask[:, None]", {"mask": torch.ones(2, 6, 9, dtype=torch.bool)}),
        (TypeError, "mask: expected", {"mask": torch.ones(6, 9, dtype=torch.uint8)}),
        (TypeError, "pass it as bias=", {"mask": torch.zeros(6, 9)}),
        (TypeError, "mask: expected", {"mask": "causal"}),
        (ValueError, "mask: expected a shape that broadcasts to (6, 9)", {"mask": torch.ones(5, 9, dtype=torch.bool)}),
        (TypeError, "pass it as mask=", {"bias": torch.ones(6, 9, dtype=torch.bool)}),
        (ValueError, "bias: expected a shape", {"bias": torch.ones(2, 3, 6, 9)}),
        (ValueError, "Alibi.slopes: expected 4 heads", {"bias": Alibi(3)}),
        (TypeError, "scale: expected", {"scale": "d"}),
        (ValueError, "softcap: expected", {"softcap": 0.0}),
        (ValueError, "softcap: expected", {"softcap": -1.0}),
        (ValueError, "softcap: expected", {"softcap": float("nan")}),
        (ValueError, "sink: expected", {"sink": torch.zeros(2)}),
        (TypeError, "sink: expected", {"sink": 0.0}),
        (ValueError, "dropout_p: expected", {"dropout_p": 1.5}),
        (TypeError, "dropout_p: expected", {"dropout_p": "half"}),
        (TypeError, "q_start: expected", {"q_start": 1.0}),
        (ValueError, "q_start: expected", {"q_start": torch.tensor([1, 2, 3])}),
        (ValueError, "q_start", {"mask": Segments.from_lengths([6], [9]), "q_start": 0}),
        (ValueError, "batch size 1", {"mask": Segments.from_lengths([6], [9])}),
        (ValueError, "backend: expected one of", {"backend": "flash"}),
        (
            BackendUnsupported,
            "'sdpa' cannot run this call: it has no softcap. These can:",
            {"softcap": 1.0, "backend": "sdpa"},
        ),
        (BackendUnsupported, "float64", {"backend": "flex"}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_errors_name_the_argument(error, text, change):
    arguments = dict(zip("qkv", inputs(), strict=True)) | change
    for call in (regard.attention, regard.attention_weights):
        with pytest.raises(error) as caught:
            call(**arguments)
        assert text in str(caught.value)
    if error is not BackendUnsupported:
        with pytest.raises(error):
            regard.explain(**arguments)


# ---- choosing a backend ----------------------------------------------------------------------------------------------


def test_explain_says_who_runs_a_call_and_why_not_the_others():
    q, k, v = inputs(64, 64)
    told = regard.explain(q, k, v, softcap=2.0)
    assert told.chosen == "chunked"
    assert {row.name for row in told.rows} == set(backends.names())
    assert "sdpa" in str(told) and "no softcap" in str(told) and "runs it" in str(told)
    meta = [torch.empty(1, 8, 4096, 64, device="meta") for _ in range(3)]
    assert regard.explain(*meta, mask=Causal()).chosen is not None
    assert regard.explain(q, k, v, backend="reference").chosen == "reference"
    assert regard.explain(q, k, v, softcap=2.0, backend="sdpa").chosen is None


def test_the_choice_does_not_depend_on_the_batch():
    for options in ({}, {"mask": Causal()}, {"softcap": 3.0}, {"mask": Window(3)}, {"bias": Alibi(4)}):
        chosen = {
            regard.explain(*(torch.empty(batch, 4, 64, 8, device="meta") for _ in range(3)), **options).chosen
            for batch in (1, 2, 64)
        }
        assert len(chosen) == 1, options


def test_use_backend():
    q, k, v = inputs()
    with regard.use_backend("reference"):
        assert regard.explain(q, k, v).chosen == "reference"
        with regard.use_backend(None):
            assert regard.explain(q, k, v, softcap=1.0).chosen == "chunked"
        with regard.use_backend("sdpa"), pytest.raises(BackendUnsupported, match="softcap"):
            regard.attention(q, k, v, softcap=1.0)
        assert regard.explain(q, k, v, backend="chunked").chosen == "chunked"  # by name at the call wins
    assert regard.explain(q, k, v, softcap=1.0).chosen == "chunked"
    with pytest.raises(ValueError, match="backend: expected one of"), regard.use_backend("nothing"):
        pass


def test_the_fall_back_to_the_dense_definition_is_said_once(caplog):
    q, k, v = inputs()
    with caplog.at_level(logging.INFO, logger="regard"):
        backends._said.clear()
        for _ in range(2):
            torch.func.vmap(lambda q, k, v: regard.attention(q, k, v, softcap=1.0))(q[None], k[None], v[None])
    assert len([record for record in caplog.records if "reference" in record.getMessage()]) == 1


# ---- other ways to differentiate and to run --------------------------------------------------------------------------


@pytest.mark.usefixtures("small_tiles")
def test_second_derivatives():
    q, k, v = (x[:1, :2].clone().requires_grad_() for x in inputs(4, 5))
    sink = SINK[:2].clone().requires_grad_()

    def call(q, k, v, sink):
        return regard.attention(q, k, v, mask=Window(3), bias=Alibi(2), softcap=3.0, sink=sink, backend="chunked")

    assert torch.autograd.gradgradcheck(call, (q, k, v, sink))


def test_compiled_in_one_graph():
    def call(q, k, v, keep, slopes):
        return regard.attention(q, k, v, mask=Causal() & KeyPadding(keep), softcap=3.0, bias=Alibi(slopes))

    q, k, v = (x.requires_grad_() for x in inputs(17, 17, torch.float32))
    keep, slopes = torch.rand(BATCH, 17) > 0.3, torch.rand(Q_HEADS, requires_grad=True)
    results = []
    for one in (call, torch.compile(call, fullgraph=True, backend="aot_eager")):
        out = one(q, k, v, keep, slopes)
        results.append([out, *torch.autograd.grad(out.square().sum(), (q, k, v, slopes))])
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


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


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.script")  # torch's own, on its first compilation
def test_flex_is_the_reference():
    """Compiled: some seconds for each kind of call."""
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
        q, k, v = (made(2, heads, 200, 16).to(dtype) for heads in (4, 2, 2))
        keep = torch.arange(200)[None] < torch.tensor([[150], [200]])
        for options in (
            {"mask": Causal()},
            {"mask": Window(50) & KeyPadding(keep), "bias": Alibi(4)},
            {"mask": Causal() & Segments(torch.arange(200) // 70), "softcap": 3.0, "q_start": 0},
        ):
            want = regard.attention(q, k, v, backend="reference", **options)
            got = regard.attention(q, k, v, backend="flex", **options)
            torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)
