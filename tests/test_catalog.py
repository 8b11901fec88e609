"""The contract, run on every record of the catalogue."""

from __future__ import annotations

import pytest

from regard.catalog import RECORDS
from regard.testing import CHECKS, Subject

CASES = [
    pytest.param(record, check, id=f"{record.name}-{check.name}", marks=[pytest.mark.slow] if check.slow else [])
    for record in RECORDS
    for check in CHECKS
    if check.skip(Subject.of(record)) is None
]


@pytest.mark.parametrize(("record", "check"), CASES)
def test_contract(record, check):
    check.run(Subject.of(record))


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.name)
def test_exemptions_are_explained(record):
    names = {check.name for check in CHECKS}
    assert set(record.exempt) <= names
    assert all(len(reason) > 20 for reason in record.exempt.values())
