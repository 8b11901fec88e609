"""The grid over which flash-attention is tested, and its rule: no more than twice the error of plain torch.

Dao 2023, arXiv:2307.08691. Heads, windows, softcaps, slopes, sizes of heads, pairs of lengths, dtypes; outputs, the
log-sum-exp and all gradients, against the formula in float64 on the same rounded numbers.
"""

from __future__ import annotations

import pytest
import torch
from grids import DTYPES, LOW, made, named, on_each_backend, spread, uniform, with_gradients
from oracles import tensor_attention as oracle
from torch import Tensor

import regard
from regard.biases import Alibi
from regard.masks import Band, Causal, KeyLengths, Mask, Segments

HEADS = {"mha": (4, 4), "mqa": (4, 1), "gqa": (4, 2), "gqa of 3": (6, 2)}
LOOKS = ("full", "causal", "local", "causal and local")
SIZES = (32, 40, 59, 64, 80, 96, 111, 128, 160, 192, 256)
SHORT = (
    (113, 203),
    (128, 217),
    (113, 211),
    (108, 256),
    (1, 147),
    (3, 256),
    (64, 128),
    (128, 128),
    (97, 97),
    (200, 113),
)
LONG = (
    (256, 512),
    (512, 256),
    (1024, 1024),
    (1023, 1024),
    (1024, 1023),
    (3, 1024),
    (64, 800),
    (1, 3131),
    (16, 2000),
    (799, 3),
    (2048, 2048),
    (384, 256),
)


def spans(look: str, keys: int, seed: int) -> tuple[bool, tuple[int | None, int | None]]:
    """(causal, window) with both of the window's sides drawn, as theirs are."""
    left, right = (int(side) for side in (uniform(2, seed=seed) * keys))
    return "causal" in look, (left, right) if "local" in look else (None, None)


def mask_of(causal: bool, window: tuple[int | None, int | None]) -> Mask | None:
    if window == (None, None):
        return Causal() if causal else None
    band = Band(*window)
    return band & Causal() if causal else band


def within(got: Tensor, want: Tensor, plain: Tensor, dtype: torch.dtype, times: float) -> None:
    """No further from the value than `times` what plain torch is, and a rounding of the largest entry.

    Theirs are half precisions alone; in float32 a score of 50 is known to 4e-6, so what it weighs is, too. Gradients
    that are 0 because there is but one key are differences, known to 1e-5.
    """
    assert torch.isfinite(got).all()
    bound = times * float((plain.double() - want).abs().max()) if plain.numel() else 0.0
    size = float(want.abs().max()) if want.numel() else 0.0
    bound += size * (torch.finfo(dtype).eps if dtype in LOW else 2e-5) + 1e-5
    error = float((got.double() - want).abs().max()) if got.numel() else 0.0
    assert error <= bound, (error, bound, size)


def finite(x: Tensor) -> Tensor:
    return torch.where(x == -torch.inf, 0.0, x)


def check(q, k, v, oracle_options, options, bias_tensors=(), names=None, expected=("native",), backward=True):
    """One call on every backend: forward alone, then the log-sum-exp and all gradients."""
    dtype, tensors, given = q.dtype, (q, k, v), oracle_options
    weight = made(*q.shape[:3], v.shape[3], dtype=dtype, seed=3)
    wide = [x.double() for x in tensors]

    def truth(*x):
        return oracle.attention(*x, **given)

    want = with_gradients(truth, wide, [weight])
    plain = with_gradients(lambda *x: truth(*x)[:1], tensors, [weight])
    with torch.no_grad():
        for _, out in on_each_backend(lambda: regard.attention(q, k, v, **options), names=names, expected=expected):
            assert out.dtype == dtype
            within(out, want[0], plain[0], dtype, 2)
    if not backward:
        return

    def run():
        return with_gradients(lambda *x: regard.attention(*x, return_lse=True, **options), tensors, [weight])

    for _, (out, lse, *grads) in on_each_backend(run, expected=expected):
        within(out, want[0], plain[0], dtype, 2)
        assert torch.equal(lse == -torch.inf, want[1] == -torch.inf)
        torch.testing.assert_close(finite(lse).double(), finite(want[1]), rtol=1e-5, atol=1e-5)
        for got, right, near in zip(grads, want[2:], plain[1:], strict=True):
            assert got.dtype == dtype
            within(got, right, near, dtype, 3)


