"""The drop-in function against torch's own: shapes that broadcast, empty sizes, torch's causal rule, numbers."""

import itertools
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

import regard
from regard.backends import without_kernels
from regard.catalog import RECORDS
from regard.masks import Causal, Dense
from regard.nn.functional import scaled_dot_product_attention


def both(*tensors, **options):
    """Ours and torch's, and the gradients of both."""
    results = []
    for function in (scaled_dot_product_attention, F.scaled_dot_product_attention):
        leaves = [x.detach().requires_grad_() for x in tensors]
        with sdpa_kernel(SDPBackend.MATH):
            out = function(*leaves, **options)
        results.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    for ours, theirs in zip(*results, strict=True):
        assert ours.shape == theirs.shape and ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    return results[0][0]


SHAPES = [
    ((3, 4), (2, 5, 7, 4), (2, 5, 7, 6)),
    ((3, 4), (7, 4), (7, 6)),
    ((5, 3, 4), (7, 4), (2, 5, 7, 6)),
    ((2, 5, 3, 4), (7, 4), (5, 7, 6)),
    ((2, 5, 3, 4), (1, 1, 7, 4), (2, 1, 7, 6)),
    ((6, 2, 5, 3, 4), (2, 1, 7, 4), (7, 6)),
    ((1, 3, 4), (4, 5, 7, 4), (5, 7, 6)),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shapes", SHAPES)
def test_axes_that_broadcast(shapes, dtype):
    tensors = [torch.randn(shape, dtype=dtype) for shape in shapes]
    both(*tensors)
    lead = torch.broadcast_shapes(*(shape[:-2] for shape in shapes[:2]))
    both(*tensors, is_causal=True)
    for mask in (torch.rand(3, 7) > 0.4, torch.randn(3, 7, dtype=dtype), torch.rand(*lead, 3, 7) > 0.4):
        if mask.dtype == torch.bool:
            mask[..., 0] = True
        both(*tensors, attn_mask=mask)


def test_grouped_heads_that_broadcast_elsewhere():
    q, k, v = torch.randn(2, 6, 3, 4), torch.randn(1, 2, 7, 4), torch.randn(2, 2, 7, 5)
    want = F.scaled_dot_product_attention(q, k.expand(2, -1, -1, -1), v, enable_gqa=True)
    torch.testing.assert_close(scaled_dot_product_attention(q, k, v, enable_gqa=True), want)


@pytest.mark.parametrize("sizes", [s for s in itertools.product((0, 2), (0, 3), (0, 4), (0, 5), (0, 6)) if 0 in s])
def test_empty_sizes(sizes):
    batch, q_len, k_len, dim, v_dim = sizes
    q, k, v = torch.randn(batch, 2, q_len, dim), torch.randn(batch, 2, k_len, dim), torch.randn(batch, 2, k_len, v_dim)
    both(q, k, v, scale=0.5)
    both(q, k, v, scale=0.5, is_causal=True)
    both(q, k, v, scale=0.5, attn_mask=torch.ones(q_len, k_len, dtype=torch.bool))
    both(q, k, v, scale=0.5, attn_mask=torch.ones(batch, 1, q_len, k_len))
    assert scaled_dot_product_attention(q[0:1].sum(0), k.sum(0), v.sum(0)).shape == (2, q_len, v_dim)


@pytest.mark.parametrize("scale", [np.float32(0.3), np.float64(0.3), np.int64(1), np.float16(0.5), 1, True])
def test_numbers_of_other_kinds(scale):
    q = torch.randn(1, 2, 5, 4)
    if isinstance(scale, bool):
        with pytest.raises(TypeError, match="scale: expected a number"):
            scaled_dot_product_attention(q, q, q, scale=scale)
        return
    want = F.scaled_dot_product_attention(q, q, q, scale=float(scale))
    torch.testing.assert_close(scaled_dot_product_attention(q, q, q, scale=scale), want)
    torch.testing.assert_close(regard.attention(q, q, q, scale=scale), want)
    torch.testing.assert_close(
        regard.attention(q, q, q, softcap=scale), regard.attention(q, q, q, softcap=float(scale))
    )
    drop = np.float32(0.0)
    torch.testing.assert_close(scaled_dot_product_attention(q, q, q, dropout_p=drop, scale=scale), want)


@pytest.mark.parametrize("make", [causal_upper_left, causal_lower_right])
@pytest.mark.parametrize(("q_len", "k_len"), [(5, 5), (3, 7)])
def test_the_causal_rule_of_torch(make, q_len, k_len):
    q, k = torch.randn(2, 4, q_len, 8), torch.randn(2, 4, k_len, 8)
    rule = make(q_len, k_len)
    want = F.scaled_dot_product_attention(q, k, k, attn_mask=rule)
    torch.testing.assert_close(scaled_dot_product_attention(q, k, k, attn_mask=rule), want)
    with pytest.raises(ValueError, match="is_causal"):
        scaled_dot_product_attention(q, k, k, attn_mask=rule, is_causal=True)


def test_the_causal_rule_of_torch_elsewhere_is_named():
    q = torch.randn(1, 2, 5, 4)
    rule = causal_upper_left(5, 5)
    with pytest.raises(ValueError, match="expected a CausalBias for 5 queries and 5 keys"):
        scaled_dot_product_attention(q, q, q, attn_mask=causal_lower_right(4, 6))
    for options in ({"bias": rule}, {"mask": rule}, {"sink": rule}):
        with pytest.raises(TypeError, match=f"{next(iter(options))}.*CausalBias"):
            regard.attention(q, q, q, **options)
    with pytest.raises(TypeError, match="CausalBias"):
        regard.attention(q, q, rule)


def _foreign():
    dense = torch.randn(1, 2, 5, 4)
    yield "nested", torch.nested.nested_tensor([torch.randn(2, 5, 4)], layout=torch.jagged)
    yield "sparse", dense.to_sparse()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch's own, of what it will leave
        yield "quantized", torch.quantize_per_tensor(dense, 0.1, 0, torch.qint8)


@pytest.mark.filterwarnings("ignore:.*prototype.*:UserWarning", "ignore:.*nested.*:UserWarning")
def test_tensors_without_strides_are_refused_by_name():
    q = torch.randn(1, 2, 5, 4)
    for kind, x in _foreign():
        for call in (
            lambda x=x: regard.attention(x, q, q),
            lambda x=x: regard.attention(q, q, x),
            lambda x=x: scaled_dot_product_attention(q, x, q),
            lambda x=x: regard.recurrence(x, q, q, regard.Decay()),
            lambda x=x: regard.attention(q, q, q, bias=x),
        ):
            with pytest.raises(TypeError, match=rf"^[\w, ]+: expected .*({kind}|qint8)"):
                call()


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64, torch.int32])
def test_dtypes_without_arithmetic_are_refused_by_name(dtype):
    x = torch.zeros(1, 2, 5, 4).to(dtype)
    good = torch.zeros(1, 2, 5, 4)
    for call in (
        lambda: regard.attention(x, x, x),
        lambda: scaled_dot_product_attention(x, x, x),
        lambda: regard.recurrence(x, x, x, regard.Decay()),
        lambda: regard.attention(good, good, good, bias=x[..., :1].expand(-1, -1, -1, 5)),
        lambda: regard.attention(good, good, good, sink=x[0, :, 0, 0]),
        lambda: regard.nn.MultiHeadAttention(4, 2)(x[0]),
    ):
        with pytest.raises(TypeError, match=r"^[\w, ]+: expected"):
            call()


