"""Failures that users of linear-attention implementations reported, and the recurrent sides of others."""

import math
from functools import partial

import pytest
import torch
from recipes import WIDE, close, drawn, leaves, made, step_by_step

import regard
from regard import Decay, Delta
from regard.catalog import RECORDS

BACKENDS = ["reference", "chunked"]
LAYERS = {record.name: record for record in RECORDS if record.kind == "recurrent" and record.cached}
KINDS = ("constant", "scalar", "channel", "delta", "delta scalar", "delta channel")


def built(name, dtype=WIDE):
    return drawn(LAYERS[name].build(16, 4), dtype)


def transition(kind, beta, scalar, channel):
    """The transition of a kind, from tensors (B, H, T), (B, H, T), (B, H, T, Dk)."""
    constant = scalar.mean((0, 2)) if scalar.numel() else scalar.sum((0, 2))
    decay = {"constant": constant, "scalar": scalar, "channel": channel}.get(kind.split()[-1])
    return Delta(beta, decay) if kind.startswith("delta") else Decay(decay)


def drawn_call(kind, tokens, batch=2, heads=2, dim=4, dtype=WIDE):
    """q, k, v, a state and a transition, as leaves."""
    q, k, v = (made(batch, heads, tokens, dim, seed=n) for n in (1, 2, 3))
    k = k / k.norm(dim=-1, keepdim=True)
    beta, scalar = torch.sigmoid(made(batch, heads, tokens, seed=4)), -made(batch, heads, tokens, seed=5).abs()
    channel, state = -made(batch, heads, tokens, dim, seed=6).abs(), made(batch, heads, dim, dim, seed=7)
    own = leaves(*(x.to(dtype) for x in (q, k, v, state, beta, scalar, channel)))
    return *own[:4], transition(kind, *own[4:]), own


def ones(tokens, dtype=WIDE, batch=1):
    return torch.ones(batch, 1, tokens, 1, dtype=dtype)


# ---- shapes, lengths, dtypes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
def test_H10_no_tokens_or_no_rows(kind, backend):
    for batch, tokens in ((2, 0), (0, 3), (0, 0)):
        q, k, v, state, given, own = drawn_call(kind, tokens, batch)
        out, last = regard.recurrence(q, k, v, given, state=state, backend=backend)
        assert out.shape == v.shape and last.shape == state.shape
        assert tokens or torch.equal(last, state)
        used = [x for x in (*own[:4], given.beta, given.log_decay) if x is not None]
        for grad, x in zip(torch.autograd.grad(out.sum() + 0 * last.sum(), used), used, strict=True):
            assert grad.shape == x.shape and bool((grad == 0).all())
        last = regard.recurrence(q, k, v, given, backend=backend)[1]
        assert bool((last == 0).all())


@pytest.mark.parametrize("backend", BACKENDS)
def test_H12_the_raw_product_overflows_half_precision(backend):
    q, k, v = leaves(*(torch.full((1, 1, 2, 64), 64.0, dtype=torch.float16),) * 2, torch.zeros(1, 1, 2, 1).half())
    with torch.no_grad():
        v[..., 1, :] = 1.0
    out, _ = regard.recurrence(q, k, v, Decay(), backend=backend)  # q . k is 262144, times 1/8 it fits
    assert out.flatten().tolist() == [0.0, 32768.0]
    for grad in torch.autograd.grad(out[..., -1, :].sum(), (q, k, v)):
        assert grad.isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
def test_H13_the_tail_of_a_very_long_row(kind):
    length = 65537
    q, k, v = leaves(ones(length), ones(length), torch.zeros(1, 1, length, 1, dtype=WIDE))
    with torch.no_grad():
        v[..., -1, :] = 3.0
    decay = torch.full((1, 1, length), -math.log(2.0), dtype=WIDE)
    given = transition(kind, torch.ones(1, 1, length, dtype=WIDE), decay, decay[..., None])
    out, state = regard.recurrence(q, k, v, given, scale=1.0)
    assert out[..., -1, :].item() == state.item() == 3.0
    assert torch.autograd.grad(out[..., -1, :].sum(), v)[0][..., -1, :].item() == 1.0


