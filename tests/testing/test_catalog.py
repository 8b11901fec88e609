"""The catalogue: it lists every mechanism, each has its formula, and keeps the contract in every dtype."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import pytest
import torch
from oracles import oracles

from regard.backends.native import library
from regard.catalog import MECHANISMS, RECORDS
from regard.testing import CHECKS, DTYPES, Subject

SUBJECTS = [(record, dtype, Subject.of(record).at(dtype)) for record in RECORDS for dtype in DTYPES]
CASES = [
    pytest.param(
        subject,
        check,
        id=f"{record.name}-{check.name}-{str(dtype).removeprefix('torch.')}",
        marks=[pytest.mark.slow] if dtype in check.slow else [],
    )
    for record, dtype, subject in SUBJECTS
    for check in CHECKS
    if check.skip(subject) is None
]


MIXERS = Path(__file__).parents[2] / "regard" / "mixers"
ORACLES = Path(__file__).parents[1] / "oracles"
FORMULAS = oracles()


def test_every_file_with_records_is_in_the_catalogue():
    found = [path.stem for path in MIXERS.glob("*.py") if "\nrecords = " in path.read_text(encoding="utf-8")]
    assert found
    missing = sorted(set(found) - set(MECHANISMS))
    assert not missing, f"regard/catalog.py: MECHANISMS lacks {missing}"
    assert len({record.name for record in RECORDS}) == len(RECORDS), "two records have one name"


def test_every_formula_is_of_a_record():
    extra = sorted(set(FORMULAS) - {record.name for record in RECORDS})
    assert not extra, f"{extra}: no record has this name; is its file in MECHANISMS of regard/catalog.py?"


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.name)
@torch.no_grad()
def test_every_mechanism_is_the_formula_of_its_oracle(record):
    if record.name not in FORMULAS:
        file = record.build.__module__.rpartition(".")[2]
        pytest.fail(f"write tests/oracles/{file}.py, with ORACLES = {{{record.name!r}: formula}}: see tests/oracles")
    subject = Subject.of(record)
    layer, x = subject.layer(), subject.tokens(2, 7)
    weights = {name: tensor.numpy() for name, tensor in layer.state_dict().items()}
    context = subject.context_for(layer, x)
    got = layer(x, **context)
    for row in range(2):
        given = {name: value[row].numpy() for name, value in context.items()}
        want = torch.from_numpy(FORMULAS[record.name](x[row].numpy(), weights, 4, **given))
        torch.testing.assert_close(got[row], want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "path", sorted((Path(__file__).parents[1] / "oracles").glob("*.py")), ids=lambda path: path.stem
)
def test_oracles_import_nothing_from_the_library(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
        module = getattr(node, "module", None) or ""
        assert not any(name.partition(".")[0] == "regard" for name in (module, *names)), f"line {node.lineno}"


@pytest.mark.parametrize(("subject", "check"), CASES)
def test_contract(subject, check):
    check.run(subject)


def test_every_cell_of_the_table_runs_or_is_excused_by_a_sentence():
    """Checks by layers by dtypes; no check is excused everywhere, and no reason is a word alone."""
    ran: Counter[tuple[str, torch.dtype]] = Counter()
    for _, dtype, subject in SUBJECTS:
        for check in CHECKS:
            reason = check.skip(subject)
            ran[check.name, dtype] += reason is None
            assert reason is None or len(reason.split()) >= 4, (subject.name, check.name, reason)
    nowhere = {(name, torch.float64) for name in ("native_runs", "low_precision", "inductor")}
    nowhere |= {("inductor", torch.float16)}
    nowhere |= {(name, dtype) for name in ("averages", "window") for dtype in DTYPES}  # of anybody's modules
    nowhere |= {("native_runs", dtype) for dtype in DTYPES} if library.REASON else set()
    assert {(check.name, dtype) for check in CHECKS for dtype in DTYPES if not ran[check.name, dtype]} == nowhere
