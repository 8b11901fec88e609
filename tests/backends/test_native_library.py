"""The native kernels in torch and in a process: derivatives, compilation, the shared library."""

import os
import platform
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from attention_calls import inputs, made
from native_calls import near, needs_native

import regard
from regard import masks
from regard.backends.native import library
from regard.backends.native.operands import operands_of
from regard.backends.native.structs import STRUCTS, Struct
from regard.biases import Alibi, Dense
from regard.errors import BackendUnsupported
from regard.masks import (
    Causal,
    KeyLengths,
    KeyPadding,
    Prefix,
    Segments,
    Window,
)
from regard.ops.attention import _call
from regard.transitions import Decay

ROOT = Path(__file__).parents[2]
pytestmark = needs_native


def test_second_derivatives_go_through_the_definition():
    q, k, v = (x[:1, :2] for x in inputs(4, 5))
    slopes = made(2)

    def twice(dtype, backend):
        leaves = [x.to(dtype).requires_grad_() for x in (q, k, v, slopes)]
        out = regard.attention(*leaves[:3], mask=Window(3), bias=Alibi(leaves[3]), softcap=3.0, backend=backend)
        grads = torch.autograd.grad(out.square().sum(), leaves, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in grads), leaves)

    for got, want in zip(twice(torch.float32, "native"), twice(torch.float64, "reference"), strict=True):
        near(got, want, 1e-4)


@pytest.mark.filterwarnings("ignore:`torch.jit.script")  # torch's own, on the first jvp
def test_transforms_are_refused_by_name():
    q, k, v = (x.float() for x in inputs())
    for text, call in (
        ("vmap", lambda: torch.func.vmap(lambda q: regard.attention(q, k, v, backend="native"))(q[None])),
        ("transforms", lambda: torch.func.grad(lambda q: regard.attention(q, k, v, backend="native").sum())(q)),
        ("jvp", lambda: torch.func.jvp(lambda q: regard.attention(q, k, v, backend="native"), (q,), (q,))),
    ):
        with pytest.raises(BackendUnsupported, match=text):
            call()
    with pytest.raises(BackendUnsupported, match="float64"):
        regard.attention(*(x.double() for x in (q, k, v)), backend="native")


CALLS = [
    {},
    {
        "mask": Causal() & KeyPadding(made(2, 9) > 0),
        "bias": Alibi(made(4)) + Dense(made(1, 4, 1, 9)),
        "softcap": 3.0,
        "dropout_p": 0.3,
    },
    {
        "mask": (Causal() | Prefix(torch.tensor([2, 3])))
        & Segments(torch.arange(9) // 4)
        & masks.Dense(made(7, 9) > 0)
        & KeyLengths(8)
    },
]


@pytest.mark.parametrize("options", CALLS, ids=["plain", "biased", "masked"])
def test_opcheck(options):
    q, k, v = (made(2, heads, n, d).float() for heads, n, d in ((4, 7, 8), (2, 9, 8), (2, 9, 5)))
    call = _call(q, k, v, **options, return_lse=True)
    plain = operands_of(call)
    trained = {name: getattr(plain, name) for name in ("q", "k", "v", "bias", "relative")}
    leaves = {name: x.detach().requires_grad_() for name, x in trained.items() if x is not None}
    torch.library.opcheck(torch.ops.regard.attention_forward.default, (*plain._replace(**leaves), True))
    torch.library.opcheck(torch.ops.regard.attention_forward.default, (*plain, False))
    out, lse, kept = torch.ops.regard.attention_forward(*plain, True)
    backward = torch.ops.regard.attention_backward.default
    wanted = [x is not None for x in trained.values()]
    torch.library.opcheck(backward, (torch.randn_like(out), torch.randn_like(lse), out, lse, kept, *plain, wanted))
    torch.library.opcheck(
        backward, (torch.randn_like(out), None, out, lse, kept, *plain, [False, True, False, False, False])
    )


def test_compiled_in_one_graph_and_exported():
    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.slopes = torch.nn.Parameter(made(4).float())

        def forward(self, q, k, v):
            return regard.attention(q, k, v, mask=Window(20), bias=Alibi(self.slopes), softcap=3.0, backend="native")

    def inputs(length):
        return tuple(made(2, heads, length, 8).float().requires_grad_() for heads in (4, 2, 2))

    layer = Layer()
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    length = torch.export.Dim("length", min=2, max=512)
    exported = torch.export.export(layer, inputs(12), dynamic_shapes=[{2: length}] * 3)
    assert "regard.attention_forward" in str(exported.graph)
    for size in (12, 33, 50):
        own = inputs(size)
        leaves = (*own, layer.slopes)
        want = layer(*own)
        torch.testing.assert_close(exported.module()(*own), want)
        got = compiled(*own)
        torch.testing.assert_close(got, want)
        for one, other in zip(*(torch.autograd.grad(out.square().sum(), leaves) for out in (got, want)), strict=True):
            torch.testing.assert_close(one, other)


def child(code: str, **environment: str) -> str:
    """What a fresh process prints."""
    process = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | environment, cwd=ROOT, capture_output=True, text=True
    )
    assert process.returncode == 0, process.stderr
    return process.stdout.strip()


