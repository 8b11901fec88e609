"""The module with torch's signature against torch's own: options, kinds of masks, layouts; outputs and gradients."""

import copy
import io
import itertools
import pickle

import pytest
import torch
from torch import nn

import regard
from regard.nn import TorchMultiheadAttention, from_torch

B, T, S, E, H = 2, 5, 7, 12, 4
LAYERS = [
    {},
    {"bias": False},
    {"kdim": 6, "vdim": 5},
    {"vdim": 5, "bias": False},
    {"add_bias_kv": True},
    {"add_zero_attn": True},
    {"add_bias_kv": True, "add_zero_attn": True, "kdim": 6},
]
MASKS = ["none", "padding", "pairs", "pairs of heads", "padding and pairs", "padding and pairs of heads", "causal"]


def pair_of(dtype=torch.float64, **options):
    """torch's module with parameters that are not 0, and ours with the same."""
    theirs = nn.MultiheadAttention(E, H, dtype=dtype, **options)
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.5)
    ours = TorchMultiheadAttention(E, H, dtype=dtype, **options)
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


def masks(kind, form, batch=B, q_len=T, k_len=S):
    """torch's two masks; every query keeps key 0."""
    found = {}
    if "padding" in kind:
        found["key_padding_mask"] = torch.rand(batch, k_len) > 0.6
    if "pairs" in kind:
        heads = (batch * H,) if "heads" in kind else ()
        found["attn_mask"] = torch.rand(*heads, q_len, k_len) > 0.5
    if kind == "causal":
        found["attn_mask"] = torch.ones(q_len, k_len, dtype=torch.bool).triu(1)
    for name, mask in found.items():
        mask[..., 0] = False
        if form != "bool":
            values = torch.zeros(mask.shape) if form == "-inf" else torch.randn(mask.shape)
            found[name] = values.double().masked_fill(mask, -torch.inf)
    return found


def results(module, tensors, **options):
    """The output, the weights, and the gradients of both by the tokens and the parameters."""
    leaves = [x.detach().requires_grad_() for x in tensors]
    out, weights = module(*leaves, **options)
    loss = (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)).sum()
    if weights is not None:
        loss = loss + (weights * torch.linspace(0, 1, weights.numel(), dtype=out.dtype).view(weights.shape)).sum()
    parameters = [*module.parameters()]
    grads = torch.autograd.grad(loss, [*leaves, *parameters])
    return [out, *([] if weights is None else [weights]), *grads]


def assert_same(ours, theirs, tolerance=1e-10):
    assert len(ours) == len(theirs)
    for own, want in zip(ours, theirs, strict=True):
        assert own.shape == want.shape and own.dtype == want.dtype
        torch.testing.assert_close(own, want, rtol=tolerance, atol=tolerance)


def tokens(module, *, batched=True):
    lengths = [(T, module.embed_dim), (S, module.kdim), (S, module.vdim)]
    shapes = [(B, n, width) if module.batch_first else (n, B, width) for n, width in lengths] if batched else lengths
    return [torch.randn(shape, dtype=module.out_proj.weight.dtype) for shape in shapes]


@pytest.mark.parametrize("options", LAYERS, ids=str)
@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("form", ["bool", "-inf", "float"])
def test_outputs_weights_and_gradients_are_torchs(options, kind, form):
    if form != "bool" and kind == "none":
        return
    for batch_first, (need, average) in itertools.product((False, True), ((False, True), (True, True), (True, False))):
        ours, theirs = pair_of(batch_first=batch_first, **options)
        given = {**masks(kind, form), "need_weights": need, "average_attn_weights": average}
        inputs = tokens(ours)
        assert_same(results(ours, inputs, **given), results(theirs, inputs, **given))


