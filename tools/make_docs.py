"""Write what comes from the catalogue: the tables in the README and in docs/, and the names that `regard.nn` exports.

    python tools/make_docs.py           write them
    python tools/make_docs.py --check   only say whether a file is out of date

A table stands between `<!-- generated: NAME -->` and `<!-- end -->`; NAME is a key of TABLES. `regard/nn/__init__.py`
is written whole: type checkers and editors see the names that a file imports, and none that a loop would find.
"""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))


def mechanisms() -> str:
    """One row for every mechanism of the catalogue, in its order."""
    from regard.catalog import RECORDS

    rows = [f"| {item.name} | {item.summary} | {item.kind} | {item.source} |" for item in RECORDS]
    return "\n".join(["| mechanism | in one line | kind | source |", "|---|---|---|---|", *rows])


def presets() -> str:
    """One row for every released model, built without memory: parameters, and what a row of tokens leaves behind."""
    from regard.analysis import estimate
    from regard.models.presets import PRESETS

    head = ["preset", "published", "built", "for one token", "cache, elements a token", "windows", "states", "tails"]
    rows = [head, ["---"] * 4 + ["--:"] * 4]
    for item in PRESETS.values():
        found = estimate(item.build())
        own = found.own
        counts = (own.per_token, own.ring, own.state, own.conv_state)
        published = item.parameters + (f", {item.active} active" if item.active else "")
        built = f"{found.parameters:,}" + (" (parts)" if item.partial else "")
        rows.append([item.name, published, built, f"{found.active:,}", *(f"{n:,}" if n else "" for n in counts)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def contract() -> str:
    """One row for every check: what it promises, where it runs, and why not where it does not."""
    from regard.catalog import RECORDS
    from regard.testing import CHECKS, DTYPES, Subject

    rows = ["| check | promise | cells that run | excused |", "|---|---|---|---|"]
    for check in CHECKS:
        reasons: dict[str, list[str]] = {}
        ran = 0
        for record in RECORDS:
            for dtype in DTYPES:
                reason = check.skip(Subject.of(record).at(dtype))
                if reason is None or reason.startswith("native not built"):
                    ran += 1
                else:
                    reasons.setdefault(reason, []).append(record.name)
        words = []
        for reason, names in reasons.items():
            own = list(dict.fromkeys(names))
            who = "all" if len(own) == len(RECORDS) else f"{len(own)} layers" if len(own) > 3 else ", ".join(own)
            words.append(f"{who}: {reason}")
        slow = ", ".join(str(dtype).removeprefix("torch.") for dtype in check.slow)
        note = f" (slow in {slow})" if slow else ""
        rows.append(f"| {check.name} | {check.summary} | {ran}{note} | {'; '.join(words)} |")
    return "\n".join(rows)


TABLES = {"contract": contract, "mechanisms": mechanisms, "presets": presets}
BLOCK = re.compile(r"(<!-- generated: (\w+) -->\n).*?(<!-- end -->)", re.S)


def filled(text: str) -> str:
    """The text with every generated block written anew."""
    return BLOCK.sub(lambda match: f"{match[1]}{TABLES[match[2]]()}\n{match[3]}", text)


NN = '''"""The layers, and the parts that they are built from.

Written by `make docs` from the `__all__` of the catalogue's files: edit those, or tools/make_docs.py.
"""

{imports}
from regard.mixers.parts import GatedRMSNorm, MambaConfig, Projections, RelativePositionBias, RMSNorm, Scores
from regard.nn.convert import from_torch
from regard.nn.swapping import SwapReport, swap, unswap
from regard.nn.torch_attention import TorchMultiheadAttention

__all__ = [{names}]
'''
PARTS = ("GatedRMSNorm", "MambaConfig", "Projections", "RMSNorm", "RelativePositionBias", "Scores")
INNER = ("records", "GraphLayer", "Nodes")  # not for users
BESIDE = (
    "graph_attention",
    "graph_layer",
    "graph_transformer",
    "image_windows",
)  # layers whose calls are not those of the catalogue
SHARED = (*PARTS, "SwapReport", "TorchMultiheadAttention", "from_torch", "swap", "unswap")


def layers(mechanisms: tuple[str, ...] | None = None) -> str:
    """The text of `regard/nn/__init__.py`: what the files of the catalogue export, but for their records."""
    from regard.catalog import MECHANISMS

    imports, names = [], list(SHARED)
    for name in (*(MECHANISMS if mechanisms is None else mechanisms), *BESIDE):
        own = [each for each in importlib.import_module(f"regard.mixers.{name}").__all__ if each not in INNER]
        imports.append(f"from regard.mixers.{name} import {', '.join(own)}")
        names += own
    text = NN.format(imports="\n".join(imports), names=", ".join(f'"{name}"' for name in sorted(names)))
    for command in (("check", "--select", "I", "--fix", "--quiet"), ("format",)):
        ruff = [sys.executable, "-m", "ruff", *command, "--stdin-filename", "regard/nn/__init__.py", "-"]
        text = subprocess.run(ruff, input=text, capture_output=True, text=True, check=True, cwd=ROOT).stdout
    return text


def main(arguments: list[str]) -> int:
    stale = []
    written = {ROOT / "regard" / "nn" / "__init__.py": lambda _: layers()}  # first: the tables import it
    written |= dict.fromkeys([ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))], filled)
    for path, made in written.items():
        text = path.read_text(encoding="utf-8")
        new = made(text)
        if new != text:
            stale.append(path.relative_to(ROOT))
            if "--check" not in arguments:
                path.write_text(new, encoding="utf-8")
    word = "out of date (run `make docs`)" if "--check" in arguments else "written"
    print("\n".join(f"{path}: {word}" for path in stale) or "what is generated: up to date")
    return int(bool(stale) and "--check" in arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
