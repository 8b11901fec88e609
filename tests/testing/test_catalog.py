"""The contract, run on every record of the catalogue in every dtype."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from regard.backends.native import library
from regard.catalog import RECORDS
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
    nowhere |= {("native_runs", dtype) for dtype in DTYPES} if library.REASON else set()
    assert {(check.name, dtype) for check in CHECKS for dtype in DTYPES if not ran[check.name, dtype]} == nowhere
