"""ViT, DeiT, SigLIP and BEiT as whole models: against transformers over options, published sizes, refusals, places."""

import json

import pytest
import torch
from torch import nn

from regard import mixing_matrix
from regard.errors import CheckpointError
from regard.models import MLP, Encoder, PreNorm, activation, from_config, load
from regard.models.images.blocks import ChannelScale, ImageBlock
from regard.models.images.patches import GridPlaces, PatchTokens, SinusoidalPlaces, TokenPlaces
from regard.models.images.vit import ClassPlaces, FirstTokens, GridRotary, ImageEncoder, MeanPooler, PatchAttention
from regard.nn import GatedDeltaNet

transformers = pytest.importorskip("transformers")

SMALL = {
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 40,
    "image_size": 20,
    "patch_size": 5,
}
CLASSES = {"num_labels": 7}


@torch.no_grad()
def peer_of(cls, config, folder, **more):
    """A model of transformers whose weights are far enough from 0 for its options to matter, then in float64."""
    torch.manual_seed(0)
    peer = getattr(transformers, cls)(config, **more).eval()
    for parameter in peer.parameters():
        parameter.add_(0.5 * torch.randn_like(parameter) / parameter.shape[-1] ** 0.5)
    peer.save_pretrained(folder)
    return peer.double()


def images(*size, channels=3):
    drawn = torch.randn(2, channels, *size, generator=torch.Generator().manual_seed(sum(size)))
    return drawn.double()


def close(found, want):
    assert found.dtype == want.dtype == torch.float64
    torch.testing.assert_close(found, want, rtol=0, atol=1e-11 * max(1.0, float(want.abs().max())))


def compare(peer, folder, x, **call):
    """A folder in both libraries: hidden state, pooled vector, scores; in float32 too; and written back."""
    asked = {"interpolate_pos_encoding": True} if call.get("interpolate") else {}
    want = peer(x, output_hidden_states=False, **asked)
    base = want if "last_hidden_state" in want else getattr(peer, peer.base_model_prefix, None)(x, **asked)
    model = load(folder, torch.float64)
    close(model.hidden(x, **call), base.last_hidden_state)
    if "logits" in want:
        close(model(x, **call), want.logits)
    else:
        close(model(x, **call), base.last_hidden_state)
        if base.pooler_output is not None:
            close(model.pool(model(x, **call)), base.pooler_output)
    answer = want.logits if "logits" in want else base.last_hidden_state
    single = load(folder, torch.float32)(x.float(), **call)
    assert float((single - answer).abs().max()) <= 3e-5 * max(1.0, float(answer.abs().max()))
    model.save(folder / "ours")
    again, left = type(peer).from_pretrained(folder / "ours", dtype=torch.float64, output_loading_info=True)
    without = [] if "logits" in want or base.pooler_output is not None else left.pop("missing_keys")
    assert not any(left.values()) and all(name.startswith("pooler.") for name in without), left
    assert json.loads((folder / "ours" / "config.json").read_text())["architectures"] == [type(peer).__name__]
    found = again.eval()(x, **asked)
    close(found.logits if "logits" in want else found.last_hidden_state, answer)


COMMON = [
    {},
    {"hidden_act": "relu", "layer_norm_eps": 1e-3, "qkv_bias": False},
    {"hidden_act": "quick_gelu", "num_attention_heads": 1, "num_channels": 1},
    {"image_size": [20, 15], "patch_size": [5, 3]},
    {"image_size": 23, "patch_size": 5},  # what is left over is not read
    {"image_size": 5, "num_hidden_layers": 1},  # one patch
    {"head_dim": 4, "intermediate_size": 7},
]


@torch.no_grad()
@pytest.mark.parametrize("options", COMMON)
@pytest.mark.parametrize("kind", ["ViT", "DeiT"])
def test_classifiers(kind, options, tmp_path):
    options = {**SMALL, **CLASSES, **options}
    peer = peer_of(f"{kind}ForImageClassification", getattr(transformers, f"{kind}Config")(**options), tmp_path)
    sides = options["image_size"]
    x = images(*(sides if isinstance(sides, list) else (sides, sides)), channels=options.get("num_channels", 3))
    compare(peer, tmp_path, x)