# ---- packing, batches, caches ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
def test_H23_packed_documents_do_not_leak(kind, backend):
    lengths, starts = (3, 4, 2), (0, 3, 7)
    ids = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))[None].expand(2, -1)
    q, k, v, _, given, own = drawn_call(kind, 9)
    out, _ = regard.recurrence(q, k, v, given, segments=ids, backend=backend)
    for start, length in zip(starts, lengths, strict=True):
        own_piece = slice(start, start + length)
        beta, decay = given.beta, given.log_decay
        decay = decay if decay is None or decay.ndim == 1 else decay[:, :, own_piece]
        piece = Decay(decay) if beta is None else Delta(beta[:, :, own_piece], decay)
        alone, _ = regard.recurrence(*(x[:, :, own_piece] for x in (q, k, v)), piece, backend=backend)
        close(out[:, :, own_piece], alone)
    other = [torch.cat((50 * torch.ones_like(x[:, :, :3]), x[:, :, 3:]), 2) for x in (q, k, v)]
    changed, _ = regard.recurrence(*other, given, segments=ids, backend=backend)
    assert torch.equal(changed[:, :, 3:], out[:, :, 3:])
    for grad in torch.autograd.grad(out[:, :, 7:].sum(), own[:3]):
        assert bool((grad[:, :, :7] == 0).all()) and bool((grad[:, :, 7:] != 0).any())


@pytest.mark.parametrize("name", LAYERS)
def test_H27_several_tokens_into_a_filled_cache(name):
    layer, x = built(name), made(2, 20, 16)
    keep = torch.ones(2, 20, dtype=torch.bool)
    keep[1, :3] = False
    once = layer.init_cache(2, 20)
    whole, padded = layer(x, cache=once), layer(x, keep=keep)
    close(whole, layer(x))
    for splits in ([20], [7, 13], [1] * 20, [5, 1, 14], [2, 2, 16]):
        close(step_by_step(layer, x, splits), whole)
        close(step_by_step(layer, x, splits, keep=keep)[keep], padded[keep])
        cache = layer.init_cache(2, 20)
        for piece in x.split(splits, 1):
            layer(piece, cache=cache)
        for one, state in cache.states.items():
            close(state, once.states[one])


@pytest.mark.parametrize("name", LAYERS)
def test_H31_reordered_beams(name):
    layer, order = built(name), [2, 0, 0]
    x, keep = made(3, 8, 16), torch.arange(8)[None] >= torch.tensor([[0], [2], [3]])
    cache = layer.init_cache(3, 12)
    layer(x, keep=keep, cache=cache)
    cache.reorder(torch.tensor(order))
    step, after = made(3, 1, 16, seed=5), made(3, 2, 16, seed=6)
    out = torch.cat([layer(step, cache=cache), layer(after, cache=cache)], 1)
    for row, old in enumerate(order):
        fresh = torch.cat((x[old], step[row], after[row]))[None]
        real = torch.cat((keep[old], torch.ones(3, dtype=torch.bool)))[None]
        close(out[row], layer(fresh, keep=real)[0, 8:])
    for state in cache.states.values():  # rows 1 and 2 come from one row and share no storage
        before = state[2].clone()
        state[1] += 1
        assert torch.equal(state[2], before)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_H33_a_row_does_not_depend_on_its_batch(kind, dtype, backend):
    ulp = {torch.float32: 1e-6, torch.bfloat16: 2**-8}[dtype]
    q, k, v, state, given, _ = drawn_call(kind, 40, batch=8, dtype=dtype)

    def rows(pick):
        beta, decay = given.beta, given.log_decay
        decay = decay if decay is None or decay.ndim == 1 else decay[pick]
        some = Decay(decay) if beta is None else Delta(beta[pick], decay)
        out, last = regard.recurrence(*(x[pick] for x in (q, k, v)), some, state=state[pick], backend=backend)
        return out.detach().double(), last.detach().double()

    alone, same, mixed = rows([3]), rows([3] * 8), rows(list(range(8)))
    for one, many, with_padding in zip(alone, same, mixed, strict=True):
        assert all(torch.equal(row, many[0]) for row in many)
        for row in (many[0], with_padding[3]):
            assert float((row - one[0]).abs().max()) <= ulp * float(one.abs().max())
    assert all(torch.equal(a, b) for a, b in zip(rows(list(range(8))), mixed, strict=True))


