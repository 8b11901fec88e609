"""Deformable attention as a layer: against transformers' module, its published start, and in the place of DETR's."""

import pytest
import torch
from torch import nn

from regard.models import MLP, PostNorm, activation
from regard.models.images import DETR, DeformableAttention, Objects, PlacedAttention, QueryBlock, SinePlaces

NAMES = {
    "sampling_offsets": "offset_proj",
    "attention_weights": "weight_proj",
    "value_proj": "v_proj",
    "output_proj": "o_proj",
}


def drawn(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def peer_of(levels, points):
    transformers = pytest.importorskip("transformers")
    from transformers.models.deformable_detr import modeling_deformable_detr as theirs

    config = transformers.DeformableDetrConfig(
        d_model=16, num_feature_levels=levels, backbone_config=transformers.ResNetConfig(), use_timm_backbone=False
    )
    return theirs, theirs.DeformableDetrMultiscaleDeformableAttention(config, num_heads=4, n_points=points)


@torch.no_grad()
@pytest.mark.parametrize("levels", [1, 3])
@pytest.mark.parametrize("padded", [False, True])
def test_against_transformers(levels, padded):
    theirs, peer = peer_of(levels, 2)
    layer = DeformableAttention(16, 4, levels=levels, points=2)
    state = {name: drawn(*tensor.shape) / 3 for name, tensor in peer.state_dict().items()}
    peer.load_state_dict(state)
    layer.load_state_dict({f"{NAMES[n.partition('.')[0]]}.{n.partition('.')[2]}": t for n, t in state.items()})
    sizes = [(5, 7), (3, 4), (2, 2)][:levels]
    area = sum(h * w for h, w in sizes)
    keep = torch.ones(2, area, dtype=torch.bool)
    if padded:
        whole = torch.zeros(1, 1, 16, 16)
        whole[..., :9, :12] = 1
        keep[1] = torch.cat([nn.functional.interpolate(whole, size)[0, 0].flatten() > 0 for size in sizes])
    x, context, places = drawn(2, 6, 16), drawn(2, area, 16), drawn(2, 6, 16)
    shapes = torch.tensor(sizes)
    common = {"attention_mask": keep, "spatial_shapes": shapes, "spatial_shapes_list": sizes}
    around = torch.rand(2, 6, levels, 2, generator=torch.Generator().manual_seed(0))
    want = peer(x, encoder_hidden_states=context, position_embeddings=places, reference_points=around, **common)[0]
    given = keep if padded else None
    found = layer(x, context, places=places, keep=given, grid=sizes, around=around)
    torch.testing.assert_close(found, want, rtol=0, atol=1e-5)
    # Tokens of the maps themselves, by the real parts of the maps.
    parts = keep.split([h * w for h, w in sizes], 1)
    maps = [part.view(2, h, w) for part, (h, w) in zip(parts, sizes, strict=True)]
    ratios = torch.stack([torch.stack([m[:, 0].float().mean(1), m[:, :, 0].float().mean(1)], -1) for m in maps], 1)
    points = theirs.DeformableDetrEncoder.get_reference_points(sizes, ratios, "cpu")
    want = peer(context, encoder_hidden_states=context, reference_points=points, **common)[0]
    torch.testing.assert_close(layer(context, keep=given, grid=sizes), want, rtol=0, atol=1e-5)


def test_the_published_start():
    layer = DeformableAttention(16, 4, levels=2, points=3)
    bias = layer.offset_proj.bias.view(4, 2, 3, 2)
    ways = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0], [0.0, -1.0]])
    for n in range(3):
        torch.testing.assert_close(bias[:, 0, n], (n + 1) * ways, rtol=0, atol=1e-6)
        assert torch.equal(bias[:, 0, n], bias[:, 1, n])
    assert not layer.offset_proj.weight.any() and not layer.weight_proj.weight.any()


def test_gradients():
    torch.manual_seed(0)
    layer = DeformableAttention(8, 2, points=2, guided=True).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(0, 0.3)
    x, context = drawn(1, 3, 8).double().requires_grad_(), drawn(1, 12, 8).double().requires_grad_()
    assert torch.autograd.gradcheck(lambda a, b: layer(a, b, places=a, grid=(3, 4)), (x, context))


def detector(deformable):
    def mixer(guided=False):
        return DeformableAttention(16, 2, guided=guided) if deformable else PlacedAttention(16, 2)

    def encoding(i):
        return PostNorm(mixer(), MLP(16, 32, activation("relu")), nn.LayerNorm(16), nn.LayerNorm(16))

    def decoding(i):
        norms = (nn.LayerNorm(16), nn.LayerNorm(16), nn.LayerNorm(16))
        return QueryBlock(PlacedAttention(16, 2), mixer(guided=True), MLP(16, 32, activation("relu")), norms)

    parts = nn.Conv2d(3, 8, 8, stride=8), nn.Conv2d(8, 16, 1), SinePlaces(16)
    return DETR(*parts, [encoding], [decoding] * 2, queries=4, classes=3)


@pytest.mark.parametrize("deformable", [False, True])
def test_a_detector_of_either_learns_one_batch(deformable):
    torch.manual_seed(0)
    model, images = detector(deformable), drawn(2, 3, 40, 48)
    keep = torch.ones(2, 40, 48, dtype=torch.bool)
    keep[1, 24:] = False
    objects = [
        Objects(torch.tensor([0, 2]), torch.tensor([[0.3, 0.3, 0.2, 0.4], [0.7, 0.6, 0.4, 0.2]])),
        Objects(torch.tensor([1]), torch.tensor([[0.5, 0.5, 0.6, 0.8]])),
    ]
    optimizer, totals = torch.optim.Adam(model.parameters(), lr=3e-3), []
    for _ in range(100):
        losses = model.objective(model.steps(images, keep=keep), objects)
        optimizer.zero_grad()
        losses.total.backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
        optimizer.step()
        totals.append(losses.total.item())
    assert totals[-1] < totals[0] / 4


def test_an_image_that_is_all_padding_is_finite():
    torch.manual_seed(0)
    model, images, keep = detector(True), drawn(2, 3, 24, 32), torch.ones(2, 24, 32, dtype=torch.bool)
    keep[1] = False
    found = model(images, keep=keep)
    assert all(part.isfinite().all() for part in found)
    torch.testing.assert_close(found.boxes[:1], model(images[:1], keep=keep[:1]).boxes)
    sum(part.sum() for part in found).backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_what_does_not_fit():
    layer = DeformableAttention(8, 2)
    with pytest.raises(ValueError, match=r"grid: expected \(height, width\) of 1 maps, got None"):
        layer(torch.ones(1, 6, 8))
    with pytest.raises(ValueError, match=r"context: expected \(B, 12, 8\) for maps of \[\(3, 4\)\], got"):
        layer(torch.ones(1, 6, 8), grid=(3, 4))
    with pytest.raises(ValueError, match="around: expected places of the queries"):
        layer(torch.ones(1, 2, 8), torch.ones(1, 6, 8), grid=(2, 3))
    with pytest.raises(ValueError, match="heads: expected a divisor of dim=8, got 3"):
        DeformableAttention(8, 3)
