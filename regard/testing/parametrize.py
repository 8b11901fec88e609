"""The contract in other people's suites: one test a check."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from regard.testing.call import Call
from regard.testing.checks import chosen, run_checks
from regard.testing.subject import Subject

__all__ = ["parametrize_with_checks"]


def parametrize_with_checks(
    *subjects: Subject | nn.Module | Callable[[], nn.Module],
    call: Call | None = None,
    only: Iterable[str] | None = None,
    **stated: Any,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A pytest decorator: the test runs once for every check and subject, with a function `check` that raises.

    A check that does not apply is skipped with its reason. `call` and what is stated besides describe modules, as in
    `check`; a `Subject` has its own. `only` names the checks.

    >>> import torch
    >>> @parametrize_with_checks(torch.nn.GRU(4, 4, batch_first=True), causal=True, only=["causality"])
    ... def test_contract(check):
    ...     check()

    Raises ImportError without pytest, ValueError for no subjects and for unknown names in `only`.
    """
    try:
        import pytest
    except ModuleNotFoundError as error:
        raise ImportError("parametrize_with_checks needs the package pytest: pip install pytest") from error

    if not subjects:
        raise ValueError("subjects: expected modules or subjects to check, got none")
    wanted = None if only is None else list(only)
    cases = []
    for given in subjects:
        subject = given if isinstance(given, Subject) else Subject.around(given, call, **stated)
        for check in chosen(subject, wanted):
            reason = check.skip(subject)
            marks = [] if reason is None else [pytest.mark.skip(reason=reason)]
            cases.append(pytest.param(_runs(subject, check.name), id=f"{subject.name}-{check.name}", marks=marks))
    decorator: Callable[[Callable[..., Any]], Callable[..., Any]] = pytest.mark.parametrize("check", cases)
    return decorator


def _runs(subject: Subject, name: str) -> Callable[[], None]:
    return lambda: run_checks(subject, [name]).raise_if_failed()
