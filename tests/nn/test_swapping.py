"""torch's own encoders and decoders with their attention swapped: the same outputs and gradients, and the way back."""

import contextlib
import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune
from torch.testing._internal.two_tensor import TwoTensor

from regard.nn import TorchMultiheadAttention, swap, unswap
from regard.nn.torch_masks import from_torch_masks

# torch's own, of what its encoder makes of padded batches
pytestmark = pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype.*:UserWarning")
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
B, T, S, E = 3, 6, 5, 16


def encoder(dtype=torch.float64, *, nested=True, layers=2, **options):
    options = {"dropout": 0.0, "batch_first": True, **options}
    layer = nn.TransformerEncoderLayer(E, 4, 24, dtype=dtype, **options)
    norm = nn.LayerNorm(E, dtype=dtype)
    return nn.TransformerEncoder(layer, layers, norm, enable_nested_tensor=nested)


def swapped(model):
    ours = copy.deepcopy(model)
    report = swap(ours)
    assert report.changed and not report.left
    return ours


@contextlib.contextmanager
def counted(monkeypatch):
    """How often the swapped modules ran: a list that grows."""
    calls, plain = [], TorchMultiheadAttention.forward

    def forward(self, *arguments, **options):
        calls.append(self)
        return plain(self, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(TorchMultiheadAttention, "forward", forward)
        yield calls


def assert_same_results(ours, theirs, call, inputs):
    """Outputs, and with gradients recorded those of inputs and parameters too."""
    tolerance = TOLERANCE[inputs[0].dtype]
    results = []
    for model in (ours, theirs):
        leaves = [x.detach().requires_grad_(torch.is_grad_enabled()) for x in inputs]
        out = call(model, *leaves)
        grads = []
        if torch.is_grad_enabled():
            weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
            parameters = [one for one in model.parameters() if one.requires_grad]
            grads = torch.autograd.grad((out * weight).sum(), [*leaves, *parameters])
        results.append([out, *grads])
    for own, want in zip(*results, strict=True):
        assert own.shape == want.shape
        torch.testing.assert_close(
            own, want, rtol=tolerance, atol=tolerance * max(1.0, float(want.detach().abs().max()))
        )


def paddings():
    """What is hidden of B rows of T: nothing, ends, starts, the whole of a column."""
    ends = torch.arange(T) >= torch.tensor([6, 4, 2])[:, None]
    column = torch.zeros(B, T, dtype=torch.bool)
    column[:, 3] = True
    return {
        "none": None,
        "ends": ends,
        "starts": ends.flip(1),
        "short": ends | (torch.arange(T) >= 4),
        "column": column,
    }


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("padding", paddings())
@pytest.mark.parametrize("causal", [None, "bool", "float"])
def test_an_encoder_stack(dtype, padding, causal, monkeypatch):
    hidden = paddings()[padding]
    mask = None if causal is None else torch.ones(T, T, dtype=torch.bool).triu(1)
    if causal and padding == "starts":
        mask[:, -1] = False  # else the first queries would have no key, where torch gives NaN
    if causal == "float":
        mask = torch.zeros(T, T, dtype=dtype).masked_fill(mask, -torch.inf)
        hidden = None if hidden is None else torch.zeros(B, T, dtype=dtype).masked_fill(hidden, -torch.inf)
    x = torch.randn(B, T, E, dtype=dtype)
    for options in (
        {},
        {"norm_first": True, "nested": False},
        {"batch_first": False, "nested": False},
        {"nested": False},
    ):
        theirs = encoder(dtype, **options)
        ours = swapped(theirs)
        inputs = x if options.get("batch_first", True) else x.transpose(0, 1)
        for training, grad in ((True, True), (False, True), (False, False)):
            ours.train(training), theirs.train(training)
            with torch.set_grad_enabled(grad), counted(monkeypatch) as calls:
                assert_same_results(
                    ours, theirs, lambda model, x: model(x, mask=mask, src_key_padding_mask=hidden), [inputs]
                )
            assert len(calls) == 2  # torch's fast path doesn't pass them by


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("norm_first", [True, False])
def test_a_decoder_stack(dtype, batch_first, norm_first):
    layer = nn.TransformerDecoderLayer(
        E, 4, 24, dropout=0.0, batch_first=batch_first, norm_first=norm_first, dtype=dtype
    )
    theirs = nn.TransformerDecoder(layer, 2)
    ours = swapped(theirs)
    x, memory = torch.randn(B, T, E, dtype=dtype), torch.randn(B, S, E, dtype=dtype)
    if not batch_first:
        x, memory = x.transpose(0, 1), memory.transpose(0, 1)
    causal = nn.Transformer.generate_square_subsequent_mask(T, dtype=dtype)
    hidden = paddings()["ends"]
    as_float = torch.zeros(B, T, dtype=dtype).masked_fill(hidden, -torch.inf)
    cross = torch.rand(T, S) > 0.6
    cross[:, 0] = False
    for options in (
        {},
        {"tgt_mask": causal},
        {"tgt_mask": causal, "tgt_is_causal": True},
        {"tgt_mask": causal, "tgt_key_padding_mask": as_float, "memory_key_padding_mask": hidden[:, :S]},
        {"tgt_mask": causal.isinf(), "tgt_key_padding_mask": hidden, "memory_mask": cross},
    ):
        for training, grad in ((True, True), (False, False)):
            ours.train(training), theirs.train(training)
            with torch.set_grad_enabled(grad):
                assert_same_results(ours, theirs, lambda model, *xs, o=options: model(*xs, **o), [x, memory])


@pytest.mark.parametrize("batch_first", [True, False])
def test_a_whole_transformer(batch_first):
    theirs = (
        nn.Transformer(E, 4, 2, 2, 24, dropout=0.0, batch_first=batch_first, dtype=torch.float64, activation="gelu")
        if batch_first
        else nn.Transformer(
            E, 4, 1, 1, 24, dropout=0.0, dtype=torch.float64, custom_encoder=encoder(nested=False, batch_first=False)
        )
    )
    ours = swapped(theirs)
    x, y = torch.randn(B, S, E, dtype=torch.float64), torch.randn(B, T, E, dtype=torch.float64)
    if not batch_first:
        x, y = x.transpose(0, 1), y.transpose(0, 1)
    hidden = paddings()["ends"][:, :S]
    causal = torch.ones(T, T, dtype=torch.bool).triu(1)
    options = {"tgt_mask": causal, "src_key_padding_mask": hidden, "memory_key_padding_mask": hidden}
    for training, grad in ((True, True), (False, False)):
        ours.train(training), theirs.train(training)
        with torch.set_grad_enabled(grad):
            assert_same_results(ours, theirs, lambda model, *xs: model(*xs, **options), [x, y])


def test_rows_that_are_padding_throughout_stay_finite():
    ours = swapped(encoder())
    hidden = torch.zeros(B, T, dtype=torch.bool)
    hidden[1] = True
    x = torch.randn(B, T, E, dtype=torch.float64)
    for training, grad in ((True, True), (False, True), (False, False)):
        ours.train(training)
        with torch.set_grad_enabled(grad):
            out = ours(x, src_key_padding_mask=hidden)
        assert out.shape == x.shape and out.isfinite().all()
        if grad:
            grads = torch.autograd.grad(out.sum(), list(ours.parameters()))
            assert all(one.isfinite().all() for one in grads)


def test_nested_tensors_by_themselves():
    theirs = nn.MultiheadAttention(E, 4, batch_first=True, dtype=torch.float64).eval()
    ours = swapped(nn.ModuleList([theirs]))[0]
    rows = [torch.randn(n, E, dtype=torch.float64) for n in (4, 1, 3)]
    x = torch.nested.nested_tensor(rows)
    for need_weights in (False, True):
        out, weights = ours(x, x, x, need_weights=need_weights)
        for index, row in enumerate(rows):
            want = theirs(row, row, row)
            torch.testing.assert_close(out[index], want[0], rtol=1e-10, atol=1e-10)
            if weights is not None:
                n = len(row)
                torch.testing.assert_close(weights[index, :n, :n], want[1], rtol=1e-10, atol=1e-10)
    grads = [
        torch.autograd.grad(one, list(module.parameters()))
        for one, module in (
            (ours(x, x, x)[0].to_padded_tensor(0.0).square().sum(), ours),
            (sum(theirs(row, row, row)[0].square().sum() for row in rows), theirs),
        )
    ]
    for own, want in zip(*grads, strict=True):
        torch.testing.assert_close(own, want, rtol=1e-9, atol=1e-9)
    with pytest.raises(ValueError, match=r"^key_padding_mask, attn_mask: .*nested"):
        ours(x, x, x, torch.zeros(3, 4, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"^key: .*nested"):
        ours(torch.randn(3, 4, E, dtype=torch.float64), x, x)
    with pytest.raises(TypeError, match=r"^query: .*strided"):
        jagged = torch.nested.nested_tensor(rows, layout=torch.jagged)
        ours(jagged, jagged, jagged)


def test_an_optimizer_goes_on_and_the_module_stays_itself():
    theirs = encoder()
    ours = copy.deepcopy(theirs)
    before = [*ours.parameters()], [*ours.modules()], list(ours.state_dict())
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01) for model in (ours, theirs)]
    report = swap(ours)
    assert all(a is b for a, b in zip(before[0], ours.parameters(), strict=True))
    assert all(a is b for a, b in zip(before[1], ours.modules(), strict=True))
    assert before[2] == list(ours.state_dict())
    x = torch.randn(B, T, E, dtype=torch.float64)
    for _ in range(3):
        for model, optimizer in zip((ours, theirs), optimizers, strict=True):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    report.undo()
    for own, want in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(own, want, rtol=1e-8, atol=1e-8)


