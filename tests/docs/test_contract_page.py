"""The page on the contract: its blocks run, and every check has a section of its own, in the order of the checks."""

import re
from pathlib import Path

import pytest

from regard.testing import CHECKS

PAGE = (Path(__file__).parents[2] / "docs" / "contract.md").read_text(encoding="utf-8")


def test_its_blocks_run(capsys):
    pytest.importorskip("transformers")
    namespace: dict[str, object] = {}
    for block in re.findall(r"^```python\n(.*?)^```", PAGE, re.M | re.S):
        exec(compile(block, "docs/contract.md", "exec"), namespace)
    assert capsys.readouterr().out.startswith("MultiheadAttention: 18 checks passed")


def test_every_check_has_a_section():
    assert re.findall(r"^### (\w+)$", PAGE, re.M) == [check.name for check in CHECKS]
