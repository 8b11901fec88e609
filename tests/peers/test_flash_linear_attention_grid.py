"""The grids over which flash-linear-attention is tested, and its measure: the error's size over the value's.

Yang and Zhang 2024, github.com/fla-org/flash-linear-attention. Linear attention, (simple) GLA, retention, the delta
rules, HGRN: outputs, last states and all gradients, against the recurrence token by token in float64.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from grids import LOW, made, named, on_each_backend, ratio, spread, uniform, with_gradients
from oracles import tensor_states as oracle
from oracles.recurrences import delta_recurrence
from torch import Tensor

import regard
from regard.gates import bounded_decay, lower_bounded_decay, softplus_decay
from regard.masks import Segments
from regard.transitions import Decay, Delta

# theirs are 0.005 for results and 0.005 to 0.02 for gradients, in every dtype
BOUNDS = {torch.float64: 1e-11, torch.float32: 3e-5, torch.bfloat16: 5e-3, torch.float16: 2e-3}
KINDS = ("linear", "simple gla", "gla", "retention", "delta", "gated delta", "kda")
T = (1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 127, 128, 129)
LONG = (200, 300, 500, 512, 1000, 1024)
NORMALIZERS = (0.1, 1.0, 10.0)


def log_decay_of(kind: str, batch: int, heads: int, tokens: int, size: int, normalizer: float, masked: float):
    """Theirs: log sigmoid of normal numbers over a normalizer, a share of them set to 0; retention's constants."""
    if kind in ("linear", "delta"):
        return None
    if kind == "retention":
        return torch.log1p(-torch.exp2(-5.0 - torch.arange(heads, dtype=torch.float64)))
    shape = (batch, heads, tokens, size) if kind in ("gla", "kda") else (batch, heads, tokens)
    gate = F.logsigmoid(made(*shape, seed=4)) / normalizer
    return gate * (uniform(*shape, seed=5) >= masked)


def drawn(kind, batch, heads, tokens, sizes, normalizer, masked, dtype, sequences=None):
    """q, k, v, the decay, the strength, the first state: those that the kind has, by name."""
    (key_heads, value_heads), (size, width) = heads, sizes
    q, k = (made(batch, key_heads, tokens, size, seed=n) for n in (0, 1))
    if kind in ("delta", "gated delta", "kda"):
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
    given = {"q": q.to(dtype), "k": k.to(dtype), "v": made(batch, value_heads, tokens, width, dtype=dtype, seed=2)}
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    decay = log_decay_of(kind, batch, value_heads, tokens, size, normalizer, masked)
    if decay is not None:
        given["log_decay"] = decay.to(wide)
    if kind in ("delta", "gated delta", "kda"):
        given["beta"] = made(batch, value_heads, tokens, seed=6).sigmoid().to(dtype)
    given["state"] = made(sequences or batch, value_heads, size, width, seed=7).to(wide)
    return given


def transition(log_decay: Tensor | None, beta: Tensor | None) -> Decay | Delta:
    return Decay(log_decay) if beta is None else Delta(beta, log_decay)


def equal(results: Sequence[Tensor], want: Sequence[Tensor], labels: Sequence[str], dtype: torch.dtype) -> None:
    for label, got, right in zip(labels, results, want, strict=True):
        error = ratio(got, right)
        assert error <= BOUNDS[dtype], (label, error)


def check(given: dict[str, Tensor], scale: float | None, lengths: Sequence[int] | None = None) -> None:
    """A call on every backend; with lengths, rows packed into one, each with a first state of its own."""
    names, tensors, dtype = list(given), list(given.values()), given["q"].dtype
    cotangents = [made(*given["v"].shape, dtype=dtype, seed=8), made(*given["state"].shape, seed=9)]

    def truth(*x):
        parts = dict(zip(names, x, strict=True))
        if lengths is None:
            return oracle.matrix_state(**parts, scale=scale)
        outs, lasts, first = [], [], 0
        for n, length in enumerate(lengths):
            own = {
                name: part if name == "log_decay" and part.ndim == 1 else part[:, :, first : first + length]
                for name, part in parts.items()
                if name != "state"
            }
            out, last = oracle.matrix_state(**own, state=parts["state"][n : n + 1], scale=scale)
            outs.append(out)
            lasts.append(last)
            first += length
        return torch.cat(outs, 2), torch.cat(lasts)

    want = with_gradients(truth, [x.double() for x in tensors], cotangents)

    def call(*x):
        parts = dict(zip(names, x, strict=True))
        shifted = transition(parts.get("log_decay"), parts.get("beta"))
        segments = None if lengths is None else Segments.from_lengths(lengths)
        return regard.recurrence(
            parts["q"], parts["k"], parts["v"], shifted, state=parts["state"], scale=scale, segments=segments
        )

    expected = () if dtype == torch.float64 else ("native",)
    labels = ["out", "state", *(f"grad of {name}" for name in names)]
    for _, got in on_each_backend(lambda: with_gradients(call, tensors, cotangents), expected=expected):
        assert got[0].dtype == dtype
        equal(got, want, labels, dtype)
    with torch.no_grad():
        for _, got in on_each_backend(lambda: call(*tensors), expected=expected):
            equal(got, want[:2], labels[:2], dtype)