def drawn(heads, look, softcap, alibi, size, pair, dtype, seed):
    """(q, k, v, the oracle's options, ours) of one point of the grid."""
    (rows, columns), (q_heads, kv_heads) = pair, HEADS[heads]
    batch = 2 if rows * columns <= 2**16 else 1
    q = made(batch, q_heads, rows, size, seed=seed)
    q = (q * softcap / 4 if softcap else q).to(dtype)  # so that the scores reach the cap
    k, v = (made(batch, kv_heads, columns, size, dtype=dtype, seed=seed + n) for n in (1, 2))
    causal, window = spans(look, columns, seed)
    slopes = 0.3 * uniform(q_heads, dtype=torch.float32, seed=seed) if alibi else None
    theirs = {"causal": causal, "window": window, "softcap": softcap, "slopes": slopes}
    bias = None if slopes is None else Alibi(slopes, symmetric=True)
    ours = {"mask": mask_of(causal, window), "bias": bias, "softcap": softcap or None}
    return q, k, v, theirs, ours


def grid(count, seed, pairs, sizes=SIZES):
    return spread(
        count,
        seed,
        heads=tuple(HEADS),
        look=LOOKS,
        softcap=(0.0, 0.0, 50.0, 15.0),
        alibi=(False, True),
        size=sizes,
        pair=pairs,
        dtype=DTYPES,
    )


NAMES = ("heads", "look", "softcap", "alibi", "size", "pair", "dtype")


@pytest.mark.parametrize(NAMES, grid(66, 1, SHORT))
def test_short_sequences(heads, look, softcap, alibi, size, pair, dtype):
    q, k, v, theirs, ours = drawn(heads, look, softcap, alibi, size, pair, dtype, size)
    check(q, k, v, theirs, ours)


@pytest.mark.parametrize(NAMES, grid(12, 2, LONG[:-2], (32, 59, 64)))
def test_long_sequences(heads, look, softcap, alibi, size, pair, dtype):
    q, k, v, theirs, ours = drawn(heads, look, softcap, alibi, size, pair, dtype, size)
    check(q, k, v, theirs, ours)


@pytest.mark.slow
@pytest.mark.parametrize(NAMES, grid(264, 3, SHORT + LONG[:-2]) + grid(24, 4, LONG))
def test_more_of_the_grid(heads, look, softcap, alibi, size, pair, dtype):
    q, k, v, theirs, ours = drawn(heads, look, softcap, alibi, size, pair, dtype, size + 7)
    check(q, k, v, theirs, ours)


@pytest.mark.slow
@pytest.mark.parametrize(NAMES, grid(12, 5, ((113, 203), (128, 217), (64, 800)), (40, 64, 111)))
def test_the_compiled_backend(heads, look, softcap, alibi, size, pair, dtype):
    q, k, v, theirs, ours = drawn(heads, look, softcap, alibi, size, pair, dtype, size)
    check(q, k, v, theirs, ours, names=("flex",), expected=("flex",), backward=False)


# ---- lengths of their own in every row ---------------------------------------------------------------------------