@pytest.mark.parametrize(
    "record", [one for one in RECORDS if "ema" not in one.name], ids=lambda record: record.name
)  # a moving average has no matrix, and takes any dtype
def test_tokens_of_another_dtype_than_the_layer_are_refused_by_name(record):
    layer = record.build(16, 4)
    context = {"context": torch.zeros(1, 4, layer.context_dim)} if record.context else {}
    for dtype in (torch.float64, torch.bfloat16):
        with pytest.raises(TypeError, match=r"^x: expected float32, as the layer's weights are, got"):
            layer(torch.zeros(1, 3, 16, dtype=dtype), **context)
        if context:
            with pytest.raises(TypeError, match=r"^context: expected float32, as the layer's weights are, got"):
                layer(torch.zeros(1, 3, 16), context["context"].to(dtype))
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(torch.zeros(1, 3, 16), **context).shape == (1, 3, 16)
        assert layer(torch.zeros(1, 3, 16, dtype=torch.bfloat16), **context).shape == (1, 3, 16)


def test_masks_and_biases_are_neither_true_nor_false():
    from regard.biases import Alibi
    from regard.masks import Window

    for use in (
        lambda: Causal() and Window(1),
        lambda: Causal() or Window(1),
        lambda: not Causal(),
        lambda: bool(Causal() & Window(2)),
        lambda: Alibi(2) and Alibi(2),
        lambda: bool(Dense(torch.ones(2, 2, dtype=torch.bool))),
    ):
        with pytest.raises(TypeError, match="neither true nor false"):
            use()


