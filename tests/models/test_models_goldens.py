"""The adapter of Mistral's recorded cases: what its options say of the mask."""

import json
from pathlib import Path

import pytest
import torch
from golden_adapters import paths_of
from golden_adapters.case import Case
from safetensors.torch import save_file

RECORDED = Path(__file__).parents[1] / "goldens" / "mistral_sliding" / "window4"


@pytest.fixture
def output(tmp_path):
    """A function: the adapter's output of the recorded case, for another window and mask."""

    def computed(window, masked):
        meta = json.loads((RECORDED / "case.json").read_text())
        meta["config"]["config"]["sliding_window"] = window
        meta["config"]["sliding_mask"] = masked
        (tmp_path / "case.json").write_text(json.dumps(meta))
        save_file(Case(RECORDED).tensors, tmp_path / "case.safetensors")
        case = Case(tmp_path)
        (way,) = paths_of(case).values()
        return way(next(case.runs()).peer(), frozenset({"out"}))["out"]

    return computed


def test_a_mistral_without_a_window_is_causal(output):
    causal = output(None, False)
    assert torch.equal(output(None, True), causal)
    assert not torch.equal(output(4, True), causal)