@pytest.mark.parametrize("options", LAYERS, ids=str)
@pytest.mark.parametrize("kind", MASKS)
def test_without_a_batch(options, kind):
    for need, average in ((False, True), (True, True), (True, False)):
        ours, theirs = pair_of(**options)
        given = masks(kind, "bool", batch=1)
        if "key_padding_mask" in given:
            given["key_padding_mask"] = given["key_padding_mask"][0]
        inputs = tokens(ours, batched=False)
        given |= {"need_weights": need, "average_attn_weights": average}
        assert_same(results(ours, inputs, **given), results(theirs, inputs, **given))


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_self_attention_and_a_shared_memory(batch_first, bias):
    ours, theirs = pair_of(batch_first=batch_first, bias=bias)
    x, memory, _ = (one.requires_grad_() for one in tokens(ours))
    for inputs in ((x, x, x), (x, memory, memory), (x, x, x.clone()), (memory, memory, x.new_zeros(memory.shape))):
        out, want = ours(*inputs)[0], theirs(*inputs)[0]
        assert out.is_contiguous()
        grads = [
            torch.autograd.grad(one.square().sum(), (inputs[0], *m.parameters()))
            for one, m in ((out, ours), (want, theirs))
        ]
        assert_same([out, *grads[0]], [want, *grads[1]])


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("options", [{}, {"add_bias_kv": True}, {"add_zero_attn": True}], ids=str)
def test_the_causal_hint(need_weights, padded, options):
    ours, theirs = pair_of(**options)
    inputs = tokens(ours)
    given = masks("padding" if padded else "", "-inf") | {"attn_mask": masks("causal", "-inf")["attn_mask"]}
    want = theirs(*inputs, **given)[0]  # torch with the hint but without weights hides the keys that it appends
    out, weights = ours(*inputs, **given, need_weights=need_weights, is_causal=True)
    torch.testing.assert_close(out, want, rtol=1e-10, atol=1e-10)
    assert (weights is not None) == need_weights
    with pytest.raises(ValueError, match=r"^is_causal: .*attn_mask"):
        ours(*inputs, is_causal=True, need_weights=need_weights)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("need_weights", [False, True])
def test_a_wrong_hint_is_trusted_where_torch_trusts_it(padded, need_weights):
    ours, theirs = pair_of()
    given = masks("padding and pairs" if padded else "pairs", "float") | {
        "is_causal": True,
        "need_weights": need_weights,
    }
    inputs = tokens(ours)
    assert_same(results(ours, inputs, **given), results(theirs, inputs, **given))


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("form", ["bool", "-inf"])
def test_a_row_that_is_masked_whole_gives_zero(need_weights, form):
    ours, _ = pair_of()
    inputs = [x.requires_grad_() for x in tokens(ours)]
    padding = torch.zeros(B, S, dtype=torch.bool)
    padding[1] = True
    pairs = torch.zeros(T, S, dtype=torch.bool)
    pairs[2] = True
    if form == "-inf":
        padding, pairs = (
            torch.zeros(m.shape, dtype=torch.float64).masked_fill(m, -torch.inf) for m in (padding, pairs)
        )
    out, weights = ours(*inputs, key_padding_mask=padding, attn_mask=pairs, need_weights=need_weights)
    for dead in (out[:, 1], out[2, 0]):
        torch.testing.assert_close(dead, ours.out_proj.bias.expand_as(dead), rtol=0, atol=0)
    if weights is not None:
        assert not weights[1].any() and not weights[0, 2].any()
        torch.testing.assert_close(weights[0, :2].sum(-1), torch.ones(2, dtype=torch.float64))
    grads = torch.autograd.grad(out.square().sum(), (*inputs, *ours.parameters()))
    assert all(grad.isfinite().all() for grad in grads)
    assert not grads[0][2, 0].any() and not grads[0][:, 1].any() and not grads[1][:, 1].any()


def test_a_row_that_is_masked_whole_reads_the_zero_key():
    ours, theirs = pair_of(add_zero_attn=True)
    padding = torch.zeros(B, S, dtype=torch.bool)
    padding[1] = True
    inputs = tokens(ours)
    assert_same(results(ours, inputs, key_padding_mask=padding), results(theirs, inputs, key_padding_mask=padding))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.05)])
@pytest.mark.parametrize("need_weights", [False, True])
def test_other_dtypes(dtype, tolerance, need_weights):
    ours, theirs = pair_of(dtype=dtype)
    inputs = tokens(ours)
    given = {
        name: mask if mask.dtype == torch.bool else mask.to(dtype) for name, mask in masks("padding", "bool").items()
    }
    for own, want in zip(
        results(ours, inputs, **given, need_weights=need_weights),
        results(theirs, inputs, **given, need_weights=need_weights),
        strict=True,
    ):
        assert own.dtype == want.dtype and own.shape == want.shape
        assert float((own - want).detach().abs().max()) <= tolerance * max(1.0, float(want.detach().abs().max()))


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("options", [{}, {"add_bias_kv": True, "add_zero_attn": True}], ids=str)
def test_autocast(need_weights, options):
    ours, theirs = pair_of(dtype=torch.float32, **options)
    inputs = tokens(ours)
    with torch.autocast("cpu", torch.bfloat16):
        found, want = (module(*inputs, need_weights=need_weights) for module in (ours, theirs))
    for own, one in zip(found, want, strict=True):
        assert (own is None) == (one is None)
        if own is not None:
            assert own.dtype == one.dtype
            torch.testing.assert_close(own.float(), one.float(), rtol=0.05, atol=0.05)


