"""DETR as a whole model: against transformers over options, names of both backbones, padding, published sizes."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from regard.errors import CheckpointError
from regard.models import from_config, load
from regard.models.images.detr import LearnedPlaces, PlacedAttention, SinePlaces, pixel_boxes
from regard.models.images.matching import Weights
from regard.models.images.resnet import FrozenBatchNorm, ResNet, ResNetShape

transformers = pytest.importorskip("transformers")

BACKBONE = {"embedding_size": 6, "hidden_sizes": [8, 12], "depths": [2, 1], "layer_type": "basic"}
SMALL = {
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 20,
    "decoder_ffn_dim": 12,
    "num_queries": 5,
    "id2label": {0: "a", 1: "b", 2: "c"},
}


@torch.no_grad()
def peer_of(folder, backbone=None, **options):
    """A model of transformers whose weights and batch statistics are far enough from their start to matter."""
    backbone = {**BACKBONE, **(backbone or {})}
    last = f"stage{len(backbone['depths'])}"
    config = transformers.DetrConfig(
        backbone_config=transformers.ResNetConfig(**backbone, out_features=[last]),
        use_timm_backbone=False,
        **{**SMALL, **options},
    )
    torch.manual_seed(0)
    peer = transformers.DetrForObjectDetection(config).eval()
    for parameter in peer.parameters():
        parameter.add_(0.5 * torch.randn_like(parameter) / parameter[0].numel() ** 0.5)
    for name, buffer in peer.named_buffers():
        if "running_var" in name or "normalization.weight" in name:
            buffer.uniform_(0.5, 2)
        elif "normalization" in name:
            buffer.normal_(0, 0.3)
    peer.save_pretrained(folder)
    return peer


def drawn(*size, channels=3):
    """Images, and which of their pixels are real: all of the first, a corner of the second."""
    generator = torch.Generator().manual_seed(sum(size))
    images = torch.randn(2, channels, *size, generator=generator)
    keep = torch.ones(2, *size, dtype=torch.bool)
    keep[1, size[0] * 2 // 3 :] = False
    keep[1, :, size[1] // 2 :] = False
    return images * keep[:, None], keep


def close(found, want):
    for got, right in ((found.logits, want.logits), (found.boxes, want.pred_boxes)):
        torch.testing.assert_close(got, right, rtol=0, atol=2e-5 * float(right.abs().max()))


@torch.no_grad()
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(
    ("size", "backbone", "options"),
    [
        ((64, 96), {}, {}),
        ((37, 51), {"layer_type": "bottleneck", "hidden_act": "gelu"}, {"activation_function": "gelu"}),
        (
            (70, 40),
            {"layer_type": "bottleneck", "downsample_in_bottleneck": True, "depths": [1, 2]},
            {"position_embedding_type": "learned"},
        ),
        ((64, 64), {"downsample_in_first_stage": True, "num_channels": 1}, {"auxiliary_loss": True}),
        ((33, 200), {"hidden_sizes": [6, 8, 12], "depths": [1, 1, 1]}, {"encoder_layers": 1, "decoder_layers": 3}),
    ],
)
def test_detr(size, backbone, options, padded, tmp_path):
    peer = peer_of(tmp_path / "peer", backbone, **options)
    images, keep = drawn(*size, channels=backbone.get("num_channels", 3))
    model = load(tmp_path / "peer")
    theirs, ours = ({"pixel_mask": keep.long()}, {"keep": keep}) if padded else ({}, {})
    want = peer(images, **theirs)
    close(model(images, **ours), want)
    model.save(tmp_path / "ours")
    again = transformers.DetrForObjectDetection.from_pretrained(tmp_path / "ours").eval()
    assert torch.equal(again(images, **theirs).logits, want.logits)


def test_every_layer_answers(tmp_path):
    """The last of the steps is the answer; with one layer fewer in the file the first step is that model's answer."""
    peer_of(tmp_path)
    model, (images, keep) = load(tmp_path), drawn(40, 50)
    steps = model.steps(images, keep=keep)
    assert len(steps) == 2 and all(torch.equal(a, b) for a, b in zip(steps[-1], model(images, keep=keep), strict=True))
    del model.decoder[1]
    assert torch.equal(steps[0].logits, model(images, keep=keep).logits)


TIMM = {
    "embedder.embedder.convolution": "conv1",
    "embedder.embedder.normalization": "bn1",
    "shortcut.convolution": "downsample.0",
    "shortcut.normalization": "downsample.1",
    **{f"layer.{k}.convolution": f"conv{k + 1}" for k in range(3)},
    **{f"layer.{k}.normalization": f"bn{k + 1}" for k in range(3)},
    **{f"encoder.stages.{i}.layers.": f"layer{i + 1}." for i in range(4)},
}


