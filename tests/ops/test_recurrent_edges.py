"""Edges of the recurrent operations: what shares memory; gradients of low-precision arguments that are read often."""

from __future__ import annotations

import pytest
import torch
from native_calls import needs_native

import regard
from regard.catalog import find
from regard.masks import Segments


@pytest.mark.parametrize("backend", ["native", "chunked"])
@pytest.mark.parametrize("lengths", [None, [3, 200, 0, 17, 80]])
def test_gradients_of_bfloat16_parameters_add_up_in_the_compute_dtype(backend: str, lengths: list[int] | None) -> None:
    """One rounding at the end, not one for every block of tokens or group of sequences."""
    torch.manual_seed(0)
    x, dt, B, C = torch.randn(1, 300, 2), torch.rand(1, 300, 2), torch.randn(1, 300, 1), torch.randn(1, 300, 1)
    segments = None if lengths is None else Segments.from_lengths(lengths)
    exact = [-torch.rand(2, 1).bfloat16().double(), torch.randn(2).bfloat16().double()]

    def gradients(parameters: list[torch.Tensor], dtype: torch.dtype, backend: str) -> list[torch.Tensor]:
        leaves = [p.clone().requires_grad_() for p in parameters]
        wide = [t.to(dtype) for t in (x, dt, B, C)]
        y, _ = regard.selective_scan(
            wide[0], wide[1], leaves[0], wide[2], wide[3], leaves[1], segments=segments, backend=backend
        )
        return list(torch.autograd.grad(y.cos().sum(), leaves))

    got = gradients([p.bfloat16() for p in exact], torch.float32, _able(backend))
    want = gradients(exact, torch.float64, "reference")
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g.double(), w, rtol=2**-8, atol=1e-3 * float(w.abs().max()))


@pytest.mark.parametrize("lengths", [[3, 200, 0, 17, 80]])
def test_packed_convolution_adds_its_weights_gradients_once(lengths: list[int]) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(1, 300, 2, dtype=torch.float64), torch.randn(2, 4).bfloat16()
    found = []
    for dtype in (torch.float32, torch.float64):
        leaf = weight.to(torch.bfloat16 if dtype == torch.float32 else dtype).requires_grad_()
        y, _ = regard.short_conv(x.to(dtype), leaf, segments=Segments.from_lengths(lengths))
        found.append(torch.autograd.grad(y.cos().sum(), leaf)[0].double())
    torch.testing.assert_close(*found, rtol=2**-8, atol=1e-3)


@pytest.mark.parametrize("backend", ["native", "chunked", "reference"])
def test_into_may_be_the_state_and_nothing_else(backend: str) -> None:
    torch.manual_seed(0)
    memory = torch.randn(1000)
    q, k, v = (memory[n * 60 : n * 60 + 60].view(1, 2, 5, 6) for n in range(3))
    state = memory[200:272].view(1, 2, 6, 6)
    backend = _able(backend)
    before = memory.clone()
    for name, where in (("state", 236), ("state", 201), ("v", 179), ("q", 0)):
        with pytest.raises(ValueError, match=f"^state_out: it shares memory with {name}"):
            regard.recurrence(
                q,
                k,
                v,
                regard.Decay(),
                state=state,
                state_out=memory[where : where + 72].view_as(state),
                backend=backend,
            )
        assert torch.equal(memory, before)
    out, last = regard.recurrence(q, k, v, regard.Decay(), state=state, backend=backend)
    for where in (272, 200):  # beside the state, and the state itself
        state_out = memory[where : where + 72].view_as(state)
        again, same = regard.recurrence(q, k, v, regard.Decay(), state=state, state_out=state_out, backend=backend)
        assert same is state_out and torch.equal(again, out) and torch.equal(state_out, last)


def _able(backend: str) -> str:
    from regard.backends.native import library

    if backend == "native" and library.REASON is not None:
        pytest.skip(library.REASON)
    return backend


