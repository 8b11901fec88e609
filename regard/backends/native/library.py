"""The shared library of csrc/: finding it, loading it, and its two structs. See csrc/regard.h for their meaning."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path
from typing import Any

import torch  # before the library: its OpenMP symbols bind to the runtime that torch has loaded

__all__ = ["ISA", "LIBRARY", "REASON", "CallRecord", "GradRecord", "run"]

NAME = "libregard.so"


def _fields(text: str) -> list[tuple[str, Any]]:
    """The fields of a struct from lines of `type: names`; `name[n]` is an array, a pointer is an address."""
    kinds: dict[str, Any] = {
        "int64": ctypes.c_int64,
        "int32": ctypes.c_int32,
        "float": ctypes.c_float,
        "pointer": ctypes.c_void_p,
    }
    found = []
    for line in text.strip().splitlines():
        kind, names = line.split(":")
        for name in names.split():
            base, _, count = name.rstrip("]").partition("[")
            found.append((base, kinds[kind.strip()] * int(count) if count else kinds[kind.strip()]))
    return found


class CallRecord(ctypes.Structure):
    """``regard_attention``."""

    _fields_ = _fields("""
        int64: batch q_heads kv_heads q_len k_len k_dim v_dim
        int32: dtype
        float: scale softcap
        pointer: q k v out lse
        int32: out_f32
        int64: q_stride[3] k_stride[3] v_stride[3] out_stride[3]
        pointer: q_start
        int64: low high
        pointer: prefix k_length keep q_segment k_segment mask
        int64: mask_stride[4]
        pointer: layout
        int64: layout_stride[4] layout_rows layout_cols
        pointer: bias
        int64: bias_stride[4]
        pointer: relative
        int64: relative_stride relative_zero relative_count
        float: dropout_p
        int64: dropout_seed
    """)


class GradRecord(ctypes.Structure):
    """``regard_attention_grad``."""

    _fields_ = _fields("""
        pointer: d_out d_lse out d_q d_k d_v d_bias
        int64: d_bias_stride[4]
        pointer: d_relative
    """)


def _find() -> Path | None:
    named = os.environ.get("REGARD_LIBRARY")  # a build made apart, with sanitizers say
    if named:
        return Path(named)
    folders = sys.modules[__name__.split(".")[0]].__path__  # an editable install has two: the sources' and its own
    return next((path for folder in folders if (path := Path(folder) / NAME).exists()), None)


def _load() -> tuple[Any, str | None]:
    """(the library, None) or (None, why there is none)."""
    path = _find()
    if path is None:
        return None, "the kernels were not built: the package holds no libregard.so (installing needs a C++ compiler)"
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        return None, f"the kernels could not be loaded: {error}"
    library.regard_isa.restype = ctypes.c_char_p
    library.regard_error.restype = ctypes.c_char_p
    library.regard_struct_size.restype = ctypes.c_int64
    for which, record in enumerate((CallRecord, GradRecord)):
        if library.regard_struct_size(which) != ctypes.sizeof(record):
            return None, f"the kernels in {path} were built from other sources: install the package again"
    if library.regard_isa() is None:
        return None, f"REGARD_ISA={os.environ.get('REGARD_ISA')!r} names no instruction set"
    return library, None


LIBRARY, REASON = _load()
ISA: str | None = LIBRARY.regard_isa().decode() if LIBRARY is not None else None


def run(name: str, *records: ctypes.Structure) -> None:
    """Call a kernel with torch's number of threads; raises RuntimeError with the library's words where it fails."""
    torch.get_num_threads()  # gives a new thread its share: OpenMP's setting belongs to the calling thread
    status = getattr(LIBRARY, name)(*(ctypes.byref(record) for record in records))
    if status:
        raise RuntimeError(f"{name}: {LIBRARY.regard_error(status).decode()}")
