"""The kernels that carry a state, against the plain forms in float64: every kind, sizes, strides, threads, sets."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor

import regard
from regard import Decay, Delta
from regard.backends import count_backends
from regard.backends.native import library
from regard.masks import Segments

pytestmark = pytest.mark.skipif(library.REASON is not None, reason=f"native not built: {library.REASON}")

KINDS = ("none", "constant", "scalar", "channel")


def tensors(
    kind: str, delta: bool, sizes: tuple[int, ...], resets: bool = True, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """Arguments of a recurrence of sizes (B, Hk, Hv, T, Dk, Dv); some decays are -inf, some -200."""
    g = torch.Generator().manual_seed(0)
    batch, key_heads, heads, tokens, key_dim, value_dim = sizes

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g)

    k = randn(batch, key_heads, tokens, key_dim)
    found = {"q": randn(batch, key_heads, tokens, key_dim), "k": k / k.norm(dim=-1, keepdim=True)}
    found["v"] = randn(batch, heads, tokens, value_dim)
    found = {name: x.to(dtype) for name, x in found.items()}
    found["state"] = randn(batch, heads, key_dim, value_dim)
    shapes = {"constant": (heads,), "scalar": (batch, heads, tokens), "channel": (batch, heads, tokens, key_dim)}
    if kind in shapes:
        decay = -torch.rand(shapes[kind], generator=g)
        if resets:
            chance = torch.rand(decay.shape, generator=g)
            decay = torch.where(chance < 0.1, -torch.inf, torch.where(chance < 0.2, -200.0, decay))
        found["log_decay"] = decay
    if delta:
        found["beta"] = torch.rand(batch, heads, tokens, generator=g)
    return found


def call(given: dict[str, Tensor], **options: object) -> tuple[Tensor, Tensor]:
    decay = given.get("log_decay")
    transition = Delta(given["beta"], decay) if "beta" in given else Decay(decay)
    return regard.recurrence(given["q"], given["k"], given["v"], transition, state=given.get("state"), **options)


def weighted(x: Tensor) -> Tensor:
    """A sum with fixed random weights, so that every gradient is different and none depends on rounding."""
    return (x * torch.randn(x.shape, generator=torch.Generator().manual_seed(1)).to(x.dtype)).sum()


def results(given: dict[str, Tensor], **options: object) -> dict[str, Tensor]:
    """Output, last state and every gradient."""
    leaves = {name: x.detach().clone().requires_grad_() for name, x in given.items()}
    out, last = call(leaves, **options)
    grads = torch.autograd.grad(weighted(out) + weighted(last), list(leaves.values()))
    return {"out": out, "last": last} | {f"d_{name}": grad for name, grad in zip(leaves, grads, strict=True)}


def off(got: Tensor, want: Tensor) -> float:
    """The largest difference as a share of the largest entry (at least 1)."""
    if not want.numel():
        return 0.0
    got, want = got.detach().double(), want.detach().double()
    return float((got - want).abs().max()) / max(1.0, float(want.abs().max()))


def near(got: dict[str, Tensor], want: dict[str, Tensor], tolerance: float) -> None:
    """Within `tolerance` of the largest entry of each tensor (at least 1)."""
    for name, value in want.items():
        assert off(got[name], value) <= tolerance, (
            f"{name}: off by {off(got[name], value):.3g}, allowed {tolerance:.3g}"
        )


def wide(given: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: x.double() for name, x in given.items()}


SIZES = [
    (2, 2, 4, 1, 5, 3),
    (2, 4, 4, 7, 16, 64),
    (1, 2, 4, 33, 33, 70),
    (1, 1, 2, 300, 64, 64),
    (1, 2, 2, 150, 128, 128),
]


@pytest.mark.parametrize("delta", [False, True], ids=["decay", "delta"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_recurrence(kind, delta, sizes):
    ids = torch.randint(0, 2, (sizes[0], sizes[3]), generator=torch.Generator().manual_seed(2)).cumsum(1)
    for segments, resets in ((None, False), (ids, True)):
        given = tensors(kind, delta, sizes, resets)
        with count_backends() as counts:
            got = results(given, segments=segments)
        assert counts == {"native": 1}
        want = results(wide(given), segments=segments, backend="chunked")
        if kind == "constant":  # one number is the sum of all tokens' gradients, which nearly cancel
            each = wide(given)
            each["log_decay"] = each["log_decay"][None, :, None].expand(sizes[0], -1, sizes[3])
            terms = results(each, segments=segments, backend="chunked")["d_log_decay"].abs().sum((0, 2))
            assert bool(((got.pop("d_log_decay") - want.pop("d_log_decay")).abs() <= 3e-6 * terms.clamp_min(1)).all())
        near(got, want, 3e-6)
        with torch.no_grad():
            out, last = call(given, segments=segments)
        assert torch.equal(out, got["out"]) or sizes[3] <= 4  # a few tokens go one by one
        near({"out": out, "last": last}, {name: got[name] for name in ("out", "last")}, 3e-6)


@pytest.mark.parametrize("kind", ["scalar", "channel"])
def test_nothing_crosses_a_reset(kind):
    given = tensors(kind, True, (1, 1, 2, 100, 16, 16), resets=False)
    ids = torch.tensor([[0] * 40 + [1] * 60])
    leaves = {name: x.clone().requires_grad_() for name, x in given.items()}
    out, last = call(leaves, segments=ids)
    grads = torch.autograd.grad(out[:, :, 40:].sum() + last.sum(), list(leaves.values()))
    for name, grad in zip(leaves, grads, strict=True):
        assert bool((grad if name == "state" else grad[:, :, :40]).eq(0).all()), name
    alone = {name: x[:, :, 40:] for name, x in given.items() if name != "state"}
    near({"out": out[:, :, 40:], "last": last}, dict(zip(("out", "last"), call(alone), strict=True)), 1e-6)


@pytest.mark.parametrize(("low", "tolerance"), [(torch.bfloat16, 1e-2), (torch.float16, 2e-3)])
def test_low_precision(low, tolerance):
    for kind in ("scalar", "channel"):
        given = tensors(kind, True, (2, 2, 4, 70, 32, 48), dtype=low)
        got = results(given)
        assert got["out"].dtype == low and got["d_q"].dtype == low and got["last"].dtype == torch.float32
        near(got, results(wide(given), backend="chunked"), tolerance)
        near({"last": got["last"]}, {"last": call(wide(given), backend="chunked")[1]}, 3e-6)


def test_strides_and_other_dtypes():
    given = tensors("channel", True, (2, 2, 2, 50, 16, 24))
    want = results(given)
    odd = {
        "q": given["q"].transpose(1, 2).contiguous().transpose(1, 2),
        "k": torch.stack((given["k"], given["k"]), -1)[..., 0],
        "v": given["v"].permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0),
        "state": given["state"].mT.contiguous().mT,
        "log_decay": given["log_decay"].transpose(1, 3).contiguous().transpose(1, 3),
        "beta": given["beta"].double(),
    }
    got = results({name: odd[name] for name in given})
    near(got, want, 1e-6)
    assert got["d_beta"].dtype == torch.float64
    one = {name: x[:, :1].expand_as(x) if x.ndim > 1 else x for name, x in given.items()}
    near(results(one), results({name: x.contiguous() for name, x in one.items()}), 1e-6)


def test_bits_do_not_depend_on_batch_threads_or_runs():
    given = tensors("scalar", True, (3, 2, 4, 130, 64, 192))
    threads, found = torch.get_num_threads(), []
    try:
        for count in (1, 2, 1):
            torch.set_num_threads(count)
            found.append(results(given))
    finally:
        torch.set_num_threads(threads)
    for other in found[1:]:
        assert all(torch.equal(other[name], value) for name, value in found[0].items())
    alone = results({name: x[1:2] for name, x in given.items()})
    for name in ("out", "last"):
        assert torch.equal(alone[name][0], found[0][name][1]), name
    step = {name: x[:, :, :1] if name != "state" else x for name, x in given.items()}
    with torch.no_grad():
        whole = call(step)
        for row in range(3):
            one = call({name: x[row : row + 1] for name, x in step.items()})
            assert all(torch.equal(a[0], b[row]) for a, b in zip(one, whole, strict=True))


def test_steps_equal_the_whole_and_inputs_stay():
    given = tensors("channel", True, (2, 2, 4, 20, 33, 70))
    kept = {name: x.clone() for name, x in given.items()}
    with torch.no_grad():
        out, last = call(given)
        state, outs = given["state"], []
        for t in range(20):
            token = {name: x[:, :, t : t + 1] for name, x in given.items() if name != "state"} | {"state": state}
            part, state = call(token)
            outs.append(part)
    near({"out": torch.cat(outs, 2), "last": state}, {"out": out, "last": last}, 2e-6)
    assert all(torch.equal(kept[name], x) for name, x in given.items())


@pytest.mark.parametrize("tokens", [1, 20])
def test_a_state_updated_in_place(tokens):
    given = tensors("channel", True, (2, 2, 4, tokens, 33, 70))
    with torch.no_grad():
        out, last = call(given)
        for backend in ("native", "chunked"):
            state = given["state"].clone()
            again, same = call(given | {"state": state}, state_out=state, backend=backend)
            assert same is state
            near({"out": again, "last": state}, {"out": out, "last": last}, 3e-6)
            assert torch.equal(again, out) or backend != "native"
    for wrong in (torch.zeros(2, 4, 33, 69), torch.zeros(2, 4, 70, 33).mT, given["state"].double(), None):
        options = {"state_out": given["state"] if wrong is None else wrong}
        leaves = {name: x.clone().requires_grad_(wrong is None) for name, x in given.items()}
        with pytest.raises(ValueError, match=r"^state_out"):
            call(leaves, **options)


def test_packed_lengths():
    lengths = [3, 0, 40, 5, 1]
    given = {name: x for name, x in tensors("scalar", True, (1, 2, 4, sum(lengths), 16, 8)).items() if name != "state"}
    out, last = call(given, segments=Segments.from_lengths(lengths))
    want = call(wide(given), segments=Segments.from_lengths(lengths), backend="chunked")
    near({"out": out, "last": last}, dict(zip(("out", "last"), want, strict=True)), 3e-6)


def test_second_derivatives_go_through_the_plain_form():
    given = tensors("scalar", True, (1, 1, 1, 5, 3, 2), resets=False)

    def penalty(leaves: dict[str, Tensor], **options: object) -> list[Tensor]:
        values = list(leaves.values())
        out, last = call(leaves, **options)
        first = torch.autograd.grad(out.square().sum() + last.square().sum(), values, create_graph=True)
        return list(torch.autograd.grad(sum(g.square().sum() for g in first), values))

    got = penalty({name: x.clone().requires_grad_() for name, x in given.items()}, backend="native")
    want = penalty({name: x.double().requires_grad_() for name, x in given.items()}, backend="chunked")
    names = list(given)
    near(dict(zip(names, got, strict=True)), dict(zip(names, want, strict=True)), 1e-4)


def scans(tokens: int, width: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(0)
    log_a = -torch.rand(2, tokens, width, generator=g)
    log_a = torch.where(torch.rand(log_a.shape, generator=g) < 0.1, -torch.inf, log_a)
    found = {"log_a": log_a, "x": torch.randn(2, tokens, width, generator=g)}
    return {name: x.to(dtype) for name, x in (found | {"state": torch.randn(2, width, generator=g)}).items()}


@pytest.mark.parametrize(("tokens", "width"), [(1, 3), (7, 16), (65, 300)])
def test_scan(tokens, width):
    ids = torch.randint(0, 2, (2, tokens), generator=torch.Generator().manual_seed(2)).cumsum(1)

    def run(given: dict[str, Tensor], segments: Tensor | None, backend: str | None) -> dict[str, Tensor]:
        leaves = {name: x.clone().requires_grad_() for name, x in given.items()}
        y, last = regard.scan(leaves["log_a"], leaves["x"], state=leaves["state"], segments=segments, backend=backend)
        grads = torch.autograd.grad(weighted(y) + weighted(last), list(leaves.values()))
        return {"y": y, "last": last} | {f"d_{name}": g for name, g in zip(leaves, grads, strict=True)}

    given = scans(tokens, width)
    for segments in (None, ids):
        near(run(given, segments, "native"), run(wide(given), segments, "chunked"), 2e-6)
    shared = given | {"log_a": given["log_a"][:1, :1].clamp_min(-1.0)}
    near(run(shared, ids, "native"), run(wide(shared), ids, "chunked"), 5e-6)


@pytest.mark.parametrize(("tokens", "width", "states"), [(1, 3, 1), (7, 16, 5), (130, 270, 16)])
def test_selective_scan(tokens, width, states):
    g = torch.Generator().manual_seed(0)
    x, dt = (torch.randn(2, tokens, width, generator=g) for _ in range(2))
    b, c = (torch.randn(2, tokens, states, generator=g) for _ in range(2))
    given = {"x": x, "dt": dt.abs(), "A": -torch.rand(width, states, generator=g), "B": b, "C": c}
    given |= {"D": torch.randn(width, generator=g), "state": torch.randn(2, width, states, generator=g)}
    ids = torch.randint(0, 2, (2, tokens), generator=g).cumsum(1)

    def run(given: dict[str, Tensor], segments: Tensor | None, backend: str) -> dict[str, Tensor]:
        leaves = {name: x.clone().requires_grad_() for name, x in given.items()}
        values = dict(leaves)
        state = values.pop("state")
        y, last = regard.selective_scan(**values, state=state, segments=segments, backend=backend)
        grads = torch.autograd.grad(weighted(y) + weighted(last), list(leaves.values()))
        return {"y": y, "last": last} | {f"d_{name}": g for name, g in zip(leaves, grads, strict=True)}

    for segments in (None, ids):
        near(run(given, segments, "native"), run(wide(given), segments, "chunked"), 5e-6)
    without = {name: x for name, x in given.items() if name != "D"}
    near(run(without, None, "native"), run(wide(without), None, "chunked"), 5e-6)


@pytest.mark.parametrize(("tokens", "channels", "taps"), [(1, 3, 4), (2, 16, 1), (70, 150, 4), (9, 33, 6)])
def test_short_conv(tokens, channels, taps):
    g = torch.Generator().manual_seed(0)
    sizes = {
        "x": (2, tokens, channels),
        "weight": (channels, taps),
        "bias": (channels,),
        "state": (2, taps - 1, channels),
    }
    given = {name: torch.randn(size, generator=g) for name, size in sizes.items()}
    ids = torch.randint(0, 2, (2, tokens), generator=g).cumsum(1)

    def run(given: dict[str, Tensor], segments: Tensor | None, backend: str) -> dict[str, Tensor]:
        leaves = {name: x.clone().requires_grad_() for name, x in given.items()}
        values = dict(leaves)
        with regard.use_backend(backend):
            y, tail = regard.short_conv(values.pop("x"), values.pop("weight"), **values, segments=segments)
        grads = torch.autograd.grad(weighted(y) + weighted(tail), list(leaves.values()), allow_unused=True)
        found = {"y": y, "tail": tail} | {f"d_{name}": g for name, g in zip(leaves, grads, strict=True)}
        return {name: x for name, x in found.items() if x is not None}

    for segments in (None, ids):
        near(run(given, segments, "native"), run(wide(given), segments, "chunked"), 1e-6)
    bare = {name: given[name] for name in ("x", "weight")}
    near(run(bare, None, "native"), run(wide(bare), None, "chunked"), 1e-6)
    turned = given | {"x": given["x"].transpose(0, 1).contiguous().transpose(0, 1)}
    near(run(turned, ids, "native"), run(given, ids, "native"), 1e-7)


def test_operators():
    given = tensors("channel", True, (1, 1, 2, 20, 16, 8), resets=False)
    arguments = [given[name] for name in ("q", "k", "v", "beta", "log_decay", "state")]
    for x in arguments:
        x.requires_grad_()
    segment_starts = torch.zeros(1, 20, dtype=torch.bool)
    torch.library.opcheck(torch.ops.regard.recurrence_forward, (*arguments, segment_starts, 0.25, True))
    torch.library.opcheck(torch.ops.regard.recurrence_forward, (*arguments[:3], *[None] * 4, 0.25, True))
    s = {name: x.requires_grad_() for name, x in scans(9, 5).items()}
    torch.library.opcheck(torch.ops.regard.scan_forward, (s["log_a"], s["x"], s["state"], None, True))
    x = torch.randn(2, 9, 4, requires_grad=True)
    conv = (x, torch.randn(3, 4), None, torch.randn(2, 2, 4), None, True)
    torch.library.opcheck(torch.ops.regard.short_conv_forward, conv)
    given = (x, x.detach().abs(), -torch.rand(4, 3), torch.randn(2, 9, 3), torch.randn(2, 9, 3), None, None, None)
    torch.library.opcheck(torch.ops.regard.selective_scan_forward, (*given, True))


def test_compiled():
    given = tensors("scalar", True, (1, 2, 4, 40, 16, 8))

    def run(leaves: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        return call(leaves)

    torch._dynamo.reset()
    fast = torch.compile(run, fullgraph=True, backend="aot_eager", dynamic=True)
    for tokens in (40, 33, 17):
        part = {name: x if name == "state" else x[:, :, :tokens].clone() for name, x in given.items()}
        found = []
        for function in (run, fast):
            leaves = {name: x.clone().requires_grad_() for name, x in part.items()}
            out, last = function(leaves)
            grads = torch.autograd.grad(out.square().sum() + last.sum(), list(leaves.values()))
            found.append({str(n): x for n, x in enumerate((out, last, *grads))})
        near(found[1], found[0], 1e-6)


@pytest.mark.parametrize("isa", ["portable", "x86-64-v3", "x86-64-v4"])
def test_instruction_sets(isa):
    script = (
        "import sys; sys.path[:0] = sys.argv[1:]\n"
        "import test_native_states as t\n"
        "from regard.backends.native import library\n"
        "assert library.ISA, library.REASON\n"
        "for kind in t.KINDS:\n"
        "    t.test_recurrence(kind, True, t.SIZES[2])\n"
        "t.test_scan(65, 300)\n"
        "t.test_selective_scan(7, 16, 5)\n"
    )
    here = os.path.dirname(__file__)
    command = [sys.executable, "-c", script, here, os.path.dirname(here)]
    found = subprocess.run(command, env=os.environ | {"REGARD_ISA": isa}, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr[-2000:]


def test_float64_and_transforms_go_elsewhere():
    given = tensors("scalar", True, (1, 1, 1, 5, 4, 4), resets=False)
    with count_backends() as counts:
        call(wide(given))
        torch.vmap(lambda q: call(given | {"q": q})[0])(given["q"][None])
    assert counts == {"chunked": 2}
    with pytest.raises(NotImplementedError, match=r"float64.*These can: chunked"):
        call(wide(given), backend="native")


def test_empty_sizes():
    for sizes in ((0, 1, 2, 5, 4, 4), (1, 1, 2, 0, 4, 4), (1, 1, 2, 5, 4, 0), (1, 1, 2, 5, 0, 4)):
        given = tensors("scalar", True, sizes, resets=False)
        got = results(given)
        assert got["out"].shape == given["v"].shape and torch.equal(got["last"], given["state"]) | bool(sizes[3])