NAMES = ("kind", "tokens", "sizes", "heads", "normalizer", "masked", "scale", "dtype")
HEADS = ((2, 2), (1, 1), (1, 2), (2, 4), (1, 3))


def grid(count, seed, tokens, sizes, heads=HEADS):
    return spread(
        count,
        seed,
        kind=KINDS,
        tokens=tokens,
        sizes=sizes,
        heads=heads,
        normalizer=NORMALIZERS,
        masked=(0.0, 0.0, 0.5, 1.0),
        scale=(None, 1.0, 0.1),
        dtype=(torch.float32, *LOW),
    )


SMALL = ((32, 32), (60, 60), (64, 64), (100, 100), (32, 64), (64, 32))
WIDE = ((128, 128), (64, 128), (128, 64), (110, 110), (256, 256), (100, 200), (16, 256))


@pytest.mark.parametrize(NAMES, grid(75, 11, T, SMALL))
def test_around_the_borders_of_chunks(kind, tokens, sizes, heads, normalizer, masked, scale, dtype):
    check(drawn(kind, 2, heads, tokens, sizes, normalizer, masked, dtype), scale)


@pytest.mark.parametrize(NAMES, grid(14, 12, (300, 200, 129, 63), WIDE[:4], ((1, 1), (1, 2))))
def test_longer_and_wider(kind, tokens, sizes, heads, normalizer, masked, scale, dtype):
    check(drawn(kind, 1, heads, tokens, sizes, normalizer, masked, dtype), scale)


@pytest.mark.parametrize("kind", KINDS)
def test_float64_and_the_loop_of_one_head(kind):
    given = drawn(kind, 2, (1, 2), 70, (12, 10), 1.0, 0.3, torch.float64)
    check(given, None)
    parts = {name: x.numpy() for name, x in given.items()}
    out, last = delta_recurrence(**parts)
    also, end = oracle.matrix_state(**given)
    assert ratio(also, torch.from_numpy(out)) < 1e-13 and ratio(end, torch.from_numpy(last)) < 1e-13


@pytest.mark.slow
@pytest.mark.parametrize(NAMES, grid(210, 13, T + LONG, SMALL) + grid(105, 14, T + LONG[:3], WIDE, ((1, 1), (1, 2))))
def test_more_of_the_grid(kind, tokens, sizes, heads, normalizer, masked, scale, dtype):
    check(drawn(kind, 1, heads, tokens, sizes, normalizer, masked, dtype), scale)


# ---- packed sequences --------------------------------------------------------------------------------------------

BORDERS = ((0, 15), (0, 1, 2), (0, 16, 33, 64), (0, 15, 100, 129, 257), (0, 63, 127, 192), (0, 0, 16), (0, 40, 40, 90))
MANY = ((0, 122, 229, 400, 1000), (0, 256, 500, 1000), (0, 15, 100, 300, 1200, 2000), (0, 1, 100, 300, 1200, 2048))
VARLEN = ("kind", "borders", "size", "heads", "masked", "dtype")


def varlen_grid(count, seed, borders, sizes, kinds=KINDS):
    return spread(
        count,
        seed,
        kind=kinds,
        borders=borders,
        size=sizes,
        heads=((2, 2), (1, 2)),
        masked=(0.0, 0.5),
        dtype=(torch.float32, *LOW),
    )


def check_varlen(kind, borders, size, heads, masked, dtype):
    lengths = [end - start for start, end in itertools.pairwise(borders)]
    check(drawn(kind, 1, heads, borders[-1], (size, size), 1.0, masked, dtype, len(lengths)), None, lengths)


@pytest.mark.parametrize(VARLEN, varlen_grid(35, 15, BORDERS, (16, 60, 64)))
def test_packed_sequences(kind, borders, size, heads, masked, dtype):
    check_varlen(kind, borders, size, heads, masked, dtype)


@pytest.mark.slow
@pytest.mark.parametrize(VARLEN, varlen_grid(48, 16, MANY, (60, 64, 100)))
def test_more_packed_sequences(kind, borders, size, heads, masked, dtype):
    check_varlen(kind, borders, size, heads, masked, dtype)


# ---- HGRN: a number per channel ----------------------------------------------------------------------------------