def test_dropout_is_for_training_alone_and_keeps_the_mean():
    ours, _ = pair_of(dtype=torch.float64, dropout=0.5)
    inputs = tokens(ours)
    plain = ours.eval()(*inputs)
    before = torch.get_rng_state()
    torch.testing.assert_close(ours(*inputs, need_weights=False)[0], plain[0])
    assert torch.equal(before, torch.get_rng_state())
    ours.train()
    out, weights = ours(*inputs)
    assert not torch.allclose(out, plain[0])
    torch.testing.assert_close(weights, plain[1])  # before dropout
    torch.manual_seed(3)
    first = ours(*inputs, need_weights=False)[0]
    torch.manual_seed(3)
    assert torch.equal(first, ours(*inputs, need_weights=False)[0])
    many = torch.stack([ours(*inputs, need_weights=False)[0] for _ in range(600)])
    room = 5 * many.std(0) / 600**0.5 + 1e-9
    assert bool(((many.mean(0) - plain[0]).abs() <= room).all())


def test_a_learned_mask_gets_its_gradient():
    ours, theirs = pair_of()
    inputs = tokens(ours)
    grads = []
    for module in (ours, theirs):
        learned = [torch.linspace(-1, 1, n * S).double().view(n, S).requires_grad_() for n in (B, T)]
        out, weights = module(*inputs, key_padding_mask=learned[0], attn_mask=learned[1])
        grads.append(torch.autograd.grad(out.square().sum() + weights.square().sum(), learned))
    assert_same(*grads)


def test_two_masks_of_different_types():
    ours, theirs = pair_of()
    inputs = tokens(ours)
    padding, pairs = masks("padding", "bool")["key_padding_mask"], masks("pairs", "float")["attn_mask"]
    both = torch.zeros(padding.shape).double().masked_fill(padding, -torch.inf)
    want = theirs(*inputs, key_padding_mask=both, attn_mask=pairs)
    assert_same(ours(*inputs, key_padding_mask=padding, attn_mask=pairs), want)


@pytest.mark.parametrize("sizes", [(0, 3, 4), (2, 0, 4), (2, 3, 0), (0, 0, 0)])
def test_empty_sizes(sizes):
    batch, q_len, k_len = sizes
    ours, _ = pair_of(batch_first=True)
    q, k = torch.randn(batch, q_len, E, dtype=torch.float64), torch.randn(batch, k_len, E, dtype=torch.float64)
    given = masks("padding and pairs of heads", "bool", *sizes) if k_len else {}
    for need_weights in (False, True):
        out, weights = ours(q, k, k, **given, need_weights=need_weights)
        assert out.shape == (batch, q_len, E) and (weights is None or weights.shape == (batch, q_len, k_len))
        if not k_len:
            torch.testing.assert_close(out, ours.out_proj.bias.expand_as(out))


@pytest.mark.parametrize("options", LAYERS, ids=str)
def test_states_go_both_ways_and_copies_are_whole(options):
    ours, theirs = pair_of(**options)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())
    inputs = tokens(ours)
    want = ours(*inputs)
    buffer = io.BytesIO()
    torch.save(ours, buffer)
    buffer.seek(0)
    copies = (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours)), torch.load(buffer, weights_only=False))
    for other in copies:
        assert type(other) is TorchMultiheadAttention
        assert all(torch.equal(a, b) for a, b in zip(other(*inputs), want, strict=True))


@pytest.mark.parametrize("options", LAYERS, ids=str)
def test_parameters_start_as_torchs_do(options):
    torch.manual_seed(5)
    theirs = nn.MultiheadAttention(E, H, **options)
    torch.manual_seed(5)
    ours = TorchMultiheadAttention(E, H, **options)
    for module in (ours, theirs):
        torch.manual_seed(6)
        module._reset_parameters()
    assert isinstance(ours, nn.MultiheadAttention) and type(ours) is TorchMultiheadAttention
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))


def test_wrong_sizes_make_no_module():
    for arguments in ((12, 5), (0, 1), (12, 0)):
        with pytest.raises((ValueError, AssertionError)):
            TorchMultiheadAttention(*arguments)


@pytest.mark.parametrize(
    ("options", "kind", "form", "need_weights"),
    [
        ({}, "padding and pairs", "bool", False),
        ({"add_bias_kv": True}, "padding and pairs", "float", True),
        ({"add_zero_attn": True, "kdim": 6}, "causal", "bool", False),
    ],
)
def test_compiled_whole_and_exported(options, kind, form, need_weights):
    ours, _ = pair_of(**options)
    inputs, given = tokens(ours), {**masks(kind, form), "need_weights": need_weights}
    want = results(ours, inputs, **given)
    torch._dynamo.reset()
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    assert_same(results(compiled, inputs, **given), want)
    exported = torch.export.export(ours, tuple(inputs), given).module()
    torch.testing.assert_close(exported(*inputs, **given)[0], want[0], rtol=1e-10, atol=1e-10)


