"""Imports go one way, and `import regard` needs torch alone."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))
from check_imports import check  # noqa: E402


def test_imports_of_the_package_go_one_way():
    assert check(ROOT / "regard") == []


def test_import_needs_torch_alone():
    """With other packages made unimportable, all modules import but the integrations and the command line's."""
    program = """
import importlib, pkgutil, sys
import torch
missing = ("numpy", "safetensors", "tokenizers", "gguf", "typer", "rich", "transformers", "matplotlib", "PIL", "scipy")
for name in missing:
    sys.modules[name] = None
import regard
for item in pkgutil.walk_packages(regard.__path__, "regard."):
    if not item.name.startswith(("regard.cli.", "regard.integrations.")):
        importlib.import_module(item.name)
print("imported")
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == "imported", done.stderr


def test_import_regard_does_not_import_torch():
    """The command line answers `--help` at once."""
    program = "import sys, regard; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == "False", done.stderr


@pytest.mark.parametrize(
    ("file", "line", "words"),
    [
        ("masks.py", "from regard.ops.attention import attention", "higher layer"),
        ("masks.py", "from .ops import attention", "higher layer"),
        ("ops/attention.py", "from ..mixers import parts", "higher layer"),
        ("ops/attention.py", "from regard.backends import chunked", "only backends/__init__.py"),
        ("backends/flex.py", "from .sdpa import run", "only backends/__init__.py"),
        ("mixers/gla.py", "from .softmax import MultiHeadAttention", "no mixer imports another"),
        ("mixers/gla.py", "import numpy", "inside the function"),
        ("mixers/gla.py", "from regard import attention", "front page"),
        ("mixers/gla.py", "attention(backend='chunked')", "leave the choice"),
        ("mixers/gla.py", "from regard.nowhere import x", "does not exist"),
    ],
)
def test_the_check_finds_what_it_should(tmp_path, file, line, words):
    package = tmp_path / "regard"
    for name in ("masks", "ops/attention", "backends/flex", "backends/reference", "mixers/gla", "mixers/softmax"):
        path = package / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
        (path.parent / "__init__.py").write_text("")
    (package / "mixers" / "parts.py").write_text("")
    (package / "mixers" / "softmax.py").write_text("records = ()\n")
    for name in ("chunked", "sdpa"):
        (package / "backends" / f"{name}.py").write_text("from . import reference\ndef reject(call): pass\n")
    allowed = (
        "import math\nimport torch\nfrom regard import masks\nfrom ..masks import Causal\ndef f():\n    import numpy\n"
    )
    (package / "ops" / "attention.py").write_text(allowed)
    (package / "mixers" / "gla.py").write_text("from . import parts\nfrom ..ops.attention import f\n")
    (package / "backends" / "__init__.py").write_text("from . import chunked\n")
    assert check(package) == []
    (package / file).write_text(line + "\n")
    found = check(package)
    assert words in found[0]
    assert all(words in one or "in a circle" in one for one in found)


@pytest.mark.parametrize("where", ["at the top", "in a function", "for type checkers"])
def test_the_check_finds_circles_inside_a_layer(tmp_path, where):
    package = tmp_path / "regard"
    (package / "masks").mkdir(parents=True)
    back = {
        "at the top": "from regard.masks import base",
        "in a function": "def f():\n    from regard.masks import base",
        "for type checkers": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from regard.masks import base",
    }[where]
    for name in ("__init__", "masks/__init__", "masks/base", "masks/block_layout", "masks/segments"):
        (package / f"{name}.py").write_text("")
    (package / "masks" / "base.py").write_text("from regard.masks import block_layout\n")
    (package / "masks" / "block_layout.py").write_text("from regard.masks import segments\n")
    assert check(package) == []
    (package / "masks" / "segments.py").write_text(back + "\n")
    (found,) = check(package)
    assert "in a circle: regard.masks.base, regard.masks.block_layout, regard.masks.segments" in found
