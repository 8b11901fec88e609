"""Kernel linear attention: against numpy, published numbers, its normaliser, caches, precision, wrong arguments."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from oracles import kernel_linear as oracle
from torch import Tensor

import regard
from regard.feature_maps import EluPlusOne, FeatureMap, Quadratic, Rebased, Taylor, positive_features, symmetric_square
from regard.masks import Causal, Window
from regard.mixers.kernel_sums import divided, read, with_ones, written
from regard.nn import DeltaNet, LinearAttention, LinearCrossAttention

DIM, HEADS = 12, 4
WIDE = torch.float64


class Rectified(FeatureMap):
    """A user's own map, whose features may all be 0."""

    def forward(self, x: Tensor) -> Tensor:
        return x.relu()


MAPS = {"elu": EluPlusOne, "taylor": Taylor, "quadratic": Quadratic, "rebased": Rebased, "relu": Rectified}


def drawn(layer: Any, seed: int = 3) -> Any:
    """The layer in float64 with random parameters."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator))
    return layer.to(WIDE).eval()


def tokens(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=WIDE)


def close(got: Tensor, want: Tensor, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(got, want.to(got.dtype), rtol=tolerance, atol=tolerance)


# ---- the papers' formulas --------------------------------------------------------------------------------------------

FORMULA = partial(oracle.kernel_attention, heads=HEADS)
LAYERS = {
    "linear": (lambda: LinearAttention(DIM, HEADS), partial(FORMULA, key_heads=HEADS)),
    "linear, grouped": (
        lambda: LinearAttention(DIM, HEADS, key_heads=2, key_dim=5, value_dim=2, eps=0.1),
        partial(FORMULA, key_heads=2, eps=0.1),
    ),
    "linear, both ways": (
        lambda: LinearAttention(DIM, HEADS, key_heads=1, bidirectional=True),
        partial(FORMULA, key_heads=1, causal=False),
    ),
    "no division": (
        lambda: LinearAttention(DIM, HEADS, value_dim=5, eps=None),
        partial(FORMULA, key_heads=HEADS, eps=None),
    ),
    "no division, both ways": (
        lambda: LinearAttention(DIM, HEADS, eps=None, bidirectional=True),
        partial(FORMULA, key_heads=HEADS, eps=None, causal=False),
    ),
    "based": (
        lambda: LinearAttention(DIM, HEADS, key_dim=5, feature_map=Taylor, eps=1e-12),
        partial(FORMULA, key_heads=HEADS, kernel=oracle.taylor, eps=1e-12),
    ),
    "rebased": (
        lambda: LinearAttention(DIM, HEADS, key_heads=2, feature_map=Rebased, eps=1e-5),
        partial(FORMULA, key_heads=2, kernel=oracle.parabola, eps=1e-5),
    ),
    "rebased, both ways": (
        lambda: LinearAttention(DIM, HEADS, feature_map=Rebased, bidirectional=True),
        partial(FORMULA, key_heads=HEADS, kernel=oracle.parabola, causal=False),
    ),
}


@pytest.mark.parametrize("name", LAYERS)
def test_the_oracle(name):
    make, formula = LAYERS[name]
    layer, x = drawn(make()), tokens(2, 9, DIM)
    weights = {key: value.numpy() for key, value in layer.state_dict().items()}
    with torch.no_grad():
        got = layer(x)
    for row in range(2):
        close(got[row], torch.from_numpy(formula(x[row].numpy(), weights)))


@pytest.mark.parametrize(("name", "kernel"), [("elu", oracle.elu_plus_one), ("taylor", oracle.taylor)])
def test_the_oracle_over_a_context(name, kernel):
    layer = drawn(LinearCrossAttention(DIM, HEADS, key_heads=2, context_dim=7, feature_map=MAPS[name]))
    x, context = tokens(2, 5, DIM), tokens(2, 8, 7, seed=1)
    weights = {key: value.numpy() for key, value in layer.state_dict().items()}
    with torch.no_grad():
        got = layer(x, context)
    for row in range(2):
        want = FORMULA(x[row].numpy(), weights, key_heads=2, kernel=kernel, causal=False, context=context[row].numpy())
        close(got[row], torch.from_numpy(want))


def wave(seed: int, *shape: int) -> Tensor:
    n = torch.arange(torch.Size(shape).numel(), dtype=WIDE)
    return torch.sin(1.7 * seed + 0.37 * n + 0.011 * n * n).view(shape)


@pytest.mark.parametrize("backend", ["reference", "chunked"])
@pytest.mark.parametrize(("dtype", "atol"), [(WIDE, 1e-6), (torch.float32, 2e-6)], ids=["float64", "float32"])
def test_numbers_of_another_implementation(dtype, atol, backend):
    """Six decimals of eight tokens, Dk 4, Dv 3, made with independent code from sines; elu + 1, eps 1e-6."""
    q, k, v = (wave(seed, 1, 1, 8, width).to(dtype) for seed, width in ((1, 4), (2, 4), (3, 3)))
    phi = EluPlusOne(1, 4)
    sums, _ = regard.recurrence(phi(q), phi(k), with_ones(v), regard.Decay(), scale=1.0, backend=backend)
    for t, numbers in ((-1, [0.082505, 0.084303, 0.07809]), (1, [-0.426879, -0.10321, 0.239071])):
        want = torch.tensor(numbers, dtype=WIDE)
        torch.testing.assert_close(divided(sums, 1e-6)[0, 0, t].to(WIDE), want, rtol=0, atol=atol)
    last = divided(read(phi(q), written(phi(k), with_ones(v))), 1e-6)[0, 0, -1]  # the last token reads all
    torch.testing.assert_close(last, divided(sums, 1e-6)[0, 0, -1], rtol=0, atol=atol)


# ---- feature maps ----------------------------------------------------------------------------------------------------


def test_kernels():
    q, k = tokens(2, 3, 7, 5), tokens(2, 3, 7, 5, seed=1)
    s = (q * k).sum(-1)
    for factory, want in (
        (Quadratic, s * s / 5),
        (partial(Quadratic, scale=1.0), s * s),
        (Taylor, 1 + s / 5**0.5 + s * s / 10),
        (partial(Taylor, scale=0.3), 1 + 0.3 * s + 0.045 * s * s),
    ):
        phi = factory(3, 5)
        features = phi.queries(q), phi.keys(k)
        assert features[0].shape == (2, 3, 7, phi.features)
        close((features[0] * features[1]).sum(-1), want)
    close((symmetric_square(q) * symmetric_square(k)).sum(-1), s * s)


def test_elu_plus_one_is_exact_far_below_zero():
    x = torch.tensor([-80.0, -20.0, -1e-9, 0.0, 1e-9, 3.0], requires_grad=True)
    y = EluPlusOne(1, 6)(x)
    torch.testing.assert_close(y.detach().double(), (x.double().clamp(max=0).exp() + x.double().clamp(min=0)).detach())
    assert bool((y > 0).all())
    (grad,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(grad, torch.exp(x.detach().clamp(max=0)))


@pytest.mark.parametrize("hyperbolic", [False, True])
def test_positive_features_are_right_on_average(hyperbolic):
    """The mean over many projections is exp(q . k / sqrt(d)), within 4 of its own standard errors."""
    q, k = 0.5 * tokens(6, 4), 0.5 * tokens(6, 4, seed=1)
    kinds = [positive_features(x, tokens(20_000, 4, seed=2), hyperbolic=hyperbolic) for x in (q, k)]
    each = (kinds[0] * kinds[1]).unflatten(-1, (-1, 20_000)).sum(-2) * 20_000
    want = torch.exp((q * k).sum(-1) / 2)
    assert bool(((each.mean(-1) - want).abs() < 4 * each.std(-1) / 20_000**0.5).all())


# ---- the normaliser --------------------------------------------------------------------------------------------------


def giving_ones(make: Any, **options: Any) -> Any:
    """A layer whose values are 1 for tokens whose channel 0 is 1, and which returns what it mixes."""
    layer = drawn(make(DIM, HEADS, key_dim=5, value_dim=3, **options))
    with torch.no_grad():
        layer.v_proj.weight.zero_()[:, 0] = 1.0
        layer.o_proj.weight.copy_(torch.eye(DIM))
    return layer


def marked(batch: int, length: int, seed: int = 0) -> Tensor:
    x = tokens(batch, length, DIM, seed=seed)
    x[..., 0] = 1.0
    return x


@pytest.mark.parametrize("bidirectional", [False, True], ids=["causal", "both ways"])
@pytest.mark.parametrize("name", ["elu", "taylor", "rebased"])
def test_H30_a_mean_of_ones_is_one(name, bidirectional):
    layer = giving_ones(LinearAttention, feature_map=MAPS[name], eps=1e-30, bidirectional=bidirectional)
    x = marked(2, 70)
    for length in range(1, 71):
        out = layer(x[:, :length])
        close(out, torch.ones_like(out), 1e-8)
    matrix, _ = regard.mixing_matrix(layer, x)
    close(matrix.sum(-1), torch.ones_like(matrix[..., 0]), 1e-8)
    assert bool((matrix >= 0).all())


@pytest.mark.parametrize("name", ["elu", "taylor", "rebased"])
def test_H30_a_mean_of_ones_over_a_context(name):
    layer = giving_ones(LinearCrossAttention, feature_map=MAPS[name], eps=1e-30)
    for queries, keys in ((1, 70), (70, 1), (5, 33), (33, 5), (0, 4)):
        out = layer(tokens(2, queries, DIM), marked(2, keys, seed=1))
        close(out, torch.ones_like(out), 1e-8)
    matrix, values = regard.mixing_matrix(layer, tokens(2, 4, DIM), context=marked(2, 6, seed=1))
    assert matrix.shape == (2, HEADS, 4, 6) and values.shape == (2, HEADS, 6, 3)
    close(matrix.sum(-1), torch.ones_like(matrix[..., 0]), 1e-8)
    close((matrix @ values).transpose(1, 2).flatten(2), layer(tokens(2, 4, DIM), marked(2, 6, seed=1)))


@pytest.mark.parametrize("name", MAPS)
def test_H30_the_ways_agree(name):
    """The loop, the chunks, single steps, and the matrix."""
    layer, x = drawn(LinearAttention(DIM, HEADS, key_dim=5, feature_map=MAPS[name], eps=1e-3)), tokens(2, 70, DIM)
    whole = layer(x)
    with regard.use_backend("reference"):
        close(layer(x), whole)
    cache = layer.init_cache(2, 0)
    close(torch.cat([layer(x[:, t : t + 1], cache=cache) for t in range(70)], 1), whole)
    matrix, values = regard.mixing_matrix(layer, x)
    close(matrix @ values, layer.mixed(x))
    assert bool((matrix.triu(1) == 0).all())


@pytest.mark.parametrize("dtype", [torch.float32, WIDE], ids=str)
@pytest.mark.parametrize("bidirectional", [False, True], ids=["causal", "both ways"])
def test_H30_weights_that_are_all_zero(bidirectional, dtype):
    """0 / (0 + eps) is 0, and a small sum n gives n / (n + eps): never NaN, forwards or backwards."""
    for eps in (1e-6, 1e-12, 2e-38):
        layer = giving_ones(LinearAttention, feature_map=Rectified, eps=eps, bidirectional=bidirectional).to(dtype)
        with torch.no_grad():
            layer.q_proj.weight.copy_(-layer.q_proj.weight.abs())
        x = marked(1, 9).abs().to(dtype).requires_grad_()
        out = layer(x)
        assert bool((out == 0).all())
        for grad in torch.autograd.grad(out.sum(), [x, *layer.parameters()]):
            assert bool(grad.isfinite().all())
    tiny = giving_ones(LinearAttention, eps=1e-6, bidirectional=bidirectional).to(dtype)
    with torch.no_grad():  # every feature of a query is exp(-20), of a key exp(0): five of them
        tiny.q_proj.weight.zero_()[:, 0] = -20.0
        tiny.k_proj.weight.zero_()
    sums = (
        5
        * torch.exp(torch.tensor(-20.0, dtype=WIDE))
        * (torch.full((9,), 9.0, dtype=WIDE) if bidirectional else torch.arange(1, 10))
    )
    out = tiny(marked(1, 9).to(dtype))
    close(out.to(WIDE), (sums / (sums + 1e-6))[None, :, None].expand_as(out), 1e-5 if dtype == torch.float32 else 1e-10)


def test_an_empty_context_gives_zero():
    layer = drawn(LinearCrossAttention(DIM, HEADS))
    assert bool((layer(tokens(2, 3, DIM), tokens(2, 0, DIM)) == 0).all())


# ---- padding, packing, the context's cache ---------------------------------------------------------------------------


def test_padding_is_not_a_key_of_features_one():
    """phi(0) = 1, so a padded token must be left out after the map, whatever it holds."""
    x, keep = tokens(1, 6, DIM), torch.tensor([[True, True, False, True, False, False]])
    for layer in (drawn(LinearAttention(DIM, HEADS)), drawn(LinearAttention(DIM, HEADS, bidirectional=True))):
        close(layer(x, keep=keep)[keep], layer(x[keep][None])[0])
    layer = drawn(LinearCrossAttention(DIM, HEADS))
    context = torch.where(keep[..., None], x, torch.nan)
    close(layer(x, context, keep=keep), layer(x, x[keep][None]))
    matrix, values = layer.mixing(x, context, keep=keep)
    assert bool((matrix[..., ~keep[0]] == 0).all()) and bool(values.isfinite().all())


def test_segments_of_a_layer_that_reads_both_ways():
    """The sums of a segment are the two passes', against one product for each segment alone."""
    layer, x = drawn(LinearAttention(DIM, HEADS, key_heads=2, bidirectional=True)), tokens(2, 70, DIM)
    ids = torch.tensor([0] * 3 + [1] * 1 + [4] * 66).expand(2, -1)
    close(layer(x, segments=ids), torch.cat([layer(part) for part in x.split([3, 1, 66], 1)], 1))
    close(layer(x, segments=torch.zeros_like(ids)), layer(x))


