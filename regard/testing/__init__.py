"""The contract as checks: run them on regard's layers, or on anybody's modules.

>>> import torch
>>> from regard.testing import Call, PaddingArgument, check
>>> padding = PaddingArgument("key_padding_mask", means="hide")
>>> call = Call(x=("query", "key", "value"), padding=padding, given={"need_weights": False})
>>> check(torch.nn.MultiheadAttention(8, 2, batch_first=True), call, averages=True).ok
True

`Call` says how a module is called, `check` what else is promised of it. A layer with the library's own signature is a
`Subject`, on which `run_checks` runs every check. What they find is a list that prints as a table, likely root first.
"""

from regard.testing.call import CacheArgument, Call, CausalArgument, PaddingArgument
from regard.testing.checks import CHECKS, DTYPES, Check, check, run_checks
from regard.testing.parametrize import parametrize_with_checks
from regard.testing.results import Result, Results
from regard.testing.subject import Promises, Subject
from regard.testing.violation import ContractViolation

__all__ = [
    "CHECKS",
    "DTYPES",
    "CacheArgument",
    "Call",
    "CausalArgument",
    "Check",
    "ContractViolation",
    "PaddingArgument",
    "Promises",
    "Result",
    "Results",
    "Subject",
    "check",
    "parametrize_with_checks",
    "run_checks",
]
