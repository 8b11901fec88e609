"""The shared library of csrc/: finding it, loading it, running its kernels."""

from __future__ import annotations

import ctypes
import functools
import os
import struct
from pathlib import Path
from typing import Any

import torch  # before the library: its OpenMP symbols bind to the runtime that torch has loaded
from torch import Tensor

from regard.backends.native.finding import NAME, Found, digest_of, find
from regard.backends.native.structs import STRUCTS

__all__ = ["ISA", "LIBRARY", "REASON", "SURPRISING", "fresh", "number", "run"]

LONG = 2**22  # bytes of a tensor for which large pages are asked


def _is_whole(path: Path) -> bool:
    """Whether a file in the ELF format is as long as its header says; loading one that is not would end the process."""
    try:
        with path.open("rb") as file:
            head = file.read(64)
            size = file.seek(0, os.SEEK_END)
    except OSError:
        return True  # the loader says what is the matter
    if len(head) < 64 or head[:5] != b"\x7fELF\x02":
        return len(head) == 64 or not head.startswith(b"\x7fELF")
    (offset,), (entry, count) = struct.unpack_from("=Q", head, 40), struct.unpack_from("=HH", head, 58)
    whole: bool = offset + entry * count <= size
    return whole


_EXPORTS = (
    "regard_isa",
    "regard_error",
    "regard_struct",
    "regard_sources",
    "regard_large_pages",
    "regard_attention_forward",
)


def _load() -> tuple[Any, str | None]:
    """(the library, None) or (None, why there is none)."""
    found = find()
    path, sources = found.path, found.sources
    if path is None:
        if sources is None:
            return None, f"the kernels were not built: the package holds no {NAME} (installing needs a C++ compiler)"
        return None, (
            f"the kernels were not built: neither the sources in {sources.parent} nor an installed regard hold {NAME} "
            "(`pip install .` there builds them, with a C++ compiler)"
        )
    if not _is_whole(path):
        return None, f"the kernels in {path} are cut off: install the package again"
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        return None, f"the kernels could not be loaded: {error}"
    if not all(hasattr(library, name) for name in _EXPORTS):
        return (
            None,
            f"{path} is not the library of the kernels, or was built from other sources: install the package again",
        )
    library.regard_isa.restype = ctypes.c_char_p
    library.regard_error.restype = ctypes.c_char_p
    library.regard_struct.restype = ctypes.c_char_p
    library.regard_sources.restype = ctypes.c_char_p
    if sources is not None and library.regard_sources().decode() != digest_of(sources):
        return None, (
            f"the kernels in {path} were built from other sources than those in {sources}: `pip install .` in "
            f"{sources.parent} builds these, or import regard from another folder"
        )
    for which, struct_ in enumerate(STRUCTS):
        text = library.regard_struct(which)
        wrong = f"{struct_.name} is missing" if text is None else struct_.mismatch(text.decode())
        if wrong:
            return None, f"the kernels in {path} were built from other sources ({wrong}): install the package again"
    library.regard_large_pages.restype = None
    if library.regard_isa() is None:
        return None, f"REGARD_ISA={os.environ.get('REGARD_ISA')!r} names no instruction set"
    return library, None


LIBRARY, REASON = _load()
SURPRISING = REASON is not None and find() != Found()
"""Whether there are no kernels though they, or their sources, are here: worth a word unasked."""
ISA: str | None = LIBRARY.regard_isa().decode() if LIBRARY is not None else None


@functools.lru_cache(maxsize=256)
def number(name: str, *arguments: int) -> int:
    """One of the sizes that the library alone knows, such as the tokens between the states that it keeps."""
    function = getattr(LIBRARY, name)
    function.restype = ctypes.c_int64
    found: int = function(*map(ctypes.c_int64, arguments))
    return found


def fresh(*tensors: Tensor) -> None:
    """Prepare memory that a kernel is about to fill: large pages under long tensors, where the system has them."""
    for x in tensors:
        if x.nbytes >= LONG:
            LIBRARY.regard_large_pages(ctypes.c_void_p(x.data_ptr()), ctypes.c_int64(x.nbytes))


def run(name: str, *records: bytes) -> None:
    """Call a kernel with torch's number of threads; raises RuntimeError with the library's words where it fails."""
    torch.get_num_threads()  # gives a new thread its share: OpenMP's setting belongs to the calling thread
    status = getattr(LIBRARY, name)(*records)  # ctypes lets other Python threads run meanwhile
    if status:
        raise RuntimeError(f"{name}: {LIBRARY.regard_error(status).decode()}")