@pytest.mark.parametrize("name", ["gated_deltanet", "mamba", "based", "rglru"])
def test_decoding_with_a_cache_in_one_graph(name: str) -> None:
    layer = find(name).build(16, 4).eval()
    x, keep = torch.randn(2, 9, 16), torch.ones(2, 9, dtype=torch.bool)
    keep[0, :2] = False

    def decode(x: torch.Tensor, keep: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        cache = layer.init_cache(2, 9)
        return layer(x[:, :5], keep=keep[:, :5], cache=cache), layer(x[:, 5:], cache=cache)

    compiled = torch.compile(decode, fullgraph=True, backend="aot_eager")
    for got, want in zip(compiled(x, keep), decode(x, keep), strict=True):
        torch.testing.assert_close(got, want)


# in plain torch a selective scan unrolls its loop, so only the kernels export with a free length
@pytest.mark.parametrize("name", ["gated_deltanet", "gla", pytest.param("mamba", marks=needs_native)])
def test_layers_export_with_a_free_length(name: str) -> None:
    layer = find(name).build(16, 4)  # its parameters want gradients, so states are kept for the backward pass
    length = torch.export.Dim("length", min=2, max=5000)
    program = torch.export.export(layer, (torch.randn(1, 12, 16),), dynamic_shapes=({1: length},))
    for tokens in (2, 70, 300):
        x = torch.randn(1, tokens, 16)
        torch.testing.assert_close(program.module()(x), layer(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("lengths", [[], [0], [0, 0, 0]])
def test_sequences_that_are_all_empty_give_zero_gradients(lengths: list[int]) -> None:
    segments = Segments.from_lengths(lengths)
    q, beta, state = torch.randn(1, 2, 0, 4), torch.rand(1, 2, 0), torch.randn(len(lengths), 2, 4, 4)
    x, steps, taps, hidden = torch.randn(1, 0, 3), torch.rand(1, 0, 3), torch.randn(3, 4), torch.randn(len(lengths), 3)
    A, B, D = -torch.rand(3, 2), torch.randn(1, 0, 2), torch.randn(3)

    def recurrence(q: torch.Tensor, beta: torch.Tensor, decay: torch.Tensor, state: torch.Tensor) -> tuple:
        return regard.recurrence(q, q, q, regard.Delta(beta, decay), state=state, segments=segments)

    cases = [
        (recurrence, (q, beta, torch.tensor([-0.1, -0.2]), state)),
        (lambda a, x, s: regard.scan(a, x, state=s, segments=segments), (-steps, x, hidden)),
        (lambda *t: regard.selective_scan(*t, segments=segments), (x, steps, A, B, B, D)),
        (lambda *t: regard.short_conv(*t, segments=segments), (x, taps, D)),
    ]
    for call, given in cases:
        leaves = [t.clone().requires_grad_() for t in given]
        out, last = call(*leaves)
        assert not out.numel() and last.shape[0] == len(lengths)
        for leaf, gradient in zip(leaves, torch.autograd.grad(out.sum(), leaves), strict=True):
            assert gradient.shape == leaf.shape and not gradient.any()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int64])
def test_segment_ids_of_any_integer_dtype(dtype: torch.dtype) -> None:
    """Differences of ids would wrap around."""
    low, high = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    x = torch.randn(1, 1, 4, 2)
    rising = torch.tensor([[low, low, high, high]], dtype=dtype)
    out, _ = regard.recurrence(x, x, x, regard.Decay(), segments=rising)
    torch.testing.assert_close(out[:, :, 2:], regard.recurrence(*(x[:, :, 2:],) * 3, regard.Decay())[0])
    with pytest.raises(ValueError, match=r"^segments: .* never fall"):
        regard.recurrence(x, x, x, regard.Decay(), segments=rising.flip(1))


def test_segments_with_ids_for_keys_are_refused() -> None:
    x, ids = torch.randn(1, 1, 4, 2), torch.tensor([0, 0, 1, 1])
    with pytest.raises(ValueError, match=r"^segments: a recurrence has no keys"):
        regard.recurrence(x, x, x, regard.Decay(), segments=Segments(ids, ids + 1))


@pytest.mark.parametrize("backend", ["native", "chunked", "reference"])
@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_token_that_is_not_finite_stays_in_its_row_head_and_channel(backend: str, delta: bool, value: float) -> None:
    torch.manual_seed(0)
    q, k, v, beta = (
        torch.randn(2, 2, 70, 9),
        torch.rand(2, 2, 70, 9) / 3,
        torch.randn(2, 2, 70, 20),
        torch.rand(2, 2, 70),
    )
    transition = regard.Delta(beta, -beta) if delta else regard.Decay(-beta)

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return regard.recurrence(q, k, v, transition, backend=_able(backend))[0]

    want = run(q, k, v)
    for name in "qkv":
        given = {"q": q.clone(), "k": k.clone(), "v": v.clone()}
        given[name][0, 1, 40, 3] = value
        got, same = run(**given), torch.ones_like(want, dtype=torch.bool)
        if name == "v":
            same[0, 1, :, 3] = False
        elif name == "q":
            same[0, 1, 40] = False
        else:
            same[0, 1] = False
        assert torch.equal(got[same], want[same]), name


@pytest.mark.parametrize("backend", ["native", "chunked", "reference"])
def test_the_state_after_no_tokens_is_a_copy(backend: str) -> None:
    backend, q, state = _able(backend), torch.randn(1, 2, 0, 4), torch.randn(1, 2, 4, 4)
    _, last = regard.recurrence(q, q, q, regard.Decay(), state=state, backend=backend)
    x, hidden = torch.randn(1, 0, 3), torch.randn(1, 3)
    _, end = regard.scan(x, x, state=hidden, backend=backend)
    for new, old in ((last, state), (end, hidden)):
        assert torch.equal(new, old) and new.data_ptr() != old.data_ptr()


@pytest.mark.parametrize("backend", ["native", "reference"])
@pytest.mark.parametrize("kind", ["scalar", "channel", "delta", "channel delta"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_token_that_is_not_finite_reaches_no_earlier_token_and_no_other_document(
    backend: str, kind: str, value: float
) -> None:
    """Each alone: bits for the tokens before, rounding for the documents behind."""
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 2, 90, 9), torch.rand(2, 2, 90, 9) / 3, torch.randn(2, 2, 90, 20)
    beta, decay = torch.rand(2, 2, 90), -torch.rand(2, 2, 90, 9) if "channel" in kind else -torch.rand(2, 2, 90)
    ids = torch.tensor([0] * 41 + [1] * 3 + [2] * 46).expand(2, -1)

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segments: torch.Tensor | None) -> torch.Tensor:
        transition = regard.Delta(beta, decay) if "delta" in kind else regard.Decay(decay)
        return regard.recurrence(q, k, v, transition, segments=segments, backend=_able(backend))[0]

    for name in "qkv":
        for place in (0, 37, 42):
            given = {"q": q.clone(), "k": k.clone(), "v": v.clone()}
            given[name][0, 1, place, 3] = value
            got, want = run(**given, segments=None), run(q, k, v, None)
            assert torch.equal(got[:, :, :place], want[:, :, :place]), name
            assert not got[0, 1, place].isfinite().all()
            got, want = run(**given, segments=ids), run(q, k, v, ids)
            others = ids[0] != ids[0, place]
            torch.testing.assert_close(got[:, :, others], want[:, :, others])
            assert torch.equal(got[:, :, :place], want[:, :, :place]), name


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_a_step_that_opens_a_segment_reads_nothing_of_a_state_that_is_not_finite(backend: str) -> None:
    q, state = torch.randn(1, 2, 1, 8), torch.full((1, 2, 8, 8), float("nan"))
    transition, ids = regard.Delta(torch.ones(1, 2, 1), -torch.ones(1, 2, 1)), torch.tensor([[0, 1]])
    both = torch.cat([q, q], 2)
    twice = regard.Delta(torch.ones(1, 2, 2), -torch.ones(1, 2, 2))
    out, last = regard.recurrence(both, both, both, twice, state=state, segments=ids, backend=_able(backend))
    want, end = regard.recurrence(q, q, q, transition, backend=_able(backend))
    torch.testing.assert_close(out[:, :, 1:], want)
    torch.testing.assert_close(last, end)


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_scans_carry_nothing_that_is_not_finite_into_the_next_document(backend: str) -> None:
    torch.manual_seed(0)
    x, log_a, ids = torch.randn(1, 12, 20), -torch.rand(1, 12, 20), torch.tensor([[0] * 5 + [1] * 7])
    x[0, 2, 3] = float("nan")
    y, last = regard.scan(log_a, x, segments=ids, backend=_able(backend))
    want, end = regard.scan(log_a[:, 5:], x[:, 5:], backend=_able(backend))
    assert torch.equal(y[:, 5:], want) and torch.equal(last, end)
    dt, A, B = torch.rand(1, 12, 20), -torch.rand(20, 4), torch.randn(1, 12, 4)
    y, last = regard.selective_scan(x, dt, A, B, B, segments=ids, backend=_able(backend))
    want, end = regard.selective_scan(x[:, 5:], dt[:, 5:], A, B[:, 5:], B[:, 5:], backend=_able(backend))
    assert torch.equal(y[:, 5:], want) and torch.equal(last, end)


@pytest.mark.parametrize("backend", ["reference", "chunked", pytest.param("native", marks=needs_native)])
def test_a_log_decay_that_is_not_a_number_shows_in_the_result(backend):
    q, k, v = (torch.randn(1, 2, 40, 3) for _ in range(3))
    decay = -torch.rand(1, 2, 40)
    decay[0, 0, 30] = float("nan")
    with regard.use_backend(backend):
        out, state = regard.recurrence(q, k, v, regard.Decay(decay))
    assert out[0, 0, 30:].isnan().all() and state[0, 0].isnan().all()
    assert out[0, 1].isfinite().all() and state[0, 1].isfinite().all()
    decay[0, 1, 5] = 0.5
    with pytest.raises(ValueError, match=r"^log_decay: expected log-decays <= 0 .*, got 0\.5$"):
        regard.recurrence(q, k, v, regard.Decay(decay))