def test_a_context_is_written_once():
    layer = drawn(LinearCrossAttention(DIM, HEADS, context_dim=7))
    x, context = tokens(2, 5, DIM), tokens(2, 8, 7, seed=1)
    keep = torch.tensor([[True] * 8, [False] * 3 + [True] * 5])
    cache, want = layer.init_cache(2, 0), layer(x, context, keep=keep)
    got = [layer(x[:, :1], context, keep=keep, cache=cache)]
    sums = cache.states["state"].clone()
    got += [layer(x[:, 1:3], cache=cache), layer(x[:, 3:], cache=cache)]
    close(torch.cat(got, 1), want)
    assert torch.equal(cache.states["state"], sums) and cache.length == 8 and not sums.requires_grad
    for given, said in (({"context": context}, "context"), ({"keep": keep}, "keep")):
        with pytest.raises(ValueError, match=f"^{said}"):
            layer(x, cache=cache, **given)
    with pytest.raises(ValueError, match=r"^context"):
        layer.mixing(x, cache=cache)
    cache.reset()
    with pytest.raises(ValueError, match=r"^context"):
        layer(x, cache=cache)
    close(layer(x, context, cache=cache), layer(x, context))


# ---- precision -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bidirectional", [False, True], ids=["causal", "both ways"])
def test_a_normaliser_in_half_precision_would_stop_at_256(bidirectional):
    """1024 equal tokens: their mean is their value, in bfloat16 and inside autocast."""
    layer = giving_ones(LinearAttention, bidirectional=bidirectional)
    with torch.no_grad():
        layer.q_proj.weight.zero_()
        layer.k_proj.weight.zero_()
    x = marked(1, 1024)
    for low in (layer.bfloat16(), layer.float()):
        inside = next(low.parameters()).dtype == torch.float32
        with torch.autocast("cpu", torch.bfloat16, enabled=inside):
            out = low(x.to(next(low.parameters()).dtype))
        assert out.dtype == torch.bfloat16 and bool((out == 1).all())
    if not bidirectional:
        cache = layer.bfloat16().init_cache(1, 0, dtype=torch.bfloat16)
        for part in x.bfloat16().split([512, 511, 1], 1):
            assert bool((layer(part, cache=cache) == 1).all())
        state = cache.states["state"]
        assert state.dtype == torch.float32 and bool((state == 1024).all())


