"""Swin v1 and v2 as whole models: against transformers over options and odd sizes, published sizes, small images."""

import json

import pytest
import torch

from regard.errors import CheckpointError
from regard.models import from_config, load
from regard.models.images.patches import GridPlaces
from regard.models.images.swin import PatchMerging, SwinBlock

transformers = pytest.importorskip("transformers")

SMALL = {
    "image_size": 24,
    "patch_size": 2,
    "embed_dim": 12,
    "depths": [2, 3],
    "num_heads": [2, 3],
    "window_size": 3,
    "mlp_ratio": 1.5,
    "num_labels": 7,
}


@torch.no_grad()
def peer_of(cls, config, folder):
    """A model of transformers whose weights are far enough from 0 for its options to matter."""
    torch.manual_seed(0)
    peer = getattr(transformers, cls)(config).eval()
    for parameter in peer.parameters():
        parameter.add_(0.5 * torch.randn_like(parameter) / parameter.shape[-1] ** 0.5)
    peer.save_pretrained(folder)
    return peer


def images(*size, channels=3):
    return torch.randn(2, channels, *size, generator=torch.Generator().manual_seed(sum(size)))


def close(found, want):
    torch.testing.assert_close(found, want, rtol=0, atol=2e-5 * float(want.abs().max()))


V1 = [
    ({}, (24, 24)),
    ({}, (25, 31)),  # patches, windows and merging all pad
    ({}, (12, 40)),  # the second map is as high as a window
    ({"window_size": 6, "depths": [2, 2]}, (24, 24)),  # the second map is one window
    ({"window_size": 4, "patch_size": 3}, (50, 37)),
    ({"window_size": 1}, (9, 7)),
    ({"qkv_bias": False, "hidden_act": "relu", "layer_norm_eps": 1e-3}, (24, 30)),
    ({"use_absolute_embeddings": True}, (24, 24)),
    ({"num_channels": 1, "depths": [1], "num_heads": [4]}, (17, 23)),
    ({"depths": [1, 1, 2], "num_heads": [1, 2, 4], "image_size": [24, 32]}, (24, 32)),
]


@torch.no_grad()
@pytest.mark.parametrize(("options", "size"), V1)
def test_swin(options, size, tmp_path):
    options = {**SMALL, **options}
    peer = peer_of("SwinForImageClassification", transformers.SwinConfig(**options), tmp_path / "peer")
    x = images(*size, channels=options.get("num_channels", 3))
    model, want = load(tmp_path / "peer"), peer(x)
    close(model(x), want.logits)
    model.save(tmp_path / "ours")
    again = transformers.SwinForImageClassification.from_pretrained(tmp_path / "ours").eval()
    assert torch.equal(again(x).logits, want.logits)


@torch.no_grad()
@pytest.mark.parametrize("size", [(48, 48), (40, 26)])
def test_absolute_places_of_another_size(size, tmp_path):
    config = transformers.SwinConfig(**{**SMALL, "use_absolute_embeddings": True})
    peer = peer_of("SwinForImageClassification", config, tmp_path)
    x = images(*size)
    close(load(tmp_path)(x), peer(x, interpolate_pos_encoding=True).logits)


V2 = [
    ({}, (24, 24)),
    ({}, (25, 31)),
    ({}, (48, 40)),
    ({}, (5, 9)),  # smaller than the windows that the model was made for
    ({"window_size": 6}, (24, 24)),  # the second stage is one window, without a shift
    ({"window_size": 8}, (24, 24)),  # windows of the second stage are cut to 6
    ({"window_size": 8}, (30, 20)),
    ({"window_size": 4, "pretrained_window_sizes": [6, 3]}, (24, 32)),
    ({"qkv_bias": False, "hidden_act": "gelu_new", "image_size": [12, 24]}, (12, 24)),
]


@torch.no_grad()
@pytest.mark.parametrize(("options", "size"), V2)
def test_swin_v2(options, size, tmp_path):
    config = transformers.Swinv2Config(**{"pretrained_window_sizes": [0, 0], **SMALL, **options})
    peer = peer_of("Swinv2ForImageClassification", config, tmp_path / "peer")
    model, want = load(tmp_path / "peer"), peer(images(*size))
    close(model(images(*size)), want.logits)
    model.save(tmp_path / "ours")
    again = transformers.Swinv2ForImageClassification.from_pretrained(tmp_path / "ours").eval()
    assert torch.equal(again(images(*size)).logits, want.logits)


@torch.no_grad()
@pytest.mark.parametrize("cls", ["SwinModel", "Swinv2Model", "SwinForMaskedImageModeling"])
def test_models_without_classes(cls, tmp_path):
    kind = "Swinv2" if "v2" in cls else "Swin"
    options = {**SMALL, "encoder_stride": 2}
    options |= {"pretrained_window_sizes": [0, 0]} if kind == "Swinv2" else {}
    peer = peer_of(cls, getattr(transformers, f"{kind}Config")(**options), tmp_path)
    model, x = load(tmp_path), images(20, 24)
    want = getattr(peer, "swin", peer)(x)
    close(model.hidden(x).flatten(1, 2), want.last_hidden_state)
    if want.pooler_output is not None:
        close(model(x), want.pooler_output)
    assert [tuple(m.shape) for m in model.maps(x)] == [(2, 10, 12, 12), (2, 5, 6, 24)]


