"""Other people's implementations, run on small random weights: float64 first, then the stored dtype, on every backend.

`REGARD_GOLDENS` names the folder of cases (default: tests/goldens).
"""

import os
from pathlib import Path

import pytest
from golden_adapters import paths_of
from golden_adapters.case import Case, Run, Way, cases_below

import regard
from regard import backends
from regard.errors import BackendUnsupported

ROOT = Path(os.environ.get("REGARD_GOLDENS") or Path(__file__).parent / "goldens")
CASES = cases_below(ROOT)
MUST_RUN = (None, "reference", "chunked")
COMPILED = ("flex",)  # a compilation of many seconds a call; tests/test_attention.py runs it


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
    run.compare(found, wanted - peer.given)
    if case.has("input.cotangent"):
        run.compare_gradients(found["out"], peer)
