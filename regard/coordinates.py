"""Where the queries and keys of one call stand: the coordinates that masks and biases read.

A call has ``Tq`` query rows and ``Tk`` key columns. Row ``r`` stands at slot ``i = q_start + r`` and column ``c`` at
slot ``j = c`` (``q_start`` defaults to ``Tk - Tq``: the queries are the last slots). In a packed call (`Packing`)
``i`` and ``j`` are counted inside each segment instead. `Coordinates` knows this for a whole call and hands it out tile
by tile: as index tensors (`TileIndices`), or as integer ranges (`TileBounds`), which is all that a block layout needs.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

__all__ = [
    "Coordinates",
    "Packing",
    "TileIndices",
    "TileBounds",
    "can_read",
    "has_values",
    "is_recording",
    "plain_eager",
    "plain_tensors",
]


_KEYS = torch._C._TorchDispatchModeKey
_RECORDERS = (_KEYS.PROXY, _KEYS.FAKE, _KEYS.FUNCTIONAL)


def is_recording() -> bool:
    """Whether a compiler or a tracer follows the operations: a value that is looked at would be frozen into a graph."""
    if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
        return True
    return torch._C._len_torch_dispatch_stack() > 0 and any(map(torch._C._get_dispatch_mode, _RECORDERS))


def has_values(tensor: Tensor) -> bool:
    """Whether `tensor` holds values that may be looked at here, be it by waiting for a device: eager mode, outside
    function transforms, neither fake nor on the meta device."""
    if type(tensor) not in (Tensor, torch.nn.Parameter) or is_recording():
        return False
    return tensor.device.type != "meta" and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def can_read(tensor: Tensor) -> bool:
    """Whether the values of `tensor` may be looked at here without waiting: as `has_values`, and on the CPU."""
    return tensor.device.type == "cpu" and has_values(tensor)


@contextlib.contextmanager
def plain_tensors() -> Iterator[None]:
    """Where tensors are made with values, on the CPU, whatever the default device and though tensors be fake: for the
    constants of a layer, which it keeps as numbers."""
    with unset_fake_temporarily(), torch.device("cpu"):
        yield


@dataclass(frozen=True)
class TileIndices:
    """A tile of (query, key) pairs as integer tensors that broadcast against ``(B, H, rows, columns)``."""

    b: Tensor
    h: Tensor
    i: Tensor  # the query's slot
    j: Tensor  # the key's slot
    row: Tensor  # the query's row in the call
    col: Tensor  # the key's column in the call
    origin: tuple[int, int] = (0, 0)  # the tile's first row and column

    def shifted(self, by: int) -> TileIndices:
        """The same pairs in coordinates whose slots and columns start `by` earlier."""
        origin = (self.origin[0], self.origin[1] + by)
        return TileIndices(self.b, self.h, self.i + by, self.j + by, self.row, self.col + by, origin)


@dataclass(frozen=True)
class TileBounds:
    """A tile as inclusive ranges of slots, ``i_low..i_high`` by ``j_low..j_high``, and its rows and columns."""

    i_low: int
    i_high: int
    j_low: int
    j_high: int
    rows: tuple[int, int]
    cols: tuple[int, int]
    ragged: bool = False  # the slots differ between batch rows, so the ranges are only an outer bound

    @property
    def distance(self) -> tuple[int, int]:
        """The smallest and largest ``i - j`` in the tile."""
        return self.i_low - self.j_high, self.i_high - self.j_low

    def shifted(self, by: int) -> TileBounds:
        """The same tile in coordinates whose slots and columns start `by` earlier."""
        low, high = self.cols
        return TileBounds(
            self.i_low + by,
            self.i_high + by,
            self.j_low + by,
            self.j_high + by,
            self.rows,
            (low + by, high + by),
            self.ragged,
        )


@dataclass(frozen=True, eq=False)
class Packing:
    """Sequences laid end to end in one row: query and key lengths of each; empty ones are allowed on either side."""

    q_lengths: tuple[int, ...]
    k_lengths: tuple[int, ...]
    q_local: tuple[int, ...] = field(init=False, repr=False)
    k_local: tuple[int, ...] = field(init=False, repr=False)
    q_ids: tuple[int, ...] = field(init=False, repr=False)
    k_ids: tuple[int, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        pairs = list(zip(self.q_lengths, self.k_lengths, strict=True))
        flat = itertools.chain.from_iterable
        # bottom-right inside each segment: its queries are the last of its slots
        object.__setattr__(self, "q_local", tuple(flat(range(k - q, k) for q, k in pairs)))
        object.__setattr__(self, "k_local", tuple(flat(range(k) for _, k in pairs)))
        object.__setattr__(self, "q_ids", tuple(flat([n] * q for n, (q, _) in enumerate(pairs))))
        object.__setattr__(self, "k_ids", tuple(flat([n] * k for n, (_, k) in enumerate(pairs))))


class Coordinates:
    """The coordinates of one call, handed out tile by tile.

    `q_start` is an int or an integer tensor ``(B,)``; `packing` replaces it for packed rows.
    """

    def __init__(
        self,
        batch: int,
        heads: int,
        q_len: int,
        k_len: int,
        q_start: int | Tensor,
        packing: Packing | None = None,
        device: torch.device | None = None,
    ) -> None:
        self.batch, self.heads, self.q_len, self.k_len = batch, heads, q_len, k_len
        self.q_start, self.packing, self.device = q_start, packing, device
        self.start_range: tuple[int, int] | None = None  # the smallest and largest start, where known
        if not isinstance(q_start, Tensor):
            self.start_range = (q_start, q_start)
        elif can_read(q_start):  # without batch rows any start will do
            self.start_range = (int(q_start.min()), int(q_start.max())) if q_start.numel() else (0, 0)

    def indices(self, rows: tuple[int, int] | None = None, cols: tuple[int, int] | None = None) -> TileIndices:
        """The index tensors of rows ``rows[0]:rows[1]`` by columns ``cols[0]:cols[1]`` (all of them by default)."""
        r0, r1 = rows if rows is not None else (0, self.q_len)
        c0, c1 = cols if cols is not None else (0, self.k_len)
        row = torch.arange(r0, r1, device=self.device).view(1, 1, -1, 1)
        col = torch.arange(c0, c1, device=self.device).view(1, 1, 1, -1)
        i: Tensor
        if self.packing is not None:
            i = self._local(self.packing.q_local, r0, r1).view(1, 1, -1, 1)
            j = self._local(self.packing.k_local, c0, c1).view(1, 1, 1, -1)
        else:
            start = self.q_start
            i = row + (start.to(row.device).view(-1, 1, 1, 1) if isinstance(start, Tensor) else start)
            j = col
        b = torch.arange(self.batch, device=self.device).view(-1, 1, 1, 1)
        h = torch.arange(self.heads, device=self.device).view(1, -1, 1, 1)
        return TileIndices(b, h, i, j, row, col, (r0, c0))

    def bounds(self, rows: tuple[int, int], cols: tuple[int, int]) -> TileBounds | None:
        """The integer ranges of the same tile, or None where they cannot be known without reading traced values."""
        if self.packing is not None:
            i, j = self.packing.q_local[slice(*rows)], self.packing.k_local[slice(*cols)]
            return TileBounds(min(i), max(i), min(j), max(j), rows, cols, ragged=True)
        if self.start_range is None:
            return None
        low, high = self.start_range
        return TileBounds(low + rows[0], high + rows[1] - 1, cols[0], cols[1] - 1, rows, cols, ragged=low != high)

    def _local(self, values: Sequence[int], low: int, high: int) -> Tensor:
        return torch.tensor(values[low:high], dtype=torch.long, device=self.device)


def plain_eager(positions: Tensor) -> bool:
    """Whether a tensor holds plain values now: not traced, not batched by vmap, not wrapped, not differentiated."""
    return (
        not torch.compiler.is_compiling()
        and not torch._C._is_tracing()
        and type(positions) is Tensor
        and not positions.requires_grad
        and not torch._C._are_functorch_transforms_active()
        and torch._C._len_torch_dispatch_stack() == 0
    )
