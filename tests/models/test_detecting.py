"""Pictures in, objects out: the preparation against transformers' own, names, thresholds, drawings."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch

from regard.errors import CheckpointError
from regard.models import load
from regard.models.images.detecting import Found, class_names, detect, draw, found_in
from regard.models.images.matching import Detections
from regard.models.images.pictures import Preprocessing, fitted, open_picture

Image = pytest.importorskip("PIL.Image")
transformers = pytest.importorskip("transformers")

CHECKPOINT = Path(__file__).parents[1] / "checkpoints" / "detr"


def picture(width, height, mode="RGB"):
    values = torch.randint(256, (height, width, 3), generator=torch.Generator().manual_seed(width + height))
    return Image.frombytes("RGB", (width, height), bytes(values.to(torch.uint8).flatten().tolist())).convert(mode)


@pytest.mark.parametrize(
    "options",
    [
        {"size": {"shortest_edge": 40, "longest_edge": 70}},
        {"size": 30, "max_size": 50, "feature_extractor_type": "DetrFeatureExtractor"},
        {"size": {"height": 20, "width": 33}, "resample": 3},
        {
            "size": {"shortest_edge": 17, "longest_edge": 40},
            "image_mean": [0.5, 0.4, 0.3],
            "image_std": [0.2, 0.3, 0.9],
        },
        {"size": {"shortest_edge": 24, "longest_edge": 99}, "do_normalize": False, "rescale_factor": 0.01},
        {"do_resize": False, "do_rescale": False},
    ],
)
def test_preparation(options):
    processor = transformers.models.detr.image_processing_pil_detr.DetrImageProcessorPil(**options)
    images = [picture(64, 48), picture(31, 50), picture(90, 20)]
    want = processor(images, return_tensors="pt")
    found = Preprocessing.read(options, "preprocessor_config.json")(images)
    torch.testing.assert_close(found.pixels, want["pixel_values"].float(), rtol=0, atol=2e-6)
    assert torch.equal(found.keep, want["pixel_mask"].bool())
    assert found.sizes == [(48, 64), (50, 31), (20, 90)]


def test_what_transformers_writes_is_read(tmp_path):
    transformers.models.detr.image_processing_pil_detr.DetrImageProcessorPil().save_pretrained(tmp_path)
    (written,) = tmp_path.glob("*.json")
    assert Preprocessing.read(json.loads(written.read_text()), written.name) == Preprocessing()


@pytest.mark.parametrize(
    ("size", "want"),
    [
        ((480, 640), (800, 1066)),
        ((640, 480), (1066, 800)),
        ((800, 900), (800, 900)),
        ((100, 400), (333, 1333)),
        ((1, 1), (800, 800)),
        ((333, 1333), (333, 1333)),
    ],
)
def test_sides(size, want):
    assert fitted(size, 800, 1333) == want


@pytest.fixture
def folder(tmp_path):
    """The tiny checkpoint, which prepares small pictures."""
    shutil.copytree(CHECKPOINT, tmp_path / "detr")
    options = {"size": {"shortest_edge": 64, "longest_edge": 96}, "image_processor_type": "DetrImageProcessor"}
    (tmp_path / "detr" / "preprocessor_config.json").write_text(json.dumps(options))
    return tmp_path / "detr"


def test_detect_is_what_transformers_finds(folder):
    processor = transformers.models.detr.image_processing_pil_detr.DetrImageProcessorPil(
        size={"shortest_edge": 64, "longest_edge": 96}
    )
    peer = transformers.DetrForObjectDetection.from_pretrained(folder).eval()
    images = [picture(120, 80), picture(40, 60)]
    with torch.no_grad():
        answer = peer(**processor(images, return_tensors="pt"))
    want = processor.post_process_object_detection(answer, threshold=0.2, target_sizes=[(80, 120), (60, 40)])
    found = detect(load(folder), images, threshold=0.2)
    assert sum(map(len, found)) > 0
    for one, right in zip(found, want, strict=True):
        order = right["scores"].argsort(descending=True, stable=True)
        assert [f.label for f in one] == [f"LABEL_{n}" for n in right["labels"][order]]
        torch.testing.assert_close(torch.tensor([f.score for f in one]), right["scores"][order], rtol=0, atol=1e-5)
        torch.testing.assert_close(torch.tensor([f.box for f in one]), right["boxes"][order], rtol=0, atol=1e-3)


def test_a_saved_folder_keeps_its_preparation(folder, tmp_path):
    load(folder).save(tmp_path / "again")
    written = json.loads((tmp_path / "again" / "preprocessor_config.json").read_text())
    assert written["size"] == {"shortest_edge": 64, "longest_edge": 96}


def test_thresholds_and_names():
    logits = torch.tensor([[[2.0, 0, 0], [0, 3.0, 0], [0, 0, 9.0]]])
    one = Detections(logits, torch.tensor([[[0.5, 0.5, 1, 1], [0.5, 0.25, 0.5, 0.5], [0.1, 0.1, 0.1, 0.1]]]))
    (found,) = found_in(one, [(40, 20)], ["cat", "dog"], threshold=0.5)
    assert [(f.label, f.box) for f in found] == [("dog", (5, 0, 15, 20)), ("cat", (0, 0, 20, 40))]
    assert found[0].score == pytest.approx(float(logits[0, 1].softmax(-1)[1]))
    assert [len(f) for f in found_in(one, [(40, 20)], ["cat", "dog"], threshold=0.8)] == [1]
    assert class_names({"id2label": {0: "a", "2": "c"}}, 3) == {0: "a", 1: "class 1", 2: "c"}
    with pytest.raises(ValueError, match="sizes: expected 1, one an image, got 2"):
        found_in(one, [(1, 1), (1, 1)], ["cat", "dog"])
    with pytest.raises(ValueError, match="threshold: expected a probability"):
        found_in(one, [(1, 1)], ["cat", "dog"], threshold=2)


def test_drawings_leave_the_picture_alone():
    image = Image.new("L", (200, 120))
    copy = draw(image, [Found("cat", 0.9, (20, 30, 100, 90)), Found("dog", 0.8, (-5, -5, 300, 300))])
    assert image.getbbox() is None and copy.mode == "RGB" and copy.size == image.size
    assert copy.getpixel((60, 30)) != (0, 0, 0) and copy.getpixel((60, 60)) == (0, 0, 0)


def test_pictures_are_turned_as_their_camera_says(tmp_path):
    image, exif = picture(8, 5), Image.Exif()
    exif[0x0112] = 6  # turned by a quarter
    image.save(tmp_path / "one.png", exif=exif)
    assert open_picture(tmp_path / "one.png").size == (5, 8)
    assert open_picture(tmp_path / "one.png").mode == "RGB"
    (tmp_path / "text.png").write_text("no picture")
    with pytest.raises(OSError, match=r"images: expected a picture.*text.png"):
        open_picture(tmp_path / "text.png")
    with pytest.raises(FileNotFoundError):
        open_picture(tmp_path / "none.png")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"size": {"longest_edge": 5}}, "size: expected shortest_edge"),
        ({"size": {"shortest_edge": 0}}, "size: expected shortest_edge"),
        ({"size": "large"}, "size: expected shortest_edge"),
        ({"do_pad": False}, "do_pad: expected True"),
        ({"pad_size": {"height": 9, "width": 9}}, "pad_size: expected None"),
        ({"image_std": [1, 1]}, "image_std: expected three numbers"),
        ({"image_std": [1, 0, 1]}, "image_std: expected numbers other than 0"),
        ({"resample": 9}, "resample: expected the number"),
        ({"do_center_crop": True}, "unknown option do_center_crop"),
    ],
)
def test_preparations_that_are_not_supported(options, words):
    with pytest.raises(CheckpointError, match=words):
        Preprocessing.read(options, "preprocessor_config.json")


def test_what_does_not_fit(monkeypatch):
    with pytest.raises(TypeError, match="model: expected a detector"):
        detect(torch.nn.Linear(1, 1), [picture(3, 3)])
    with pytest.raises(TypeError, match=r"images\[0\]: expected a picture"):
        Preprocessing()(["file.png"])
    with pytest.raises(ValueError, match="images: expected one picture or more"):
        Preprocessing()([])
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'regard\[images\]'"):
        open_picture("one.png")
