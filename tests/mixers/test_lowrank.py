"""Linformer and Performer: what their papers promise, beyond the contract."""

import pytest
import torch

import regard
from regard.mixers.kernel_sums import divided, read, with_ones, written
from regard.nn import LengthProjection, Linformer, Performer
from regard.random_features import (
    PositiveFeatures,
    PublishedPositiveFeatures,
    RedrawSchedule,
    ReluFeatures,
    orthogonal_rows,
    redraw_features,
)
from regard.testing import Subject, run_checks


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


# ---- Linformer -------------------------------------------------------------------------------------------------------


def test_with_as_many_compressed_keys_as_tokens_it_is_attention():
    layer = Linformer(8, 2, LengthProjection(9, 9, 2)).double()
    with torch.no_grad():
        layer.projection.keys.copy_(torch.eye(9)[None])
        layer.projection.values.copy_(torch.eye(9)[None])
    x = drawn(2, 9, 8)
    q, k, v = (getattr(layer, f"{name}_proj")(x).unflatten(-1, (2, 4)).transpose(1, 2) for name in "qkv")
    torch.testing.assert_close(layer.mixed(x), regard.attention(q, k, v))
    torch.testing.assert_close(layer.mixing(x)[0], regard.attention_weights(q, k, v)[1])


def test_heads_may_be_wider_or_narrower_than_a_share_of_the_tokens():
    wide = Linformer(8, 3, LengthProjection(9, 4, 1), kv_heads=1, head_dim=5).double()
    x = drawn(2, 7, 8)
    assert wide(x).shape == x.shape
    assert wide.q_proj.weight.shape == (15, 8) and wide.k_proj.weight.shape == (5, 8)
    M, V = wide.mixing(x)
    torch.testing.assert_close(M @ V, wide.mixed(x))
    with pytest.raises(ValueError, match="heads: expected a divisor of dim=8 where head_dim is not given, got 3"):
        Linformer(8, 3, LengthProjection(9, 4, 1))


def test_a_compressed_key_that_nothing_was_written_to_keeps_its_share_of_the_weight():
    layer = Linformer(4, 1, LengthProjection(3, 3, 1)).double()
    with torch.no_grad():
        layer.projection.keys.copy_(torch.eye(3)[None])
        layer.projection.values.copy_(torch.eye(3)[None])
        layer.q_proj.weight.zero_()  # all scores 0: equal weights
    x = drawn(1, 3, 4)
    keep = torch.tensor([[False, True, True]])
    values = layer.v_proj(x)[0, 1:]
    torch.testing.assert_close(layer.mixed(x, keep=keep)[0, 0, 1], values.sum(0) / 3)
    torch.testing.assert_close(layer.mixed(x[:, 1:])[0, 0, 1], values.sum(0) / 3)


@pytest.mark.parametrize(("sharing", "count"), [("none", 2 * 3), ("heads", 2), ("keys and values", 1)])
def test_parameters_of_the_sharing_modes(sharing, count):
    maps = LengthProjection(20, 4, 3, sharing=sharing)
    assert sum(p.numel() for p in maps.parameters()) == count * 20 * 4
    layers = torch.nn.ModuleList(Linformer(6, 3, maps) for _ in range(2))  # layerwise: one module for both
    assert sum(p.numel() for p in layers.parameters()) == count * 20 * 4 + 2 * 4 * 36


@pytest.mark.parametrize(
    ("words", "call"),
    [
        ("x: expected at most 9 tokens, got 10", lambda layer: layer(drawn(1, 10, 8))),
        ("mask: expected None", lambda layer: layer(drawn(1, 5, 8), mask=regard.masks.Causal())),
        ("cache: expected None", lambda layer: layer(drawn(1, 5, 8), cache=object())),
        ("context: expected None", lambda layer: layer(drawn(1, 5, 8), drawn(1, 5, 8))),
        ("sharing: expected 'none'", lambda layer: LengthProjection(4, 2, 1, sharing="layers")),
        ("projection: expected one for 2 heads", lambda la: Linformer(8, 2, LengthProjection(9, 3, 4, sharing="none"))),
    ],
)
def test_errors_name_the_argument(words, call):
    with pytest.raises(ValueError, match=words):
        call(Linformer(8, 2, LengthProjection(9, 3, 2)).double())


