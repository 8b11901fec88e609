"""The archives carry the package and nothing of the tests or their data."""

import tarfile
import zipfile
from pathlib import Path

from hatchling.builders.sdist import SdistBuilder
from hatchling.builders.wheel import WheelBuilder

ROOT = Path(__file__).parent.parent


def test_the_wheel_carries_the_package_alone(tmp_path):
    (path,) = WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])
    names = zipfile.ZipFile(path).namelist()
    assert "regard/py.typed" in names
    assert {name.split("/")[0].split("-")[0] for name in names} == {"regard"}
    assert not any(name.endswith((".npz", ".safetensors", ".pyc")) for name in names)


def test_the_source_archive_carries_the_package_and_its_papers(tmp_path):
    (path,) = SdistBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])
    with tarfile.open(path) as archive:
        top = {name.split("/")[1] for name in archive.getnames()}
    papers = {"README.md", "CHANGELOG.md", "LICENSE", "pyproject.toml", "PKG-INFO"}
    assert top - {".gitignore"} == {"regard"} | papers
