"""Pictures for classifiers: exactly what transformers' processors make of them; and what a model finds in them."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from regard.errors import CheckpointError
from regard.models import from_config, load
from regard.models.images import classify, open_picture, preparation, preprocess

Image = pytest.importorskip("PIL.Image")
transformers = pytest.importorskip("transformers")
CHECKPOINTS = Path(__file__).parents[1] / "checkpoints"


def picture(width, height, mode="RGB"):
    values = torch.randint(256, (height, width, 3), generator=torch.Generator().manual_seed(width + height))
    return Image.frombytes("RGB", (width, height), bytes(values.to(torch.uint8).flatten().tolist())).convert(mode)


def processor(family, options):
    module = getattr(transformers.models, family.lower())
    return getattr(getattr(module, f"image_processing_pil_{family.lower()}"), f"{family}ImageProcessorPil")(**options)


PICTURES = [picture(64, 48), picture(31, 50), picture(300, 20), picture(256, 256), picture(1, 3)]
OPTIONS = [
    ("ViT", {}),
    ("ViT", {"size": {"height": 24, "width": 30}, "resample": 0}),
    ("ViT", {"size": 20, "do_normalize": False}),
    ("ViT", {"size": [12, 30], "resample": 1, "image_mean": [0.1, 0.2, 0.3], "image_std": [1.0, 2.0, 0.3]}),
    ("ViT", {"size": 20, "do_rescale": False, "resample": 4}),
    ("ViT", {"size": 20, "rescale_factor": 1 / 127.5, "resample": 5}),
    ("ViT", {"size": {"shortest_edge": 16}, "do_center_crop": True, "crop_size": 13}),
    ("ViT", {"do_resize": False, "do_center_crop": True, "crop_size": {"height": 30, "width": 41}}),
    ("DeiT", {}),
    ("DeiT", {"size": 21, "crop_size": [12, 21]}),
    ("DeiT", {"size": 21, "crop_size": 40}),
    ("DeiT", {"size": 21, "do_center_crop": False}),
    ("DeiT", {"do_resize": False}),
    ("Siglip", {}),
    ("Siglip", {"size": {"height": 20, "width": 20}, "resample": 2}),
    ("Siglip", {"size": 15, "do_center_crop": True, "crop_size": 11}),
    ("Beit", {}),
    ("Beit", {"size": 26, "do_center_crop": True, "crop_size": {"height": 24, "width": 24}, "do_reduce_labels": True}),
]


@pytest.mark.parametrize(("family", "options"), OPTIONS)
def test_pictures_are_prepared_exactly_as_by_transformers(family, options, tmp_path):
    peer = processor(family, options)
    peer.save_pretrained(tmp_path)
    assert (tmp_path / "preprocessor_config.json").exists() or list(tmp_path.iterdir())
    (written,) = tmp_path.iterdir()
    stated = {"image_processor_type": f"{family}ImageProcessor", **options}
    for image in PICTURES:
        want = torch.as_tensor(peer(image, return_tensors="pt")["pixel_values"]).float()
        for source in (stated, json.loads(written.read_text())):
            found = preprocess(image, source)
            assert found.dtype == torch.float32 and torch.equal(found, want)


def test_batches_files_and_colours(tmp_path):
    stated = {"image_processor_type": "ViTFeatureExtractor", "size": 9, "image_mean": [0.5], "image_std": [0.25]}
    picture(12, 8).save(tmp_path / "one.png")
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(stated))
    grey = preprocess([tmp_path / "one.png", picture(5, 5, "RGBA")], tmp_path)
    assert grey.shape == (2, 1, 9, 9)
    want = processor("ViT", {"size": 9, "image_mean": [0.5], "image_std": [0.25]})
    assert torch.equal(grey[:1], want(picture(12, 8, "L"), return_tensors="pt")["pixel_values"])
    assert torch.equal(preprocess(str(tmp_path / "one.png"), stated), grey[:1])
    with pytest.raises(ValueError, match="images: expected pictures that are prepared to one size, got 8 × 12 and"):
        preprocess([picture(12, 8), picture(5, 5)], {**stated, "do_resize": False})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"image_processor_type": "CLIPImageProcessor"}, "image_processor_type: expected one of ViTImageProcessor"),
        ({}, "image_processor_type: expected a name, got none"),
        ({"shear": 1}, "unknown option shear=1"),
        ({"do_pad": True}, "do_pad: expected"),
        ({"size": {"longest_edge": 4}}, "size: expected shortest_edge"),
        ({"size": 0}, "size: expected shortest_edge"),
        ({"size": [3]}, "size: expected a number, or a height and a width"),
        ({"crop_size": {"shortest_edge": 4}}, "crop_size: expected a number, or a height and a width"),
        ({"do_center_crop": True}, "crop_size: expected a number, or a height and a width, beside do_center_crop"),
        ({"image_mean": [0.5, 0.5]}, "image_mean: expected three numbers"),
        ({"image_mean": [0.5]}, "image_std: expected as many numbers as image_mean has, 1"),
        ({"image_std": [0.5, 0.0, 1.0]}, "image_std: expected numbers other than 0"),
        ({"resample": 9}, "resample: expected the number of one of Pillow's filters"),
    ],
)
def test_preparations_that_are_refused(options, words):
    named = {} if options == {} else {"image_processor_type": "ViTImageProcessor"}
    with pytest.raises(CheckpointError, match=words):
        preparation({**named, **options})


def test_a_model_without_a_file_gets_its_own_size():
    small = {"image_size": [12, 20], "patch_size": 4, "hidden_size": 8, "num_hidden_layers": 1}
    small |= {"num_attention_heads": 2, "intermediate_size": 8}
    for kind, resample in (("vit", 2), ("deit", 3), ("siglip_vision_model", 3), ("beit", 3)):
        model = from_config({"model_type": kind, **small})
        found = preparation(model)
        assert (found.exact, found.crop, found.resample) == ((12, 20), None, resample)
        assert model(preprocess(picture(9, 9), model)).shape[0] == 1
    assert preparation(from_config({"model_type": "siglip", "vision_config": small})).exact == (12, 20)
    grey = from_config({"model_type": "vit", **small, "num_channels": 1})
    assert grey(preprocess(picture(9, 9), grey)).shape == (1, 2)


def test_arguments_that_do_not_fit(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"source: expected a folder with preprocessor_config.json, got .*none"):
        preparation(tmp_path)
    with pytest.raises(TypeError, match="source: expected a model, a folder, or"):
        preparation(3)
    with pytest.raises(CheckpointError, match="source: expected a model that was loaded from a folder with"):
        preparation(load(CHECKPOINTS / "llama"))
    with pytest.raises(FileNotFoundError, match=r"images: expected files of pictures, got no file: .*none\.png"):
        preprocess("none.png", load(CHECKPOINTS / "vit"))
    with pytest.raises(FileNotFoundError, match="images: expected files of pictures, got no file"):
        open_picture(tmp_path)
    picture(40, 40).save(tmp_path / "whole.png")
    (tmp_path / "cut.png").write_bytes((tmp_path / "whole.png").read_bytes()[:900])
    with pytest.raises(OSError, match=r"images: expected a picture, got a file that Pillow cannot read: .*cut\.png"):
        open_picture(tmp_path / "cut.png")
    with pytest.raises(TypeError, match=r"images\[0\]: expected a picture of Pillow's, got int 3"):
        preprocess([3], load(CHECKPOINTS / "vit"))
    with pytest.raises(TypeError, match="model: expected a classifier of images, got a ImageEncoder without classes"):
        classify(load(CHECKPOINTS / "vit_pooler"), picture(3, 3))


@torch.no_grad()
def test_classes_by_probability(tmp_path):
    shutil.copytree(CHECKPOINTS / "vit", tmp_path, dirs_exist_ok=True)
    options = {"image_processor_type": "ViTImageProcessor", "size": 24, "image_mean": [0.2] * 3}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(options))
    model, images = load(tmp_path), [picture(30, 30), picture(24, 50)]
    want = model(preprocess(images, options)).softmax(-1)
    for n, guesses in enumerate(classify(model, images, top=9)):
        assert sorted(guess.label for guess in guesses) == [f"LABEL_{i}" for i in range(5)]
        assert sum(guess.probability for guess in guesses) == pytest.approx(1)
        assert guesses == sorted(guesses, key=lambda guess: -guess.probability)
        assert guesses[0].probability == pytest.approx(float(want[n].max()))
        assert guesses[0].label == f"LABEL_{int(want[n].argmax())}"
    assert [len(g) for g in classify(model, images[0], top=2)] == [2]
    model.save(tmp_path / "again")
    assert classify(load(tmp_path / "again"), images) == classify(model, images)  # its preparation came along
    with pytest.raises(ValueError, match="top: expected an int of at least 1"):
        classify(model, images, top=0)