# ---- Performer -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dim", [4, 16])
def test_the_estimate_is_right_on_average(dim):
    q, k = drawn(1, 1, 1, dim) * 0.7, drawn(1, 1, 3, dim) * 0.7
    exact = torch.exp(q @ k.mT * dim**-0.5)
    z_q, z_k = q * dim**-0.25, k * dim**-0.25
    rows = torch.cat([orthogonal_rows(4 * dim, dim, seed=seed) for seed in range(500)]).double()
    for one, other in ((z_q, z_k),):
        features = [torch.exp(z @ rows.T - z.square().sum(-1, keepdim=True) / 2) for z in (one, other)]
        products = features[0] * features[1]  # (1, 1, 3, rows)
    spread = products.std(-1) / len(rows) ** 0.5
    assert ((products.mean(-1) - exact[0, 0, 0]).abs() < 4 * spread).all()


def test_rows_are_orthogonal_in_blocks_and_their_lengths_are_as_asked():
    rows = orthogonal_rows(10, 4, lengths="equal")
    for first in (0, 4, 8):
        block = rows[first : first + 4]
        torch.testing.assert_close(block @ block.T, 4 * torch.eye(len(block)), atol=1e-5, rtol=0)
    assert rows[:4].norm(dim=1).std() < 1e-6 < orthogonal_rows(10, 4).norm(dim=1).std()
    directions = torch.stack([orthogonal_rows(1, 2, seed=seed)[0] for seed in range(400)])
    assert (directions > 0).float().mean(0).sub(0.5).abs().max() < 0.1  # QR alone would favour one side


@pytest.mark.parametrize("kind", [PositiveFeatures, ReluFeatures])
def test_features_are_of_a_token_alone(kind):
    phi, x = kind(2, 8, features=12), drawn(1, 2, 6, 8)
    for one in (phi.queries, phi.keys):
        torch.testing.assert_close(one(x)[:, :, 2:4], one(x[:, :, 2:4]))


@pytest.mark.parametrize("size", [1e-3, 30.0, 1e4])
@pytest.mark.parametrize("dim", [16, 64, 256])
def test_large_numbers_stay_numbers(size, dim):
    phi = PositiveFeatures(1, dim)
    q, k, v = (drawn(1, 1, 7, dim + n).float()[..., :dim] * size for n in range(3))
    assert phi.queries(q).isfinite().all() and phi.keys(k).isfinite().all()
    out = divided(read(phi.queries(q), written(phi.keys(k), with_ones(v))), 1e-20)
    assert out.isfinite().all() and out.abs().max() <= v.abs().max() * 1.01


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("size", [1.0, 4.0, 16.0])
def test_keys_far_from_zero_are_weighed_as_in_float64(size, bidirectional):
    """Every feature of such keys is 0 in float32, or below the layer's eps, unless they are measured by each other."""
    layer = Performer(128, 1, features=64, bidirectional=bidirectional)
    with torch.no_grad():
        for proj, factor in ((layer.q_proj, 1.0), (layer.k_proj, size), (layer.v_proj, 1.0)):
            proj.weight.copy_(factor * torch.eye(128))
    x = drawn(2, 40, 128)
    segments = (torch.arange(40) >= 15).long().expand(2, -1)
    z_q, z_k = x * 128**-0.25, size * x * 128**-0.25
    rows = layer.feature_map.projection.double()
    u_q, u_k = (z @ rows.T - z.square().sum(-1, keepdim=True) / 2 for z in (z_q, z_k))
    logs = torch.logsumexp(u_q[:, :, None] + u_k[:, None], -1)  # (B, T, S)
    allowed = segments[:, :, None] == segments[:, None]
    allowed = allowed if bidirectional else allowed.tril()
    exact = torch.softmax(logs.masked_fill(~allowed, -torch.inf), -1) @ x
    found = layer.mixed(x.float(), segments=segments)[:, 0].double()
    torch.testing.assert_close(found, exact, atol=1e-3, rtol=1e-3)
    if not bidirectional:
        cache = layer.init_cache(2, 40)
        parts = [layer(x.float()[:, n : n + 5], segments=segments[:, n : n + 5], cache=cache) for n in range(0, 40, 5)]
        torch.testing.assert_close(torch.cat(parts, 1), layer(x.float(), segments=segments), atol=1e-4, rtol=1e-4)


