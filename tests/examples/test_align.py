"""The example of a recurrent translator: it runs, learns to reverse and to copy, and its alignment shows it."""

import importlib.util
from pathlib import Path

import pytest
import torch

PATH = Path(__file__).parents[2] / "examples" / "align.py"


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("align", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("attention", ["additive", "luong"])
def test_it_runs_and_draws(example, attention, capsys):
    before = torch.random.get_rng_state()
    assert 0 <= example.main(["--attention", attention, "--steps", "3"]) <= 1
    torch.random.set_rng_state(before)
    assert len(capsys.readouterr().out.splitlines()) == 2 + example.LENGTH


@pytest.mark.slow
@pytest.mark.parametrize("task", ["reverse", "copy"])
@pytest.mark.parametrize("attention", ["additive", "luong"])
def test_it_learns(example, attention, task):
    assert example.main(["--attention", attention, "--task", task]) > 0.98
