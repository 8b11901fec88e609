"""Attention of images: any size, what shifted windows may read, other sizes of a table, and samples of feature maps."""

import pytest
import torch
import torch.nn.functional as F

import regard
from regard.mixers.image_windows import offsets
from regard.nn import GridAttention, LogPlaces, PlaceTable, ShiftedWindowAttention
from regard.ops.deformable import deformable_attention
from regard.positions import image_positions


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


def filled(layer):
    layer = layer.double()
    with torch.no_grad():
        for n, parameter in enumerate(layer.parameters()):
            parameter.copy_(drawn(*parameter.shape, n + 1)[..., 0] / 2)
    return layer


@pytest.mark.parametrize("size", [(8, 8), (7, 5), (1, 1), (3, 9), (9, 4), (16, 5)])
@pytest.mark.parametrize("cosine", [False, True])
def test_windows_are_attention_among_neighbours_of_the_padded_image(size, cosine):
    layer, x = filled(ShiftedWindowAttention(8, 2, 4, shift=2, cosine=cosine)), drawn(2, *size, 8)
    side = 4 if min(size) > 4 else max(min(size), 1)
    shift = 2 if min(size) > 4 else 0
    padded = F.pad(x, (0, 0, 0, -size[1] % side, 0, -size[0] % side))
    height, width = padded.shape[1:3]
    y, z = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    window = ((y + side - shift) // side) * 100 + (z + side - shift) // side  # windows that begin at the shift
    together = window.flatten()[:, None] == window.flatten()
    dy, dz = (part.flatten()[:, None] - part.flatten() for part in (y, z))
    table = layer.places((side, side)).table
    at = (dy.clamp(1 - side, side - 1) + side - 1) * (2 * side - 1) + dz.clamp(1 - side, side - 1) + side - 1
    q, k, v = (
        proj(padded.flatten(1, 2)).unflatten(-1, (2, 4)).transpose(1, 2)
        for proj in (layer.q_proj, layer.k_proj, layer.v_proj)
    )
    scale = 0.5
    if cosine:
        q, k, scale = F.normalize(q, dim=-1), F.normalize(k, dim=-1), 1.0
        q = q * layer.logit_scale.clamp(max=torch.tensor(100.0).log()).exp()[:, None, None]
    scores = q @ k.mT * scale + table[at].permute(2, 0, 1)
    weights = scores.masked_fill(~together, -torch.inf).softmax(-1)
    want = layer.o_proj((weights @ v).transpose(1, 2).flatten(2)).view(2, height, width, 8)[:, : size[0], : size[1]]
    torch.testing.assert_close(layer(x), want)


def test_an_image_no_larger_than_a_window_is_one_window():
    layer = filled(ShiftedWindowAttention(8, 2, 7, shift=3))
    grid = GridAttention(8, 2, (7, 7)).double()
    grid.load_state_dict(layer.state_dict())
    x = drawn(1, 7, 7, 8)
    torch.testing.assert_close(layer(x), grid(x))
    assert layer.mixing(x)[0].shape == (1, 2, 49, 49)


def test_log_places_are_the_papers():
    places = filled(LogPlaces(2, pretrained=8))
    table = places((4, 4)).table
    step = offsets((4, 4)).reshape(-1, 2)[5].double() / 7 * 8  # one of the offsets, by hand
    spaced = torch.sign(step) * torch.log2(step.abs() + 1) / 3
    right = 16 * torch.sigmoid(places.second(torch.relu(places.first(spaced))))
    torch.testing.assert_close(table[5], right)


def test_another_grid_resizes_the_table():
    table = filled(PlaceTable(2, (4, 4)))
    assert table((6, 3)).table.shape == (11 * 5, 2)
    layer = filled(GridAttention(8, 2, (4, 4)))
    assert layer(drawn(1, 6, 3, 8)).isfinite().all()


def test_gradients_and_half_precision():
    for layer in (ShiftedWindowAttention(8, 2, 3, shift=1), GridAttention(8, 2, (5, 4))):
        x = drawn(1, 5, 4, 8).requires_grad_()
        assert torch.autograd.gradcheck(filled(layer), (x,))
        low = layer.to(torch.bfloat16)
        near = low(x.detach().bfloat16()).double() - layer.double()(x.detach().bfloat16().double())
        assert near.abs().max() < 0.05


def test_samples_are_bilinear_and_zero_outside():
    values = drawn(1, 6, 1, 3)  # one map of 2 rows, 3 columns
    centres = torch.tensor([[0.5 / 3, 0.25], [1.5 / 3, 0.25], [2.5 / 3, 0.75], [1 / 3, 0.5], [1.5, 0.5]]).double()
    places = centres.view(1, 5, 1, 1, 1, 2)
    y = deformable_attention(values, [(2, 3)], places, torch.ones(1, 5, 1, 1, 1, dtype=torch.float64))[0, :, 0]
    pixels = values[0, :, 0]
    torch.testing.assert_close(y[:3], pixels[[0, 1, 5]])
    torch.testing.assert_close(y[3], pixels[[0, 1, 3, 4]].mean(0))
    assert (y[4] == 0).all()
    weights = drawn(1, 5, 1, 1, 1).requires_grad_()
    inputs = (values.requires_grad_(), (places + 0.01).requires_grad_(), weights)
    assert torch.autograd.gradcheck(lambda v, p, w: deformable_attention(v, [(2, 3)], p, w), inputs)


def test_places_of_an_image_count_real_pixels():
    real = torch.ones(1, 4, 6, dtype=torch.bool)
    real[:, :, 4:] = False
    padded, small = image_positions(real, 8), image_positions(real[:, :, :4], 8)
    torch.testing.assert_close(padded[:, :, :4], small)
    assert padded.shape == (1, 4, 6, 16)


def test_places_of_an_image_are_exact_in_float64():
    found = image_positions(torch.ones(1, 3, 5, dtype=torch.bool), 4, dtype=torch.float64)
    angle = torch.tensor(2 / (3 + 1e-6) * 2 * torch.pi, dtype=torch.float64)  # the second row
    want = torch.stack([angle.sin(), angle.cos(), (angle / 100).sin(), (angle / 100).cos()])
    torch.testing.assert_close(found[0, 1, 0, :4], want, rtol=0, atol=1e-14)


def sampled(values: torch.Tensor) -> torch.Tensor:
    return deformable_attention(values, [(2, 3)], torch.ones(1, 5, 2), torch.ones(1, 5))


@pytest.mark.parametrize(
    ("error", "words", "make"),
    [
        (
            ValueError,
            r"x: expected \(B, height, width, 8\)",
            lambda: ShiftedWindowAttention(8, 2, 4)(torch.randn(1, 9, 8)),
        ),
        (ValueError, "shift: expected 0 to 3", lambda: ShiftedWindowAttention(8, 2, 4, shift=4)),
        (ValueError, "heads: expected a divisor", lambda: GridAttention(8, 3, (4, 4))),
        (TypeError, "real: expected a bool tensor", lambda: image_positions(torch.ones(1, 2, 2), 4)),
        (ValueError, r"values: expected \(B, S, H, D\) with S pixels", lambda: sampled(torch.ones(1, 4, 1, 3))),
        (ValueError, r"places: expected \(1, Q, 1, 1, P, 2\)", lambda: sampled(torch.ones(1, 6, 1, 3))),
        (TypeError, "x: expected float32", lambda: GridAttention(8, 2, (4, 4))(drawn(1, 4, 4, 8))),
    ],
)
def test_errors_name_the_argument(error, words, make):
    with pytest.raises(error, match=words):
        make()


def test_all_windows_are_one_call():
    with regard.backends.count_backends() as counts:
        ShiftedWindowAttention(8, 2, 4, shift=2)(torch.randn(2, 16, 16, 8))
    assert sum(counts.values()) == 1
