"""The contract as checks: run them on regard's layers, or on your own.

>>> import regard
>>> from regard.testing import Subject, run_checks
>>> subject = Subject.of(regard.catalog.find("mqa"))
>>> [(one.name, one.passed) for one in run_checks(subject, only=["splits"])]
[('splits', True)]

A check raises `ContractViolation`, whose text says what was done and by how much the answer was off. `Subject` says
how to make a layer, and which promises it gives.
"""

from regard.testing.checks import CHECKS, DTYPES, Check, run_checks
from regard.testing.results import Result, Results
from regard.testing.subject import Subject
from regard.testing.violation import ContractViolation

__all__ = ["CHECKS", "DTYPES", "Check", "ContractViolation", "Result", "Results", "Subject", "run_checks"]
