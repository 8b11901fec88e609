"""The list of checks, when each applies, and a runner."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from regard.backends import without_kernels
from regard.names import not_among
from regard.testing import behaviour, modules, numerics, sequence
from regard.testing.call import Call
from regard.testing.results import Result, Results
from regard.testing.subject import TOLERANCES, Subject, Trace
from regard.testing.violation import ContractViolation

__all__ = ["CHECKS", "DTYPES", "Check", "check", "chosen", "run_checks"]


def _always(subject: Subject) -> str | None:
    return None


def _cached(subject: Subject) -> str | None:
    return None if subject.cached else "it does not decode with a cache"


def _causal(subject: Subject) -> str | None:
    return None if subject.causal else "it is not causal"


def _padded(subject: Subject) -> str | None:
    if subject.context:
        return "keep and segments of a layer with a context describe the context"
    return None if subject.padded else "no argument for padding was stated"


def _flags(subject: Subject) -> str | None:
    if subject.lengths_alone:
        return "its padding is given as lengths, so it follows the tokens"
    return _padded(subject)


def _no_slots(subject: Subject) -> str | None:
    if (reason := _flags(subject)) is None and subject.counts_slots:
        return "its masks or biases count slots, so padding between tokens moves them"
    return reason


def _segmented(subject: Subject) -> str | None:
    if subject.call is not None and subject.call.segments is None:
        return "no argument for packed sequences was stated"
    return None if subject.call is not None else _padded(subject)


def _windowed(subject: Subject) -> str | None:
    return None if subject.promises.window is not None else "no width of a window was stated"


def _averaging(subject: Subject) -> str | None:
    return None if subject.promises.averages else "nobody states that its weights sum to one"


def _own(subject: Subject) -> str | None:
    return None if subject.call is None else "it is a promise of the library's own layers"


def _cached_own(subject: Subject) -> str | None:
    return _own(subject) or _cached(subject)


def _mixes(subject: Subject) -> str | None:
    return None if hasattr(subject.make(), "mixing") else "it has no mixing method"


def _rounded(subject: Subject) -> str | None:
    if (reason := _own(subject)) is not None:
        return reason
    return "float64 is what the other dtypes are compared with" if subject.dtype == torch.float64 else None


def _native(subject: Subject) -> str | None:
    if (reason := _own(subject)) is not None:
        return reason
    if subject.off_kernels:
        return subject.off_kernels
    if (reason := without_kernels()) is not None:
        return f"native not built: {reason}"
    if subject.dtype == torch.float64:
        return "the kernels compute in float32, so float64 runs on the plain-torch backends"
    return None


def _generated(subject: Subject) -> str | None:
    if (reason := _own(subject)) is not None:
        return reason
    if subject.dtype in (torch.float32, torch.bfloat16):
        return None
    return "Inductor takes minutes, and its code for float64 and float16 differs from these two in names of types alone"


@dataclass(frozen=True)
class Check:
    """One promise: `run` raises `ContractViolation` when a subject breaks it; `skip` says why it does not apply.

    `slow` names the dtypes in which it takes long, so that it runs only when asked for.
    """

    name: str
    run: Callable[[Subject], None]
    applies: Callable[[Subject], str | None] = _always
    slow: tuple[torch.dtype, ...] = ()

    @property
    def summary(self) -> str:
        """What is promised, in one sentence."""
        return (self.run.__doc__ or "").strip()

    def skip(self, subject: Subject) -> str | None:
        """Why this check does not apply to `subject`, or None."""
        return subject.exempt.get(self.name) or self.applies(subject)


DTYPES = tuple(TOLERANCES)


# In the order of causes: a check that fails may explain later ones, never earlier (causes.py says which).
CHECKS: tuple[Check, ...] = (
    Check("shapes", behaviour.shapes),
    Check("inputs_unmodified", behaviour.inputs_unmodified),
    Check("determinism", behaviour.determinism),
    Check("evaluation", behaviour.evaluation),
    Check("stateless", behaviour.stateless),
    Check("unwritten_memory", numerics.unwritten_memory),
    Check("strides", numerics.strides),
    Check("batch_independence", sequence.batch_independence),
    Check("averages", behaviour.averages, _averaging),
    Check("causality", sequence.causality, _causal),
    Check("prefixes", sequence.prefixes, _causal),
    Check("window", behaviour.window, _windowed),
    Check("streams", behaviour.streams, _cached),
    Check("splits", sequence.splits, _cached),
    Check("polarity", behaviour.polarity, _flags),
    Check("dead_rows", behaviour.dead_rows, _padded),
    Check("right_padding", sequence.right_padding, _padded),
    Check("left_padding", sequence.left_padding, _flags),
    Check("interior_padding", sequence.interior_padding, _no_slots),
    Check("packed", sequence.packed, _segmented),
    Check("reorder", sequence.reorder, _cached_own),
    Check("cache_rules", sequence.cache_rules, _cached_own),
    Check("no_grad", behaviour.no_grad),
    Check("backends_agree", numerics.backends_agree, _own),
    Check("gradients", numerics.gradients),
    Check("second_gradients", numerics.second_gradients, _own),
    Check("native_runs", numerics.native_runs, _native),
    Check("low_precision", numerics.low_precision, _rounded),
    Check("empty_inputs", numerics.empty_inputs, _own),
    Check("mixing", numerics.mixing, _mixes),
    Check("copies", modules.copies),
    Check("meta_device", modules.meta_device, _own),
    Check("compiled", modules.compiled, _own, slow=(torch.float64, torch.bfloat16, torch.float16)),
    Check("error_texts", modules.error_texts, _own),
    Check("inductor", modules.inductor, _generated, slow=DTYPES),
)


def check(
    module: nn.Module | Callable[[], nn.Module],
    call: Call | None = None,
    *,
    only: Iterable[str] | None = None,
    **stated: Any,
) -> Results:
    """Check anybody's module, with its own weights and in its own dtype, on what is said of it.

    `module`, `call` and what is stated besides (`dim`, `vocabulary`, `causal`, `window`, `averages`, `counts_slots`,
    `dtype`, `exempt`, `name`) are those of `Subject.around`; `only` is that of `run_checks`.

    >>> import torch
    >>> found = check(torch.nn.GRU(8, 8, batch_first=True), causal=True, dtype=torch.float64)
    >>> found.ok, [one.passed for one in found if one.name in ("causality", "splits")]
    (True, [True, None])
    """
    return run_checks(Subject.around(module, call, **stated), only)


def run_checks(subject: Subject, only: Iterable[str] | None = None, *, slow: bool = False) -> Results:
    """Run the checks (those named in `only`, else all that are not slow) on a subject.

    They run in the subject's dtype; ``subject.at(torch.bfloat16)`` is the same subject in another. A check that ends in
    any error has failed, and the result says which error. The results are a list that prints as a table.

    Raises ValueError for unknown names in `only`, and for exemptions that name no check or give no reason.
    """
    return Results(subject.name, [_result(check, subject) for check in chosen(subject, only, slow=slow)])


def chosen(subject: Subject, only: Iterable[str] | None = None, *, slow: bool = False) -> list[Check]:
    """The checks that `run_checks` runs, those that do not apply included; raises what it raises."""
    _check_exemptions(subject)
    if isinstance(only, str):
        raise TypeError(f"only: expected a list of names of checks, got the string {only!r}")
    wanted = None if only is None else set(only)
    unknown = (wanted or set()) - {check.name for check in CHECKS}
    if unknown:
        raise ValueError(f"only: {not_among(min(unknown, key=str), [check.name for check in CHECKS])}")
    return [
        check
        for check in CHECKS
        if (check.name in wanted if wanted is not None else slow or subject.dtype not in check.slow)
    ]


def _result(check: Check, subject: Subject) -> Result:
    reason = check.skip(subject)
    if reason is not None:
        return Result(check.name, None, reason)
    trace = Trace()
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)  # so that a failure can be shown again
            check.run(replace(subject, trace=trace))
    except ContractViolation as broken:
        return Result(check.name, False, str(broken), broken.effect, broken.allowed, broken.place, trace.inputs)
    except Exception as error:  # a module of a third party may fail in any way; the other checks still run
        return Result(check.name, False, f"it raised {type(error).__name__}: {error}", inputs=trace.inputs)
    return Result(check.name, True, check.summary, trace.effect, trace.allowed)


def _check_exemptions(subject: Subject) -> None:
    unknown = set(subject.exempt) - {check.name for check in CHECKS}
    if unknown:
        raise ValueError(f"exempt: expected names of checks, got {', '.join(sorted(unknown))}")
    for name, reason in subject.exempt.items():
        if not isinstance(reason, str) or len(reason.split()) < 4:
            raise ValueError(f"exempt: expected a sentence that says why {name} does not apply, got {reason!r}")
