"""Every operation under every recorder that torch has: what is recorded is the operation, not its first result."""

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import regard
from regard import Decay, Delta
from regard.masks import Causal, KeyLengths, KeyPadding, Segments, Window

LENGTH = 6


def _attention(mask=None, **options) -> Callable[[Tensor], Tensor]:
    return lambda x: regard.attention(x, x, x, mask=mask, **options)


def _recurrence(make) -> Callable[[Tensor], Tensor]:
    return lambda x: regard.recurrence(x, torch.tanh(x), x, make(x))[0]


KEEP = torch.tensor([[True, True, False, True, True, True]])
CALLS: dict[str, Callable[[Tensor], Tensor]] = {
    "attention": _attention(),
    "causal": _attention(Causal()),
    "window": _attention(Window(2)),
    "lengths": _attention(KeyLengths(torch.tensor([4]))),
    "padding": _attention(Causal() & KeyPadding(KEEP)),
    "documents": _attention(Causal() & Segments(torch.arange(LENGTH) // 3)),
    "packed": _attention(Causal() & Segments.from_lengths([2, 4])),
    "sink": _attention(Causal(), sink=torch.tensor([0.5, -1.0])),
    "softcap": _attention(Causal(), softcap=2.0),
    "one query": lambda x: regard.attention(x[:, :, -1:], x, x, mask=Causal()),
    "starts": _attention(Causal(), q_start=torch.tensor([1])),
    "decay": _recurrence(lambda x: Decay(-torch.sigmoid(x))),
    "no decay": _recurrence(lambda x: Decay()),
    "delta": _recurrence(lambda x: Delta(torch.sigmoid(x[..., 0]), -torch.sigmoid(x[..., 0]))),
    "carried": lambda x: regard.recurrence(x, x, x, Decay(), state=regard.recurrence(x, x, x, Decay())[1])[0],
    "scan": lambda x: regard.scan(-torch.sigmoid(x[0]), x[0])[0],
    "selective": lambda x: regard.selective_scan(
        x[0], torch.sigmoid(x[0]), -torch.ones(8, 3), x[0][..., :3], x[0][..., 3:6]
    )[0],
    "convolution": lambda x: regard.short_conv(x[0], torch.ones(8, 3))[0],
}


def given(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    torch.manual_seed(3)
    return torch.randn(1, 2, LENGTH, 8, dtype=dtype), torch.randn(1, 2, LENGTH, 8, dtype=dtype)


def right(name: str, x: Tensor) -> Tensor:
    """The definition in float64, the tensors of masks as they are."""
    with torch.no_grad(), regard.use_backend("reference"):
        return CALLS[name](x.double())


def near(got: Tensor, want: Tensor, dtype: torch.dtype = torch.float32) -> None:
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 5e-2, torch.float64: 1e-12}[dtype]
    torch.testing.assert_close(got.detach().double(), want, rtol=tolerance, atol=tolerance)


def traced(run: Callable[[Tensor], Tensor], x: Tensor) -> Callable[[Tensor], Tensor]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", torch.jit.TracerWarning)  # of sizes, which a trace fixes
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.trace(run, (x,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", CALLS)
def test_a_trace_computes_anew(name, dtype):
    one, other = given(dtype)
    with torch.no_grad():
        record = traced(CALLS[name], one)
        near(record(other), right(name, other), dtype)
    near(record(one), right(name, one), dtype)


@pytest.mark.parametrize("name", ["causal", "delta", "scan", "selective", "convolution"])
def test_a_trace_of_what_is_trained(name):
    one, other = given()
    record = traced(CALLS[name], one.clone().requires_grad_())
    x, y = other.clone().requires_grad_(), other.clone().requires_grad_()
    near(record(x), right(name, other))
    (got,) = torch.autograd.grad(record(x).square().sum(), x)
    (want,) = torch.autograd.grad(CALLS[name](y).square().sum(), y)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
@pytest.mark.parametrize("name", CALLS)
def test_make_fx(name, mode):
    one, other = given()
    with torch.no_grad():
        record = make_fx(CALLS[name], tracing_mode=mode, _allow_non_fake_inputs=True)(one)
        near(record(other), right(name, other))


@pytest.mark.parametrize("mode", ["real", "symbolic"])
@pytest.mark.parametrize("name", ["causal", "padding", "decay", "delta", "scan", "selective", "convolution"])
def test_make_fx_of_gradients(name, mode):
    def gradient(x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        return torch.autograd.grad(CALLS[name](x).square().sum(), x)[0]

    one, other = given()
    record = make_fx(gradient, tracing_mode=mode, _allow_non_fake_inputs=True)(one)
    torch.testing.assert_close(record(other), gradient(other), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", CALLS)
def test_fake_tensors(name):
    """Under the mode and outside of it, with fake tensors alone or beside the real ones of a mask."""
    real, _ = given()
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fake = mode.from_tensor(real)
    want = CALLS[name](real)
    for place in (mode, torch.no_grad()):
        with place:
            out = CALLS[name](fake)
        assert type(out) is type(fake) and out.shape == want.shape and out.dtype == want.dtype
    with mode:
        x = torch.randn(1, 2, LENGTH, 8, requires_grad=True)
        out = CALLS[name](x)
        out.sum().backward()
        assert x.grad is not None and x.grad.shape == x.shape
    near(CALLS[name](real), right(name, real))  # nothing fake was remembered


class Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", CALLS)
def test_a_dispatch_mode_sees_the_operators(name):
    x, _ = given()
    with Seen() as seen, torch.no_grad():
        out = CALLS[name](x)
    near(out, right(name, x))
    if regard.explain(x, x, x).chosen == "native":
        assert any(one.startswith("regard.") for one in seen.names), seen.names


class Tagged(Tensor):
    """A subclass that follows every function, as user classes do."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return super().__torch_function__(func, types, args, kwargs or {})


@pytest.mark.parametrize("name", CALLS)
def test_a_subclass_of_tensors_is_honoured(name):
    x, _ = given()
    out = CALLS[name](x.as_subclass(Tagged))
    assert isinstance(out, Tagged)
    near(out.as_subclass(Tensor), right(name, x))


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_export(name, strict):
    class Module(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return CALLS[name](x)

    one, other = given()
    program = torch.export.export(Module(), (one,), strict=strict)
    near(program.module()(other), right(name, other))


@pytest.mark.parametrize("name", ["causal", "padding", "window"])
def test_a_trace_of_what_is_trained_without_the_kernels(name):
    one, other = given(torch.float64)
    record = traced(CALLS[name], one.clone().requires_grad_())
    x = other.clone().requires_grad_()
    near(record(x), right(name, other), torch.float64)
    (got,) = torch.autograd.grad(record(x).sum(), x)
    assert bool(got.isfinite().all()) and bool((got != 0).any())


@pytest.mark.parametrize("name", ["causal", "delta", "selective"])
def test_what_was_recorded_without_gradients_can_be_trained(name):
    one, other = given()
    with torch.no_grad():
        record = make_fx(CALLS[name], _allow_non_fake_inputs=True)(one)
    x, y = other.clone().requires_grad_(), other.clone().requires_grad_()
    (got,) = torch.autograd.grad(record(x).square().sum(), x)
    (want,) = torch.autograd.grad(CALLS[name](y).square().sum(), y)
    torch.testing.assert_close(got, want)
