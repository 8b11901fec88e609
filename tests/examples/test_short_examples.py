"""The short examples run, and what they print or learn is what they say."""

import importlib.util
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(name: str, *arguments):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    before = torch.random.get_rng_state()
    try:
        return module.main(*arguments)
    finally:
        torch.random.set_rng_state(before)


def test_custom_mask(capsys):
    run("custom_mask")
    drawn = capsys.readouterr().out.splitlines()[:12]
    assert drawn[-1].strip() == "#..#..#.####" and drawn[0] == "#..........."


def test_custom_mechanism(capsys):
    run("custom_mechanism")
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("passed  causality") for line in lines)
    assert not any(line.startswith("failed") for line in lines)


def test_swap_transformers(capsys):
    pytest.importorskip("transformers")
    run("swap_transformers", 64)
    assert "times as fast" in capsys.readouterr().out


def test_packed_windows():
    assert run("packed_windows", 60) < 0.3


def test_retrieved_chunks():
    assert run("retrieved_chunks", 100) > 0.99


def test_they_are_short():
    for path in EXAMPLES.glob("*.py"):
        assert len(path.read_text(encoding="utf-8").splitlines()) <= 200, path
