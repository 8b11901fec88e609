"""Every block in the README runs.

`python` blocks run from top to bottom in one namespace. In `console` blocks each line after `$ ` runs, and the lines
below it, if any, must be what it prints. `sh` blocks are set-up (make, pip, git) and may hold nothing else.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from regard.backends.native import library

ROOT = Path(__file__).parents[2]
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", (ROOT / "README.md").read_text(encoding="utf-8"), re.M | re.S)
NATIVE = "native     runs it"  # what a block shows where the kernels are built
CONSOLE = [block for language, block in BLOCKS if language == "console"]


def test_python_blocks_run(monkeypatch):
    monkeypatch.chdir(ROOT)
    namespace: dict[str, object] = {}
    for language, block in BLOCKS:
        if language == "python":
            exec(compile(block, "README.md", "exec"), namespace)


@pytest.mark.parametrize("block", CONSOLE)
def test_console_blocks_print_what_they_show(block):
    if NATIVE in block and (library.REASON or library.ISA == "portable"):
        pytest.skip(f"native not built: {library.REASON or 'only portable kernels'}")
    # `regard` is this checkout's, and a fixed width makes its tables the same everywhere.
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "120", "NO_COLOR": "1"}
    for command, shown in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", block, re.M):
        command = re.sub(r"(^|\| )regard\b", rf"\1{sys.executable} -m regard", command)
        done = subprocess.run(command, shell=True, cwd=ROOT, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        if shown:
            assert [line.rstrip() for line in done.stdout.splitlines()] == shown.rstrip().splitlines()


def test_shell_blocks_are_set_up_only():
    for language, block in BLOCKS:
        assert language in {"python", "console", "sh"}
        if language == "sh":
            assert {line.split()[0] for line in block.splitlines() if line.strip()} <= {"make", "pip", "git"}


def test_it_opens_with_the_two_commands():
    language, block = BLOCKS[0]
    assert language == "sh"
    assert [line.split("#")[0].split() for line in block.splitlines()] == [["make", "demo"], ["make", "test"]]
