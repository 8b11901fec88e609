"""`regard classify`: its table, its JSON, and its mistakes in one line."""

import json
import shutil
import sys
from pathlib import Path

import pytest

from regard.cli import main

Image = pytest.importorskip("PIL.Image")
CHECKPOINTS = Path(__file__).parents[1] / "checkpoints"


@pytest.fixture
def place(tmp_path):
    """A folder with a tiny classifier and two pictures."""
    shutil.copytree(CHECKPOINTS / "beit", tmp_path / "beit")
    config = json.loads((tmp_path / "beit" / "config.json").read_text())
    config["id2label"]["0"] = "[bold]cat[/bold]"
    (tmp_path / "beit" / "config.json").write_text(json.dumps(config))
    Image.linear_gradient("L").resize((120, 80)).save(tmp_path / "one.png")
    Image.radial_gradient("L").resize((50, 60)).save(tmp_path / "two.png")
    return tmp_path


def run(capsys, *arguments):
    code = main(["classify", *map(str, arguments)])
    said = capsys.readouterr()
    return code, said.out, said.err


def test_a_table(place, capsys):
    code, out, err = run(capsys, place / "one.png", "--model", place / "beit")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].split() == ["label", "probability"] and len(lines) == 6
    assert {line.split()[0] for line in lines[1:]} == {"[bold]cat[/bold]", *(f"LABEL_{i}" for i in range(1, 5))}
    values = [float(line.split()[1]) for line in lines[1:]]
    assert values == sorted(values, reverse=True) and sum(values) == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize("kind", ["vit", "swin", "beit"])
def test_json_of_several_pictures(place, capsys, kind):
    arguments = ["--model", CHECKPOINTS / kind, "--json", "--top", 2]
    code, out, _ = run(capsys, place / "one.png", place / "two.png", *arguments)
    rows = json.loads(out)
    assert code == 0 and [Path(row["image"]).name for row in rows] == ["one.png"] * 2 + ["two.png"] * 2
    assert set(rows[0]) == {"image", "label", "probability"} and rows[0]["probability"] >= rows[1]["probability"]
    code, out, _ = run(capsys, place / "two.png", *arguments)
    assert json.loads(out) == rows[2:]
    code, out, _ = run(capsys, place / "one.png", place / "two.png", *arguments[:2])
    assert out.splitlines()[0].split() == ["image", "label", "probability"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["none.png", "--model", "beit"], "images: expected files of pictures, got no file: none.png"),
        (["beit", "--model", "beit"], "images: expected files of pictures, got no file: beit"),
        (["beit/config.json", "--model", "beit"], "images: expected a picture, got a file that Pillow cannot read"),
        (["one.png", "--model", "none"], "path: expected a folder"),
        (["one.png", "--model", str(CHECKPOINTS / "llama")], "--model: expected a classifier of images, got"),
        (["one.png", "--model", str(CHECKPOINTS / "vit_pooler")], "--model: expected a classifier of images, got"),
        (["one.png", "--model", str(CHECKPOINTS / "detr")], "--model: expected a classifier of images, got"),
        (["one.png", "--model", "beit", "--top", "0"], "--top"),
        (["one.png"], "--model"),
        ([], "Missing argument"),
    ],
)
def test_mistakes_are_one_line(place, capsys, monkeypatch, arguments, words):
    monkeypatch.chdir(place)
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "") and words in err and len(err.splitlines()) == 1


def test_without_pillow(place, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    code, _, err = run(capsys, place / "one.png", "--model", place / "beit")
    assert code == 2 and "pip install 'regard[images]'" in err
