"""`recurrence`, `scan`, `selective_scan`, `short_conv`: against numpy loops, across backends, chunks, packing."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from oracles.recurrences import delta_recurrence, diagonal_scan, selective
from torch import Tensor

import regard
from regard import Decay, Delta, GeneralizedDelta
from regard.masks import Segments

B, HK, HV, DK, DV = 2, 2, 4, 5, 3
KINDS = ("none", "constant", "scalar", "channel")
RULES = ("decay", "delta", "generalized")


def tensors(kind: str, tokens: int, rule: str, groups: int = 2, seed: int = 0) -> dict[str, Tensor]:
    """Arguments in float64; some decays are -inf, some -200."""
    g = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    found = {"q": randn(B, HV // groups, tokens, DK), "k": randn(B, HV // groups, tokens, DK)}
    found["k"] = found["k"] / found["k"].norm(dim=-1, keepdim=True)
    found |= {"v": randn(B, HV, tokens, DV), "state": randn(B, HV, DK, DV)}
    shapes = {"constant": (HV,), "scalar": (B, HV, tokens), "channel": (B, HV, tokens, DK)}
    if kind in shapes:
        decay = -torch.rand(shapes[kind], generator=g, dtype=torch.float64)
        if kind != "constant":
            chance = torch.rand(decay.shape, generator=g)
            decay = torch.where(chance < 0.1, -torch.inf, torch.where(chance < 0.2, -200.0, decay))
        found["log_decay"] = decay
    if rule == "delta":
        found["beta"] = torch.rand(B, HV, tokens, generator=g, dtype=torch.float64)
    if rule == "generalized":
        found["read_key"] = randn(B, HV, tokens, DK) / DK
        found["write_key"] = randn(B, HV, tokens, DK) / DK
    return found


def call(given: dict[str, Tensor], **options: object) -> tuple[Tensor, Tensor]:
    decay = given.get("log_decay")
    transition = Delta(given["beta"], decay) if "beta" in given else Decay(decay)
    if "read_key" in given:
        transition = GeneralizedDelta(given["read_key"], given["write_key"], decay)
    return regard.recurrence(given["q"], given["k"], given["v"], transition, state=given.get("state"), **options)


def with_gradients(given: dict[str, Tensor], **options: object) -> dict[str, Tensor]:
    """Output, state and the gradient of everything."""
    leaves = {name: x.detach().clone().requires_grad_() for name, x in given.items()}
    out, state = call(leaves, **options)
    loss = (out.sin() * 3).sum() + (state.cos() * 2).sum()
    grads = torch.autograd.grad(loss, list(leaves.values()))
    return {"out": out, "last": state} | {f"d{name}": g for name, g in zip(leaves, grads, strict=True)}


def same(got: dict[str, Tensor], want: dict[str, Tensor], tolerance: float = 1e-10) -> None:
    for name, value in want.items():
        torch.testing.assert_close(got[name], value, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("kind", KINDS)
def test_the_oracle(kind, rule):
    given = tensors(kind, 9, rule)
    ids = torch.tensor([[0, 0, 0, 0, 3, 3, 3, 3, 3], [1, 1, 2, 2, 2, 2, 2, 2, 9]])
    for segments in (None, ids):
        want = delta_recurrence(
            **{name: x.numpy() for name, x in given.items()}, ids=None if segments is None else segments.numpy()
        )
        for backend in ("reference", "chunked"):
            out, state = call(given, segments=segments, backend=backend)
            np.testing.assert_allclose(out.numpy(), want[0], atol=1e-12)
            np.testing.assert_allclose(state.numpy(), want[1], atol=1e-12)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [1, 7, 70])
def test_chunks_agree_with_the_loop(kind, rule, tokens):
    ids = torch.randint(0, 2, (B, tokens), generator=torch.Generator().manual_seed(3)).cumsum(1)
    for groups, segments in ((1, None), (2, ids)):
        given = tensors(kind, tokens, rule, groups)
        want = with_gradients(given, segments=segments, backend="reference")
        for size in (None, 1, 5, 16):
            same(with_gradients(given, segments=segments, chunk_size=size, backend="chunked"), want)


@pytest.mark.parametrize("kind", ["scalar", "channel"])
@pytest.mark.parametrize("backend", ["reference", "chunked"])
def test_a_hard_reset_is_two_calls(kind, backend):
    given = tensors(kind, 20, "delta")
    given["log_decay"] = given["log_decay"].clamp_min(-1.0)
    given["log_decay"][:, :, 13] = -torch.inf
    leaves = {name: x.clone().requires_grad_() for name, x in given.items()}
    out, state = call(leaves, backend=backend)
    late = {name: x[:, :, 13:].clone() for name, x in given.items() if name != "state"}
    want, last = call(late, backend=backend)
    torch.testing.assert_close(out[:, :, 13:], want, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(state, last, rtol=1e-12, atol=1e-12)
    grads = torch.autograd.grad(out[:, :, 13:].sum() + state.sum(), list(leaves.values()))
    for name, grad in zip(leaves, grads, strict=True):
        before = grad if name == "state" else grad[:, :, :13]
        assert bool((before == 0).all()), name


@pytest.mark.parametrize("rule", RULES)
def test_packed_lengths_are_separate_calls(rule):
    lengths = [3, 0, 5, 70, 1, 66, 0]
    given = {name: x[:1] for name, x in tensors("scalar", sum(lengths), rule).items()}
    given["state"] = torch.randn(len(lengths), HV, DK, DV, dtype=torch.float64)
    out, state = call(given, segments=Segments.from_lengths(lengths))
    ends = np.cumsum(lengths)
    for number, (stop, length) in enumerate(zip(ends, lengths, strict=True)):
        part = {name: x[:, :, stop - length : stop] for name, x in given.items() if name != "state"}
        want, last = call(part | {"state": given["state"][number : number + 1]})
        torch.testing.assert_close(out[:, :, stop - length : stop], want, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(state[number : number + 1], last, rtol=1e-12, atol=1e-12)
    none, empty = call(
        {name: x[:, :, :0] for name, x in given.items() if name != "state"}, segments=Segments.from_lengths([])
    )
    assert none.shape == (1, HV, 0, DV) and empty.shape == (0, HV, DK, DV)


@pytest.mark.parametrize("tokens", [0, 1, 64, 65, 200])
def test_scans(tokens):
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 2, (2, tokens), generator=g).cumsum(1)
    x, log_a = (torch.randn(2, tokens, 5, generator=g, dtype=torch.float64) for _ in range(2))
    log_a = torch.where(torch.rand(log_a.shape, generator=g) < 0.1, -torch.inf, -log_a.abs())
    state = torch.randn(2, 5, generator=g, dtype=torch.float64)
    for segments in (None, ids):
        for decay in (log_a, log_a[:, :1].clamp_min(-1.0)):
            if not decay.shape[1] and tokens:
                continue
            want = diagonal_scan(np.exp(np.broadcast_to(decay, x.shape)), x.numpy(), state.numpy(), segments)
            leaves = [t.clone().requires_grad_() for t in (decay, x, state)]
            found = {}
            for backend in ("reference", "chunked"):
                y, last = regard.scan(leaves[0], leaves[1], state=leaves[2], segments=segments, backend=backend)
                np.testing.assert_allclose(y.detach().numpy(), want[0], atol=1e-12)
                np.testing.assert_allclose(last.detach().numpy(), want[1], atol=1e-12)
                found[backend] = torch.autograd.grad(y.sin().sum() + last.cos().sum(), leaves)
            for a, b in zip(*found.values(), strict=True):
                torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("tokens", [0, 1, 64, 130])
def test_selective_scans(tokens):
    g = torch.Generator().manual_seed(0)
    x, dt = (torch.randn(2, tokens, 4, generator=g, dtype=torch.float64) for _ in range(2))
    b, c = (torch.randn(2, tokens, 3, generator=g, dtype=torch.float64) for _ in range(2))
    a, d = -torch.rand(4, 3, generator=g, dtype=torch.float64), torch.randn(4, generator=g, dtype=torch.float64)
    state = torch.randn(2, 4, 3, generator=g, dtype=torch.float64)
    ids = torch.randint(0, 2, (2, tokens), generator=g).cumsum(1)
    for segments in (None, ids):
        given = (x, dt.abs(), a, b, c, d)
        want = selective(*(t.numpy() for t in given), state.numpy(), segments)
        leaves = [t.clone().requires_grad_() for t in (*given, state)]
        found = {}
        for backend in ("reference", "chunked"):
            y, last = regard.selective_scan(*leaves[:6], state=leaves[6], segments=segments, backend=backend)
            np.testing.assert_allclose(y.detach().numpy(), want[0], atol=1e-12)
            np.testing.assert_allclose(last.detach().numpy(), want[1], atol=1e-12)
            found[backend] = torch.autograd.grad(y.sin().sum() + last.cos().sum(), leaves)
        for one, other in zip(*found.values(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


def test_the_selective_scan_never_holds_all_states():
    tokens, width, states = 512, 64, 16
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            for t in out if isinstance(out, (tuple, list)) else (out,):
                if isinstance(t, Tensor):
                    largest = max(largest, t.untyped_storage().nbytes())
            return out

    x = torch.randn(1, tokens, width, requires_grad=True)
    given = (x.abs(), -torch.rand(width, states), torch.randn(1, tokens, states), torch.randn(1, tokens, states))
    with Watch():
        y, _ = regard.selective_scan(x, *given)
        y.sum().backward()
    assert largest <= tokens * width * states  # bytes: a quarter of all states in float32


def test_short_convolutions():
    g = torch.Generator().manual_seed(0)
    x, tail = (
        torch.randn(2, 12, 3, generator=g, dtype=torch.float64),
        torch.randn(2, 3, 3, generator=g, dtype=torch.float64),
    )
    weight, bias = torch.randn(3, 4, generator=g, dtype=torch.float64), torch.randn(3, generator=g, dtype=torch.float64)
    want = torch.nn.functional.conv1d(torch.cat((tail, x), 1).mT, weight[:, None], bias, groups=3).mT
    y, last = regard.short_conv(x, weight, bias, state=tail)
    torch.testing.assert_close(y, want, rtol=1e-12, atol=1e-12)
    assert torch.equal(last, x[:, -3:])
    for pieces in ([1] * 12, [5, 7], [0, 12], [2, 1, 9]):
        outs, state = [], tail
        for part in x.split(pieces, 1):
            out, state = regard.short_conv(part, weight, bias, state=state)
            outs.append(out)
        assert torch.equal(torch.cat(outs, 1), y) and torch.equal(state, last)
    lengths = [1, 0, 7, 4]
    packed, tails = regard.short_conv(
        x[:1], weight, state=torch.zeros(4, 3, 3), segments=Segments.from_lengths(lengths)
    )
    ids = torch.repeat_interleave(torch.arange(4), torch.tensor(lengths))
    by_ids, tail_by_ids = regard.short_conv(x[:1], weight, segments=ids)
    torch.testing.assert_close(packed, by_ids, rtol=1e-12, atol=1e-12)
    assert torch.equal(tails[3:], tail_by_ids) and bool((tails[1] == 0).all())


@pytest.mark.filterwarnings("ignore:`torch.jit.script")  # torch's own, on the first jvp
def test_gradients_of_gradients_and_transforms():
    given = tensors("channel", 5, "delta")
    given["log_decay"] = -torch.rand(B, HV, 5, DK, dtype=torch.float64)
    names = list(given)
    leaves = tuple(x[:1].clone().requires_grad_() for x in given.values())

    def run(*values: Tensor) -> tuple[Tensor, Tensor]:
        return call(dict(zip(names, values, strict=True)))

    assert torch.autograd.gradcheck(run, leaves) and torch.autograd.gradgradcheck(run, leaves)
    plain = tuple(x.detach() for x in leaves)
    tangents = tuple(torch.randn_like(x) for x in plain)
    _, (change, _) = torch.func.jvp(run, plain, tangents)
    step = 1e-6
    ahead, behind = (run(*(x + s * step * t for x, t in zip(plain, tangents, strict=True)))[0] for s in (1, -1))
    torch.testing.assert_close(change, (ahead - behind) / (2 * step), rtol=1e-6, atol=1e-7)
    rows = tuple(torch.stack((x, 0.5 * x)) for x in plain)
    mapped = torch.vmap(run)(*rows)[0]
    torch.testing.assert_close(mapped[1], run(*(x[1] for x in rows))[0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("changes", "error", "name"),
    [
        ({"log_decay": torch.full((B, HV, 6), 0.1)}, ValueError, "log_decay"),
        ({"log_decay": torch.zeros(B, HV, 5)}, ValueError, "log_decay"),
        ({"log_decay": torch.zeros(B, HV, 6, dtype=torch.long)}, TypeError, "log_decay"),
        ({"beta": torch.zeros(B, HV)}, ValueError, "beta"),
        ({"state": torch.zeros(B, HV, DV, DK)}, ValueError, "state"),
        ({"state": torch.zeros(B, HV, DK, DV, dtype=torch.long)}, TypeError, "state"),
        ({"v": torch.zeros(B, 3, 6, DV, dtype=torch.float64)}, ValueError, "v"),
        ({"k": torch.zeros(B, HK, 6, DK + 1, dtype=torch.float64)}, ValueError, "k"),
        ({"q": torch.zeros(B, HK, 6, DK)}, TypeError, "q, k, v"),
        ({"segments": torch.tensor([[0, 0, 1, 1, 0, 0]] * B)}, ValueError, "segments"),
        ({"segments": torch.zeros(B, 5, dtype=torch.long)}, ValueError, "segments"),
        ({"segments": Segments.from_lengths([6])}, ValueError, "segments"),
        ({"scale": float("nan")}, ValueError, "scale"),
        ({"chunk_size": 0}, ValueError, "chunk_size"),
        ({"backend": "sdpa"}, NotImplementedError, "backend 'sdpa' cannot run this call: it has no recurrence"),
        ({"backend": "fastest"}, ValueError, "backend"),
    ],
)
def test_wrong_arguments(changes, error, name):
    given = tensors("scalar", 6, "delta")
    names = {*given, "state"}
    given |= {name: x for name, x in changes.items() if name in names}
    options = {name: x for name, x in changes.items() if name not in names}
    with pytest.raises(error, match=f"^{name}"):
        call(given, **options)


def test_wrong_arguments_of_the_scans():
    x = torch.zeros(2, 4, 3)
    for error, name, run in (
        (ValueError, "log_a", lambda: regard.scan(x + 1, x)),
        (ValueError, "log_a", lambda: regard.scan(torch.zeros(2, 5, 3), x)),
        (TypeError, "x", lambda: regard.scan(x, x.long())),
        (ValueError, "state", lambda: regard.scan(x, x, state=torch.zeros(2, 4))),
        (ValueError, "A", lambda: regard.selective_scan(x, x, torch.ones(3, 2), x[..., :2], x[..., :2])),
        (ValueError, "dt", lambda: regard.selective_scan(x, x - 1, -torch.ones(3, 2), x[..., :2], x[..., :2])),
        (ValueError, "weight", lambda: regard.short_conv(x, torch.zeros(4, 4))),
        (ValueError, "state", lambda: regard.short_conv(x, torch.zeros(3, 4), state=torch.zeros(2, 4, 3))),
    ):
        with pytest.raises(error, match=f"^{name}"):
            run()


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
def test_low_precision_keeps_wide_states(low):
    given = tensors("scalar", 40, "delta")
    given["log_decay"] = given["log_decay"].clamp_min(-1.0)
    given["state"] = given["state"].to(low)
    lowered = {name: x.to(low) if name in ("q", "k", "v") else x for name, x in given.items()}
    out, state = call(lowered)
    assert out.dtype == low and state.dtype == torch.float32
    want, last = call({name: x.double() for name, x in lowered.items()})
    torch.testing.assert_close(state.double(), last, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out.double(), want, rtol=1e-2, atol=1e-2)


def test_autocast_lowers_q_k_v_alone():
    given = {name: x.float() for name, x in tensors("scalar", 6, "delta").items()}
    with torch.autocast("cpu", torch.bfloat16):
        out, state = call(given)
    assert out.dtype == torch.bfloat16 and state.dtype == torch.float32


@pytest.mark.parametrize("kind", ["scalar", "channel"])
def test_compiled(kind):
    given = tensors(kind, 20, "delta")
    torch._dynamo.reset()
    fast = torch.compile(with_gradients_graph, fullgraph=True, backend="aot_eager")
    for got, want in zip(fast(given), with_gradients_graph(given), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


def with_gradients_graph(given: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    return call(given)


def test_no_large_tensor_for_channel_decays():
    tokens, width, heads = 512, 64, 2
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            for t in out if isinstance(out, (tuple, list)) else (out,):
                if isinstance(t, Tensor) and t.is_floating_point():
                    largest = max(largest, t.numel())
            return out

    q, k, v = (torch.randn(1, heads, tokens, width, requires_grad=True) for _ in range(3))
    decay = -torch.rand(1, heads, tokens, width)
    with Watch():
        out, _ = regard.recurrence(q, k, v, Delta(torch.rand(1, heads, tokens), decay))
        out.sum().backward()
    assert largest <= 2 * heads * tokens * width  # the solve's two right-hand sides lie side by side


def test_the_generalized_delta_rule_has_the_delta_rule_in_it():
    given = tensors("none", 40, "delta", groups=1)
    want, last = call(given)
    k, beta = given["k"].double(), given["beta"][..., None]
    found, end = regard.recurrence(
        given["q"], k, beta * given["v"], GeneralizedDelta(k, -beta * k), state=given["state"]
    )
    torch.testing.assert_close(found, want, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(end, last, rtol=1e-11, atol=1e-11)


def test_the_generalized_delta_rule_says_what_it_takes():
    given = tensors("channel", 6, "generalized")
    for name, value, text in (
        ("read_key", given["q"], r"read_key: expected \(2, 4, 6, 5\), got \(2, 2, 6, 5\)"),
        ("write_key", given["write_key"].int(), "write_key: expected a float tensor"),
        ("log_decay", -given["log_decay"], "log_decay: expected log-decays <= 0"),
    ):
        with pytest.raises((ValueError, TypeError), match=text):
            call(given | {name: value})
    with pytest.raises(regard.errors.BackendUnsupported, match=r"no generalised delta rule|float64|not built"):
        call({name: x.float() for name, x in given.items()}, backend="native")
    half = {name: x.bfloat16() for name, x in given.items()}
    out, state = call(half)
    assert out.dtype == torch.bfloat16 and state.dtype == torch.float32
    compiled = torch.compile(lambda **x: call(x), backend="aot_eager", fullgraph=True)
    same({"out": compiled(**given)[0]}, {"out": call(given)[0]})
