"""The example of a detector: its pictures are what their boxes say, and it learns to find shapes."""

import importlib.util
import json
import random
from pathlib import Path

import pytest
import torch

from regard.models.images.matching import corners

Image = pytest.importorskip("PIL.Image")
PATH = Path(__file__).parents[2] / "examples" / "shapes.py"


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("shapes", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_boxes_hold_their_shapes(example):
    rng = random.Random(5)
    for _ in range(20):
        image, objects = example.picture(rng)
        bright = example.pixels([image])[0].amax(0) > (100 / 255 - 0.5) / 0.25
        held = torch.zeros_like(bright)
        for left, top, right, bottom in (corners(objects.boxes) * example.SIDE).round().int().tolist():
            inside = bright[top:bottom, left:right]
            assert inside.any(0).all() and inside.any(1).all()  # the box is tight
            held[top:bottom, left:right] = True
        assert len(objects.labels) and not (bright & ~held).any()


def test_it_runs_draws_and_saves(example, tmp_path, capsys):
    before = torch.random.get_rng_state()
    drawing, folder = tmp_path / "shapes.png", tmp_path / "model"
    iou, named = example.main(["--steps", "2", "--batch", "2", "--output", str(drawing), "--save", str(folder)])
    torch.random.set_rng_state(before)
    assert 0 <= iou <= 1 and 0 <= named <= 1
    with Image.open(drawing) as drawn:
        assert drawn.size == (16 * example.SIDE, 8 * example.SIDE)
    assert "after 2 steps" in capsys.readouterr().out
    from regard.cli import main

    assert main(["detect", str(folder / "example.png"), "--model", str(folder), "--threshold", "0", "--json"]) == 0
    assert {row["label"] for row in json.loads(capsys.readouterr().out)} <= set(example.NAMES)


@pytest.mark.slow
def test_it_learns(example, capsys):
    before = torch.random.get_rng_state()
    iou, named = example.main(["--steps", "1000", "--seconds", "600"])
    torch.random.set_rng_state(before)
    totals = [float(line.split("total ")[1].split(",")[0]) for line in capsys.readouterr().out.splitlines()[:-1]]
    assert totals[-1] < totals[0] / 3
    assert iou > 0.7 and named > 0.85
