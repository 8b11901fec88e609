"""Which library of kernels a package takes: its own, or an installed one that was built from the same sources."""

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from native_calls import needs_native

from regard.backends.native import library
from regard.backends.native.finding import NAME, digest_of

ROOT = Path(__file__).parents[2]
pytestmark = [
    needs_native,
    pytest.mark.skipif(platform.system() != "Linux", reason="kernels are built on Linux alone"),
    pytest.mark.skipif("REGARD_LIBRARY" in os.environ, reason="the library under test is named, not found"),
]
CODE = f"""
import pathlib, sys
sys.meta_path = [f for f in sys.meta_path if 'Redirecting' not in type(f).__name__]  # an editable install's
import torch
if sys.argv[1:] == ['alone']:
    sys.path[:] = [p for p in sys.path if not (pathlib.Path(p) / 'regard' / '{NAME}').exists()]
import regard
q = torch.randn(1, 2, 5, 8)
print(regard.__file__)
print(regard.explain(q, q, q))
regard.attention(q, q, q)
regard.attention(q, q, q)
"""


@pytest.fixture
def clone(tmp_path):
    """A checkout without a build, and beside it a place where packages are installed."""
    for name in ("regard", "csrc"):
        shutil.copytree(ROOT / name, tmp_path / "clone" / name, ignore=shutil.ignore_patterns("__pycache__", NAME))
    (tmp_path / "site" / "regard").mkdir(parents=True)
    return tmp_path / "clone"


def told(clone, *places, alone=False):
    """What a process that runs in the checkout says of the kernels, when asked and on its own; it sees `places`."""
    path = os.pathsep.join(map(str, (clone, *places)))
    done = subprocess.run(
        [sys.executable, "-c", CODE, *(["alone"] if alone else [])],
        cwd=clone,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    file, *lines = done.stdout.splitlines()
    assert file == str(clone / "regard" / "__init__.py")
    return next(line for line in lines if line.startswith("native")), done.stderr


def test_a_checkout_takes_the_kernels_that_were_installed(clone):
    site = clone.parent / "site"
    shutil.copy(library.LIBRARY._name, site / "regard" / NAME)
    asked, unasked = told(clone, site)
    assert asked.split() == ["native", "runs", "it"] and unasked == ""


def test_kernels_of_other_sources_are_not_taken(clone):
    site = clone.parent / "site"
    shutil.copy(library.LIBRARY._name, site / "regard" / NAME)
    with (clone / "csrc" / "vec.h").open("a") as file:
        file.write("// changed\n")
    asked, unasked = told(clone, site)
    assert f"the kernels in {site / 'regard' / NAME} were built from other sources than those in" in asked
    assert f"`pip install .` in {clone} builds these" in asked
    assert unasked.count("built from other sources") == 1  # the first call that would have run on them


def test_a_checkout_without_any_kernels_says_how_to_build_them(clone):
    asked, unasked = told(clone, alone=True)
    assert f"neither the sources in {clone} nor an installed regard hold {NAME}" in asked
    assert unasked.count("neither the sources in") == 1


def test_the_library_says_what_it_was_built_from():
    assert library.LIBRARY.regard_sources().decode() == digest_of(ROOT / "csrc")
