"""The archives carry the package, its kernels where they could be built, and nothing of the tests or their data."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def build(kind: str, to: Path, source: Path = ROOT, objects: Path | None = None, **environment: str) -> Path:
    """The archive that the build backend makes of the sources; `kind` is sdist, wheel or pure_wheel."""
    settings = {"wheel.cmake": "false", "wheel.platlib": "false"} if kind == "pure_wheel" else {}
    settings |= {} if objects is None else {"build-dir": str(objects)}
    code = f"from scikit_build_core import build; build.build_{kind.removeprefix('pure_')}({str(to)!r}, {settings!r})"
    process = subprocess.run(
        [sys.executable, "-c", code], cwd=source, env=os.environ | environment, capture_output=True, text=True
    )
    assert process.returncode == 0, process.stderr
    (path,) = to.iterdir()
    return path


def test_the_wheel_carries_the_package_alone(tmp_path):
    path = build("pure_wheel", tmp_path)
    assert path.name.endswith("-py3-none-any.whl")
    names = zipfile.ZipFile(path).namelist()
    assert "regard/py.typed" in names and "regard/models/layouts/llama.py" in names
    assert {name.split("/")[0].split("-")[0] for name in names} == {"regard"}
    assert not any(name.endswith((".npz", ".safetensors", ".pyc", ".so.1")) for name in names)


def test_the_source_archive_carries_the_package_its_kernels_and_its_papers(tmp_path):
    with tarfile.open(build("sdist", tmp_path)) as archive:
        names = archive.getnames()
    papers = {"README.md", "CHANGELOG.md", "LICENSE", "pyproject.toml", "PKG-INFO"}
    assert {name.split("/")[1] for name in names} == {"regard", "csrc", "CMakeLists.txt"} | papers
    assert not any(name.endswith((".pyc", ".so.1")) for name in names)


@pytest.fixture
def clone(tmp_path):
    """A copy of what the source archive holds."""
    (tmp_path / "sdist").mkdir()
    with tarfile.open(build("sdist", tmp_path / "sdist")) as archive:
        archive.extractall(tmp_path, filter="data")
    (source,) = tmp_path.glob("regard-*")
    return source


@pytest.mark.slow
def test_without_a_compiler_the_wheel_is_pure_and_says_why_it_has_no_kernels(tmp_path, clone):
    (tmp_path / "wheel").mkdir()
    path = build("wheel", tmp_path / "wheel", clone, CXX="/bin/false")
    assert path.name.endswith("-py3-none-any.whl")
    zipfile.ZipFile(path).extractall(tmp_path / "site")
    code = (  # an editable install of this checkout would come first
        "import sys; sys.meta_path = [f for f in sys.meta_path if 'Redirecting' not in type(f).__name__];"
        "import torch, regard; q = torch.randn(1, 2, 5, 8); told = regard.explain(q, q, q);"
        "print(regard.__file__); print(told); regard.attention(q, q, q)"
    )
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "site")}
    environment.pop("REGARD_LIBRARY", None)
    process = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert process.returncode == 0, process.stderr
    assert str(tmp_path / "site") in process.stdout
    assert "the kernels were not built" in process.stdout


@pytest.mark.slow
@pytest.mark.skipif(not (shutil.which("c++") and shutil.which("cmake")), reason="needs a compiler and cmake")
def test_with_a_compiler_one_wheel_serves_every_python(tmp_path, clone):
    (tmp_path / "wheel").mkdir()
    path = build("wheel", tmp_path / "wheel", clone, tmp_path / "objects")
    assert "-py3-none-linux_" in path.name
    assert [name for name in zipfile.ZipFile(path).namelist() if ".so" in name] == ["regard/libregard.so.1"]
    zipfile.ZipFile(path).extract("regard/libregard.so.1", tmp_path)
    table = subprocess.run(
        ["readelf", "--dynamic", "--dyn-syms", "--wide", tmp_path / "regard/libregard.so.1"],
        capture_output=True,
        text=True,
    ).stdout
    assert "gomp" not in table.replace("GOMP_", "").lower()  # OpenMP is never linked: torch's is used
    defined = [line.split()[-1] for line in table.splitlines() if " UND " not in line and " GLOBAL " in line]
    assert defined and all(name.startswith("regard_") for name in defined)
    sets = [one for kind in ("attention*.o", "states*.o") for one in (tmp_path / "objects").rglob(kind)]
    assert len(sets) > 3
    for one in sets:  # a weak symbol of one instruction set could be linked into another's code
        symbols = subprocess.run(["nm", one], capture_output=True, text=True).stdout
        assert not re.findall(r" [WVu] \S+", symbols)
        shared = re.findall(r" [TD] (\S+)", symbols)
        own = one.parent.parent.name.removeprefix("regard_").removesuffix(".dir")
        assert shared and all(name.startswith(f"_ZN6regard{len(own)}{own}") for name in shared)  # regard::v3::…
