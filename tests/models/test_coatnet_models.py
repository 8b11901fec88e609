"""CoAtNet as a whole model: published sizes, a block by plain formulas, any size of image, training."""

import pytest
import torch
import torch.nn.functional as F

from regard.models.images.coatnet import (
    COATNETS,
    AttentionBlock,
    CoAtNet,
    CoAtNetShape,
    ConvolutionBlock,
    SqueezeExcite,
)

SMALL = CoAtNetShape(8, (8, 16, 16), (1, 2, 2), attention=1, head_dim=4, image=(32, 48))


def drawn(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("coatnet-0", 25_036_820),  # published: 25 M
        ("coatnet-1", 42_225_776),  # 42 M
        ("coatnet-2", 74_684_744),  # 75 M
        ("coatnet-3", 166_966_264),  # 168 M
        ("coatnet-4", 275_425_288),  # 275 M
        ("coatnet-5", 687_472_008),  # 688 M
    ],
)
def test_parameter_counts_of_the_released_code(name, count):
    with torch.device("meta"):
        model = CoAtNet(COATNETS[name], 1000)
    assert sum(p.numel() for p in model.parameters()) == count


def test_maps_of_the_published_image():
    with torch.device("meta"):
        shapes = [tuple(m.shape[1:]) for m in CoAtNet(COATNETS["coatnet-0"]).eval().maps(torch.empty(1, 3, 224, 224))]
    assert shapes == [(96, 56, 56), (192, 28, 28), (384, 14, 14), (768, 7, 7)]
    assert COATNETS["coatnet-0"].grid(2) == (14, 14) and COATNETS["coatnet-0"].grid(3) == (7, 7)


@torch.no_grad()
def test_an_attention_block_is_the_formula():
    torch.manual_seed(0)
    block = AttentionBlock(4, 8, 4, (3, 2), halves=True).double()
    x = drawn(2, 4, 6, 4).double()
    pooled = F.avg_pool2d(F.layer_norm(x.permute(0, 2, 3, 1), (4,), eps=1e-6).permute(0, 3, 1, 2), 2)
    tokens = pooled.flatten(2).transpose(1, 2)
    y, z = (part.flatten() for part in torch.meshgrid(torch.arange(3), torch.arange(2), indexing="ij"))
    at = (y[:, None] - y + 2) * 3 + z[:, None] - z + 1
    mixer, heads = block.mixer, []
    q, k, v = (proj(tokens) for proj in (mixer.q_proj, mixer.k_proj, mixer.v_proj))
    for h in range(2):
        part = slice(4 * h, 4 * h + 4)
        scores = q[..., part] @ k[..., part].mT / 2 + mixer.places.table[at, h]
        heads.append(scores.softmax(-1) @ v[..., part])
    short = block.shortcut.proj(F.avg_pool2d(x, 2)).flatten(2).transpose(1, 2)
    out = short + mixer.o_proj(torch.cat(heads, -1))
    out = out + block.ff(F.layer_norm(out, (8,), eps=1e-6))
    torch.testing.assert_close(block(x), out.transpose(1, 2).view(2, 8, 3, 2))


@torch.no_grad()
def test_a_convolution_block_is_the_formula():
    torch.manual_seed(0)
    block = ConvolutionBlock(4, 8, halves=True).double().eval()
    for part in block.modules():
        if isinstance(part, torch.nn.BatchNorm2d):
            part.running_mean.normal_()
            part.running_var.uniform_(0.5, 2)
    x = drawn(2, 4, 6, 4).double()

    def normed(norm, y):
        shape = (1, -1, 1, 1)
        mean, var = norm.running_mean.view(shape), norm.running_var.view(shape)
        return (y - mean) / (var + 1e-5).sqrt() * norm.weight.view(shape) + norm.bias.view(shape)

    y = torch.einsum("oc,bcyx->boyx", block.expand.weight[:, :, 0, 0], normed(block.norm, x))
    y = F.conv2d(F.gelu(normed(block.expand_norm, y)), block.depthwise.weight, stride=2, padding=1, groups=32)
    y = F.gelu(normed(block.depthwise_norm, y))
    weights = torch.sigmoid(block.weigh.excite(F.silu(block.weigh.squeeze(y.mean((2, 3))))))
    y = F.conv2d(y * weights[:, :, None, None], block.shrink.weight, block.shrink.bias)
    torch.testing.assert_close(block(x), y + block.shortcut.proj(F.avg_pool2d(x, 2)))


def test_an_odd_edge_is_the_mean_of_the_pixels_that_are_there():
    block = ConvolutionBlock(4, 4, halves=True)
    short = block.shortcut(torch.arange(9.0).view(1, 1, 3, 3).expand(1, 4, 3, 3))
    assert short[0, 0].tolist() == [[2, 3.5], [6.5, 8]]


def test_squeezed_channels_are_weighed_by_the_whole_map():
    part = SqueezeExcite(6, 2)
    x = drawn(2, 6, 3, 5)
    moved = x.roll(1, 2)
    torch.testing.assert_close(part(moved), part(x).roll(1, 2))


@pytest.mark.parametrize("size", [(32, 48), (33, 50), (1, 1), (2, 64)])
def test_any_size_trains(size):
    torch.manual_seed(0)
    model = CoAtNet(SMALL, 3)
    out = model(drawn(4, 3, *size))
    out.square().sum().backward()
    assert out.shape == (4, 3)
    used = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.isfinite().all()]
    assert not used


def test_a_few_images_are_learnt():
    torch.manual_seed(0)
    model, labels = CoAtNet(SMALL, 4), torch.arange(4)
    images = drawn(4, 3, 32, 32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(30):
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 0.1


def test_what_does_not_fit():
    with pytest.raises(ValueError, match=r"images: expected \(B, 3, height, width\)"):
        CoAtNet(SMALL, 3)(torch.ones(1, 4, 8, 8))
    with pytest.raises(ValueError, match="depths: expected 2, one a stage"):
        CoAtNetShape(8, (8, 8), (1,))
    with pytest.raises(ValueError, match="attention: expected 0 to 2 stages, got 3"):
        CoAtNetShape(8, (8, 8), (1, 1), attention=3)
    with pytest.raises(ValueError, match="head_dim: expected a divisor of width=16"):
        CoAtNet(CoAtNetShape(8, (8, 16), (1, 1), attention=1))
    with pytest.raises(ValueError, match="width: expected 8, as before"):
        ConvolutionBlock(8, 16)
