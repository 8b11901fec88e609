"""What the checks found: one result a check, and all of them as a list that says what to read first."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from regard.testing.causes import EXPLAINS
from regard.testing.violation import ContractViolation

__all__ = ["PAGE", "Result", "Results"]

PAGE = "docs/contract.md"


@dataclass(frozen=True)
class Result:
    """What a check found.

    Args:
        name: the check.
        passed: None where it does not apply.
        text: the violation, the reason why it does not apply, or the promise that is kept.
        effect: how far two answers were apart: in a failure the difference found, else the largest one seen.
        allowed: how far apart they may be.
        place: where the first difference beyond that is: (row, token, channel) or fewer numbers.
        inputs: the latest tokens drawn, as the call that draws them again, such as ``tokens(2, 3, seed=1)``.
    """

    name: str
    passed: bool | None
    text: str
    effect: float | None = None
    allowed: float | None = None
    place: tuple[int, ...] | None = None
    inputs: str | None = None

    @property
    def read(self) -> str:
        """Where the promise is explained, and what usually breaks it."""
        return f"{PAGE}#{self.name}"

    @property
    def status(self) -> str:
        """ "passed", "FAILED" or "not applicable"."""
        return {True: "passed", False: "FAILED", None: "not applicable"}[self.passed]

    @property
    def measured(self) -> str:
        """The effect beside what is allowed, or nothing where no numbers were compared."""
        if self.effect is None:
            return ""
        return f"{self.effect:.2g}" + ("" if self.allowed is None else f" (allowed {self.allowed:.2g})")


class Results(list[Result]):
    """Results in the order of the checks, which is an order of causes; iterates as a list of `Result`.

    A failure that another one explains (a leak explains why cached steps disagree with one call) stands after it.

    >>> found = Results("mine", [Result("causality", False, "off by 1"), Result("splits", False, "off by 2")])
    >>> found.ok, [one.name for one in found.causes], found.follows(found[1])
    (False, ['causality'], 'causality')
    """

    def __init__(self, subject: str, results: Iterable[Result]) -> None:
        super().__init__(results)
        self.subject = subject

    @property
    def ok(self) -> bool:
        """Whether no check failed; checks that do not apply are no failures."""
        return not any(one.passed is False for one in self)

    def follows(self, result: Result) -> str | None:
        """The first failed check that may explain this failure, or None where none does."""
        for other in self:
            if other.passed is False and result.name in EXPLAINS.get(other.name, ()):
                return other.name
        return None

    @property
    def causes(self) -> list[Result]:
        """The failures that no other one explains, the likeliest root first."""
        return [one for one in self.failures if self.follows(one) is None]

    @property
    def failures(self) -> list[Result]:
        """Every failure, those that no other one explains first."""
        failed = [one for one in self if one.passed is False]
        return sorted(failed, key=lambda one: self.follows(one) is not None)  # sorted keeps the order of causes

    def raise_if_failed(self) -> None:
        """Raise `ContractViolation` with what failed, causes first, unless all is well."""
        if not self.ok:
            first = self.causes[0]
            raise ContractViolation(
                "\n".join([self.headline, *map(self.describe, self.failures)]),
                effect=first.effect,
                allowed=first.allowed,
                place=first.place,
            )

    @property
    def headline(self) -> str:
        """One sentence: how many checks failed, of how many, and which to read first."""
        failed, ran = len(self.failures), sum(one.passed is not None for one in self)
        if not failed:
            return f"{self.subject}: {ran} checks passed, {len(self) - ran} do not apply"
        return f"{self.subject}: {failed} of {ran} checks failed; the first cause to look at is {self.causes[0].name}"

    def describe(self, result: Result) -> str:
        """A failure in full: what was done, on which tokens, by how much it was off, what to read."""
        lines = [f"{result.name}: {result.text}"]
        if result.inputs is not None:
            where = "" if result.place is None else f", first at index {result.place}"
            lines.append(f"  tokens: {result.inputs}{where}")
        cause = self.follows(result)
        if cause is not None:
            lines.append(f"  it probably follows from {cause}")
        return "\n".join([*lines, f"  read {result.read}"])

    def __str__(self) -> str:
        """A table: failures first, then what passed, then what does not apply, by its reason."""
        shown = self.failures + [one for one in self if one.passed]
        names = max((len(one.name) for one in shown), default=0)
        numbers = max((len(one.measured) for one in shown), default=0)
        lines = [self.headline]
        for one in shown:
            head = f"{one.status:<6}  {one.name:<{names}}  {one.measured:<{numbers}}  "
            lines.append((head + ("" if one.passed else " ".join(one.text.split()))).rstrip())
            if not one.passed and (cause := self.follows(one)) is not None:
                lines.append(" " * len(head) + f"probably follows from {cause}")
        reasons: dict[str, list[str]] = {}
        for one in self:
            if one.passed is None:
                reasons.setdefault(one.text, []).append(one.name)
        lines += [f"not applicable: {', '.join(names)} ({reason})" for reason, names in reasons.items()]
        return "\n".join(lines)