@torch.no_grad()
def test_deit_with_its_teachers_token(tmp_path):
    peer = peer_of("DeiTForImageClassificationWithTeacher", transformers.DeiTConfig(**SMALL, **CLASSES), tmp_path)
    x = images(20, 20)
    compare(peer, tmp_path, x)
    model, want = load(tmp_path, torch.float64), peer(x)
    labels, teacher = model.classifier.separate(model.pool(model.hidden(x)))
    close(labels, want.cls_logits)
    close(teacher, want.distillation_logits)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["ViT", "DeiT", "Beit"])
@pytest.mark.parametrize(
    ("options", "more"),
    [({}, {}), ({}, {"add_pooling_layer": False}), ({"pooler_act": "relu", "pooler_output_size": 6}, {})],
)
def test_models_without_classes(kind, options, more, tmp_path):
    options = {} if kind == "Beit" else options
    config = getattr(transformers, f"{kind}Config")(**SMALL, **options)
    compare(peer_of(f"{kind}Model", config, tmp_path, **more), tmp_path, images(20, 20))


@torch.no_grad()
@pytest.mark.parametrize("size", [(20, 20), (35, 35), (24, 11), (10, 40)])
@pytest.mark.parametrize(
    ("cls", "options"),
    [
        ("ViTForImageClassification", {}),
        ("DeiTForImageClassificationWithTeacher", {}),
        ("SiglipVisionModel", {}),
        ("BeitForImageClassification", {"use_absolute_position_embeddings": True}),
        ("BeitForImageClassification", {"use_relative_position_bias": True}),
        ("BeitForImageClassification", {"use_shared_relative_position_bias": True}),
    ],
)
def test_images_of_other_sizes(cls, options, size, tmp_path):
    kind = cls.removesuffix("Model").removesuffix("WithTeacher").removesuffix("ForImageClassification")
    sizes = SMALL if kind == "SiglipVision" else SMALL | CLASSES
    peer = peer_of(cls, getattr(transformers, f"{kind}Config")(**sizes, **options), tmp_path)
    compare(peer, tmp_path, images(*size), interpolate=True)
    if size != (20, 20):
        with pytest.raises(ValueError, match=r"images: expected 20 × 20 pixels.*interpolate=True.*, got \d+ × \d+"):
            load(tmp_path, torch.float64)(images(*size))


BEIT = [
    {"use_relative_position_bias": True, "layer_scale_init_value": 0.3},
    {"use_shared_relative_position_bias": True, "use_absolute_position_embeddings": True},
    {"use_relative_position_bias": True, "use_shared_relative_position_bias": True},
    {"use_mean_pooling": False, "layer_scale_init_value": 0.0},
    {"use_relative_position_bias": True, "layer_scale_init_value": -1.0, "hidden_act": "silu"},
]


@torch.no_grad()
@pytest.mark.parametrize("options", BEIT)
@pytest.mark.parametrize("cls", ["BeitForImageClassification", "BeitModel"])
def test_beit(cls, options, tmp_path):
    config = transformers.BeitConfig(**{**SMALL, **CLASSES, **options})
    compare(peer_of(cls, config, tmp_path), tmp_path, images(20, 20))


SIGLIP = [
    {},
    {"vision_use_head": False},
    {"hidden_act": "gelu", "layer_norm_eps": 1e-3, "num_attention_heads": 1},
    {"image_size": 23},
    {"num_channels": 1},
]


@torch.no_grad()
@pytest.mark.parametrize("options", SIGLIP)
def test_siglip(options, tmp_path):
    options = {**SMALL, **options}
    peer = peer_of("SiglipVisionModel", transformers.SiglipVisionConfig(**options), tmp_path)
    compare(
        peer, tmp_path, images(options["image_size"], options["image_size"], channels=options.get("num_channels", 3))
    )


TEXT = {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8, "vocab_size": 9}


@torch.no_grad()
def test_the_part_of_a_siglip_that_reads_images(tmp_path):
    config = transformers.SiglipConfig(text_config=TEXT, vision_config=SMALL)
    peer, x = peer_of("SiglipModel", config, tmp_path / "whole"), images(20, 20)
    want, model = peer.vision_model(x), load(tmp_path / "whole", torch.float64)
    close(model(x), want.last_hidden_state)
    close(model.pool(model(x)), want.pooler_output)
    model.save(tmp_path / "part")
    again, left = transformers.SiglipVisionModel.from_pretrained(
        tmp_path / "part", dtype=torch.float64, output_loading_info=True
    )
    assert not any(left.values()), left
    close(again.eval()(x).last_hidden_state, want.last_hidden_state)
    assert json.loads((tmp_path / "part" / "config.json").read_text())["model_type"] == "siglip_vision_model"
    close(load(tmp_path / "part")(x), want.last_hidden_state)
    assert model.origin.layout.model_type == "siglip"  # what was loaded is as it was