def test_the_published_stabiliser_leaks_and_ours_does_not():
    for kernel, sound in (("softmax", True), ("relu", True), ("published softmax", False)):
        subject = Subject(kernel, lambda kernel=kernel: Performer(16, 2, features=16, kernel=kernel), 16)
        found = {result.name: result.passed for result in run_checks(subject, ["causality", "splits"])}
        assert found == {"causality": sound, "splits": sound}, kernel


def test_redrawing_changes_the_rows_and_checkpoints_keep_them():
    layer, other = Performer(16, 2, seed=3), Performer(16, 2, seed=4)
    assert not torch.equal(layer.feature_map.projection, other.feature_map.projection)
    other.load_state_dict(layer.state_dict())
    assert torch.equal(layer.feature_map.projection, other.feature_map.projection)
    before = layer.feature_map.projection.clone()
    assert redraw_features(torch.nn.ModuleList([layer, other]), seed=9) == 2
    assert not torch.equal(before, layer.feature_map.projection)
    assert not torch.equal(other.feature_map.projection, layer.feature_map.projection)
    layer.feature_map.reset_parameters()
    assert torch.equal(before, layer.feature_map.projection)
    layer.redraw(9)
    assert not torch.equal(before, layer.feature_map.projection)
    with pytest.raises(ValueError, match="every: expected an int of at least 1"):
        RedrawSchedule(layer, every=0)


def test_no_layer_is_given_rows_that_another_one_had_a_step_before():
    layers = torch.nn.ModuleList(Performer(16, 2, features=8) for _ in range(3))
    schedule, seen = RedrawSchedule(layers, every=1), set()
    for _ in range(4):
        schedule.step()
        seen |= {float(layer.feature_map.projection.sum()) for layer in layers}
    assert len(seen) == 12


def test_a_schedule_goes_on_from_its_state():
    layer = Performer(16, 2, features=8)
    one = RedrawSchedule(layer, every=3)
    drawn_at = [one.step() for _ in range(4)]
    kept = one.state_dict()
    drawn_at += [one.step() for _ in range(2)]
    rows = layer.feature_map.projection.clone()
    layer.redraw(0)
    other = RedrawSchedule(layer, every=3)
    other.load_state_dict(kept)
    assert [other.step() for _ in range(2)] == drawn_at[4:] == [False, True]
    assert torch.equal(layer.feature_map.projection, rows)


def test_the_error_falls_with_the_number_of_features():
    q, k, v = (drawn(1, 1, 32, 16 + n)[..., :16] * 0.5 for n in range(3))
    exact = regard.attention(q, k, v)
    errors = []
    for features in (16, 256, 4096):
        runs = []
        for seed in range(5):
            phi = PositiveFeatures(1, 16, features=features, seed=seed).double()
            estimate = divided(read(phi.queries(q), written(phi.keys(k), with_ones(v))), 1e-300)
            runs.append(float((estimate - exact).norm() / exact.norm()))
        errors.append(sorted(runs)[2])
    assert errors[0] > 2 * errors[1] > 4 * errors[2]


def test_the_published_features_are_stated_by_name_alone():
    with pytest.raises(ValueError, match="kernel: expected 'softmax', 'relu', 'published softmax', got 'exp'"):
        Performer(16, 2, kernel="exp")
    assert isinstance(Performer(16, 2, kernel="published softmax").feature_map, PublishedPositiveFeatures)
