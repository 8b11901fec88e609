"""Rotary, sinusoidal and learned positions against plain formulas, and against transformers' frequencies."""

import copy
import io
import math
import pickle
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from regard.positions import (
    LearnedPositions,
    LinearScaling,
    Llama3Scaling,
    NTKScaling,
    Rotary,
    YarnScaling,
    interleaved_to_half,
    sinusoidal,
)

STYLES = ("half", "interleaved")


def turned_by_formula(x, positions, dim, base, style):
    """Each pair as a complex number times exp(i p f), in float64, channel by channel."""
    y = x.double().clone()
    for m in range(dim // 2):
        a, b = (m, m + dim // 2) if style == "half" else (2 * m, 2 * m + 1)
        angle = positions.double() * base ** (-2 * m / dim)
        angle = angle.view(1, 1, -1) if angle.dim() == 1 else angle.unsqueeze(1)
        z = torch.complex(x[..., a].double(), x[..., b].double()) * torch.polar(torch.ones_like(angle), angle)
        y[..., a], y[..., b] = z.real, z.imag
    return y


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("positions", [torch.arange(5), torch.tensor([[3, 1, 4, 1, 5], [0, 0, 7, 100000, 2]])])
@pytest.mark.parametrize(("dim", "width"), [(6, 6), (4, 10), (2, 3)])
def test_rotary_equals_the_formula(style, positions, dim, width):
    x = torch.randn(2, 3, 5, width, dtype=torch.float64)
    expected = turned_by_formula(x, positions, dim, 10000.0, style)
    before = x.clone()
    torch.testing.assert_close(Rotary(dim, style=style)(x, positions), expected, atol=1e-10, rtol=0)
    assert torch.equal(x, before)
    torch.testing.assert_close(Rotary(dim, style=style)(x.float(), positions), expected.float(), atol=2e-6, rtol=0)


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from(STYLES), st.integers(1, 5), st.integers(-50000, 50000), st.integers(0, 300), st.integers(-300, 300)
)
def test_scores_depend_on_distance_and_norms_stay(style, pairs, start, gap, other):
    rotary = Rotary(2 * pairs, style=style)
    q, k = torch.randn(2, 1, 1, 1, 2 * pairs, dtype=torch.float64)

    def score(at):
        return (rotary(q, torch.tensor([at + gap])) * rotary(k, torch.tensor([at]))).sum()

    torch.testing.assert_close(score(start), score(other), atol=1e-9, rtol=0)
    torch.testing.assert_close(rotary(q, torch.tensor([start])).norm(), q.norm())


def test_any_split_and_any_batch_give_the_same():
    rotary, x = Rotary(8), torch.randn(3, 2, 9, 8, dtype=torch.float64)
    positions = torch.stack([torch.arange(9), torch.arange(9) + 4, torch.arange(9) * 3])
    whole = rotary(x, positions)
    pieces = [rotary(x[:, :, a:b], positions[:, a:b]) for a, b in ((0, 4), (4, 5), (5, 9))]
    assert torch.equal(torch.cat(pieces, 2), whole)
    assert torch.equal(rotary(x[1:2], positions[1]), whole[1:2])


def test_interleaved_input_laid_out_half_split():
    x, positions = torch.randn(2, 3, 5, 8), torch.arange(5)
    a = interleaved_to_half(Rotary(8, style="interleaved")(x, positions))
    b = Rotary(8, style="half")(interleaved_to_half(x), positions)
    torch.testing.assert_close(a, b)


def test_strides_empty_sizes_and_gradients():
    rotary = Rotary(4)
    wide = torch.randn(2, 5, 3, 12, dtype=torch.float64).transpose(1, 2)
    positions = torch.arange(5)
    torch.testing.assert_close(rotary(wide[..., ::2], positions), rotary(wide[..., ::2].contiguous(), positions))
    for shape in ((0, 2, 3, 4), (2, 2, 0, 4), (2, 0, 3, 4)):
        for style in STYLES:
            assert Rotary(4, style=style)(torch.randn(shape), torch.arange(shape[2])).shape == shape
    x = torch.randn(1, 2, 3, 6, dtype=torch.float64, requires_grad=True)
    for style in STYLES:
        turn = Rotary(4, style=style)
        assert torch.autograd.gradcheck(lambda t, turn=turn: turn(t, torch.arange(3)), (x,))
    # float positions get gradients too (a contextual count of tokens)
    p = torch.rand(3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda t: rotary(x.detach(), t), (p,))


# Frequencies and their scaling


def published(kind, dim, base, longest, *, tokens=None, **parameters):
    """transformers' frequencies and attention factor for a configuration."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = SimpleNamespace(
        head_dim=dim,
        hidden_size=dim,
        num_attention_heads=1,
        max_position_embeddings=longest,
        rope_parameters={"rope_type": kind, "rope_theta": base, **parameters},
        standardize_rope_params=lambda: None,
    )
    return ROPE_INIT_FUNCTIONS[kind](config, "cpu", seq_len=tokens)


@pytest.mark.parametrize("base", [10000.0, 500000.0, 150000.0])
@pytest.mark.parametrize("dim", [4, 16, 64, 128])
def test_linear_and_llama3_scaling_equal_transformers(dim, base):
    expected, factor = published("linear", dim, base, 4096, factor=3.0)
    rotary = Rotary(dim, base, scaling=LinearScaling(3.0))
    torch.testing.assert_close(rotary.frequencies(torch.float32), expected, atol=0, rtol=2e-6)
    assert rotary.attention_factor == factor == 1
    for trained in (8192, 64, 8):
        expected, _ = published(
            "llama3",
            dim,
            base,
            4096,
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=trained,
        )
        rotary = Rotary(dim, base, scaling=Llama3Scaling(8.0, 1.0, 4.0, trained))
        torch.testing.assert_close(rotary.frequencies(torch.float32), expected, atol=0, rtol=5e-6)


@pytest.mark.parametrize("dim", [4, 16, 64])
def test_ntk_scaling_equals_transformers_at_twice_the_length(dim):
    """Its dynamic form at L = 2 * trained with factor 2 has the base of the static form with factor 3."""
    expected, _ = published("dynamic", dim, 10000.0, 64, tokens=128, factor=2.0)
    rotary = Rotary(dim, scaling=NTKScaling(3.0))
    torch.testing.assert_close(rotary.frequencies(torch.float32), expected, atol=0, rtol=5e-6)
    slowest = Rotary(dim).frequencies()[-1] / rotary.frequencies()[-1]
    torch.testing.assert_close(slowest, torch.tensor(3.0, dtype=torch.float64))


@pytest.mark.parametrize("trained", [4096, 64, 8, 2, 10**9])
@pytest.mark.parametrize("dim", [4, 16, 64])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"truncate": False},
        {"attention_factor": 1.25},
        {"mscale": 1.0, "mscale_all_dim": 0.7},
        {"mscale": 0.7},
        {"mscale": 1.0, "mscale_all_dim": 0.0},
        {"beta_fast": 8.0, "beta_slow": 2.0},
    ],
)
def test_yarn_scaling_equals_transformers(trained, dim, options):
    for factor in (1.0, 4.0, 32.0):
        expected, amplitude = published(
            "yarn", dim, 150000.0, 4096, factor=factor, original_max_position_embeddings=trained, **options
        )
        rotary = Rotary(dim, 150000.0, scaling=YarnScaling(factor, trained, **options))
        torch.testing.assert_close(rotary.frequencies(torch.float32), expected, atol=0, rtol=5e-6)
        assert math.isclose(rotary.attention_factor, amplitude, rel_tol=1e-12)


def test_the_attention_factor_multiplies_the_turned_channels_only():
    scaling = YarnScaling(4.0, 64, attention_factor=1.5)
    x = torch.randn(1, 1, 3, 6, dtype=torch.float64)
    y = Rotary(4, scaling=scaling)(x, torch.zeros(3, dtype=torch.long))
    torch.testing.assert_close(y, torch.cat((1.5 * x[..., :4], x[..., 4:]), -1))


# Precision


def test_H08_a_turn_keeps_the_dtype_and_forms_angles_in_float32():
    rotary = Rotary(8)
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        x = torch.randn(1, 2, 4, 10).to(dtype)
        y = rotary(x, torch.arange(1000, 1004))
        assert y.dtype is dtype
        exact = rotary(x.double(), torch.arange(1000, 1004))
        assert torch.equal(y, exact.to(dtype)) or (y - exact).abs().max() <= torch.finfo(dtype).eps * 8
        cos, sin = rotary.angles(torch.arange(4), dtype)
        assert cos.dtype is sin.dtype is (torch.float64 if dtype is torch.float64 else torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert rotary(torch.randn(1, 1, 2, 8), torch.arange(2)).dtype is torch.float32
        assert torch.equal(rotary.angles(torch.arange(9))[0], Rotary(8).angles(torch.arange(9))[0])


def test_H21_angles_stay_exact_at_large_positions_whatever_the_module_becomes():
    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.rotary = Rotary(64)

    positions = torch.tensor([255, 256, 257, 258, 4097, 32767, 131071])
    frequency = 10000.0 ** (-torch.arange(0, 64, 2, dtype=torch.float64) / 64)
    exact = positions.double()[:, None] * frequency
    for layer in (Layer().to(torch.bfloat16), Layer().half()):
        cos, sin = layer.rotary.angles(positions, torch.float32)
        assert (cos - exact.cos()).abs().max() < 1e-7
        assert (sin - exact.sin()).abs().max() < 1e-7
        assert (cos[2] - cos[3]).abs().max() > 0.1
    q, k = torch.randn(2, 1, 1, 1, 64)

    def score(p):
        return (Rotary(64)(q, torch.tensor([p + 7])) * Rotary(64)(k, torch.tensor([p]))).sum()

    torch.testing.assert_close(score(0), score(100000), atol=1e-5, rtol=0)


# Angles kept from call to call


def test_the_last_angles_are_shared_and_never_stale():
    rotary, positions = Rotary(4), torch.arange(6)
    first = rotary.angles(positions)[0]
    assert rotary.angles(positions)[0].data_ptr() == first.data_ptr()
    assert rotary.angles(torch.arange(6))[0].data_ptr() == first.data_ptr()  # equal values, another tensor
    assert rotary.angles(positions, torch.float64)[0].dtype is torch.float64
    assert rotary.angles(torch.arange(6, dtype=torch.int32))[0].dtype is torch.float32
    assert rotary.angles(positions.view(2, 3))[0].shape == (2, 3, 2)
    rotary.angles(positions)
    positions += 3
    torch.testing.assert_close(rotary.angles(positions)[0], Rotary(4).angles(torch.arange(3, 9))[0])


def test_kept_angles_cross_inference_mode_both_ways():
    rotary = Rotary(4)
    with torch.inference_mode():
        positions = torch.arange(3)
        first = rotary.angles(positions)[0]
        assert rotary.angles(positions)[0].data_ptr() == first.data_ptr()
        positions += 1
        assert (rotary.angles(positions)[0].data_ptr() == first.data_ptr()) is False
    x = torch.randn(1, 1, 3, 4, requires_grad=True)
    rotary(x, torch.arange(1, 4)).sum().backward()
    assert x.grad is not None


def test_kept_angles_are_left_alone_by_transforms_and_fake_tensors():
    from torch._subclasses.fake_tensor import FakeTensorMode

    rotary, x = Rotary(4), torch.randn(3, 1, 2, 5, 4)
    positions = torch.arange(5)
    batched = torch.func.vmap(lambda t: rotary(t, positions))(x)
    rows = torch.func.vmap(lambda t, p: rotary(t, p))(x, torch.stack([positions, positions + 1, positions * 2]))
    torch.testing.assert_close(batched[1], rotary(x[1], positions))
    torch.testing.assert_close(rows[2], rotary(x[2], positions * 2))
    torch.func.grad(lambda t: rotary(t, positions).square().sum())(x[0])
    with FakeTensorMode():
        assert rotary(torch.randn(1, 2, 5, 4), torch.arange(5)).shape == (1, 2, 5, 4)
    assert rotary(torch.randn(1, 2, 5, 4, device="meta"), torch.arange(5, device="meta")).shape == (1, 2, 5, 4)
    kept = rotary.angles(positions)[0]
    assert type(kept) is torch.Tensor
    torch.testing.assert_close(kept, Rotary(4).angles(positions)[0])


def test_equal_copies_carry_no_angles():
    rotary = Rotary(4, scaling=LinearScaling(2.0))
    rotary.angles(torch.arange(1000))
    for other in (copy.deepcopy(rotary), pickle.loads(pickle.dumps(rotary))):
        assert other == rotary
        assert hash(other) == hash(rotary)
        assert other._memo is not rotary._memo
    assert len(pickle.dumps(rotary)) < 1000
    stream = io.BytesIO()
    torch.save({"rotary": rotary}, stream)
    assert stream.tell() < 4000


@pytest.mark.parametrize("scaling", [None, YarnScaling(4.0, 64), Llama3Scaling(8.0, 1.0, 4.0, 64), NTKScaling(2.0)])
@pytest.mark.parametrize("style", STYLES)
def test_compiles_as_one_graph(style, scaling):
    rotary = Rotary(8, style=style, scaling=scaling)
    x, positions = torch.randn(2, 3, 5, 10), torch.arange(5)
    expected = rotary(x, positions)
    compiled = torch.compile(lambda a, p: rotary(a, p), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, positions), expected)
    torch.testing.assert_close(compiled(x, positions + 9), rotary(x, positions + 9))


# Mistakes


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Rotary(5), "dim: expected an even"),
        (lambda: Rotary(0), "dim: expected an even"),
        (lambda: Rotary(4, base=1.0), "base: expected"),
        (lambda: Rotary(4, style="neox"), "style: expected"),
        (lambda: LinearScaling(0.0), "factor: expected"),
        (lambda: NTKScaling(math.inf), "factor: expected"),
        (lambda: Rotary(2, scaling=NTKScaling(2.0)).frequencies(), "above 2"),
        (lambda: Llama3Scaling(8.0, 4.0, 4.0, 64), "high_freq_factor: expected a number above"),
        (lambda: YarnScaling(4.0, 0), "original_max_positions: expected"),
        (lambda: YarnScaling(4.0, 64, attention_factor=-1.0), "attention_factor: expected"),
        (lambda: Rotary(8)(torch.randn(1, 1, 2, 4), torch.arange(2)), "at least the 8"),
        (lambda: Rotary(4)(torch.randn(1, 2, 4), torch.arange(2)), "expected .B, H, T, D."),
        (lambda: Rotary(4)(torch.randn(2, 1, 3, 4), torch.arange(2)), "positions: expected .3,. or .2, 3."),
        (lambda: Rotary(4)(torch.randn(2, 1, 3, 4), torch.zeros(3, 3)), "positions: expected .3,. or .2, 3."),
        (lambda: sinusoidal(4, 3), "dim: expected an even"),
        (lambda: sinusoidal(-1, 4), "count of 0 or more"),
        (lambda: sinusoidal(4, 4, style="sines"), "style: expected"),
        (lambda: interleaved_to_half(torch.arange(3)), "even number of channels"),
        (lambda: LearnedPositions(0, 4), "above 0"),
        (lambda: LearnedPositions(4, 2)(torch.tensor([0, 4])), "numbers in .0, 4., got 0 to 4"),
        (lambda: LearnedPositions(4, 2)(torch.tensor([-1])), "numbers in .0, 4., got -1"),
    ],
)
def test_mistakes_name_the_argument(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_dtypes_that_cannot_count_are_refused():
    for dtype in (torch.bfloat16, torch.float16, torch.bool):
        with pytest.raises(TypeError, match="positions: expected integers"):
            Rotary(4)(torch.randn(1, 1, 2, 4), torch.arange(2).to(dtype))
    with pytest.raises(TypeError, match="x: expected a floating"):
        Rotary(4)(torch.ones(1, 1, 2, 4, dtype=torch.long), torch.arange(2))
    with pytest.raises(TypeError, match="positions: expected integers"):
        LearnedPositions(4, 2)(torch.zeros(2))


# Sinusoidal and learned


def test_sinusoidal_equals_the_formula():
    table = sinusoidal(50, 6, dtype=torch.float64)
    for p in (0, 1, 49):
        for m in range(3):
            angle = p * 10000.0 ** (-2 * m / 6)
            assert math.isclose(table[p, 2 * m], math.sin(angle), abs_tol=1e-12)
            assert math.isclose(table[p, 2 * m + 1], math.cos(angle), abs_tol=1e-12)
    assert torch.equal(sinusoidal(50, 6, style="half", dtype=torch.float64), interleaved_to_half(table))
    positions = torch.tensor([[3, 0], [49, 7]])
    assert torch.equal(sinusoidal(positions, 6, dtype=torch.float64), table[positions])
    assert sinusoidal(0, 6).shape == (0, 6)


def test_learned_positions_look_up_their_table():
    layer = LearnedPositions(7, 4)
    positions = torch.tensor([[0, 6, 6], [1, 2, 3]])
    assert torch.equal(layer(positions), layer.weight[positions])
    assert layer(torch.empty(2, 0, dtype=torch.long)).shape == (2, 0, 4)
    layer(positions).sum().backward()
    assert layer.weight.grad[6].tolist() == [2.0] * 4
    assert set(layer.state_dict()) == {"weight"}
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(positions), layer(positions))
