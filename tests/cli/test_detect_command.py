"""`regard detect`: its table, its JSON, its drawings, and its mistakes in one line."""

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
    """A folder with a tiny detector, which prepares small pictures, and two pictures."""
    shutil.copytree(CHECKPOINTS / "detr", tmp_path / "detr")
    options = {"size": {"shortest_edge": 64, "longest_edge": 96}}
    (tmp_path / "detr" / "preprocessor_config.json").write_text(json.dumps(options))
    Image.linear_gradient("L").resize((120, 80)).save(tmp_path / "one.png")
    Image.radial_gradient("L").resize((50, 60)).save(tmp_path / "two.png")
    return tmp_path


def run(capsys, *arguments):
    code = main(["detect", *map(str, arguments)])
    said = capsys.readouterr()
    return code, said.out, said.err


def test_a_table(place, capsys):
    code, out, err = run(capsys, place / "one.png", "--model", place / "detr", "--threshold", 0)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].split() == ["label", "score", "left", "top", "right", "bottom"]
    assert len(lines) == 8 and all(line.startswith("LABEL_") for line in lines[1:])  # seven queries
    code, out, _ = run(capsys, place / "one.png", "--model", place / "detr", "--threshold", 1)
    assert (code, out) == (0, "nothing is surer than 1\n")


def test_json_and_drawings(place, capsys):
    arguments = ["--model", place / "detr", "--threshold", 0, "--json"]
    code, out, _ = run(capsys, place / "one.png", *arguments, "--output", place / "new" / "drawn.png")
    rows = json.loads(out)
    assert code == 0 and len(rows) == 7 and set(rows[0]) == {"image", "label", "score", "box"}
    assert rows == sorted(rows, key=lambda row: -row["score"])
    with Image.open(place / "new" / "drawn.png") as drawn:
        assert drawn.size == (120, 80)
    code, out, _ = run(capsys, place / "one.png", place / "two.png", *arguments, "--output", place / "all")
    assert code == 0 and json.loads(out)[:7] == rows  # each picture alone: another beside it changes nothing
    assert sorted(path.name for path in (place / "all").iterdir()) == ["one.png", "two.png"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["none.png", "--model", "detr"], "none.png"),
        (["one.png", "--model", "none"], "path: expected a folder"),
        (["one.png", "--model", str(CHECKPOINTS / "llama")], "--model: expected a detector"),
        (["one.png", "--model", "detr", "--output", "drawn.jpg"], "--output: expected a file that ends in .png"),
        (["one.png", "two.png", "--model", "detr", "--output", "drawn.png"], "--output: expected a folder for 2"),
        (["one.png", "detr/../one.png", "--model", "detr", "--output", "all"], "two that would be written to one file"),
        (["detr/config.json", "--model", "detr"], "expected a picture"),
        (["one.png"], "--model"),
        ([], "Missing argument"),
    ],
)
def test_mistakes_are_one_line(place, capsys, monkeypatch, arguments, words):
    monkeypatch.chdir(place)
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "") and words in err and len(err.splitlines()) == 1
    assert not (place / "all").exists()


def test_without_pillow(place, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    code, _, err = run(capsys, place / "one.png", "--model", place / "detr")
    assert code == 2 and "pip install 'regard[images]'" in err
