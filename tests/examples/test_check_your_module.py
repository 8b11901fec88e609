"""The example of a check: it finds its own fault first, and nothing in the mended module."""

import importlib.util
from pathlib import Path

import pytest

PATH = Path(__file__).parents[2] / "examples" / "check_your_module.py"


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("check_your_module", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_it_finds_the_leak_and_none_in_the_mended_module(example, capsys):
    assert example.main([]) == 1
    said = capsys.readouterr().out
    assert "the first cause to look at is causality" in said.splitlines()[0]
    assert said.count("read docs/contract.md#") == 1
    assert example.main(["--sound"]) == 0
    assert "FAILED" not in capsys.readouterr().out
