"""The contract in somebody's suite: a test for each check, skipped where it does not apply."""

import pytest
from foreign import STATED, WHOLE, LooksAhead, Sound
from torch import nn

from regard.testing import Subject, parametrize_with_checks


@parametrize_with_checks(Sound, call=WHOLE, **STATED, only=["causality", "splits", "window"])
def test_a_sound_module(check):
    check()


@parametrize_with_checks(
    Subject.around(LooksAhead, WHOLE, **STATED), nn.GRU(8, 8, batch_first=True), causal=True, only=["causality"]
)
def test_only_the_faulty_one_fails(check, request):
    if "LooksAhead" not in request.node.name:
        check()
        return
    with pytest.raises(AssertionError, match="after changing those from 1 on: off by"):
        check()


def test_cases_are_named_and_skipped_with_the_reason():
    mark = parametrize_with_checks(nn.GRU(8, 8, batch_first=True)).mark
    cases = {case.id: case for case in mark.args[1]}
    assert "GRU-shapes" in cases and not cases["GRU-shapes"].marks
    (skip,) = cases["GRU-splits"].marks
    assert skip.kwargs["reason"] == "it does not decode with a cache"


def test_what_is_wrong_is_said_while_tests_are_collected():
    with pytest.raises(ValueError, match="subjects: expected modules or subjects to check, got none"):
        parametrize_with_checks()
    with pytest.raises(ValueError, match=r"only: expected one of shapes, .*, got 'speed'"):
        parametrize_with_checks(Sound, call=WHOLE, dim=8, only=["speed"])