@torch.no_grad()
def test_siglip_with_classes(tmp_path):
    config = transformers.SiglipConfig(text_config=TEXT, vision_config={**SMALL, "vision_use_head": False}, **CLASSES)
    peer, x = peer_of("SiglipForImageClassification", config, tmp_path), images(20, 20)
    model = load(tmp_path, torch.float64)
    close(model(x), peer(x).logits)
    model.save(tmp_path / "ours")
    again = transformers.SiglipForImageClassification.from_pretrained(tmp_path / "ours", dtype=torch.float64).eval()
    close(again(x).logits, peer(x).logits)


# ---- sizes, refusals -------------------------------------------------------------------------------------------------

THOUSAND = {"id2label": {str(i): f"class {i}" for i in range(1000)}}
TINY, HALF = (
    {"hidden_size": dim, "num_attention_heads": heads, "intermediate_size": 4 * dim}
    for dim, heads in ((192, 3), (384, 6))
)
PUBLISHED = {
    "ViT-B/16": ("vit", THOUSAND, 86_567_656),
    "ViT-L/16": (
        "vit",
        {
            **THOUSAND,
            "hidden_size": 1024,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "intermediate_size": 4096,
        },
        304_326_632,
    ),
    "DeiT-T": ("vit", THOUSAND | TINY, 5_717_416),
    "DeiT-S": ("vit", THOUSAND | HALF, 22_050_664),
    "DeiT-T distilled": ("deit", THOUSAND | TINY, 5_910_800),
    "DeiT-S distilled": ("deit", THOUSAND | HALF, 22_436_432),
    "DeiT-B distilled": ("deit", THOUSAND, 87_338_192),
    "SigLIP-B/16": ("siglip_vision_model", {}, 92_884_224),
    "BEiT-B/16": ("beit", THOUSAND | {"use_relative_position_bias": True}, 86_530_984),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_sizes(name):
    kind, options, count = PUBLISHED[name]
    model = from_config({"model_type": kind, **options}, device="meta")
    assert sum(p.numel() for p in model.parameters()) == count


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        ("vit", {"shear": 1.0}, "unknown option shear=1.0"),
        ("vit", {"hidden_act": "swoosh"}, "hidden_act: expected"),
        ("vit", {"num_attention_heads": 5}, "num_attention_heads: expected a divisor of hidden_size=24, got 5"),
        ("vit", {"patch_size": 24}, r"patch_size: expected at most image_size=\(20, 20\), got 24"),
        ("vit", {"patch_size": [5]}, "patch_size: expected a positive integer, or two of them"),
        ("vit", {"image_size": 0}, "image_size: expected a positive integer"),
        ("vit", {"qkv_bias": "yes"}, "qkv_bias: expected true or false"),
        ("vit", {"pooler_act": 3}, "pooler_act"),
        ("deit", {"num_labels": 0}, "num_labels: expected a positive integer"),
        ("deit", {"vision_use_head": True}, "unknown option vision_use_head"),
        ("siglip_vision_model", {"qkv_bias": True}, "unknown option qkv_bias"),
        ("siglip_vision_model", {"layer_norm_eps": -1}, "layer_norm_eps: expected a finite number of 0 or more"),
        ("siglip", {"vision_config": {**SMALL, "shear": 1}}, "vision_config: unknown option shear=1"),
        ("beit", {"drop_path_rate": 1.0}, "drop_path_rate: expected a probability below 1"),
        ("beit", {"layer_scale_init_value": None, "use_mean_pooling": 3}, "use_mean_pooling: expected true or false"),
        (
            "beit",
            {"image_size": [20, 15], "use_relative_position_bias": True},
            "image_size: expected a square grid of patches beside relative places",
        ),
    ],
)
def test_options_that_are_refused(kind, options, words):
    with pytest.raises(CheckpointError, match=words):
        from_config({"model_type": kind, **({} if kind == "siglip" else SMALL), **options})