def test_it_runs_on_the_functions_of_torch_func():
    ours, _ = pair_of(batch_first=True)
    inputs = tokens(ours)
    parameters = {name: one.detach() for name, one in ours.named_parameters()}

    def loss(parameters):
        return torch.func.functional_call(ours, parameters, tuple(inputs))[0].square().sum()

    want = torch.autograd.grad(ours(*inputs)[0].square().sum(), list(ours.parameters()))
    assert_same(list(torch.func.grad(loss)(parameters).values()), list(want))


def test_weights_are_not_computed_unless_they_are_asked_for(monkeypatch):
    ours, _ = pair_of()
    module = __import__("regard.nn.torch_attention", fromlist=["attention_weights"])
    monkeypatch.setattr(module, "attention_weights", None)
    assert ours(*tokens(ours), need_weights=False)[1] is None


def test_what_does_not_fit_is_refused_by_name():
    ours, _ = pair_of()
    q, k, v = tokens(ours)
    for name, error, arguments, options in (
        ("query", ValueError, (q[..., :5], k, v), {}),
        ("query", ValueError, (q[None], k, v), {}),
        ("query", TypeError, (q.float(), k, v), {}),
        ("query", TypeError, (q.long(), k, v), {}),
        ("key", ValueError, (q, k[..., :5], v), {}),
        ("key", ValueError, (q, k[0], v), {}),
        ("key", ValueError, (q, k[:, :1], v[:, :1]), {}),
        ("key", TypeError, (q, None, v), {}),
        ("value", ValueError, (q, k, v[:3]), {}),
        ("value", ValueError, (q, k, v[:, 0]), {}),
        ("key_padding_mask", ValueError, (q, k, v), {"key_padding_mask": torch.zeros(S, B, dtype=torch.bool)}),
        ("key_padding_mask", ValueError, (q, k, v), {"key_padding_mask": torch.zeros(S, dtype=torch.bool)}),
        ("key_padding_mask", TypeError, (q, k, v), {"key_padding_mask": torch.zeros(B, S, dtype=torch.long)}),
        ("attn_mask", ValueError, (q, k, v), {"attn_mask": torch.zeros(S, T, dtype=torch.bool)}),
        ("attn_mask", ValueError, (q, k, v), {"attn_mask": torch.zeros(B, T, S)}),
        ("attn_mask", ValueError, (q, k, v), {"attn_mask": torch.zeros(B, H, T, S)}),
        ("attn_mask", TypeError, (q, k, v), {"attn_mask": torch.zeros(T, S, dtype=torch.uint8)}),
        ("attn_mask", TypeError, (q, k, v), {"attn_mask": [[0.0]]}),
    ):
        for need_weights in (False, True):
            with pytest.raises(error, match=rf"^{name}: expected"):
                ours(*arguments, **options, need_weights=need_weights)


@pytest.mark.parametrize("options", [{}, {"kdim": 6, "vdim": 5}], ids=str)
def test_it_converts_as_torchs_own_does(options):
    ours, theirs = pair_of(batch_first=True, **options)
    found, want = (dict(from_torch(module).named_parameters()) for module in (ours, theirs))
    assert all(torch.equal(found[name], want[name]) for name in want)


def test_nan_behind_the_padding_stays_there():
    ours, _ = pair_of(dtype=torch.float32, batch_first=True)
    q, k, v = tokens(ours)
    padding = torch.zeros(B, S, dtype=torch.bool)
    padding[:, 5:] = True
    want = ours(q, k, v, padding, need_weights=False)[0]
    k[:, 5:], v[:, 5:] = torch.nan, torch.inf
    for mask in (padding, torch.zeros(B, S).masked_fill(padding, -torch.inf)):
        assert torch.equal(ours(q, k, v, mask, need_weights=False)[0], want)


def test_a_bool_mask_and_its_float_form_are_one_rule():
    masks_of = regard.nn.torch_masks.from_torch_masks
    blocked = torch.ones(4, 4, dtype=torch.bool).triu(1)
    as_float = torch.zeros(4, 4).masked_fill(blocked, -torch.inf)
    for mask in (blocked, as_float):
        assert repr(masks_of(None, mask, (2, 1, 4, 4))) == "(Causal(), None)"
    padding = torch.tensor([[False, False, True, True]])
    for mask in (padding, torch.zeros(1, 4).masked_fill(padding, -torch.inf)):
        rule, bias = masks_of(mask, None, (1, 1, 4, 4))
        assert bias is None and torch.equal(rule.keep, ~padding)