@needs_native
@pytest.mark.parametrize("number", range(len(STRUCTS)), ids=[one.name for one in STRUCTS])
def test_the_structs_are_the_library_s(number):
    """Every field is found by name and place; one renamed, moved, missing, resized or added is said."""
    own = STRUCTS[number]
    text = library.LIBRARY.regard_struct(number).decode()
    copy = Struct(own.name, *(" ".join(part.names) for part in own.parts))
    assert copy.mismatch(text) is None
    assert [part.size for part in copy.parts] == [part.size for part in own.parts]
    head, *fields = text.split(" ")
    name, code, offset, size = fields[2].split(":")
    for wrong in (
        f"{name}_:{code}:{offset}:{size}",
        f"{name}:{code}:{int(offset) + 8}:{size}",
        f"{name}:{code}:{int(offset) - 4}:{size}",
        f"{name}:{code}:{offset}:{int(size) + 3}",
    ):
        assert copy.mismatch(" ".join([head, *fields[:2], wrong, *fields[3:]])), wrong
    assert copy.mismatch(" ".join([head, *fields[:2], *fields[3:]]))
    assert copy.mismatch(" ".join([head, *fields, "more:q:0:8"]))
    assert copy.mismatch(" ".join([head, str(int(fields[0]) + 8), *fields[1:]]))
    assert copy.mismatch("regard_other" + text[len(own.name) :])


@needs_native
def test_every_field_of_the_headers_is_described():
    text = "".join((ROOT / "csrc" / name).read_text(encoding="utf-8") for name in ("regard.h", "recurrent.h"))
    bodies = re.findall(r"typedef struct (\w+) {(.*?)\n} \w+;", text, re.S)
    assert [name for name, _ in bodies] == [one.name for one in STRUCTS]
    for (_, body), one in zip(bodies, STRUCTS, strict=True):
        pieces = [piece.strip() for line in re.sub(r"//.*", "", body).split(";") for piece in line.split(",")]
        fields = [found[1] for piece in pieces if (found := re.search(r"(\w+)(\[\d\])?$", piece))]
        assert fields == [field for part in one.parts for field in part.names]


@needs_native
def test_a_buffer_that_is_too_small_is_refused(monkeypatch):
    q = torch.randn(1, 2, 300, 8)
    x = torch.rand(1, 70, 300, requires_grad=True)
    state = {"regard_recurrence_every": 1024, "regard_selective_every": 1024, "regard_selective_group": 1024}
    monkeypatch.setattr(library, "number", lambda name, *_: state[name])
    with pytest.raises(RuntimeError, match="a buffer smaller than the kernel needs"):
        regard.recurrence(q.requires_grad_(), q, q, Decay(torch.zeros(2)), backend="native")
    with pytest.raises(RuntimeError, match="a buffer smaller than the kernel needs"):
        regard.selective_scan(x, x, -torch.ones(300, 2), x[..., :2], x[..., :2], backend="native")
    heads = torch.ones(1, 1, 20, 4)
    operands = operands_of(_call(heads, heads, heads, return_lse=True))
    outputs = torch.ops.regard.attention_forward(*operands, False)  # nothing is kept
    with pytest.raises(RuntimeError, match="a buffer smaller than the kernel needs"):
        torch.ops.regard.attention_backward(heads, None, *outputs, *operands, [True] * 3 + [False] * 2)
    state["regard_selective_every"] = 64
    y, _ = regard.selective_scan(x, x, -torch.ones(300, 2), x[..., :2], x[..., :2], backend="native")
    with pytest.raises(RuntimeError, match="a buffer smaller than the kernel needs"):
        y.sum().backward()


def test_there_is_one_openmp_runtime_and_it_follows_torch():
    code = """
import re, threading, torch, regard
from regard.backends.native import library
q = torch.randn(1, 2, 64, 8)
regard.attention(q, q, q, backend="native")
print(sorted(set(re.findall(r"/\\S*lib(?:g|i)?omp\\S*", open("/proc/self/maps").read()))))
for n in (1, 2, 1):
    torch.set_num_threads(n)
    print(library.LIBRARY.regard_threads(), end=" ")
    def in_a_thread():
        regard.attention(q, q, q, backend="native")
        print(library.LIBRARY.regard_threads() == torch.get_num_threads())
    thread = threading.Thread(target=in_a_thread)
    thread.start()
    thread.join()
"""
    runtimes, *threads = child(code).splitlines()
    assert runtimes.count(".so") == 1, runtimes
    assert threads == ["1 True", "2 True", "1 True"]