@torch.no_grad()
@pytest.mark.parametrize("saying", ["old", "new"])
def test_names_of_timm(saying, tmp_path):
    """The same tensors under timm's names of a ResNet-18 give the same answers, and are written back so."""
    sizes = {"embedding_size": 64, "hidden_sizes": [64, 128, 256, 512], "depths": [2, 2, 2, 2]}
    peer_of(tmp_path / "peer", sizes)
    tensors = {}
    for name, tensor in load_file(tmp_path / "peer" / "model.safetensors").items():
        if "conv_encoder" in name:
            for theirs, timm in TIMM.items():
                name = name.replace(theirs, timm)
        tensors[name] = tensor
    tensors["model.backbone.conv_encoder.model.bn1.num_batches_tracked"] = torch.tensor(3)
    config = json.loads((tmp_path / "peer" / "config.json").read_text())
    del config["backbone_config"]
    if saying == "old":
        config |= {"backbone": "resnet18", "use_timm_backbone": True, "backbone_kwargs": {"out_indices": [1, 2, 3, 4]}}
    else:
        named = {"model_type": "timm_backbone", "backbone": "resnet18", "features_only": True, "num_channels": 3}
        config["backbone_config"] = {**named, "out_indices": [1, 2, 3, 4], "use_pretrained_backbone": False}
    config.pop("use_timm_backbone", None) if saying == "new" else None
    (tmp_path / "timm").mkdir()
    (tmp_path / "timm" / "config.json").write_text(json.dumps(config))
    save_file(tensors, str(tmp_path / "timm" / "model.safetensors"))
    images, keep = drawn(64, 70)
    model = load(tmp_path / "timm")
    assert torch.equal(model(images, keep=keep).logits, load(tmp_path / "peer")(images, keep=keep).logits)
    model.save(tmp_path / "again")
    written = load_file(tmp_path / "again" / "model.safetensors")
    assert set(written) == {name for name in tensors if "num_batches" not in name}


COCO = {str(i): f"class {i}" for i in range(91)}


@pytest.mark.parametrize(
    ("options", "count"),
    [
        ({}, 41_501_895),  # timm's ResNet-50, with two classes as transformers' options have by default
        ({"use_timm_backbone": False, "backbone_config": {"model_type": "resnet"}}, 41_501_895),
        ({"dilation": True}, 41_501_895),
        ({"id2label": COCO}, 41_524_768),  # the released detector of 91 classes, 41 M
        ({"id2label": COCO, "backbone": "resnet101"}, 60_464_672),  # 60 M
    ],
)
def test_published_parameter_counts(options, count):
    model = from_config({"model_type": "detr", **options}, device="meta")
    assert sum(p.numel() for p in model.parameters()) == count


def test_the_options_of_the_first_release_are_all_understood():
    """As the released folder of the detector with a ResNet-50 states them."""
    options = {"model_type": "detr", "architectures": ["DetrForObjectDetection"], "activation_dropout": 0.0}
    options |= {"activation_function": "relu", "attention_dropout": 0.0, "auxiliary_loss": False, "d_model": 256}
    options |= {"backbone": "resnet50", "backbone_config": None, "use_timm_backbone": True, "dilation": False}
    options |= {"backbone_kwargs": {"in_chans": 3, "out_indices": [1, 2, 3, 4]}, "use_pretrained_backbone": True}
    options |= {"bbox_cost": 5, "bbox_loss_coefficient": 5, "class_cost": 1, "classifier_dropout": 0.0, "giou_cost": 2}
    options |= {f"{stack}_{part}": n for stack in ("encoder", "decoder") for part, n in
                (("attention_heads", 8), ("ffn_dim", 2048), ("layerdrop", 0.0), ("layers", 6))}  # fmt: skip
    options |= {"dice_loss_coefficient": 1, "dropout": 0.1, "eos_coefficient": 0.1, "giou_loss_coefficient": 2}
    options |= {"id2label": COCO, "init_std": 0.02, "init_xavier_std": 1.0, "is_encoder_decoder": True}
    options |= {"mask_loss_coefficient": 1, "max_position_embeddings": 1024, "num_channels": 3, "num_hidden_layers": 6}
    options |= {"num_queries": 100, "position_embedding_type": "sine", "scale_embedding": False}
    model = from_config(options, device="meta")
    assert sum(p.numel() for p in model.parameters()) == 41_524_768


@pytest.mark.parametrize("depths", [[3, 4, 6, 3], [3, 4, 23, 3]])
def test_as_many_parameters_as_transformers(depths):
    backbone = transformers.ResNetConfig(depths=depths, out_features=["stage4"])
    with torch.device("meta"):
        peer = transformers.DetrForObjectDetection(
            transformers.DetrConfig(backbone_config=backbone, use_timm_backbone=False)
        )
    model = from_config(peer.config.to_dict(), device="meta")
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in peer.parameters())


