"""The shared library of csrc/: finding it, loading it, and its two structs, whose meaning csrc/regard.h tells."""

from __future__ import annotations

import ctypes
import os
import struct
import sys
from pathlib import Path
from typing import Any

import torch  # before the library: its OpenMP symbols bind to the runtime that torch has loaded
from torch import Tensor

__all__ = ["CALL", "GRAD", "ISA", "LIBRARY", "OPTIONS", "REASON", "fresh", "run"]

NAME = "libregard.so.1"
LONG = 2**22  # bytes of a tensor for which large pages are asked


class Record:
    """A C struct by lines of `type: names`, where ``name[n]`` is an array: packs its values, arrays entry by entry.

    As `struct.Struct`, which takes a fifth of the time of a `ctypes.Structure`.
    """

    def __init__(self, fields: str) -> None:
        codes = {"int64": "q", "int32": "i", "float": "f", "pointer": "P"}
        self.names: list[str] = []
        layout = "@"
        for line in fields.strip().splitlines():
            kind, names = line.split(":")
            for name in names.split():
                base, _, count = name.rstrip("]").partition("[")
                self.names.append(base)
                layout += count + codes[kind.strip()]
        self._struct = struct.Struct(layout + "0q")  # ends where an int64 could follow, as C pads
        self.size, self.pack = self._struct.size, self._struct.pack


# regard_attention in two parts: what every call gives, and what most leave out
CALL = Record("""
    int64: batch q_heads kv_heads q_len k_len k_dim v_dim
    int32: dtype
    float: scale softcap
    pointer: q k v out lse lse_low
    int32: out_f32
    int64: q_stride[3] k_stride[3] v_stride[3] out_stride[3]
    pointer: q_start
    int64: low high
""")
OPTIONS = Record("""
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
GRAD = Record("""
    pointer: d_out d_lse out d_q d_k d_v d_bias
    int64: d_bias_stride[4]
    pointer: d_relative
""")
# csrc/recurrent.h
RECURRENCE = Record("""
    int64: batch key_heads heads tokens k_dim v_dim
    int32: dtype channel
    float: scale
    pointer: q k v out
    int64: out_f32 q_stride[3] k_stride[3] v_stride[3] out_stride[3]
    pointer: beta
    int64: beta_stride[3]
    pointer: log_decay
    int64: decay_stride[3]
    pointer: starts state last kept
""")
RECURRENCE_GRAD = Record("pointer: d_out d_last d_q d_k d_v d_beta d_log_decay d_state")
SCAN = Record("""
    int64: batch tokens width
    pointer: log_a x starts state y last
""")
SCAN_GRAD = Record("pointer: y d_y d_last d_log_a d_x d_state")
SELECTIVE = Record("""
    int64: batch tokens width states
    pointer: x dt A B C D starts state y last kept
""")
SELECTIVE_GRAD = Record("pointer: d_y d_last d_x d_dt d_A d_B d_C d_D d_state")
CONV = Record("""
    int64: batch tokens channels taps
    pointer: x
    int64: x_stride[2]
    pointer: weight bias starts state y
""")
CONV_GRAD = Record("pointer: d_y d_x d_weight d_bias d_state")
_RECORDS = (RECURRENCE, RECURRENCE_GRAD, SCAN, SCAN_GRAD, SELECTIVE, SELECTIVE_GRAD, CONV, CONV_GRAD)


def _find() -> Path | None:
    named = os.environ.get("REGARD_LIBRARY")  # a build made apart, with sanitizers say
    if named:
        return Path(named)
    folders = sys.modules[__name__.split(".")[0]].__path__  # an editable install has two: the sources' and its own
    return next((path for folder in folders if (path := Path(folder) / NAME).exists()), None)


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


_EXPORTS = ("regard_isa", "regard_error", "regard_struct_size", "regard_large_pages", "regard_attention_forward")


def _load() -> tuple[Any, str | None]:
    """(the library, None) or (None, why there is none)."""
    path = _find()
    if path is None:
        return None, "the kernels were not built: the package holds no libregard.so.1 (installing needs a C++ compiler)"
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
    library.regard_struct_size.restype = ctypes.c_int64
    for which, size in enumerate((CALL.size + OPTIONS.size, GRAD.size, *(record.size for record in _RECORDS))):
        if library.regard_struct_size(which) != size:
            return None, f"the kernels in {path} were built from other sources: install the package again"
    library.regard_large_pages.restype = None
    if library.regard_isa() is None:
        return None, f"REGARD_ISA={os.environ.get('REGARD_ISA')!r} names no instruction set"
    return library, None


LIBRARY, REASON = _load()
ISA: str | None = LIBRARY.regard_isa().decode() if LIBRARY is not None else None


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
