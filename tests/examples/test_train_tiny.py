"""The example that trains a small model runs, learns, and reaches the loss that it states."""

import importlib.util
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import regard

ROOT = Path(__file__).parents[2]
PATH = ROOT / "examples" / "train_tiny.py"
TINY = ["--dim", "16", "--rows", "2", "--tokens", "32"]


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("train_tiny", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_its_text_is_the_projects_pages_and_part_of_it_is_kept_back(example):
    seen, unseen = example.read_text()
    assert len(seen) > 50_000 and 6 < len(seen) / len(unseen) < 8
    first = bytes(unseen[:100].tolist())
    assert (ROOT / "README.md").read_bytes().startswith(first) and first not in bytes(seen.tolist())


def test_a_batch_is_text_and_what_follows_each_byte(example):
    text = torch.arange(50)
    inputs, targets = next(example.batches(text, rows=3, tokens=8))
    assert inputs.shape == (3, 8) and torch.equal(inputs + 1, targets)


def test_a_few_seconds_of_it_learn_save_load_and_continue(example, tmp_path, capsys):
    loss = example.main([*TINY, "--seconds", "4", "--folder", str(tmp_path / "model")])
    printed = capsys.readouterr().out
    assert abs(float(re.search(r"loss before: (\S+);", printed)[1]) - math.log(256)) < 0.3
    assert loss < math.log(256) - 0.3 and f": {loss:.3f}" in printed
    assert f"\n{example.PROMPT}" in printed
    loaded = regard.load(tmp_path / "model")
    assert not loaded.training and len(loaded.layers) == 4


@pytest.mark.slow
def test_it_reaches_the_loss_that_it_states_in_three_minutes(example):
    done = subprocess.run(
        [sys.executable, PATH, "--seconds", "180"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=400
    )
    assert float(re.search(r"loss after \d+ steps: (\S+)", done.stdout)[1]) < example.GOAL