def test_dilation_keeps_the_last_stage_large():
    plain = ResNetShape((8, 8), (2, 3), bottleneck=False, stem=4, strides=(1, 2), dilations=(1, 1))
    wide = ResNetShape((8, 8), (2, 3), bottleneck=False, stem=4, strides=(1, 1), dilations=(1, 2))
    x = torch.ones(1, 3, 64, 64)
    assert ResNet(plain)(x).shape[2:] == (8, 8) and ResNet(wide)(x).shape[2:] == (16, 16)
    convolutions = [m for m in ResNet(wide).stages[1].modules() if isinstance(m, torch.nn.Conv2d)]
    assert [m.dilation[0] for m in convolutions if m.kernel_size == (3, 3)] == [1, 1, 2, 2, 2, 2]


# ---- what must hold whatever the weights -----------------------------------------------------------------------------


@pytest.fixture
def model():
    torch.manual_seed(1)
    options = {**SMALL, "id2label": {"0": "a"}, "dropout": 0.0, "init_std": 0.2, "use_timm_backbone": False}
    made = from_config({"model_type": "detr", **options, "backbone_config": {"model_type": "resnet", **BACKBONE}})
    return made.double().eval()


def test_without_queries_places_all_queries_answer_alike(model):
    images, _ = drawn(40, 40)
    torch.nn.init.zeros_(model.queries.weight)
    logits = model(images.double()).logits
    torch.testing.assert_close(logits, logits[:, :1].expand_as(logits))


def test_permuted_queries_give_permuted_answers(model):
    images, order = drawn(40, 40)[0].double(), torch.tensor([3, 0, 4, 2, 1])
    before = model(images)
    model.queries.weight.data = model.queries.weight.data[order]
    for a, b in zip(before, model(images), strict=True):
        torch.testing.assert_close(a[:, order], b)


def test_padded_places_of_the_map_change_nothing(model):
    """Behind the convolutions, which reach across the edge, padding is not read at all."""
    features = model.backbone(drawn(64, 64)[0].double())
    model.backbone = torch.nn.Identity()
    beside = torch.nn.functional.pad(features, (0, 4, 0, 8), value=7.0)
    keep = torch.zeros(beside.shape[0], *beside.shape[2:], dtype=torch.bool)
    keep[:, : features.shape[2], : features.shape[3]] = True
    for a, b in zip(model(features), model(beside, keep=keep), strict=True):
        torch.testing.assert_close(a, b)


def test_an_image_that_is_all_padding_is_finite_and_leaves_the_others_alone(model):
    images, keep = drawn(40, 56)
    images, none = images.double(), keep.clone()
    none[1] = False
    found = model(images, keep=none)
    assert all(part.isfinite().all() for part in found)
    torch.testing.assert_close(found.logits[:1], model(images[:1], keep=none[:1]).logits)
    sum(part.square().sum() for part in found).backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("size", [(1, 1), (1, 70), (33, 2)])
def test_tiny_images(model, size):
    found = model(torch.randn(2, 3, *size, dtype=torch.float64))
    assert found.boxes.shape == (2, 5, 4) and all(part.isfinite().all() for part in found)
    assert (0 <= found.boxes).all() and (found.boxes <= 1).all()


def test_half_precision_keeps_statistics_wide(tmp_path):
    peer_of(tmp_path)
    low, high = load(tmp_path, dtype=torch.bfloat16), load(tmp_path)
    assert low.backbone.stem.norm.running_var.dtype == torch.float32
    images, keep = drawn(40, 40)
    found = low(images.bfloat16(), keep=keep)
    assert found.logits.dtype == torch.bfloat16
    assert (found.boxes.float() - high(images, keep=keep).boxes).abs().max() < 0.1


def test_attention_of_placed_tokens_is_the_formula():
    torch.manual_seed(0)
    layer = PlacedAttention(8, 2).double()
    x, context, places, far = (torch.randn(2, n, 8, dtype=torch.float64) for n in (3, 5, 3, 5))
    keep = torch.tensor([[True] * 5, [True, True, False, False, False]])
    q, k, v = layer.q_proj(x + places), layer.k_proj(context + far), layer.v_proj(context)
    heads = []
    for h in (slice(0, 4), slice(4, 8)):
        scores = (q[..., h] @ k[..., h].mT / 2).masked_fill(~keep[:, None], -torch.inf)
        heads.append(scores.softmax(-1) @ v[..., h])
    want = layer.o_proj(torch.cat(heads, -1))
    torch.testing.assert_close(layer(x, context, places=places, context_places=far, keep=keep), want)
    inputs = (x.requires_grad_(), context.requires_grad_())
    assert torch.autograd.gradcheck(lambda a, b: layer(a, b, places=places, context_places=far, keep=keep), inputs)