@pytest.mark.parametrize("kind", ["swin", "swinv2"])
@pytest.mark.parametrize("size", [(1, 1), (2, 2), (3, 11), (24, 1)])
def test_images_smaller_than_a_window_train(kind, size):
    options = {k: v for k, v in SMALL.items() if k != "num_labels"}
    model = from_config({"model_type": kind, **options, "drop_path_rate": 0.3, "hidden_dropout_prob": 0.1})
    out = model(images(*size))
    out.square().sum().backward()
    assert out.shape == (2, 2)
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize(
    ("kind", "options", "count"),
    [
        ("swin", {}, 28_288_354),
        ("swin", {"depths": [2, 2, 18, 2]}, 49_606_258),
        ("swin", {"embed_dim": 128, "depths": [2, 2, 18, 2], "num_heads": [4, 8, 16, 32]}, 87_768_224),
        ("swin", {"embed_dim": 192, "depths": [2, 2, 18, 2], "num_heads": [6, 12, 24, 48]}, 196_532_476),
        ("swinv2", {"image_size": 256, "window_size": 8}, 28_347_154),
    ],
)
def test_published_parameter_counts(kind, options, count):
    labels = {"id2label": {str(i): f"class {i}" for i in range(1000)}}
    model = from_config({"model_type": kind, **labels, **options}, device="meta")
    assert sum(p.numel() for p in model.parameters()) == count


def test_a_block_of_v2_starts_as_the_identity():
    options = {k: v for k, v in SMALL.items() if k != "num_labels"}
    model = from_config({"model_type": "swinv2", **options}).eval()
    x = model.embedding(images(24, 24))
    torch.testing.assert_close(model.maps(images(24, 24))[0], x)
    assert (model.stages[0].layers[1].mixer.logit_scale.exp() - 10).abs().max() < 1e-5


def test_merging_takes_the_row_below_first():
    merge = PatchMerging(1)
    x = torch.arange(4.0).view(1, 2, 2, 1)  # [[0, 1], [2, 3]]
    seen = []
    merge.norm.register_forward_pre_hook(lambda module, given: seen.append(given[0].flatten().tolist()))
    merge(x)
    assert seen == [[0.0, 2.0, 1.0, 3.0]]
    assert merge(torch.ones(1, 1, 1, 1)).shape == (1, 1, 1, 2)


def test_places_of_their_own_size_are_the_table():
    places = GridPlaces((3, 4), 2)
    assert places((3, 4)) is places.weight
    assert torch.autograd.gradcheck(lambda w: torch.func.functional_call(places, {"weight": w}, ((5, 2),)),
                                    places.weight.detach().double().requires_grad_())  # fmt: skip


def test_branches_are_left_out_by_image_in_training_alone():
    torch.manual_seed(0)
    one = torch.nn.Identity()
    block = SwinBlock(one, torch.nn.Identity(), one, one, skipped=0.5)
    x = torch.ones(64, 2, 2, 3)
    y = block(x)
    assert sorted(set(y.flatten().tolist())) == [1.0, 3.0, 9.0]
    assert (y == y[:, :1, :1, :1]).all()
    assert (block.eval()(x) == 4).all()


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        ("swin", {"depths": [2, 0]}, r"depths: expected a list of positive integers, got \[2, 0\]"),
        ("swin", {"num_heads": [2]}, "num_heads: expected a list of positive integers, 2 of them"),
        ("swin", {"num_heads": [5, 2]}, "num_heads: expected divisors"),
        ("swin", {"hidden_size": 12}, "hidden_size: expected 24"),
        ("swin", {"attention_probs_dropout_prob": 0.1}, "attention_probs_dropout_prob: expected 0.0"),
        ("swin", {"drop_path_rate": 1.0}, "drop_path_rate: expected a probability below 1"),
        ("swin", {"image_size": [3, 4, 5]}, "image_size: expected a positive integer, or two"),
        ("swin", {"pretrained_window_sizes": [7, 7]}, "unknown option pretrained_window_sizes"),
        ("swin", {"mlp_ratio": 0.01}, "mlp_ratio: expected at least"),
        ("swinv2", {"pretrained_window_sizes": [7]}, "pretrained_window_sizes: expected 0 or a window"),
        ("swinv2", {"use_absolute_embeddings": True}, "use_absolute_embeddings: expected False"),
        ("swinv2", {"id2label": []}, "id2label: expected an object"),
    ],
)
def test_options_that_cannot_be_placed(kind, options, words):
    sizes = {k: v for k, v in SMALL.items() if k != "num_labels"}
    with pytest.raises(CheckpointError, match=words):
        from_config({"model_type": kind, **sizes, **options})


def test_images_that_do_not_fit():
    model = from_config({"model_type": "swin", **SMALL})
    with pytest.raises(ValueError, match=r"images: expected \(B, 3, height, width\), got float32 tensor of shape"):
        model(torch.ones(1, 1, 8, 8))
    with pytest.raises(ValueError, match="images: expected"):
        model(torch.ones(1, 3, 0, 8))
    with pytest.raises(TypeError, match=r"images: expected torch\.float32"):
        model(torch.ones(1, 3, 8, 8, dtype=torch.float64))


def test_more_layers_than_the_file_has_room_for(tmp_path):
    peer_of("SwinForImageClassification", transformers.SwinConfig(**SMALL), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "depths": [2, 10**8]}))
    with pytest.raises(CheckpointError, match="depths: expected at most"):
        load(tmp_path)


@pytest.mark.parametrize("kind", ["swin", "swinv2"])
def test_a_few_images_are_learnt(kind):
    torch.manual_seed(0)
    options = {k: v for k, v in SMALL.items() if k != "num_labels"}
    model = from_config({"model_type": kind, **options, "id2label": dict(enumerate("abcd")), "drop_path_rate": 0.0})
    x, labels = torch.randn(4, 3, 24, 24), torch.arange(4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(40):
        loss = torch.nn.functional.cross_entropy(model(x), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 0.1
