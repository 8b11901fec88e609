"""`regard check`: the table, JSON, JUnit, exit codes, and what it says to mistakes."""

import json
import sys
import xml.etree.ElementTree as ET

import pytest

from regard.cli import main

THEIRS = """
from torch import nn

class Mixes(nn.Module):
    def __init__(self):
        super().__init__()
        self.map = nn.Linear(8, 8)

    def forward(self, x):
        return self.map(x) + x.mean(0)

ready = Mixes()

def subject():
    from regard.testing import Subject
    return Subject.around(nn.GRU(8, 8, batch_first=True), causal=True, name="a GRU")

def number():
    return 3

def broken():
    raise RuntimeError("no weights here")
"""


@pytest.fixture
def theirs(tmp_path, monkeypatch):
    (tmp_path / "their_layers.py").write_text(THEIRS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    sys.modules.pop("their_layers", None)


def run(capsys, *arguments):
    code = main(["check", *arguments])
    said = capsys.readouterr()
    return code, said.out, said.err


def test_a_mechanism_keeps_its_promises(capsys):
    code, out, err = run(capsys, "gqa", "--only", "splits", "--only", "causality", "--dtype", "bfloat16")
    assert (code, err) == (0, "")
    first, *rows = out.splitlines()
    assert first == "gqa: 2 checks passed, 0 do not apply"
    assert [row.split()[:2] for row in rows] == [["passed", "causality"], ["passed", "splits"]]


@pytest.mark.parametrize("name", ["Mixes", "ready"])
def test_a_fault_is_told_in_full(capsys, theirs, name):
    code, out, err = run(capsys, f"their_layers:{name}")
    assert (code, err) == (1, "")
    assert "the first cause to look at is batch_independence" in out.splitlines()[0]
    assert "row 0 of 2 after changing row 1: off by" in out
    assert "tokens: tokens(2, 3, seed=1), first at index (0, 0, 0)" in out
    assert "read docs/contract.md#batch_independence" in out


def test_a_factory_may_make_a_subject(capsys, theirs):
    code, out, _ = run(capsys, "their_layers:subject", "--json")
    answer = json.loads(out)
    assert (code, answer["ok"], answer["subject"], answer["dtype"]) == (0, True, "a GRU", "float32")
    assert {one["name"]: one["status"] for one in answer["checks"]}["causality"] == "passed"


def test_json_and_junit_say_the_same(capsys, theirs, tmp_path):
    code, out, _ = run(capsys, "their_layers:Mixes", "--json", "--junit", str(tmp_path / "found.xml"))
    answer = json.loads(out)
    assert code == 1 and answer["causes"] == ["batch_independence"]
    (failed,) = (one for one in answer["checks"] if one["status"] == "failed")
    assert failed["effect"] > failed["allowed"] and failed["place"] == [0, 0, 0]
    suite = ET.parse(tmp_path / "found.xml").getroot()
    assert (int(suite.get("tests")), suite.get("failures")) == (len(answer["checks"]), "1")
    assert suite.find("testcase/failure").get("message") == failed["text"]
    assert len(suite.findall("testcase/skipped")) == int(suite.get("skipped")) > 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nonsense"], "TARGET: expected a mechanism (regard list) or package.module:factory, got 'nonsense'"),
        (["gqb"], "package.module:factory, got 'gqb'; did you mean 'gqa'?"),
        (["nowhere_to_be_found:x"], "TARGET: importing nowhere_to_be_found raised ModuleNotFoundError"),
        (["their_layers:absent"], "TARGET: their_layers has no function 'absent' to make a module or a Subject"),
        (["their_layers:broken"], "TARGET: their_layers:broken raised RuntimeError: no weights here"),
        (["their_layers:number"], "module: expected a torch.nn.Module or what makes one, got int"),
        (["gqa", "--only", "speed"], "got 'speed'"),
        (["gqa", "--dtype", "int8"], "Invalid value for '--dtype'"),
        ([], "Missing argument 'target'"),
    ],
)
def test_mistakes_are_one_line(capsys, theirs, arguments, words):
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert words in err and len(err.splitlines()) == 1
