"""Where the shared library of csrc/ is: beside the package, or in an installation of the same sources."""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path
from typing import NamedTuple

__all__ = ["NAME", "Found", "digest_of", "find"]

NAME = "libregard.so.1"


class Found(NamedTuple):
    """The library's file, or None; and the folder of the sources that it must have been built from, or None where the
    library belongs to the package itself.
    """

    path: Path | None = None
    sources: Path | None = None


def find() -> Found:
    """The library that ``REGARD_LIBRARY`` names, else the package's own, else that of an installed regard.

    The last is for a checkout that Python imports from its folder while the kernels were installed elsewhere.
    """
    named = os.environ.get("REGARD_LIBRARY")  # a build made apart, with sanitizers say
    if named:
        return Found(Path(named))
    folders = [Path(folder) for folder in sys.modules[__name__.split(".")[0]].__path__]  # an editable install has two
    own = next((folder / NAME for folder in folders if (folder / NAME).exists()), None)
    if own is not None:
        return Found(own)
    sources = next((folder.parent / "csrc" for folder in folders if (folder.parent / "csrc").is_dir()), None)
    if sources is None:
        return Found()
    elsewhere = (Path(entry or ".").resolve() / folders[0].name / NAME for entry in sys.path)
    return Found(next((path for path in elsewhere if path.exists()), None), sources)


def digest_of(sources: Path) -> str:
    """What ``regard_sources`` says of a library that was built from this folder; CMakeLists.txt computes the same."""
    files = sorted(path for kind in ("*.cpp", "*.h") for path in sources.glob(kind))
    return hashlib.sha256("".join(hashlib.sha256(f.read_bytes()).hexdigest() for f in files).encode()).hexdigest()