def test_the_instruction_set_can_be_capped():
    code = (
        "import torch, regard; from regard.backends.native import library; print(library.ISA, library.REASON);"
        "torch.manual_seed(0); q = torch.randn(1, 2, 70, 24); mask = regard.masks.Causal();"
        "told = regard.explain(q, q, q, mask=mask); print(told.rows[0].reason);"
        "out = regard.attention(q, q, q, mask=mask, backend='native') if library.ISA else q * 0;"
        "want = regard.attention(q, q, q, mask=mask, backend='reference');"
        "print(float((out - want).abs().max()) < 1e-5)"
    )
    order = ["portable", "x86-64-v3", "x86-64-v4", "x86-64-v4+bf16"]
    seen = []
    for cap in order if library.ISA in order else ["portable", library.ISA]:
        isa, reason, right = child(code, REGARD_ISA=cap).splitlines()
        assert isa.endswith(" None") and right == "True"
        seen.append(isa.split()[0])
        assert (reason == "None") == (seen[-1] != "portable")
    assert seen[0] == "portable" and seen[-1] == library.ISA
    if library.ISA in order:
        assert all(order.index(one) <= order.index(cap) for one, cap in zip(seen, order, strict=True))
    said = child(code, REGARD_ISA="mmx").splitlines()
    assert "REGARD_ISA='mmx' names no instruction set" in said[1]


def test_a_missing_or_broken_library_is_said(tmp_path):
    code = "import torch, regard; q = torch.randn(1, 2, 5, 8); print(regard.explain(q, q, q))"
    (tmp_path / "libregard.so.1").write_bytes(b"no library")
    for path in (tmp_path / "libregard.so.1", tmp_path / "nothing.so"):
        told = child(code, REGARD_LIBRARY=str(path))
        assert "native" in told and "the kernels could not be loaded" in told and "runs it" in told


@needs_native
@pytest.mark.skipif(platform.system() != "Linux", reason="of the ELF format")
def test_a_library_that_is_cut_off_or_another_is_said(tmp_path):
    """Loading a file that ends too early would end the process."""
    code = "import torch, regard; q = torch.randn(1, 2, 5, 8); print(regard.explain(q, q, q))"
    whole = Path(library.LIBRARY._name).read_bytes()
    for size in (50, 100, 1000, len(whole) // 2, len(whole) - 100):
        (tmp_path / "cut.so").write_bytes(whole[:size])
        told = child(code, REGARD_LIBRARY=str(tmp_path / "cut.so"))
        assert "are cut off" in told or "could not be loaded" in told, size
    other = next(path for path in Path(torch.__file__).parent.joinpath("lib").glob("libc10.so*"))
    assert "is not the library of the kernels" in child(code, REGARD_LIBRARY=str(other))


def test_the_gradient_of_a_bias_in_low_precision():
    """It sums small differences over many pairs: as close to float64 as the definition, up to a factor of two."""
    q, k, v = (torch.randn(2, 4, 200, 32).bfloat16() for _ in range(3))
    cotangent = torch.randn(2, 4, 200, 32).bfloat16()

    def gradient(backend, dtype):
        slopes = torch.linspace(0.1, 0.9, 4, dtype=dtype).requires_grad_()
        wide = [x.double() for x in (q, k, v)] if dtype is torch.float64 else (q, k, v)
        out = regard.attention(*wide, mask=Causal(), bias=Alibi(slopes), backend=backend)
        return torch.autograd.grad(out, slopes, cotangent.to(out.dtype))[0].double()

    truth = gradient("reference", torch.float64)
    plain, ours = ((gradient(name, torch.float32) - truth).abs().max() for name in ("reference", "native"))
    assert ours <= 2 * plain


def test_many_python_threads_at_once():
    def work(length):
        q, k, v = (made(2, 4, length, 16).float().requires_grad_() for _ in range(3))
        out = regard.attention(q, k, v, mask=Causal(), backend="native")
        return [out.detach(), *torch.autograd.grad(out.sin().sum(), (q, k, v))]

    lengths = (1, 33, 65, 200)
    want = {length: work(length) for length in lengths}
    wrong = []

    def loop(first):
        for turn in range(10):
            length = lengths[(first + turn) % len(lengths)]
            if not all(map(torch.equal, work(length), want[length])):
                wrong.append(length)

    threads = [threading.Thread(target=loop, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_works_on_one_thread():
    """As torch's own kernels: a child of a process that ran OpenMP threads may only use one of its own."""
    code = """
import os, torch, regard
torch.set_num_threads(2)
q = torch.randn(1, 4, 300, 16)
want = regard.attention(q, q, q, backend="native")
child = os.fork()
if not child:
    torch.set_num_threads(1)
    os._exit(0 if torch.equal(regard.attention(q, q, q, backend="native"), want) else 3)
print(os.waitpid(child, 0)[1])
"""
    assert child(code) == "0"