def test_the_class_that_options_name():
    def parts(kind, cls):
        model = from_config({"model_type": kind, **SMALL, "architectures": [cls]})
        return type(model.classifier).__name__, type(model.pooler).__name__

    assert parts("vit", "ViTModel") == ("NoneType", "FirstTokenPooler")
    assert parts("vit", "ViTForImageClassification") == ("Linear", "FirstTokens")
    assert parts("deit", "DeiTForImageClassification") == ("Linear", "FirstTokens")
    assert parts("deit", "another") == ("DistilledClassifier", "FirstTokens")
    assert parts("beit", "BeitModel") == ("NoneType", "MeanPooler")


@pytest.mark.parametrize(
    ("x", "kind", "words"),
    [
        (torch.zeros(2, 1, 20, 20), ValueError, r"images: expected \(B, 3, height, width\)"),
        (torch.zeros(3, 20, 20), ValueError, r"images: expected \(B, 3, height, width\)"),
        (torch.zeros(2, 3, 20, 20, dtype=torch.float64), TypeError, "images: expected torch.float32"),
        (torch.zeros(2, 3, 4, 20), ValueError, "images: expected at least one patch, 5 × 5 pixels, got 4 × 20 pixels"),
    ],
)
def test_images_that_are_refused(x, kind, words):
    model = from_config({"model_type": "vit", **SMALL})
    with pytest.raises(kind, match=words):
        model(x, interpolate=True)


# ---- parts -----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_patches_are_one_linear_map():
    tokens = PatchTokens(3, 8, (2, 3)).double()
    x = images(7, 10)  # one row and one column are left over
    weight = tokens.proj.weight.flatten(1)
    for row in range(3):
        for column in range(3):
            patch = x[:, :, 2 * row : 2 * row + 2, 3 * column : 3 * column + 3].flatten(1)
            close(tokens(x)[:, 3 * row + column], patch @ weight.T + tokens.proj.bias)


def test_sinusoidal_places_of_rows_and_columns():
    grid = SinusoidalPlaces(8, tokens=2)((2, 3))
    assert torch.equal(grid[:2], torch.zeros(2, 8, dtype=torch.float64))
    y, x = torch.tensor(1.0, dtype=torch.float64), torch.tensor(2.0, dtype=torch.float64)
    want = [y.sin(), (y / 100).sin(), y.cos(), (y / 100).cos(), x.sin(), (x / 100).sin(), x.cos(), (x / 100).cos()]
    close(grid[2 + 1 * 3 + 2], torch.stack(want))


def test_rotary_places_turn_by_differences_of_rows_and_of_columns():
    """Scores of turned queries and keys are the same for pairs with the same offset; tokens before are not turned."""
    turn, q, k = GridRotary(8), torch.randn(8).double(), torch.randn(8).double()
    grid = (3, 4)
    turned_q, turned_k = (turn(v.expand(1, 1, 13, 8), grid)[0, 0] for v in (q, k))
    assert torch.equal(turned_q[0], q)
    scores = (turned_q[1:] @ turned_k[1:].T).view(3, 4, 3, 4)
    close(scores[0, 0, 1, 2], scores[1, 1, 2, 3])
    assert (scores[0, 0, 1, 2] - scores[0, 0, 2, 1]).abs() > 1e-3
    with pytest.raises(ValueError, match="grid: expected at most 13 places, the tokens, got 4 × 4"):
        turn(q.expand(1, 1, 13, 8), (4, 4))


def encoder(mixer, *, classes=4, **parts):
    def block(i):
        return PreNorm(mixer(), MLP(16, 24, activation("gelu")), nn.LayerNorm(16), nn.LayerNorm(16))

    tokens = PatchTokens(3, 16, (4, 4), tokens=1, places=SinusoidalPlaces(16, tokens=1))
    return ImageEncoder(tokens, [block] * 2, nn.LayerNorm(16), MeanPooler(skip=1), nn.Linear(16, classes), **parts)


@pytest.mark.parametrize(
    "mixer",
    [
        lambda: PatchAttention(16, 2, turn=GridRotary(8)),
        lambda: PatchAttention(16, 2, places=ClassPlaces(2, (3, 3))),
        lambda: GatedDeltaNet(16, 2),
    ],
)
def test_models_of_any_parts_train_on_any_size(mixer):
    torch.manual_seed(0)
    shared = ClassPlaces(2, (2, 2)) if isinstance(mixer(), PatchAttention) else None
    model = encoder(mixer, places=shared)
    for size in ((12, 12), (8, 17)):
        model.zero_grad()
        model(torch.randn(2, 3, *size)).square().sum().backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@torch.no_grad()