def test_undoing_gives_the_modules_back_as_they_were():
    model = encoder()
    states = {name: dict(module.__dict__) for name, module in model.named_modules()}
    classes = {name: type(module) for name, module in model.named_modules()}
    report = swap(model)
    assert report.changed == ("layers.0.self_attn", "layers.1.self_attn")
    for way in (report.undo, report.undo, lambda: unswap(model)):
        way()
        assert {name: type(module) for name, module in model.named_modules()} == classes
        for name, module in model.named_modules():
            assert module.__dict__.keys() == states[name].keys()
            assert all(module.__dict__[key] is value for key, value in states[name].items())
    swap(model)
    again = swap(model)
    assert again.changed == () and len(again.left) == 2
    again.undo()
    assert type(model.layers[0].self_attn) is TorchMultiheadAttention  # the second report changed nothing
    unswap(model)
    assert {name: type(module) for name, module in model.named_modules()} == classes


def test_copies_are_swapped_and_come_back():
    model = encoder().eval()
    x = torch.randn(B, T, E, dtype=torch.float64)
    want = model(x)
    swap(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(other.layers[0].self_attn) is TorchMultiheadAttention
        torch.testing.assert_close(other(x), want, rtol=1e-10, atol=1e-10)
        unswap(other)
        assert type(other.layers[0].self_attn) is nn.MultiheadAttention
        assert torch.equal(other(x), want)
    assert type(model.layers[0].self_attn) is TorchMultiheadAttention


def test_a_shared_module_stays_shared_and_has_all_its_names():
    shared = nn.MultiheadAttention(E, 4)
    model = nn.ModuleDict({"a": shared, "b": shared})
    report = swap(model)
    assert report.changed == ("a", "b") and model["a"] is model["b"] is shared
    report.undo()
    assert type(shared) is nn.MultiheadAttention


def test_the_module_itself_may_be_swapped():
    module = nn.MultiheadAttention(E, 4)
    report = swap(module)
    assert type(module) is TorchMultiheadAttention and "(the model itself)" in str(report)
    unswap(module)
    assert type(module) is nn.MultiheadAttention


class Subclass(nn.MultiheadAttention):
    pass


class Adapter(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base, self.weight, self.bias = base, base.weight, base.bias

    def forward(self, x):
        return self.base(x) + 1


def odd_modules():
    """Modules that are left, each with a word of the reason."""
    yield "subclass", "Subclass", Subclass(E, 4)
    quantizable = torch.ao.nn.quantizable.MultiheadAttention(E, 4)
    yield "quantizable", "subclass", quantizable
    for name in ("register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"):
        module = nn.MultiheadAttention(E, 4)
        getattr(module, name)(lambda *_: None)
        yield name.removeprefix("register_"), "hooks", module
    module = nn.MultiheadAttention(E, 4)
    parametrizations.weight_norm(module, "in_proj_weight")
    yield "parametrised", "parametrised", module
    module = nn.MultiheadAttention(E, 4)
    parametrizations.weight_norm(module.out_proj)
    yield "parametrised output", "parametrised", module
    module = nn.MultiheadAttention(E, 4)
    module.in_proj_weight = nn.Parameter(TwoTensor(module.in_proj_weight.detach(), module.in_proj_weight.detach()))
    yield "wrapped weights", "tensors of another class", module
    module = nn.MultiheadAttention(E, 4)
    prune.l1_unstructured(module, "in_proj_weight", 0.5)
    yield "pruned", "hooks", module
    module = nn.MultiheadAttention(E, 4)
    module.forward = module.forward
    yield "patched", "forward was replaced", module
    module = nn.MultiheadAttention(E, 4)
    module.out_proj = Adapter(module.out_proj)
    yield "adapter", "out_proj", module
    module = nn.MultiheadAttention(E, 4)
    module.out_proj.register_forward_hook(lambda *_: None)
    yield "hooked output", "out_proj", module
    yield "swapped", "already", TorchMultiheadAttention(E, 4)


def test_modules_that_are_more_than_torchs_own_are_left_with_the_reason():
    odd = list(odd_modules())
    model = nn.ModuleDict({name: module for name, _, module in odd} | {"plain": nn.MultiheadAttention(E, 4)})
    before = {name: type(module) for name, module in model.items()}
    report = swap(model)
    assert report.changed == ("plain",) and list(report.left) == [name for name, _, _ in odd]
    for name, word, module in odd:
        assert word in report.left[name] and type(module) is before[name]
        assert f"left     {name}: {report.left[name]}" in str(report)
    assert str(report).startswith(f"1 swapped, {len(odd)} left\n  swapped  plain\n")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_and_sharded_modules_are_left():
    class Sharded(nn.Module):
        def __init__(self, module):
            super().__init__()
            self._fsdp_wrapped_module = module

    model = nn.ModuleDict(
        {"script": torch.jit.script(nn.MultiheadAttention(E, 4)), "sharded": Sharded(nn.MultiheadAttention(E, 4))}
    )
    report = swap(model)
    assert report.changed == () and list(report.left) == ["script", "sharded._fsdp_wrapped_module"]
    assert "TorchScript" in report.left["script"] and "FullyShardedDataParallel" in str(report)


def test_inference_mode():
    theirs = encoder(torch.float32).eval()
    ours = swapped(theirs)
    x = torch.randn(B, T, E)
    with torch.inference_mode():
        for hidden in paddings().values():
            want = theirs(x, src_key_padding_mask=hidden)
            torch.testing.assert_close(ours(x, src_key_padding_mask=hidden), want, rtol=1e-5, atol=1e-5)


def test_a_change_by_others_after_the_swap_is_undone_first():
    model = nn.ModuleList([nn.MultiheadAttention(E, 4), nn.MultiheadAttention(E, 4)])
    report = swap(model)
    parametrizations.weight_norm(model[1], "in_proj_weight")
    kinds = [type(module) for module in model]
    for way in (report.undo, lambda: unswap(model)):
        with pytest.raises(ValueError, match=r"^model: 1 is a .*since it was swapped"):
            way()
        assert kinds == [type(module) for module in model]


def test_models_without_attention_and_things_that_are_none():
    report = swap(nn.Linear(2, 2))
    assert report.changed == () and report.left == {} and str(report) == "0 swapped, 0 left"
    with pytest.raises(TypeError, match=r"^model: expected a torch.nn.Module"):
        swap([nn.MultiheadAttention(E, 4)])


def test_a_swapped_encoder_compiles_whole():
    ours = swapped(encoder(torch.float32, layers=1, nested=False))
    x, hidden = torch.randn(B, T, E), paddings()["ends"]
    torch._dynamo.reset()
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    for training, grad in ((True, True), (False, False)):
        ours.train(training)
        with torch.set_grad_enabled(grad):
            torch.testing.assert_close(
                compiled(x, src_key_padding_mask=hidden), ours(x, src_key_padding_mask=hidden), rtol=1e-5, atol=1e-5
            )


def test_an_encoder_built_from_a_layer_with_the_module():
    layer = nn.TransformerEncoderLayer(E, 4, 24, dropout=0.0, batch_first=True, dtype=torch.float64)
    theirs = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    layer = copy.deepcopy(layer)
    swap(layer)
    ours = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    assert all(type(one.self_attn) is TorchMultiheadAttention for one in ours.layers)
    x = torch.randn(B, T, E, dtype=torch.float64)
    with torch.no_grad():
        assert_same_results(ours, theirs, lambda model, x: model(x), [x])


def test_the_masks_of_an_encoder_become_rules_again():
    """torch's encoder hands bool masks on as floats; what the kernels get is the rule."""
    hidden = paddings()["ends"]
    mask, bias = from_torch_masks(
        torch.zeros(B, T).masked_fill(hidden, -torch.inf),
        nn.Transformer.generate_square_subsequent_mask(T),
        (B, 4, T, T),
    )
    assert bias is None and [type(part).__name__ for part in mask.parts] == ["KeyPadding", "Causal"]
