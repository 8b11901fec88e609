"""`regard.attention` on any dtype, layout and size; its errors; the choice of a backend; compiled."""

import logging

import pytest
import torch
from attention_calls import BATCH, DK, EAGER, Q_HEADS, WIDE, K, close, inputs, made
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import regard
from regard import backends
from regard.backends import chunked
from regard.biases import Alibi, Dense, RelativeBuckets
from regard.errors import BackendUnsupported
from regard.masks import Causal, KeyLengths, KeyPadding, Segments, Window

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


def test_nothing_is_drawn_where_nothing_runs():
    q = torch.randn(1, 2, 3, 4)
    before = torch.get_rng_state()
    regard.explain(q, q, q, dropout_p=0.5)
    with pytest.raises(regard.errors.BackendUnsupported):
        regard.attention(q, q, q, dropout_p=0.5, backend="flex")
    assert torch.equal(before, torch.get_rng_state())


def test_very_loose_softcaps_and_wrong_scales():
    q = torch.randn(1, 2, 3, 4)
    torch.testing.assert_close(regard.attention(q, q, q, softcap=1e39), regard.attention(q, q, q))
    for scale in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="scale: expected a finite number"):
            regard.attention(q, q, q, scale=scale)


@pytest.mark.parametrize("options", [{"mask": Window(3)}, {"softcap": 3.0}, {"mask": Window(3), "bias": Alibi(2)}])
def test_export_with_a_named_length(options):
    class Module(torch.nn.Module):
        def forward(self, q):
            return regard.attention(q, q, q, **options)

    length = torch.export.Dim("length", min=2, max=64)
    program = torch.export.export(Module(), (torch.randn(1, 2, 8, 4),), dynamic_shapes=({2: length},))
    q = torch.randn(1, 2, 23, 4)
    torch.testing.assert_close(program.module()(q), Module()(q))