def test_learned_places_name_columns_first():
    places = LearnedPlaces(4, most=6)
    found = places(torch.ones(2, 3, 5, dtype=torch.bool), torch.float32)
    assert found.shape == (2, 3, 5, 4)
    assert torch.equal(found[0, 2, 4], torch.cat([places.columns.weight[4], places.rows.weight[2]]))
    with pytest.raises(ValueError, match="images: expected a map of at most 6 by 6 places, got 7 by 1"):
        places(torch.ones(1, 7, 1, dtype=torch.bool), torch.float32)


def test_frozen_norms_are_batch_norms_in_evaluation():
    own, torchs = FrozenBatchNorm(3), torch.nn.BatchNorm2d(3).eval()
    for name in ("weight", "bias", "running_mean", "running_var"):
        value = torch.rand(3) + 0.5
        getattr(own, name).copy_(value)
        getattr(torchs, name).data.copy_(value)
    x = torch.randn(2, 3, 4, 5)
    torch.testing.assert_close(own(x), torchs(x))
    assert not list(own.parameters())


def test_the_objective_is_the_options():
    costs = {"class_cost": 2, "bbox_cost": 3, "giou_cost": 4, "bbox_loss_coefficient": 6, "giou_loss_coefficient": 7}
    model = from_config(
        {"model_type": "detr", **SMALL, "id2label": None, **costs, "eos_coefficient": 0.3}, device="meta"
    )
    assert model.objective.cost == Weights(2, 3, 4) and model.objective.loss == Weights(1, 6, 7)
    assert model.objective.no_object == 0.3


def test_boxes_in_pixels():
    boxes = torch.tensor([[[0.5, 0.5, 1.0, 1.0]], [[0.25, 0.5, 0.5, 0.2]]])
    want = torch.tensor([[[0.0, 0, 20, 10]], [[0, 40, 20, 60]]])
    torch.testing.assert_close(pixel_boxes(boxes, [(10, 20), (100, 40)]), want)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"backbone": "resnet50d"}, "backbone: expected resnet101, resnet152, resnet18, resnet34, resnet50, got"),
        ({"backbone_config": {"model_type": "swin"}}, "model_type: expected resnet, timm_backbone, got 'swin'"),
        ({"backbone_config": {"model_type": "resnet", "groups": 2}}, "backbone_config: unknown option groups=2"),
        ({"backbone_config": {"model_type": "resnet", "depths": [1]}}, "hidden_sizes: expected a list .*, 1 of them"),
        ({"backbone_config": {"model_type": "resnet", "out_features": ["stage3"]}}, "out_features: expected a list"),
        ({"backbone_config": {"model_type": "resnet"}, "dilation": True}, "dilation: expected false"),
        ({"backbone_kwargs": {"drop_rate": 0.5}}, "backbone_kwargs: unknown option drop_rate"),
        ({"backbone_kwargs": {"in_chans": 1}}, "backbone_kwargs: in_chans: expected 3"),
        ({"backbone_kwargs": {"output_stride": 16}}, "output_stride: expected 32"),
        ({"backbone_kwargs": {"out_indices": [1, 2]}}, "out_indices: expected the last stage's map"),
        ({"encoder_attention_heads": 7}, "encoder_attention_heads: expected a divisor of d_model=256, got 7"),
        (
            {"d_model": 6, "encoder_attention_heads": 1, "decoder_attention_heads": 1},
            "d_model: expected a multiple of 4",
        ),
        ({"position_embedding_type": "fourier"}, "position_embedding_type: expected learned, sine"),
        ({"bbox_cost": -1}, "bbox_cost: expected a finite number of 0 or more"),
        ({"two_stage": True}, "unknown option two_stage"),
    ],
)
def test_options_that_cannot_be_placed(options, words):
    with pytest.raises(CheckpointError, match=words):
        from_config({"model_type": "detr", **options}, device="meta")


def test_tensors_that_do_not_fit(model):
    images = torch.ones(1, 3, 8, 8, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"keep: expected \(1, 8, 8\), got \(1, 8, 9\)"):
        model(images, keep=torch.ones(1, 8, 9, dtype=torch.bool))
    with pytest.raises(TypeError, match="keep: expected"):
        model(images, keep=torch.ones(1, 8, 8))
    with pytest.raises(ValueError, match=r"images: expected \(B, channels, height, width\)"):
        model(images[0])
    with pytest.raises(TypeError, match="images: expected float64"):
        model(images.float())
    with pytest.raises(ValueError, match="dim: expected a multiple of 4"):
        SinePlaces(6)