def test_float32_weights_far_from_one():
    """Sums of features from exp(-60) to 60 divide as precisely as float32 can."""
    layer, x = drawn(LinearAttention(DIM, HEADS, eps=1e-30)), 6 * tokens(2, 70, DIM)
    close(layer.float()(x.float()).to(WIDE), layer.double()(x.float().double()), 1e-4)


def test_float32_first_tokens_whose_query_and_key_are_orthogonal():
    """A first token's weight divides itself: without noise of s^2, the output is the value (and what eps takes)."""
    layer, x = drawn(LinearAttention(DIM, HEADS, key_dim=16, feature_map=Rebased, eps=1e-8)), tokens(20_000, 1, DIM)
    with torch.no_grad():
        want, got = (layer.to(dtype).mixed(x.float().to(dtype)).to(WIDE) for dtype in (WIDE, torch.float32))
    assert float((got - want).abs().max()) < 0.05 * float(want.abs().max())  # with sums in float32, more than all of it


# ---- wrong arguments -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: LinearAttention(8, 0), "heads"),
        (lambda: LinearAttention(1, 2), "key_dim"),
        (lambda: LinearAttention(8, 4, key_heads=3), "key_heads"),
        (lambda: LinearAttention(8, 4, key_heads=0), "key_heads"),
        (lambda: LinearAttention(8, 4, value_dim=0), "value_dim"),
        (lambda: LinearAttention(8, 4, eps=0.0), "eps"),
        (lambda: LinearAttention(8, 4, eps=1e-50), "eps"),
        (lambda: LinearAttention(8, 4, eps=float("nan")), "eps"),
        (lambda: LinearCrossAttention(8, 4, context_dim=0), "context_dim"),
        (lambda: Taylor(1, 4, scale=0.0), "scale"),
        (lambda: Rebased(1, 4, scale=float("inf")), "scale"),
    ],
)
def test_wrong_constructor_arguments(make, name):
    with pytest.raises(ValueError, match=f"^{name}"):
        make()


