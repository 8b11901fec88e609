"""The structs of the C interface, whose meaning csrc/regard.h and csrc/recurrent.h tell.

The layout comes from the library itself. Here stand the names in the order in which values are packed; loading compares
every name and checks that the library's offsets leave nothing out.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

__all__ = [
    "ATTENTION",
    "ATTENTION_GRAD",
    "CONV",
    "CONV_GRAD",
    "RECURRENCE",
    "RECURRENCE_GRAD",
    "SCAN",
    "SCAN_GRAD",
    "SELECTIVE",
    "SELECTIVE_GRAD",
    "STRUCTS",
    "Struct",
]

_FORMATS = {"q": ("q", 8), "i": ("i", 4), "f": ("f", 4), "P": ("Q", 8)}  # of the library's codes: ours, and bytes


class Part:
    """Fields that follow each other: packs their values, arrays entry by entry, in a fifth of the time of ctypes."""

    def __init__(self, fields: str) -> None:
        self.names = fields.split()
        self.size = 0
        self.pack: Callable[..., bytes] = _not_loaded

    def use(self, layout: str, size: int) -> None:
        made = struct.Struct(layout)
        assert made.size == size
        self.size, self.pack = size, made.pack


def _not_loaded(*_: Any) -> bytes:
    raise RuntimeError("the kernels are not loaded")


class Struct:
    """A struct by the names of its fields, in parts that are packed one after the other."""

    def __init__(self, name: str, *parts: str) -> None:
        self.name, self.parts = name, tuple(map(Part, parts))

    @property
    def pack(self) -> Callable[..., bytes]:
        """Packs the first part."""
        return self.parts[0].pack

    def mismatch(self, text: str) -> str | None:
        """Take the layout from the library's description, or say how it differs from what is packed here."""
        name, whole, *words = text.split(" ")
        if name != self.name:
            return f"{name} stands where {self.name} is expected"
        described = (word.split(":") for word in words)
        fields = [(field, code, int(offset), int(size)) for field, code, offset, size in described]
        names = [field for part in self.parts for field in part.names]
        if names != [field for field, *_ in fields]:
            return f"the fields of {name} are others"
        end = 0
        for part in self.parts:
            own, fields = fields[: len(part.names)], fields[len(part.names) :]
            begin, layout = end, "="
            for field, code, offset, size in own:
                letter, width = _FORMATS[code]
                if not 0 <= offset - end < width or size % width:
                    return f"{name}.{field} lies elsewhere"
                layout += f"{offset - end}x{size // width}{letter}"
                end = offset + size
            stop = fields[0][2] if fields else int(whole)
            if not 0 <= stop - end < 8:
                return f"{name} has fields that are not named"
            part.use(f"{layout}{stop - end}x", stop - begin)
            end = stop
        return None


# what every call gives, and what most leave out
ATTENTION = Struct(
    "regard_attention",
    """batch q_heads kv_heads q_len k_len k_dim v_dim dtype scale softcap q k v out lse kept out_f32
    q_stride k_stride v_stride out_stride q_start low high""",
    """prefix k_length keep q_segment k_segment mask mask_stride tile_lines tile_stride tile_column tile_bits bits
    bias bias_stride relative relative_stride relative_zero relative_count dropout_p dropout_seed""",
)
ATTENTION_GRAD = Struct("regard_attention_grad", "d_out d_lse out d_q d_k d_v d_bias d_bias_stride d_relative")
RECURRENCE = Struct(
    "regard_recurrence",
    """batch key_heads heads tokens k_dim v_dim dtype channel scale q k v out out_f32
    q_stride k_stride v_stride out_stride beta beta_stride log_decay decay_stride starts state last kept kept_size""",
)
RECURRENCE_GRAD = Struct("regard_recurrence_grad", "d_out d_last d_q d_k d_v d_beta d_log_decay d_state")
SCAN = Struct("regard_scan", "batch tokens width log_a x starts state y last")
SCAN_GRAD = Struct("regard_scan_grad", "y d_y d_last d_log_a d_x d_state")
SELECTIVE = Struct("regard_selective", "batch tokens width states x dt A B C D starts state y last kept kept_size")
SELECTIVE_GRAD = Struct("regard_selective_grad", "d_y d_last d_x d_dt d_A d_B d_C groups d_D d_state")
CONV = Struct("regard_conv", "batch tokens channels taps x x_stride weight bias starts state y")
CONV_GRAD = Struct("regard_conv_grad", "d_y d_x d_weight d_bias d_state")
STRUCTS = (  # in the library's order
    ATTENTION,
    ATTENTION_GRAD,
    RECURRENCE,
    RECURRENCE_GRAD,
    SCAN,
    SCAN_GRAD,
    SELECTIVE,
    SELECTIVE_GRAD,
    CONV,
    CONV_GRAD,
)
