"""The template in CONTRIBUTING.md is a mechanism: it keeps the contract, and its formula is its oracle's."""

from __future__ import annotations

import doctest
import importlib.util
import re
import sys
from pathlib import Path

import pytest
import torch

from regard.analysis.costs import footprint, prefill_macs, step_macs
from regard.analysis.layer_names import mixer_label
from regard.testing import Subject, run_checks

TEXT = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text(encoding="utf-8")
MIXER, ORACLE = re.findall(r"^```python\n(.*?)^```$", TEXT, re.M | re.S)


def loaded(name, text, folder):
    """The text as a module."""
    path = folder / f"{name}.py"
    path.write_text(text, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def mechanism(tmp_path_factory):
    module = loaded("fading_attention", MIXER, tmp_path_factory.mktemp("template"))
    sys.modules[module.__name__] = module  # torch.compile looks a layer's module up
    yield module
    del sys.modules[module.__name__]


@pytest.fixture(scope="module")
def record(mechanism):
    (record,) = mechanism.records
    return record


def test_its_example_runs(mechanism):
    found = doctest.testmod(mechanism)
    assert found.attempted and not found.failed


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_it_keeps_the_contract(record, dtype):
    results = run_checks(Subject.of(record).at(dtype))
    assert not [f"{one.name}: {one.text}" for one in results if one.passed is False]
    assert sum(one.passed is True for one in results) > 15


@torch.no_grad()
def test_it_is_the_formula_of_its_oracle(record, tmp_path):
    subject = Subject.of(record)
    layer, x = subject.layer(), subject.tokens(1, 7)
    weights = {name: tensor.numpy() for name, tensor in layer.state_dict().items()}
    want = loaded("oracle", ORACLE, tmp_path).ORACLES[record.name](x[0].numpy(), weights, 4)
    torch.testing.assert_close(layer(x)[0], torch.from_numpy(want), rtol=1e-10, atol=1e-10)


def test_what_is_not_stated_follows(record):
    layer = record.build(16, 4)
    assert (record.kind, record.causal, record.cached, record.counts_slots) == ("recurrent", True, True, False)
    assert mixer_label(layer) == "fading attention, 4 x 4 x 4"
    assert footprint(layer).state == 64 and footprint(layer).conv_state == 0
    assert step_macs(layer, 100) == 3 * 64
    assert prefill_macs(layer, 2) == 2 * 4 * (2 * 4 + 2 * 4 + 2 * 16)