def test_the_matrix_of_a_layer_on_a_grid():
    layer = PatchAttention(16, 2, places=ClassPlaces(2, (2, 3)), turn=GridRotary(8)).double()
    nn.init.normal_(layer.places.table)
    x = torch.randn(2, 7, 16, dtype=torch.float64)
    matrix, values = mixing_matrix(layer, x, grid=(2, 3))
    close((matrix @ values), layer.mixed(x, grid=(2, 3)))
    with pytest.raises(TypeError, match=r"grid: expected \(rows, columns\)"):
        layer(x)
    with pytest.raises(TypeError, match="context: expected None"):
        layer(x, x, grid=(2, 3))
    with pytest.raises(TypeError, match="keep: expected None"):
        layer(x, grid=(2, 3), keep=torch.ones(2, 7, dtype=torch.bool))


def test_what_an_encoder_refuses():
    tokens = PatchTokens(3, 16, (4, 4))
    with pytest.raises(ValueError, match="pooler: expected a module"):
        ImageEncoder(tokens, [], classifier=nn.Linear(16, 2))
    with pytest.raises(ValueError, match="pooler: expected a model that was built or loaded with one"):
        ImageEncoder(tokens, []).pool(torch.zeros(1, 2, 16))
    with pytest.raises(ValueError, match="embedding: expected one that gives"):
        ImageEncoder(nn.Conv2d(3, 8, 2), [])(torch.zeros(1, 3, 4, 4))
    with pytest.raises(TypeError, match="places: expected None"):
        ImageEncoder(nn.Flatten(2), [], places=ClassPlaces(2, (2, 2)))(torch.zeros(1, 3, 4, 4))
    with pytest.raises(ValueError, match="image: expected at least one patch"):
        PatchTokens(3, 16, (4, 4), image=(3, 8))
    for wrong in (lambda: SinusoidalPlaces(6), lambda: GridRotary(6)):
        with pytest.raises(ValueError, match="dim: expected a multiple of 4, got 6"):
            wrong()


def test_an_encoder_of_text_and_one_of_images_are_the_same():
    torch.manual_seed(0)
    model = encoder(lambda: PatchAttention(16, 2)).double()
    plain = Encoder(model.embedding, [lambda i: model.layers[i]] * 2, model.norm)
    x = images(8, 12)
    assert torch.equal(plain(x), model.hidden(x))


def test_blocks_leave_branches_out_in_training_alone():
    torch.manual_seed(0)
    block = ImageBlock(
        nn.Linear(4, 4),
        nn.Linear(4, 4),
        nn.LayerNorm(4),
        nn.LayerNorm(4),
        skipped=0.5,
        scales=(ChannelScale(4, 0.5), ChannelScale(4, 2.0)),
    )
    x = torch.randn(64, 3, 4)
    y = x + 0.5 * block.mixer(block.mixer_norm(x))
    torch.testing.assert_close(block.eval()(x), y + 2 * block.ff(block.ff_norm(y)))
    kept = (block.train()(x) == x).all(-1).all(-1)  # both branches left out
    assert 4 <= int(kept.sum()) <= 28


def test_places_are_resized_only_where_the_grid_is_another():
    places = TokenPlaces((3, 4), 8, tokens=2)
    assert torch.equal(places((3, 4))[2:], places.grid.weight.flatten(0, 1))
    assert torch.equal(places((6, 5))[:2], places.tokens) and places((6, 5)).shape == (32, 8)
    grid = GridPlaces((2, 2), 3)
    nn.init.constant_(grid.weight, 0.25)
    torch.testing.assert_close(grid((5, 7)), torch.full((5, 7, 3), 0.25))
    assert FirstTokens(2)(torch.zeros(1, 4, 8)).shape == (1, 2, 8)


@pytest.mark.parametrize("kind", ["vit", "deit", "siglip_vision_model", "beit"])
def test_training_changes_every_parameter(kind):
    options = {"use_relative_position_bias": True, "drop_path_rate": 0.2} if kind == "beit" else {}
    model = from_config({"model_type": kind, **SMALL, **options})
    x = torch.randn(4, 3, 20, 20)
    out = model(x) if model.classifier is not None else model.pool(model(x))
    out.square().sum().backward()
    missing = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.isfinite().all()]
    assert not missing