def test_a_feature_map_is_a_factory_of_one():
    with pytest.raises(TypeError, match=r"^feature_map"):
        LinearAttention(8, 4, feature_map=lambda heads, dim: torch.nn.ReLU())


def test_wrong_calls():
    x, context = tokens(2, 5, DIM), tokens(2, 4, DIM)
    layer, other = drawn(LinearAttention(DIM, HEADS)), drawn(DeltaNet(DIM, 3)).init_cache(2, 5)
    close(layer(x, mask=Causal()), layer(x))
    for given, said in (({"mask": Window(2)}, "mask"), ({"context": x}, "context"), ({"cache": other}, "cache")):
        with pytest.raises(ValueError, match=f"^{said}"):
            layer(x, **given)
    both = drawn(LinearAttention(DIM, HEADS, bidirectional=True))
    for given, said in (({"mask": Causal()}, "mask"), ({"cache": layer.init_cache(2, 5)}, "cache")):
        with pytest.raises(ValueError, match=f"^{said}"):
            both(x, **given)
    with pytest.raises(ValueError, match=r"^bidirectional"):
        both.init_cache(2, 5)
    cross = drawn(LinearCrossAttention(DIM, HEADS))
    for given, said in (
        ({"context": context, "mask": Causal()}, "mask"),
        ({"context": context, "cache": other}, "cache"),
        ({"context": context[:1]}, "context"),
        ({}, "context"),
        ({"cache": cross.init_cache(2, 5)}, "context"),
    ):
        with pytest.raises(ValueError, match=f"^{said}"):
            cross(x, **given)
    with pytest.raises(TypeError, match=r"^cache"):
        cross(x, context, cache=3)
