"""docs/benchmarks.md: each benchmark writes its own table between its markers.

A table stands between ``<!-- benchmark: NAME -->`` and ``<!-- end -->``; the text around it is written by hand.
"""

from __future__ import annotations

import platform
import re
from pathlib import Path

import torch

PAGE = Path(__file__).parent.parent / "docs" / "benchmarks.md"


def machine() -> str:
    """The processor's name and number of cores, and torch's version."""
    names = [line.split(":")[1].strip() for line in _cpuinfo() if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {len(names) or 1} cores, torch {torch.__version__}"


def write(name: str, lines: list[str]) -> None:
    """Put the lines of a table between the markers of `name`, with the machine's name above."""
    text = PAGE.read_text(encoding="utf-8")
    block = re.compile(rf"(<!-- benchmark: {name} -->\n).*?(<!-- end -->)", re.S)
    if not block.search(text):
        raise ValueError(f"{PAGE}: no table named {name!r}")
    body = "\n".join([f"{machine()}", "", *lines])
    PAGE.write_text(block.sub(lambda found: f"{found[1]}{body}\n{found[2]}", text), encoding="utf-8")


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text(encoding="utf-8").splitlines() if path.exists() else []
