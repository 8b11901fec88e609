"""The grids over which mamba_ssm and causal_conv1d are tested, on every backend.

Gu and Dao 2023, arXiv:2312.00752; Dao and Gu 2024, arXiv:2405.21060. The selective scan with its bias, softplus, skip
and gate; the short convolution; the state space with heads and groups; steps that update a state; packed sequences.
Results, last states and all gradients, against loops over the tokens in float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from grids import DTYPES, LOW, made, named, on_each_backend, ratio, spread, uniform, with_gradients
from oracles import tensor_states as oracle
from oracles.recurrences import selective
from torch import Tensor

import regard
from regard.gates import softplus_step
from regard.masks import Segments
from regard.transitions import Decay

ALL = (*DTYPES, torch.float64)
BOUNDS = {torch.float64: 1e-11, torch.float32: 3e-5, torch.bfloat16: 6e-3, torch.float16: 2e-3}
# of gradients: products of three tensors that are rounded between them, summed over all tokens; theirs is 0.03
SUMS = {**BOUNDS, torch.bfloat16: 2e-2, torch.float16: 3e-3}
SHORT = (1, 2, 8, 16, 31, 32, 33, 64, 127, 128, 129, 151, 256)
LONG = (372, 512, 784, 1024, 1134, 2048, 4096)


def wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def compare(
    truth: Callable[..., Sequence[Tensor]],
    call: Callable[..., Sequence[Tensor]],
    given: dict[str, Tensor | None],
    dtype: torch.dtype,
) -> None:
    """Both take the same named tensors; theirs in float64. Results and gradients, then results without gradients."""
    names = [name for name, x in given.items() if x is not None]
    tensors = [x for x in given.values() if x is not None]

    def by_name(function):
        return lambda *x: function(**dict(zip(names, x, strict=True)))

    shapes = [x.shape for x in by_name(call)(*tensors)]
    cotangents = [made(*shape, seed=50 + n).to(dtype) for n, shape in enumerate(shapes)]
    want = with_gradients(by_name(truth), [x.double() for x in tensors], cotangents)
    labels = [*(f"result {n}" for n in range(len(shapes))), *(f"grad of {name}" for name in names)]
    expected = () if dtype == torch.float64 else ("native",)
    for _, got in on_each_backend(lambda: with_gradients(by_name(call), tensors, cotangents), expected=expected):
        assert got[0].dtype == dtype
        for label, one, right in zip(labels, got, want, strict=True):
            bound = (SUMS if label.startswith("grad") else BOUNDS)[dtype]
            assert ratio(one, right) <= bound, (label, ratio(one, right))
    with torch.no_grad():
        for _, got in on_each_backend(lambda: by_name(call)(*tensors), expected=expected):
            for label, one, right in zip(labels, got, want, strict=False):
                assert ratio(one, right) <= BOUNDS[dtype], (label, ratio(one, right))


# ---- the selective scan ------------------------------------------------------------------------------------------


def gated(y: Tensor, z: Tensor | None) -> Tensor:
    return y if z is None else y * F.silu(z)


def scanned(x, delta, A, B, C, D=None, z=None, bias=None, state=None, softplus=True, segments=None):
    """Theirs in the library's words: the step made by its gate, groups of B and C one after the other."""
    step = softplus_step(delta, bias) if softplus else delta if bias is None else delta + bias
    if B.ndim == 3:
        y, last = regard.selective_scan(x, step, A, B, C, D, state=state, segments=segments)
        return gated(y, z), last
    groups, ys, lasts = B.shape[2], [], []
    for n in range(groups):
        own = slice(n * x.shape[2] // groups, (n + 1) * x.shape[2] // groups)
        skip, before = None if D is None else D[own], None if state is None else state[:, own]
        y, last = regard.selective_scan(
            x[..., own], step[..., own], A[own], B[:, :, n], C[:, :, n], skip, state=before, segments=segments
        )
        ys.append(y)
        lasts.append(last)
    return gated(torch.cat(ys, -1), z), torch.cat(lasts, 1)


def scan_truth(B, C, x, delta, A, D=None, z=None, bias=None, state=None, softplus=True):
    groups = 1 if B.ndim == 3 else B.shape[2]
    B, C = (each if each.ndim == 4 else each[:, :, None] for each in (B, C))
    parts = []
    for n in range(groups):
        own = slice(n * x.shape[2] // groups, (n + 1) * x.shape[2] // groups)
        cut = [None if each is None else each[..., own] for each in (D, z, bias)]
        before = None if state is None else state[:, own]
        one = oracle.selective(
            x[..., own], delta[..., own], A[own], B[:, :, n], C[:, :, n], *cut, state=before, softplus=softplus
        )
        parts.append(one)
    ys, lasts = zip(*parts, strict=True)
    return torch.cat(ys, -1), torch.cat(lasts, 1)


def scan_inputs(batch, tokens, width, states, groups, skip, gate, biased, softplus, dtype, stateful=True, rows=None):
    high, shape = wide(dtype), (batch, tokens, width)
    shared = (batch, tokens, states) if groups == 1 else (batch, tokens, groups, states)
    delta = 0.5 * uniform(*shape, seed=2)
    return {
        "x": made(*shape, dtype=dtype, seed=1),
        "delta": (delta - 1.0 if softplus else delta).to(dtype),
        "A": (-0.5 * uniform(width, states, seed=3)).to(high),
        "B": made(*shared, dtype=dtype, seed=4),
        "C": made(*shared, dtype=dtype, seed=5),
        "D": made(width, dtype=high, seed=6) if skip else None,
        "z": made(*shape, dtype=dtype, seed=7) if gate else None,
        "bias": (0.5 * uniform(width, seed=8)).to(high) if biased else None,
        "state": made(rows or batch, width, states, dtype=high, seed=9) if stateful else None,
    }


SCAN = ("tokens", "groups", "skip", "gate", "biased", "softplus", "stateful", "dtype")


def scan_grid(count, seed, tokens):
    both = (False, True)
    return spread(
        count,
        seed,
        tokens=tokens,
        groups=(1, 1, 2),
        skip=both,
        gate=both,
        biased=both,
        softplus=(True, True, False),
        stateful=both,
        dtype=ALL,
    )


def check_scan(tokens, groups, skip, gate, biased, softplus, stateful, dtype, batch=2, width=4, states=8):
    given = scan_inputs(batch, tokens, width, states, groups, skip, gate, biased, softplus, dtype, stateful)
    compare(lambda **x: scan_truth(**x, softplus=softplus), lambda **x: scanned(**x, softplus=softplus), given, dtype)


@pytest.mark.parametrize(SCAN, scan_grid(48, 41, SHORT))
def test_selective_scan(tokens, groups, skip, gate, biased, softplus, stateful, dtype):
    check_scan(tokens, groups, skip, gate, biased, softplus, stateful, dtype)


@pytest.mark.parametrize(("width", "states", "dtype"), named([(33, 16, d) for d in ALL] + [(64, 1, ALL[0])]))
def test_selective_scan_of_other_sizes(width, states, dtype):
    check_scan(100, 1, True, True, True, True, True, dtype, width=width, states=states)


def test_the_loop_over_single_numbers():
    given = scan_inputs(2, 9, 3, 4, 1, True, False, False, False, torch.float64)
    names = ("x", "delta", "A", "B", "C", "D", "state")
    want, last = selective(*(given[name].numpy() for name in names))
    y, end = oracle.selective(*(given[name] for name in names[:-1]), state=given["state"], softplus=False)
    assert ratio(y, torch.from_numpy(want)) < 1e-13 and ratio(end, torch.from_numpy(last)) < 1e-13


@pytest.mark.slow
@pytest.mark.parametrize(SCAN, scan_grid(84, 42, SHORT[2:] + LONG))
def test_more_of_the_selective_scan(tokens, groups, skip, gate, biased, softplus, stateful, dtype):
    check_scan(tokens, groups, skip, gate, biased, softplus, stateful, dtype)


@pytest.mark.parametrize(
    ("lengths", "dtype"), named([(n, d) for n in ((7, 1, 30), (16, 0, 33, 64), (1, 1), (100,)) for d in ALL])
)
def test_packed_selective_scan(lengths, dtype):
    given = scan_inputs(1, sum(lengths), 4, 8, 1, True, True, True, True, dtype, rows=len(lengths))

    def truth(x, delta, A, B, C, D, z, bias, state):
        parts = zip(*(each.split(lengths, 1) for each in (x, delta, B, C, z)), state.split(1), strict=True)
        done = [
            oracle.selective(x, delta, A, B, C, D, z, bias, before) if x.shape[1] else (x, before)
            for x, delta, B, C, z, before in parts
        ]
        return torch.cat([y for y, _ in done], 1), torch.cat([last for _, last in done])

    segments = Segments.from_lengths(lengths)
    compare(truth, lambda **x: scanned(**x, segments=segments), given, dtype)


@pytest.mark.parametrize(("variable", "dtype"), named([("whole block", d) for d in ALL]))
def test_the_inner_block(variable, dtype):
    """Convolution, projections, scan, gate and output, as one function of theirs does it."""
    width, states, rank, tokens, high = 32, 8, 4, 100, wide(dtype)
    given = {
        "x": made(2, tokens, width, dtype=dtype, seed=1),
        "z": made(2, tokens, width, dtype=dtype, seed=2),
        "taps": made(width, 3, dtype=high, seed=3),
        "added": made(width, dtype=high, seed=4),
        "x_proj": (made(rank + 2 * states, width, seed=5) / 6).to(high),
        "dt_proj": (made(width, rank, seed=6) / 2).to(high),
        "out_proj": (made(width // 2, width, seed=7) / 6).to(high),
        "A": (-0.5 * uniform(width, states, seed=8)).to(high),
        "D": made(width, dtype=high, seed=9),
        "bias": (0.5 * uniform(width, seed=10)).to(high),
    }

    def inner(conv, scan, x, z, taps, added, x_proj, dt_proj, out_proj, A, D, bias):
        u = conv(x, taps, added)
        step, B, C = (u.to(x_proj.dtype) @ x_proj.T).split([rank, states, states], -1)
        y, _ = scan(x=u, delta=step @ dt_proj.T, A=A, B=B, C=C, D=D, z=z, bias=bias)
        return ((y.to(out_proj.dtype) @ out_proj.T).to(x.dtype),)

    def theirs(x, taps, added):
        return oracle.convolved(x, taps, added, silu=True)[0]

    def ours(x, taps, added):
        return F.silu(regard.short_conv(x, taps, added)[0])

    compare(lambda **x: inner(theirs, scan_truth, **x), lambda **x: inner(ours, scanned, **x), given, dtype)


# ---- the short convolution ---------------------------------------------------------------------------------------


CONV = ("tokens", "width", "biased", "silu", "channel_last", "stateful", "dtype")


def conv_grid(count, seed, tokens):
    both = (False, True)
    return spread(
        count,
        seed,
        tokens=tokens,
        width=(2, 3, 4),
        biased=both,
        silu=both,
        channel_last=both,
        stateful=both,
        dtype=ALL,
    )


def check_conv(tokens, width, biased, silu, channel_last, stateful, dtype, channels=64):
    """On views into wider tensors, as theirs: the tokens or the channels are next to each other in memory."""
    high, more = wide(dtype), 40
    x = made(2, tokens, more + channels + 24, dtype=dtype, seed=1)[:, :, more : more + channels]
    x = x if channel_last else made(2, more + channels, tokens, dtype=dtype, seed=1)[:, more:].transpose(1, 2)
    given = {
        "x": x,
        "weight": made(channels, width, dtype=high, seed=2),
        "bias": made(channels, dtype=high, seed=3) if biased else None,
        "state": made(2, width - 1, channels, dtype=dtype, seed=4) if stateful else None,
    }

    def call(x, weight, bias=None, state=None):
        y, tail = regard.short_conv(x, weight, bias, state=state)
        return (F.silu(y) if silu else y), tail

    compare(lambda **x: oracle.convolved(**x, silu=silu), call, given, dtype)


@pytest.mark.parametrize(CONV, conv_grid(48, 43, SHORT))
def test_short_convolution(tokens, width, biased, silu, channel_last, stateful, dtype):
    check_conv(tokens, width, biased, silu, channel_last, stateful, dtype)


@pytest.mark.slow
@pytest.mark.parametrize(CONV, conv_grid(72, 44, SHORT + LONG))
@pytest.mark.parametrize("channels", [64, 1056])
def test_more_short_convolutions(channels, tokens, width, biased, silu, channel_last, stateful, dtype):
    check_conv(tokens, width, biased, silu, channel_last, stateful, dtype, channels)


def ids_of(batch: int, tokens: int, most: int, seed: int) -> Tensor:
    """Ids that never fall: where a row's next sequence starts is drawn."""
    borders = (uniform(batch, most, seed=seed) * tokens).long()
    return (torch.arange(tokens)[None, :, None] >= borders[:, None, :]).sum(-1)


@pytest.mark.parametrize(
    ("tokens", "width", "biased", "silu", "dtype"),
    spread(
        30,
        45,
        tokens=(1, 8, 33, 64, 128, 151, 256, 372),
        width=(2, 3, 4),
        biased=(False, True),
        silu=(False, True),
        dtype=ALL,
    ),
)
def test_convolution_of_ids(tokens, width, biased, silu, dtype):
    high = wide(dtype)
    ids = ids_of(2, tokens, 7, tokens)
    given = {
        "x": made(2, tokens, 64, dtype=dtype, seed=1),
        "weight": made(64, width, dtype=high, seed=2),
        "bias": made(64, dtype=high, seed=3) if biased else None,
        "state": made(2, width - 1, 64, dtype=dtype, seed=4),
    }

    def call(x, weight, bias=None, state=None):
        y, _ = regard.short_conv(x, weight, bias, state=state, segments=ids)
        return (F.silu(y) if silu else y,)

    compare(lambda **x: oracle.convolved(**x, ids=ids, silu=silu)[:1], call, given, dtype)


@pytest.mark.parametrize(
    ("tokens", "width", "biased", "silu", "dtype"),
    spread(18, 46, tokens=(1, 4, 5), width=(2, 3, 4), biased=(False, True), silu=(False, True), dtype=DTYPES),
)
def test_steps_of_the_convolution(tokens, width, biased, silu, dtype):
    """A state of more inputs than are read, as theirs may be; what is kept is exactly what came."""
    channels, longer = 2064, 10
    x = made(8, channels, tokens, dtype=dtype, seed=1).transpose(1, 2)
    kept = made(8, longer, channels, dtype=dtype, seed=2)
    weight, bias = made(channels, width, dtype=torch.float32, seed=3), made(channels, dtype=torch.float32, seed=4)
    bias = bias if biased else None
    state = kept[:, longer - (width - 1) :]
    wide_ones = [None if each is None else each.double() for each in (x, weight, bias, state)]
    want, _ = oracle.convolved(*wide_ones, silu=silu)
    with torch.no_grad():
        for _, (y, tail) in on_each_backend(lambda: regard.short_conv(x, weight, bias, state=state)):
            assert ratio(F.silu(y) if silu else y, want) <= BOUNDS[dtype]
            assert torch.equal(tail, torch.cat((kept, x), 1)[:, longer + tokens - (width - 1) :].float())


@pytest.mark.parametrize(("width", "dtype"), named([(w, d) for w in (2, 4) for d in DTYPES]))
def test_last_inputs_of_packed_sequences(width, dtype):
    lengths = (1 + uniform(40, seed=width) * 31).long().tolist()
    x = made(1, sum(lengths), 64, dtype=dtype)
    weight, first = made(64, width, dtype=torch.float32, seed=1), made(len(lengths), width - 1, 64, dtype=dtype, seed=2)
    for state in (None, first):
        _, tails = regard.short_conv(x, weight, state=state, segments=Segments.from_lengths(lengths))
        for n, part in enumerate(x.split(lengths, 1)):
            before = torch.zeros_like(first[:1]) if state is None else state[n : n + 1]
            assert torch.equal(tails[n : n + 1], torch.cat((before, part), 1)[:, -(width - 1) :].float())


# ---- the state space with heads ----------------------------------------------------------------------------------


def space(x, dt, A, B, C, D=None, z=None, bias=None, state=None, limits=(0.0, math.inf), segments=None):
    """Theirs in the library's words: q = C, k = B, v = dt x, a decay of dt A, no scale; states (B, H, N, P)."""
    step = softplus_step(dt, bias, limits)
    heads = [each.transpose(1, 2) for each in (C, B, step[..., None].to(x.dtype) * x)]
    before = None if state is None else state.transpose(2, 3)
    decay = Decay((step * A.to(step.dtype)).transpose(1, 2))
    y, last = regard.recurrence(*heads, decay, state=before, scale=1.0, segments=segments)
    y = y.transpose(1, 2)
    y = y if D is None else y + (D[:, None] * x).to(y.dtype)
    return gated(y, z), last.transpose(2, 3)


def space_inputs(batch, tokens, heads, size, states, groups, skip, gate, stateful, dtype, rows=None):
    high, shape = wide(dtype), (batch, tokens, heads, size)
    return {
        "x": made(*shape, dtype=dtype, seed=1),
        "dt": (made(batch, tokens, heads, seed=2) - 2.0).to(high),
        "A": (-0.1 - 3.0 * uniform(heads, seed=3)).to(high),
        "B": (made(batch, tokens, groups, states, seed=4) / 5).to(dtype),
        "C": made(batch, tokens, groups, states, dtype=dtype, seed=5),
        "D": made(heads, dtype=high, seed=6) if skip else None,
        "z": made(*shape, dtype=dtype, seed=7) if gate else None,
        "bias": (uniform(heads, seed=8) - 1.0).to(high),
        "state": made(rows or batch, heads, size, states, dtype=high, seed=9) if stateful else None,
    }


SSD = ("tokens", "groups", "size", "states", "skip", "gate", "stateful", "limits", "dtype")
LIMITS = ((0.0, math.inf), (0.0, math.inf), (0.001, 0.1), (0.05, 0.05))
EDGES = (1, 2, 31, 32, 33, 63, 64, 65, 100, 127, 128, 129, 255, 257)


def space_grid(count, seed, tokens, sizes=(16, 24, 64), states=(16, 32, 40)):
    both = (False, True)
    return spread(
        count,
        seed,
        tokens=tokens,
        groups=(1, 2, 4),
        size=sizes,
        states=states,
        skip=both,
        gate=both,
        stateful=both,
        limits=LIMITS,
        dtype=ALL,
    )


def check_space(tokens, groups, size, states, skip, gate, stateful, limits, dtype):
    given = space_inputs(1, tokens, 4, size, states, groups, skip, gate, stateful, dtype)
    compare(lambda **x: oracle.space_state(**x, limits=limits), lambda **x: space(**x, limits=limits), given, dtype)


@pytest.mark.parametrize(SSD, space_grid(56, 47, EDGES))
def test_state_space_with_heads(tokens, groups, size, states, skip, gate, stateful, limits, dtype):
    check_space(tokens, groups, size, states, skip, gate, stateful, limits, dtype)


@pytest.mark.slow
@pytest.mark.parametrize(SSD, space_grid(72, 48, (*EDGES, *LONG[:5]), (32, 64, 128), (32, 64, 128)))
def test_more_of_the_state_space(tokens, groups, size, states, skip, gate, stateful, limits, dtype):
    check_space(tokens, groups, size, states, skip, gate, stateful, limits, dtype)


def check_packed_space(lengths, groups, dtype, size=16, states=16):
    given = space_inputs(1, sum(lengths), 4, size, states, groups, True, True, True, dtype, len(lengths))

    def truth(A, D, bias, state, **timed):
        cuts = zip(*(x.split(lengths, 1) for x in timed.values()), strict=True)
        parts = [dict(zip(timed, each, strict=True)) for each in cuts]
        done = [
            oracle.space_state(**part, A=A, D=D, bias=bias, state=before) if part["x"].shape[1] else (part["x"], before)
            for part, before in zip(parts, state.split(1), strict=True)
        ]
        return torch.cat([y for y, _ in done], 1), torch.cat([last for _, last in done])

    segments = Segments.from_lengths(lengths)
    compare(truth, lambda **x: space(**x, segments=segments), given, dtype)


@pytest.mark.parametrize(
    ("lengths", "groups", "dtype"),
    named(
        [
            (n, g, d)
            for n, g in (((201, 56, 5), 1), ((64, 64, 1, 127), 2), ((1, 0, 33), 4), ((40, 17, 31, 2, 60, 9), 1))
            for d in ALL
        ]
    ),
)
def test_packed_state_space(lengths, groups, dtype):
    check_packed_space(lengths, groups, dtype)


@pytest.mark.slow
@pytest.mark.parametrize(("groups", "dtype"), named([(g, d) for g in (1, 2, 4) for d in ALL]))
def test_many_packed_sequences(groups, dtype):
    lengths = (1 + uniform(100, seed=groups) * 199).long().tolist()
    check_packed_space(lengths, groups, dtype, 32, 32)


@pytest.mark.parametrize(("tokens", "groups", "dtype"), named([(t, g, d) for t, g in ((65, 1), (130, 2)) for d in ALL]))
def test_state_space_of_ids(tokens, groups, dtype):
    """Sequences in one row, told apart by ids: the state before the row enters the first, the last one's comes out."""
    given = space_inputs(1, tokens, 4, 16, 16, groups, True, False, True, dtype)
    ids = ids_of(1, tokens, 4, tokens)
    lengths = torch.unique_consecutive(ids[0], return_counts=True)[1].tolist()

    def truth(A, D, bias, state, **timed):
        ys, last = [], state
        for each in zip(*(x.split(lengths, 1) for x in timed.values()), strict=True):
            part = dict(zip(timed, each, strict=True))
            y, last = oracle.space_state(**part, A=A, D=D, bias=bias, state=None if ys else state)
            ys.append(y)
        return torch.cat(ys, 1), last

    compare(truth, lambda **x: space(**x, segments=ids), given, dtype)


# ---- steps that update a state -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("states", "gate", "width", "dtype"),
    spread(12, 49, states=(16, 32, 64), gate=(False, True), width=(256, 272, 512), dtype=DTYPES),
)
def test_steps_of_the_selective_scan(states, gate, width, dtype):
    """A token after the other: each new state is what the next begins with."""
    given = scan_inputs(2, 3, width, states, 1, True, gate, True, True, dtype)
    given["A"] = -uniform(width, states, dtype=torch.float32, seed=1) - 1.0
    want, end = oracle.selective(**{name: None if x is None else x.double() for name, x in given.items()})
    timed = {name: given.pop(name) for name in ("x", "delta", "B", "C", "z")}

    def run():
        state, ys = given["state"], []
        for t in range(3):
            now = {name: None if x is None else x[:, t : t + 1] for name, x in timed.items()}
            y, state = scanned(**now, **{**given, "state": state})
            ys.append(y)
        return torch.cat(ys, 1), state

    with torch.no_grad():
        for _, (y, state) in on_each_backend(run, expected=("native",)):
            assert ratio(y, want) <= BOUNDS[dtype] and ratio(state, end) <= 1e-5


@pytest.mark.parametrize(
    ("states", "groups", "gate", "dtype"),
    spread(18, 50, states=(16, 32, 64), groups=(1, 2, 4), gate=(False, True), dtype=DTYPES),
)
def test_steps_of_the_state_space(states, groups, gate, dtype):
    """In place, as theirs: the state's own memory holds the new one."""
    given = space_inputs(2, 3, 4, 64, states, groups, True, gate, True, dtype)
    want, end = oracle.space_state(**{name: None if x is None else x.double() for name, x in given.items()})
    x, step = given["x"], softplus_step(given["dt"], given["bias"])
    q, k, v = (each.transpose(1, 2) for each in (given["C"], given["B"], step[..., None].to(dtype) * x))
    decay = (step * given["A"]).transpose(1, 2)

    def run():
        state, ys = given["state"].transpose(2, 3).contiguous(), []
        for t in range(3):
            now = [each[:, :, t : t + 1] for each in (q, k, v)]
            y, new = regard.recurrence(*now, Decay(decay[:, :, t : t + 1]), state=state, scale=1.0, state_out=state)
            assert new is state
            ys.append(y)
        y = torch.cat(ys, 2).transpose(1, 2) + (given["D"][:, None] * x).to(dtype)
        return gated(y, given["z"]), state.transpose(2, 3)

    with torch.no_grad():
        for _, (y, state) in on_each_backend(run, expected=("native",)):
            assert ratio(y, want) <= BOUNDS[dtype]
            assert ratio(state, end) <= (1e-5 if dtype not in LOW else BOUNDS[dtype])