def check_vector(tokens, size, normalizer, masked, dtype, lengths=None):
    batch = 2 if lengths is None else 1
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    raw = made(batch, tokens, size, seed=1)
    log_a = F.logsigmoid(raw) / normalizer * (uniform(*raw.shape, seed=2) >= masked)
    x = ((1 - raw.sigmoid()) * made(batch, tokens, size, seed=3)).to(dtype)
    rows = len(lengths) if lengths else batch
    tensors = [log_a.to(dtype), x, made(rows, size, seed=4).to(wide)]
    cotangents = [made(batch, tokens, size, dtype=dtype, seed=5), made(rows, size, seed=6)]

    def truth(log_a, x, state):
        if lengths is None:
            return oracle.vector_state(log_a, x, state)
        parts = zip(log_a.split(lengths, 1), x.split(lengths, 1), state.split(1), strict=True)
        outs, lasts = zip(*(oracle.vector_state(*part) if part[1].numel() else part[1:] for part in parts), strict=True)
        return torch.cat(outs, 1), torch.cat(lasts)

    want = with_gradients(truth, [each.double() for each in tensors], cotangents)
    segments = None if lengths is None else Segments.from_lengths(lengths)

    def call(log_a, x, state):
        return regard.scan(log_a, x, state=state, segments=segments)

    expected = () if dtype == torch.float64 else ("native",)
    for _, got in on_each_backend(lambda: with_gradients(call, tensors, cotangents), expected=expected):
        equal(got, want, ("out", "state", "grad of log_a", "grad of x", "grad of state"), dtype)


HGRN = ("tokens", "size", "normalizer", "masked", "dtype")


def hgrn_grid(count, seed, tokens, sizes):
    return spread(
        count,
        seed,
        tokens=tokens,
        size=sizes,
        normalizer=NORMALIZERS,
        masked=(0.0, 0.5),
        dtype=(torch.float32, *LOW, torch.float64),
    )


@pytest.mark.parametrize(HGRN, hgrn_grid(24, 17, (*T, 300), (100, 500, 33)))
def test_hgrn(tokens, size, normalizer, masked, dtype):
    check_vector(tokens, size, normalizer, masked, dtype)


@pytest.mark.slow
@pytest.mark.parametrize(HGRN, hgrn_grid(48, 18, T + LONG, (500, 1024, 33)))
def test_more_of_hgrn(tokens, size, normalizer, masked, dtype):
    check_vector(tokens, size, normalizer, masked, dtype)


@pytest.mark.parametrize(
    ("borders", "dtype"), named([(b, d) for b in BORDERS for d in (torch.float32, torch.bfloat16, torch.float64)])
)
def test_packed_hgrn(borders, dtype):
    lengths = [end - start for start, end in itertools.pairwise(borders)]
    check_vector(borders[-1], 100, 1.0, 0.3, dtype, lengths)


def test_linear_attention_divided_by_its_weights():
    """Their `normalize`: q over its product with the sum of the keys so far, the value's row of ones."""
    for tokens in (1, 15, 64, 129):
        q, k = (uniform(2, 2, tokens, 32, seed=n) for n in (0, 1))
        v = made(2, 2, tokens, 32, seed=2)
        out, _ = oracle.matrix_state(q, k, v, scale=1.0)
        want = out / (q * k.cumsum(2)).sum(-1, keepdim=True)
        ones = torch.cat((v, torch.ones_like(v[..., :1])), -1)
        for _, (sums, _) in on_each_backend(lambda a=(q, k, ones): regard.recurrence(*a, Decay(), scale=1.0)):
            assert ratio(sums[..., :-1] / sums[..., -1:], want) < 1e-12
        low = [x.float() for x in (q, k, ones)]
        for _, (sums, _) in on_each_backend(lambda a=low: regard.recurrence(*a, Decay(), scale=1.0)):
            assert ratio(sums[..., :-1] / sums[..., -1:], want) < 1e-5


# ---- the gates ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tokens", "size", "biased"), named([(2, 12, False), (32, 16, True), (64, 32, True)]))
def test_the_gates_of_kda(tokens, size, biased):
    """-exp(A) softplus(g + b) and low sigmoid(exp(A) (g + b)) of numbers up to 40, and HGRN's bounded gate."""
    g = 10 * made(2, tokens, 2, size, seed=1)
    rate, bias = (1 + 15 * uniform(2, 1, seed=2)).log(), made(2, size, seed=3) * biased
    low = -5.0

    def truth(g, rate, bias):
        yes = -rate.exp() * F.softplus(g + bias, threshold=1e9)
        return yes, low * torch.sigmoid(rate.exp() * (g + bias)), torch.log(0.3 + 0.7 * torch.sigmoid(g))

    def ours(g, rate, bias):
        return softplus_decay(g, rate, bias), bounded_decay(g, rate, bias, low), lower_bounded_decay(g, 0.3)

    cotangents = [made(*g.shape, seed=n) for n in (4, 5, 6)]
    want = with_gradients(truth, [g, rate, bias], cotangents)
    for dtype, bound in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        got = with_gradients(ours, [x.to(dtype) for x in (g, rate, bias)], cotangents)
        for one, other in zip(got, want, strict=True):
            assert math.isfinite(ratio(one, other)) and ratio(one, other) < bound
