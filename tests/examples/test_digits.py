"""The example of classifiers of images: it learns to name handwritten digits, and its folder names them."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("PIL.Image")
pytest.importorskip("sklearn")
PATH = Path(__file__).parents[2] / "examples" / "digits.py"


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("digits", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def own_random_numbers():
    before = torch.random.get_rng_state()
    yield
    torch.random.set_rng_state(before)


def test_a_shift_moves_the_whole_image_by_one_pixel_at_most(example):
    torch.manual_seed(0)
    images = torch.arange(1, 65, dtype=torch.uint8).view(1, 1, 8, 8).expand(60, -1, -1, -1)
    places = set()
    for image in example.shifted(images)[:, 0]:
        row, column = divmod(int(image[3, 3]) - 1, 8)
        down, right = 3 - row, 3 - column
        places.add((down, right))
        want = torch.zeros(10, 10, dtype=torch.uint8)
        want[1 + down : 9 + down, 1 + right : 9 + right] = images[0, 0]
        assert torch.equal(image, want[1:9, 1:9])
    assert len(places) == 9 and max(max(map(abs, place)) for place in places) == 1


def test_no_digit_is_both_trained_on_and_kept_back(example):
    trained, labels, unseen, answers = example.read_digits()
    assert len(trained) + len(unseen) == 1797 and len(unseen) == len(answers) == 449 and len(labels) == 1348
    assert not {tuple(i.flatten().tolist()) for i in trained} & {tuple(i.flatten().tolist()) for i in unseen}


@pytest.mark.parametrize("name", ["vit", "swin"])
def test_it_runs_draws_and_saves(example, name, tmp_path, capsys):
    folder = tmp_path / "model"
    assert 0 <= example.main([str(folder), "--model", name, "--epochs", "1", "--batch", "337"]) <= 1
    assert "epoch 1 of 1" in capsys.readouterr().out
    assert (folder / "learning_curve.png").exists()
    from regard.cli import main

    assert main(["classify", str(folder / "example.png"), "--model", str(folder), "--top", "10", "--json"]) == 0
    assert {row["label"] for row in json.loads(capsys.readouterr().out)} == {str(n) for n in range(10)}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vit", "swin"])
def test_it_learns(example, name, tmp_path):
    assert example.main([str(tmp_path), "--model", name]) > example.GOAL