# ---- other autograd modes --------------------------------------------------------------------------------------------


def one_head(kind):
    q, k, v, state, given, _ = drawn_call(kind, 5, batch=1, heads=1, dim=3)
    tensors = [x.detach() for x in (q, k, v, state, given.beta, given.log_decay) if x is not None]
    return [x.requires_grad_() for x in tensors]


def outputs(kind, q, k, v, state, *rest, backend=None):
    """Output and last state, from a flat list of tensors."""
    beta = rest[0] if kind.startswith("delta") else None
    decay = rest[-1] if kind != "delta" else None
    given = Decay(decay) if beta is None else Delta(beta, decay)
    return regard.recurrence(q, k, v, given, state=state, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
def test_H34_second_derivatives_and_subsets_of_inputs(kind, backend):
    own = one_head(kind)

    def loss(*given):
        out, last = outputs(kind, *given, backend=backend)
        return out.square().sum() + last.sin().sum()

    assert torch.autograd.gradgradcheck(loss, own)
    whole = torch.autograd.grad(loss(*own), own)
    for wanted in ((0,), (2,), (len(own) - 1,), (1, 3)):
        for grad, n in zip(torch.autograd.grad(loss(*own), [own[n] for n in wanted]), wanted, strict=True):
            close(grad, whole[n])


@pytest.mark.filterwarnings("ignore:`torch.jit.script`")  # torch's own, on its first forward-mode derivative
@pytest.mark.parametrize("kind", KINDS)
def test_H34_function_transforms(kind):
    own = tuple(x.detach() for x in one_head(kind))
    ways = tuple(0.1 * made(*x.shape, seed=8) for x in own)
    (_, last), tangents = torch.func.jvp(partial(outputs, kind), own, ways)
    step = 1e-6
    shifted = [outputs(kind, *(x + sign * step * way for x, way in zip(own, ways, strict=True))) for sign in (1, -1)]
    for tangent, ahead, behind in zip(tangents, *shifted, strict=True):
        torch.testing.assert_close(tangent, (ahead - behind) / (2 * step), rtol=1e-6, atol=1e-8)
    rows = [torch.stack([x, 0.5 * x, 0.1 * x]) for x in own]
    lifted = torch.func.vmap(partial(outputs, kind))(*rows)
    for n in range(3):
        for got, want in zip(lifted, outputs(kind, *(x[n] for x in rows)), strict=True):
            close(got[n], want)
    jacobian = torch.func.jacrev(lambda v: outputs(kind, *own[:2], v, *own[3:])[0])(own[2])
    expected = torch.autograd.functional.jacobian(lambda v: outputs(kind, *own[:2], v, *own[3:])[0], own[2])
    close(jacobian, expected)
    close(outputs(kind, *own)[1], last)


def test_H34_compiled_for_any_length(kind="delta channel"):
    compiled = torch.compile(partial(outputs, kind), fullgraph=True, backend="aot_eager", dynamic=True)
    for length in (5, 17, 33):
        q, k, v, state, given, _ = drawn_call(kind, length, dtype=torch.float32)
        own = [x for x in (q, k, v, state, given.beta, given.log_decay) if x is not None]
        for got, want in zip(compiled(*own), outputs(kind, *own), strict=True):
            close(got, want, 1e-5)


@pytest.mark.parametrize("kind", ["scalar", "delta channel"])
def test_H34_exported_with_a_free_length(kind):
    class Module(torch.nn.Module):
        def forward(self, *own):
            return outputs(kind, *own)

    def given(length):
        q, k, v, state, transition, _ = drawn_call(kind, length, dtype=torch.float32)
        return tuple(x.detach() for x in (q, k, v, state, transition.beta, transition.log_decay) if x is not None)

    free = torch.export.Dim("T", min=2, max=4096)
    timed = tuple({2: free} if n != 3 else {} for n in range(len(given(8))))
    exported = torch.export.export(Module(), given(8), dynamic_shapes={"own": timed}).module()
    for length in (2, 23, 150):
        for got, want in zip(exported(*given(length)), outputs(kind, *given(length)), strict=True):
            close(got, want, 1e-5)


# ---- chunks, decays, states ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 4, 16])
def test_H24_the_last_chunk_may_be_short(size):
    for length in sorted({1, size - 1, size, size + 1, 37, 2 * size + 5} - {0}):
        for first in (None, 2.5):
            state = None if first is None else torch.full((1, 1, 1, 1), first, dtype=WIDE)
            decay = torch.full((1, 1, length), -0.1, dtype=WIDE)
            want = (1 - math.exp(-0.1 * length)) / (1 - math.exp(-0.1)) + math.exp(-0.1 * length) * (first or 0.0)
            for given in (Decay(decay[0, :, 0]), Decay(decay), Decay(decay[..., None])):
                last = regard.recurrence(*(ones(length),) * 3, given, state=state, chunk_size=size)[1]
                assert last.item() == pytest.approx(want, rel=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_H24_no_result_depends_on_the_chunk(kind):
    for length in (1, 15, 16, 17, 37):
        results = []
        for options in ({"backend": "reference"}, *({"chunk_size": size} for size in (1, 3, 16, 64))):
            q, k, v, state, given, own = drawn_call(kind, length)
            out, last = regard.recurrence(q, k, v, given, state=state, **options)
            used = [x for x in own if x.requires_grad]
            grads = torch.autograd.grad(out.sin().sum() + last.cos().sum(), used, allow_unused=True)
            results.append([out, last, *(g for g in grads if g is not None)])
        for other in results[1:]:
            assert len(other) == len(results[0])
            for got, want in zip(other, results[0], strict=True):
                close(got, want)


def test_H24_thirty_seven_tokens():
    decay = Decay(torch.full((1, 1, 37), -0.1))
    for size in (8, 16, 64):
        last = regard.recurrence(*(ones(37, torch.float32),) * 3, decay, chunk_size=size)[1]
        assert last.item() == pytest.approx(10.248529, abs=2e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "delta"])
def test_H25_a_decay_of_200_a_step(kind, backend):
    length = 130
    q, k, v = leaves(*(made(1, 2, length, 4, seed=n).float() for n in (1, 2, 3)))
    with torch.no_grad():
        k /= k.norm(dim=-1, keepdim=True)
    decay = torch.full((1, 2, length), -200.0)
    scalar, channel = leaves(decay, decay[..., None].expand(-1, -1, -1, 4))
    given = transition(kind, torch.ones(1, 2, length), scalar, channel)
    out, state = regard.recurrence(q, k, v, given, backend=backend)
    close(out, 0.5 * (q * k).sum(-1, keepdim=True) * v, 1e-5)
    close(state, k[:, :, -1, :, None] * v[:, :, -1, None, :], 1e-5)
    used = scalar if "scalar" in kind or kind == "constant" else channel
    grads = torch.autograd.grad(out.sum() + state.sum(), (q, k, v, used))
    assert all(grad.isfinite().all() for grad in grads) and float(grads[3].abs().max()) < 1e-6


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "delta"])
def test_H25_some_decays_of_200_and_some_of_nothing(kind):
    results = []
    for backend in BACKENDS:
        q, k, v, state, _, own = drawn_call(kind, 130)
        with torch.no_grad():
            for decay in own[5:]:
                decay.copy_(torch.where(decay < -1, -200.0, 0.0))
        given = transition(kind, *own[4:])
        out, last = regard.recurrence(q, k, v, given, state=state, backend=backend)
        used = [q, k, v, state, given.log_decay]
        results.append([out, last, *torch.autograd.grad(out.square().sum() + last.sum(), used)])
    for got, want in zip(*results, strict=True):
        assert got.isfinite().all()
        close(got, want, 1e-9)


