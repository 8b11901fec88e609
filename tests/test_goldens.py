"""Other people's implementations, run on small random weights: float64 first, then the stored dtype, on every backend.

`REGARD_GOLDENS` names the folder of cases (default: tests/goldens).
"""

import json
import os
from pathlib import Path

import pytest
import torch
from golden_adapters import paths_of
from golden_adapters.case import Case, Refused, Run, Way, cases_below
from safetensors.torch import save_file

import regard
from regard import backends
from regard.errors import BackendUnsupported

ROOT = Path(os.environ.get("REGARD_GOLDENS") or Path(__file__).parent / "goldens")
CASES = cases_below(ROOT)
MUST_RUN = (None, "reference", "chunked")
COMPILED = ("flex",)  # a compilation of many seconds a call; tests/ops/test_attention.py runs it


def test_there_are_cases():
    assert CASES, f"no case.json below {ROOT}"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_golden(case: Case):
    paths = paths_of(case)
    if paths is None:
        pytest.skip(f"not covered: {case.id}")
    for run in case.runs():
        for way in paths.values():
            for name in (None, *backends.names()):
                if name not in COMPILED:
                    check(run, way, name)


def check(run: Run, way: Way, backend: str | None) -> None:
    """One case, in one dtype, one way, on one backend."""
    case, peer = run.case, run.peer()
    wanted = case.names(run.outputs)
    try:
        with regard.use_backend(backend):
            found = way(peer, wanted)
    except BackendUnsupported:
        assert backend not in MUST_RUN
        return
    unread = set(peer) - peer.read
    case.refuse_unless(not unread, f"the tensors {sorted(unread)}")
    run.compare(found, wanted - peer.given, peer.rows)
    if case.has("input.cotangent"):
        run.compare_gradients(found["out"], peer)


# ---- the comparison itself -------------------------------------------------------------------------------------------

OWN = Path(__file__).parent / "goldens" / "llama_gqa_rope" / "causal_plain"


def edited(folder: Path, tensors: dict[str, torch.Tensor] | None = None, **config: object) -> Case:
    """One of the cases with some tensors or options changed."""
    meta = json.loads((OWN / "case.json").read_text())
    meta["config"].update(config)
    (folder / "case.json").write_text(json.dumps(meta))
    save_file(Case(OWN).tensors | (tensors or {}), folder / "case.safetensors")
    return Case(folder)


@pytest.mark.parametrize("name", ["output64.out", "grad64.hidden", "output.rope_cos", "grad.weight.k_proj.weight"])
def test_a_wrong_number_is_noticed(name, tmp_path):
    shifted = Case(OWN).tensors[name].clone()
    shifted.flatten()[-1] += 1e-3
    with pytest.raises(AssertionError, match="off by"):
        test_golden(edited(tmp_path, {name: shifted}))


def test_what_an_adapter_does_not_understand_is_refused(tmp_path):
    one = torch.zeros(1)
    for changed in (
        edited(tmp_path, {"input.token_types": one}),
        edited(tmp_path, {"output.heads": one, "output64.heads": one.double()}),
        edited(tmp_path, rope_parameters={"rope_type": "spiral", "rope_theta": 100.0}),
        edited(tmp_path, rope_parameters={"rope_type": "linear", "factor": 2.0, "twist": 1.0}),
    ):
        with pytest.raises(Refused, match="does not understand"):
            test_golden(changed)


def test_a_family_without_an_adapter_is_not_covered(tmp_path):
    case = edited(tmp_path)
    case.meta["family"] = "nobody_knows"
    with pytest.raises(pytest.skip.Exception, match="not covered: nobody_knows/causal_plain"):
        test_golden(case)
