"""`regard check`: the contract on a mechanism of the catalogue, or on a module of anybody's."""

from __future__ import annotations

import importlib
import json
import os
import sys
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from regard.testing import Results, Subject

__all__ = ["CheckRequest", "run"]


@dataclass(frozen=True)
class CheckRequest:
    """What to check, on what, and how to say it."""

    target: str
    only: Sequence[str]
    dtype: str | None
    slow: bool
    as_json: bool
    junit: Path | None


def run(request: CheckRequest) -> int:
    """Carry the request out, writing to stdout and to the file for JUnit; 1 where a promise is broken, else 0."""
    import torch

    from regard.testing import run_checks

    subject = _subject(request.target)
    if request.dtype is not None:
        subject = subject.at(getattr(torch, request.dtype))
    results = run_checks(subject, request.only or None, slow=request.slow)
    if request.junit is not None:
        request.junit.write_text(_junit(results), encoding="utf-8")
    if request.as_json:
        print(json.dumps(_facts(results, subject), indent=2))
    else:
        print(results)
        for one in results.failures:
            print("", results.describe(one), sep="\n")
    return 0 if results.ok else 1


def _subject(target: str) -> Subject:
    """A record's subject, or that of what a factory makes."""
    from regard.catalog import RECORDS
    from regard.names import nearest
    from regard.testing import Subject

    if ":" not in target:
        records = {record.name: record for record in RECORDS}
        if target in records:
            return Subject.of(records[target])
        meant = nearest(target, records)
        raise ValueError(
            f"TARGET: expected a mechanism (regard list) or package.module:factory, got {target!r}"
            + (f"; did you mean {meant!r}?" if meant else "")
        )
    made = _made(target)
    return made if isinstance(made, Subject) else Subject.around(made, name=target)


def _made(target: str) -> Any:
    module, _, name = target.partition(":")
    folder = os.getcwd()
    if folder not in sys.path:  # as `python -m` does
        sys.path.insert(0, folder)
    try:
        found = importlib.import_module(module)
    except Exception as error:  # whatever the user's file does
        raise ValueError(f"TARGET: importing {module} raised {type(error).__name__}: {error}") from error
    factory = getattr(found, name, None)
    if not callable(factory):
        raise ValueError(f"TARGET: {module} has no function {name!r} to make a module or a Subject")
    from torch import nn

    if isinstance(factory, nn.Module):  # a module stands there, ready
        return factory
    try:
        return factory()
    except Exception as error:
        raise ValueError(f"TARGET: {target} raised {type(error).__name__}: {error}") from error


def _facts(results: Results, subject: Subject) -> dict[str, Any]:
    return {
        "subject": results.subject,
        "dtype": str(subject.dtype).removeprefix("torch."),
        "ok": results.ok,
        "causes": [one.name for one in results.causes],
        "checks": [
            {
                "name": one.name,
                "status": one.status.lower(),
                "text": one.text,
                "effect": one.effect,
                "allowed": one.allowed,
                "tokens": one.inputs,
                "place": one.place,
                "follows": results.follows(one) if one.passed is False else None,
                "read": one.read,
            }
            for one in results
        ],
    }


def _junit(results: Results) -> str:
    """The results as JUnit's XML, which build servers show."""
    counts = {
        "tests": len(results),
        "failures": len(results.failures),
        "skipped": sum(one.passed is None for one in results),
        "errors": 0,
    }
    suite = ET.Element(
        "testsuite", {"name": f"regard check {results.subject}"} | {k: str(n) for k, n in counts.items()}
    )
    for one in results:
        case = ET.SubElement(suite, "testcase", {"classname": results.subject, "name": one.name, "time": "0"})
        if one.passed is None:
            ET.SubElement(case, "skipped", {"message": one.text})
        elif not one.passed:
            ET.SubElement(case, "failure", {"message": one.text}).text = results.describe(one)
    return ET.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"