@pytest.mark.parametrize("backend", ["native", "chunked", "reference", "sdpa"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_that_come_many_at_once(backend, dtype):
    if backend == "native" and (dtype == torch.float64 or without_kernels()):
        backend = "chunked"
    x = torch.randn(1, 2, 5, 4, dtype=dtype, requires_grad=True)
    y = regard.attention(x, torch.tanh(x), x, mask=Causal(), backend=backend)
    cotangents = torch.randn(3, *y.shape, dtype=dtype)
    want = torch.stack([torch.autograd.grad(y, x, one, retain_graph=True)[0] for one in cotangents])
    (got,) = torch.autograd.grad(y, x, cotangents, retain_graph=True, is_grads_batched=True)
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)

    def summed(x):
        return regard.attention(x, x, x, mask=Causal(), backend=backend).sum(-1)

    jacobian = torch.autograd.functional.jacobian
    torch.testing.assert_close(
        jacobian(summed, x.detach(), vectorize=True), jacobian(summed, x.detach()), rtol=tolerance, atol=tolerance
    )
    if backend == "sdpa":  # torch warns that its own kernel runs once for every sample
        return
    got = torch.func.vmap(lambda one: torch.autograd.grad(y, x, one, retain_graph=True)[0])(cotangents)
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("backend", ["native", "chunked", "reference"])
@pytest.mark.parametrize("operation", ["attention", "recurrence"])
def test_gradients_that_are_recorded_are_those_that_are_not(backend, operation):
    """Where one tensor is query, key and value, or one comes from another, each gets its own share once."""
    if backend == "native" and without_kernels():
        pytest.skip(f"native not built: {without_kernels()}")
    x = torch.randn(1, 2, 5, 4, requires_grad=True)
    for k, v in ((x, x), (2 * x, x), (x, torch.tanh(x))):
        if operation == "attention":
            y = regard.attention(x, k, v, mask=Causal(), sink=x[0, :, 0, 0], backend=backend).square().sum()
        else:
            y = regard.recurrence(x, k, v, regard.Decay(-x.square()), backend=backend)[0].square().sum()
        (plain,) = torch.autograd.grad(y, x, retain_graph=True)
        (recorded,) = torch.autograd.grad(y, x, create_graph=True)
        torch.testing.assert_close(recorded, plain, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 65), (30, 1), (1, 1, 1, 65), (2, 1, 30, 65), (1, 4, 1, 1), ()])
def test_the_gradient_of_a_broadcast_mask_is_summed_in_the_compute_dtype(shape, dtype):
    torch.manual_seed(0)
    q, k = torch.randn(2, 4, 30, 8).to(dtype), torch.randn(2, 4, 65, 8).to(dtype)
    mask = torch.randn(shape).to(dtype)

    def gradient(x: torch.dtype) -> torch.Tensor:
        leaf = mask.to(x).requires_grad_()
        out = scaled_dot_product_attention(q.to(x), k.to(x), k.to(x), attn_mask=leaf)
        return torch.autograd.grad(out.double().sum(), leaf)[0].double()

    want = gradient(torch.float64)
    room = 4 * torch.finfo(dtype).eps * max(1.0, float(want.abs().max()))
    torch.testing.assert_close(gradient(dtype), want, rtol=0, atol=room)


def test_masks_of_other_shapes_are_refused_by_name():
    q = torch.randn(2, 4, 3, 8)
    for shape in ((4, 3), (3, 4), (5, 1, 3, 3), (1, 2, 4, 3, 3)):
        with pytest.raises((ValueError, RuntimeError)):
            scaled_dot_product_attention(q, q, q, attn_mask=torch.zeros(shape))


@pytest.mark.parametrize("heads", [(8, 2, 4), (8, 4, 2), (8, 1, 8), (6, 3, 2)])
def test_keys_and_values_may_have_different_head_counts(heads):
    q, k, v = (torch.randn(2, h, 5, 4, dtype=torch.float64, requires_grad=True) for h in heads)
    wanted = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    found = scaled_dot_product_attention(q, k, v, enable_gqa=True)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    for ours, theirs in zip(*(torch.autograd.grad(x.sum(), (q, k, v)) for x in (found, wanted)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("heads", [(0, 0, 0), (4, 0, 0), (0, 2, 2)])
def test_no_heads(heads):
    q, k, v = (torch.randn(2, h, 5, 4) for h in heads)
    grouped = heads[0] != heads[1]
    found = scaled_dot_product_attention(q, k, v, enable_gqa=grouped)
    assert torch.equal(found, torch.zeros(2, heads[0], 5, 4))


def test_numbers_may_be_tensors_of_one_number():
    q = torch.randn(2, 4, 5, 8, dtype=torch.float64)
    wanted = F.scaled_dot_product_attention(q, q, q, scale=torch.tensor(0.5), dropout_p=torch.tensor(0.0))
    found = scaled_dot_product_attention(q, q, q, scale=torch.tensor(0.5), dropout_p=torch.tensor(0.0))
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