def lengths_of(mode: str, most: int, count: int, seed: int) -> Tensor:
    share = uniform(count, seed=seed)
    low = {"full": most, "random": max(0, most - 20), "third": most // 3, "with empty": 0}[mode]
    lengths = (low + share * (most + 1 - low)).long().clamp_max(most)
    if mode == "with empty":
        lengths[1] = 0
    return lengths


def packed(x: Tensor, lengths: Tensor) -> Tensor:
    """(B, H, T, D) as (1, H, the real tokens of all rows, D)."""
    return torch.cat([row[:, : int(n)] for row, n in zip(x, lengths, strict=True)], 1)[None]


VARLEN = ("heads", "look", "softcap", "size", "pair", "modes", "dtype")
MODES = (("random", "random"), ("third", "third"), ("full", "third"), ("with empty", "third"), ("third", "with empty"))


def varlen_grid(count, seed, pairs):
    return spread(
        count,
        seed,
        heads=("mha", "mqa", "gqa"),
        look=LOOKS,
        softcap=(0.0, 50.0),
        size=(32, 59, 80, 111, 128),
        pair=pairs,
        modes=MODES,
        dtype=DTYPES,
    )


def check_varlen(heads, look, softcap, size, pair, modes, dtype):
    """Packed in one row and padded at the end: both give each row what it gives alone."""
    (rows, columns), (q_heads, kv_heads), batch = pair, HEADS[heads], 3
    q = made(batch, q_heads, rows, size, dtype=dtype)
    k, v = (made(batch, kv_heads, columns, size, dtype=dtype, seed=n) for n in (1, 2))
    q_lengths, k_lengths = lengths_of(modes[0], rows, batch, rows), lengths_of(modes[1], columns, batch, columns)
    causal, window = spans(look, columns, size)
    theirs = {"causal": causal, "window": window, "softcap": softcap, "q_lengths": q_lengths, "k_lengths": k_lengths}
    weight = made(batch, q_heads, rows, size, dtype=dtype, seed=3)
    want = with_gradients(lambda *x: oracle.attention(*x, **theirs), [x.double() for x in (q, k, v)], [weight])
    plain = with_gradients(lambda *x: oracle.attention(*x, **theirs)[:1], (q, k, v), [weight])
    real = [q_lengths, q_lengths, k_lengths, k_lengths]
    right, near = ([packed(x, n) for x, n in zip(each, real, strict=True)] for each in (want[:1] + want[2:], plain))

    mask, cap = mask_of(causal, window), softcap or None
    segments = Segments.from_lengths(q_lengths.tolist(), k_lengths.tolist())
    inside = segments if mask is None else mask & segments
    rows_of = [packed(x, n) for x, n in zip((q, k, v), real[1:], strict=True)]

    def run_packed():
        return with_gradients(
            lambda *x: [regard.attention(*x, mask=inside, softcap=cap)], rows_of, [packed(weight, q_lengths)]
        )

    long = KeyLengths(k_lengths)
    padded = long if mask is None else mask & long
    start = k_lengths - q_lengths
    real_weight = weight * (torch.arange(rows) < q_lengths[:, None])[:, None, :, None]

    def run_padded():
        got = with_gradients(
            lambda *x: [regard.attention(*x, mask=padded, softcap=cap, q_start=start)], (q, k, v), [real_weight]
        )
        return [packed(x, n) for x, n in zip(got, real, strict=True)]

    for run in (run_packed, run_padded):
        for _, got in on_each_backend(run, expected=("native",)):
            for n, triple in enumerate(zip(got, right, near, strict=True)):
                within(*triple, dtype, 3 if n else 2)


@pytest.mark.parametrize(VARLEN, varlen_grid(30, 6, SHORT))
def test_packed_and_padded_rows(heads, look, softcap, size, pair, modes, dtype):
    check_varlen(heads, look, softcap, size, pair, modes, dtype)


@pytest.mark.slow
@pytest.mark.parametrize(VARLEN, varlen_grid(60, 7, SHORT + LONG[:-2]))
def test_more_packed_and_padded_rows(heads, look, softcap, size, pair, modes, dtype):
    check_varlen(heads, look, softcap, size, pair, modes, dtype)


# ---- what is left of float64 -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("heads", "look"), named([(h, l) for h in ("mha", "gqa of 3") for l in LOOKS]))
def test_float64_is_exact(heads, look):
    q, k, v, theirs, ours = drawn(heads, look, 15.0, True, 59, (113, 203), torch.float64, 5)
    theirs["slopes"] = theirs["slopes"].double()
    ours["bias"] = Alibi(theirs["slopes"], symmetric=True)
    weight = made(*q.shape, seed=3)
    want = with_gradients(lambda *x: oracle.attention(*x, **theirs), (q, k, v), [weight])

    def run():
        return with_gradients(lambda *x: regard.attention(*x, return_lse=True, **ours), (q, k, v), [weight])

    for _, got in on_each_backend(run):
        for one, other in zip(got, want, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)
