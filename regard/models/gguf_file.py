"""One GGUF file: its metadata and its tensors, quantised or not.

The format (versions 2 and 3, little endian): a magic word, counts, metadata as typed key/value pairs, a list of
tensors, then their aligned data. https://github.com/ggml-org/ggml/blob/master/docs/gguf.md

The header is read here, and not by ``GGUFReader`` of the `gguf` package, because on a torn file that fails with errors
that name neither file nor place (IndexError, ValueError), and it makes several arrays of each entry of a
vocabulary; dequantising is the package's.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.errors import CheckpointError
from regard.models.files import check_readable

__all__ = ["GGUFSource"]

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9


class _Cursor:
    """Reads a byte string from front to back; running past its end is an error that names the file."""

    def __init__(self, data: memoryview, where: str) -> None:
        self.data, self.where, self.at = data, where, 0

    def take(self, count: int) -> memoryview:
        if count > len(self.data) - self.at:
            raise CheckpointError(
                f"{self.where}: ends too early: {count} bytes wanted at {self.at} of {len(self.data)}"
            )
        self.at += count
        return self.data[self.at - count : self.at]

    def number(self, code: str) -> Any:
        (value,) = struct.unpack(code, self.take(struct.calcsize(code)))
        return value

    def text(self) -> str:
        raw = bytes(self.take(self.number("<Q")))
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            raise CheckpointError(f"{self.where}: text at {self.at} is not UTF-8") from None

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            inner, count = self.number("<I"), self.number("<Q")
            if inner in _SCALARS:
                code = _SCALARS[inner]
                raw = self.take(count * struct.calcsize(code))
                return [v for (v,) in struct.iter_unpack(code, raw)]
            if count > len(self.data):
                raise CheckpointError(
                    f"{self.where}: an array of {count} entries at {self.at} of {len(self.data)} bytes"
                )
            return [self.value(inner) for _ in range(count)]
        if kind not in _SCALARS:
            raise CheckpointError(f"{self.where}: unknown kind of value {kind} at {self.at}")
        return self.number(_SCALARS[kind])


class _Info(NamedTuple):
    """One tensor: its shape (rows first), its quantisation and where its data begin."""

    shape: tuple[int, ...]
    kind: Any
    start: int
    nbytes: int


class GGUFSource:
    """The metadata and tensors of a GGUF file; tensors are dequantised to float32 as they are read.

    Raises:
        CheckpointError: for a file of another kind or version, one that ends too early, and an unknown quantisation.
    """

    mapped = False  # every tensor is dequantised or copied

    def __init__(self, path: Path) -> None:
        import numpy as np

        self.where = str(path)
        check_readable(path)
        if path.stat().st_size == 0:
            raise CheckpointError(f"{path}: expected a GGUF file, got an empty one")
        self._data = np.memmap(path, mode="r")
        cursor = _Cursor(memoryview(self._data), self.where)  # type: ignore[arg-type]  # numpy's stubs before 2.3
        magic = bytes(cursor.take(min(4, len(self._data))))
        if magic != b"GGUF":
            raise CheckpointError(f"{path}: expected a GGUF file, which begins with b'GGUF', got {magic!r}")
        version = cursor.number("<I")
        if version not in (2, 3):
            raise CheckpointError(f"{path}: version: expected 2 or 3, little endian, got {version}")
        tensors, pairs = cursor.number("<Q"), cursor.number("<Q")
        self.metadata: dict[str, Any] = {}
        for _ in range(pairs):
            key = cursor.text()
            self.metadata[key] = cursor.value(cursor.number("<I"))
        self._infos = self._read_infos(cursor, tensors)

    def _read_infos(self, cursor: _Cursor, count: int) -> dict[str, _Info]:
        raw = []
        for _ in range(count):
            name, dims = cursor.text(), cursor.number("<I")
            shape = tuple(cursor.number("<Q") for _ in range(dims))[::-1]
            raw.append((name, shape, cursor.number("<I"), cursor.number("<Q")))
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise CheckpointError(f"{self.where}: general.alignment: expected a positive integer, got {alignment!r}")
        base = -(-cursor.at // alignment) * alignment
        infos: dict[str, _Info] = {}
        for name, shape, code, offset in raw:
            if name in infos:
                raise CheckpointError(f"{self.where}: holds {name} twice")
            infos[name] = self._info(name, shape, code, base + offset)
        return infos

    def _info(self, name: str, shape: tuple[int, ...], code: int, start: int) -> _Info:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        try:
            kind = GGMLQuantizationType(code)
        except ValueError:
            raise CheckpointError(f"{self.where}: {name} has the unknown quantisation {code}") from None
        block, size = GGML_QUANT_SIZES[kind]
        if not shape or shape[-1] % block:
            raise CheckpointError(
                f"{self.where}: {name} of shape {shape} does not divide into {kind.name} blocks of {block}"
            )
        nbytes = math.prod(shape) // block * size
        if start + nbytes > len(self._data):
            raise CheckpointError(
                f"{self.where}: ends too early: {name} needs {start + nbytes} of {len(self._data)} bytes"
            )
        return _Info(shape, kind, start, nbytes)

    def has(self, name: str) -> bool:
        return name in self._infos

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: info.shape for name, info in self._infos.items()}

    def foreign(self) -> Mapping[str, str]:
        whole = ("I8", "I16", "I32", "I64")
        return {name: info.kind.name for name, info in self._infos.items() if info.kind.name in whole}

    def read(self, name: str) -> Tensor:
        from gguf import quants

        info = self._infos[name]
        raw = self._data[info.start : info.start + info.nbytes].reshape(*info.shape[:-1], -1)
        try:
            values = quants.dequantize(raw, info.kind)
        except NotImplementedError as e:
            raise CheckpointError(f"{self.where}: {name}: {info.kind.name} cannot be dequantised ({e})") from None
        return torch.from_numpy(
            values.reshape(info.shape).copy() if not values.flags.owndata else values.reshape(info.shape)
        )

    def read_once(self, name: str) -> Tensor:
        return self.read(name)