@pytest.mark.parametrize("backend", BACKENDS)
def test_H26_the_state_decays_before_it_is_corrected(backend):
    half, decay = torch.full((1, 1, 3), 0.5, dtype=WIDE), torch.full((1, 1, 3), math.log(0.5), dtype=WIDE)
    for given in (Delta(half, decay), Delta(half, decay[..., None]), Delta(half, decay[0, :, 0])):
        out, state = regard.recurrence(*(ones(3),) * 3, given, scale=1.0, backend=backend)
        close(out.flatten(), torch.tensor([0.5, 0.625, 0.65625], dtype=WIDE))
        assert state.item() == pytest.approx(0.65625)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["none", "constant", "scalar", "channel"])
def test_H28_a_state_in_half_precision_would_stop_at_256(kind, backend):
    length, low = 1024, torch.bfloat16
    zeros = torch.zeros(1, 1, length, dtype=low)
    given = Decay() if kind == "none" else transition(kind, zeros, zeros, zeros[..., None])
    out, state = regard.recurrence(*(ones(length, low),) * 3, given, scale=1.0, backend=backend)
    assert out.dtype == low and out[..., -1, :].item() == 1024.0
    assert state.dtype == torch.float32 and state.item() == 1024.0
    first = torch.full((1, 1, 1, 1), 256.0, dtype=low)  # a low state is widened before anything is added
    last = regard.recurrence(*(ones(length, low),) * 3, given, scale=1.0, state=first, backend=backend)[1]
    assert last.dtype == torch.float32 and last.item() == 1280.0
    state = None
    for _ in range(length):
        one = Decay() if kind == "none" else transition(kind, zeros[..., :1], zeros[..., :1], zeros[..., :1, None])
        out, state = regard.recurrence(*(ones(1, low),) * 3, one, scale=1.0, state=state, backend=backend)
    assert out.item() == 1024.0 and state.dtype == torch.float32 and state.item() == 1024.0


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("name", LAYERS)
def test_H29_padding_never_enters_a_convolution_or_a_state(name, rows):
    layer, real, pad = built(name), made(rows, 4, 16), 20 * made(rows, 3, 16, seed=9)
    keep = torch.tensor([[False] * 3 + [True] * 4] * rows)
    want, fresh = layer.init_cache(rows, 8), layer.init_cache(rows, 8)
    alone = layer(real, cache=want)
    (x,) = leaves(torch.cat((pad, real), 1))
    out = layer(x, keep=keep, cache=fresh)
    close(out[:, 3:], alone)
    for one, state in fresh.states.items():
        close(state, want.states[one])
    (grad,) = torch.autograd.grad(layer(x, keep=keep)[:, 3:].square().sum(), x)
    assert bool((grad[:, :3] == 0).all()) and bool((grad[:, 3:] != 0).any())
    # the same as a second piece onto what was already read
    more = made(rows, 4, 16, seed=10)
    close(
        layer(torch.cat((pad, more), 1), keep=keep, cache=fresh)[:, 3:],
        layer(torch.cat((real, more), 1))[:, 4:],
    )
    layer(more, cache=want)
    for one, state in fresh.states.items():
        close(state, want.states[one])
