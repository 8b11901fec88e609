"""Results are a list, a table, and an answer to "what do I mend first?"."""

from __future__ import annotations

import pytest
from test_planted_faults import Layer, Leaks

from regard.testing import CHECKS, ContractViolation, Result, Results, Subject, run_checks
from regard.testing.causes import EXPLAINS

NAMES = [check.name for check in CHECKS]


def test_a_check_explains_later_checks_alone():
    for name, others in EXPLAINS.items():
        assert name in NAMES
        assert others and all(NAMES.index(other) > NAMES.index(name) for other in others), name


def test_they_iterate_as_the_list_that_they_were():
    found = run_checks(Subject("sound", Layer, 8), only=["splits", "causality"])
    assert [(one.name, one.passed) for one in found] == [("causality", True), ("splits", True)]
    assert found.ok and found.causes == found.failures == []
    found.raise_if_failed()
    assert str(found).splitlines()[0] == "sound: 2 checks passed, 0 do not apply"
    assert 0 < found[1].effect < found[1].allowed  # the largest difference seen, though it passed


def test_the_root_comes_first_and_what_follows_says_so():
    found = run_checks(Subject("leaky", Leaks, 8), only=["causality", "splits", "left_padding", "strides"])
    assert [one.name for one in found.causes] == ["causality"]
    assert {one.name for one in found.failures} == {"causality", "splits", "left_padding"}
    assert found.follows(found.failures[1]) == "causality"
    first = found.failures[0]
    assert first.effect > first.allowed and first.inputs.startswith("tokens(") and len(first.place) == 3
    with pytest.raises(
        ContractViolation, match=r"the first cause to look at is causality(?s:.*)follows from causality"
    ):
        found.raise_if_failed()


def test_the_table_says_all_of_each_kind():
    table = str(
        Results(
            "three",
            [
                Result("causality", True, "kept", 1e-16, 1e-12),
                Result("splits", None, "it does not decode with a cache"),
                Result("gradients", False, "off by 0.5", 0.5, 1e-4),
            ],
        )
    )
    assert table.splitlines() == [
        "three: 1 of 2 checks failed; the first cause to look at is gradients",
        "FAILED  gradients  0.5 (allowed 0.0001)   off by 0.5",
        "passed  causality  1e-16 (allowed 1e-12)",
        "not applicable: splits (it does not decode with a cache)",
    ]
