"""Reading and writing the files of a checkpoint folder: JSON and safetensors, never anything that runs code."""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from regard.errors import CheckpointError

__all__ = [
    "Asked",
    "SafetensorsSource",
    "Source",
    "check_readable",
    "is_file",
    "is_folder",
    "path_of",
    "read_json",
    "read_text",
    "replacing",
]

FLOATING = frozenset({"F16", "BF16", "F32", "F64"})
"""The dtypes that a parameter may have, as safetensors spells them."""
PASSING = 2**24  # bytes
PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack")
"""Suffixes of files of weights that are never opened: reading them may run code."""
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


class Source(Protocol):
    """Named tensors that are read one at a time."""

    where: str
    mapped: bool  # whether tensors are views of the file that take no memory until they are read

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Every tensor's shape, without reading the tensors."""
        ...

    def foreign(self) -> Mapping[str, str]:
        """The tensors whose dtype no parameter may have, each with that dtype's name."""
        ...

    def read(self, name: str) -> Tensor:
        """One tensor; it may be mapped from the file rather than copied."""
        ...

    def read_once(self, name: str) -> Tensor:
        """One tensor that is copied at once: the file is unmapped again, so its pages leave memory."""
        ...


def _unreadable(path: Path, error: OSError) -> CheckpointError:
    return CheckpointError(f"{path}: cannot be read ({error.strerror or error})")


def _is(kind: Callable[[int], bool], path: Path) -> bool:
    try:
        return kind(path.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: the name holds a null character
        return False
    except OSError as e:
        raise _unreadable(path, e) from None


def is_file(path: Path) -> bool:
    """Whether there is such a file; CheckpointError where the system does not let that be known."""
    return _is(stat.S_ISREG, path)


def is_folder(path: Path) -> bool:
    """Whether there is such a folder; CheckpointError where the system does not let that be known."""
    return _is(stat.S_ISDIR, path)


def check_readable(path: Path) -> None:
    """Raises CheckpointError where the system does not let a file be read, as where permission is missing."""
    try:
        path.open("rb").close()
    except OSError as e:
        raise _unreadable(path, e) from None


def read_json(path: Path) -> dict[str, Any]:
    """A file that holds one JSON object.

    Raises:
        CheckpointError: where it does not, and where it cannot be read.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise _unreadable(path, e) from None
    except (UnicodeDecodeError, ValueError, RecursionError) as e:
        raise CheckpointError(f"{path}: not a readable JSON file ({e})") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected one JSON object, got {type(value).__name__}")
    return value


def read_text(path: Path) -> str:
    """A file of text.

    Raises:
        CheckpointError: where it is none in UTF-8, and where it cannot be read.
    """
    try:
        return path.read_text(encoding="utf-8")
    except OSError as e:
        raise _unreadable(path, e) from None
    except UnicodeDecodeError as e:
        raise CheckpointError(f"{path}: not a text in UTF-8 ({e})") from None


class SafetensorsSource:
    """``model.safetensors``, or the shards that ``model.safetensors.index.json`` names.

    Tensors are mapped from the file, so a folder larger than memory opens at once and pages come as they are used.

    Raises:
        CheckpointError: for a folder with neither file, a shard that is absent, outside the folder, damaged or not to
            be read, and an index that does not say what the shards hold.
    """

    mapped = True

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._passing: tuple[str, Any] | None = None  # a second mapping of a shard, for tensors that are copied
        self._passed = 0  # bytes read through it
        self._open_files: dict[str, Any] = {}
        self._shard: dict[str, str] = {}
        if is_file(folder / SINGLE):
            self.where = str(folder / SINGLE)
            self._shard = dict.fromkeys(self._open(folder, SINGLE).keys(), SINGLE)
        elif is_file(folder / INDEX):
            self.where = str(folder / INDEX)
            self._read_index(folder, read_json(folder / INDEX))
        else:
            other = sorted(name for name in _names(folder) if Path(name).suffix in PICKLED)
            found = f"{', '.join(other)}, which are never opened" if other else "neither"
            raise CheckpointError(f"{folder}: expected {SINGLE}, or {INDEX} with its shards, got {found}")

    def _open(self, folder: Path, name: str) -> Any:
        self._open_files[name] = file = _opened(folder / name)
        return file

    def _read_index(self, folder: Path, index: Mapping[str, Any]) -> None:
        table = index.get("weight_map")
        if not isinstance(table, dict) or not all(isinstance(v, str) for v in table.values()):
            raise CheckpointError(f"{self.where}: weight_map: expected an object from tensor names to shard files")
        shards = sorted(set(table.values()))
        for shard in shards:
            if Path(shard).name != shard or "\\" in shard or shard in ("", ".", ".."):
                raise CheckpointError(f"{self.where}: weight_map: expected names of files in the folder, got {shard!r}")
        for shard in shards:
            if not is_file(folder / shard):
                raise CheckpointError(f"{self.where}: names the shard {shard!r}, which is absent from {folder}")
            held = set(self._open(folder, shard).keys())
            named = {name for name, s in table.items() if s == shard}
            if held != named:
                raise CheckpointError(
                    f"{self.where}: does not say what {shard} holds; named but absent: {sorted(named - held)}; "
                    f"present but not named: {sorted(held - named)}"
                )
        self._shard = dict(table)

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: tuple(self._open_files[s].get_slice(name).get_shape()) for name, s in self._shard.items()}

    def foreign(self) -> Mapping[str, str]:
        kinds = {name: str(self._open_files[s].get_slice(name).get_dtype()) for name, s in self._shard.items()}
        return {name: kind for name, kind in kinds.items() if kind not in FLOATING}

    def read(self, name: str) -> Tensor:
        return self._read(self._open_files[self._shard[name]], name)

    def _read(self, file: Any, name: str) -> Tensor:
        from safetensors import SafetensorError

        try:
            tensor: Tensor = file.get_tensor(name)
        except (SafetensorError, OSError, ValueError, KeyError, AttributeError) as e:
            raise CheckpointError(f"{self.where}: {name} cannot be read ({e})") from None
        return tensor

    def read_once(self, name: str) -> Tensor:
        shard = self._shard[name]
        if self._passing is None or self._passing[0] != shard or self._passed > PASSING:
            self._passing = None  # the pages that it has touched go with it
            self._passing, self._passed = (shard, _opened(self._folder / shard)), 0
        tensor = self._read(self._passing[1], name)
        self._passed += tensor.nbytes
        return tensor


def _opened(path: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    check_readable(path)  # safetensors says of such a file that there is none
    try:
        file: Any = safe_open(str(path), framework="pt")
        file.keys()
    except (SafetensorError, OSError, ValueError) as e:
        raise CheckpointError(f"{path}: damaged or not a safetensors file ({e})") from None
    return file


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError as e:
        raise _unreadable(folder, e) from None


_TEMPORARY = re.compile(r"\..+\.(json|safetensors)\.\d+\.tmp")


@contextmanager
def replacing(folder: Path) -> Iterator[Callable[[str], Path]]:
    """Files written beside their places and moved there together at the end; nothing remains of a failed attempt.

    The folder is made where there is none, and removed again if the attempt fails. What an attempt that was killed left
    behind is removed first, so one process at a time writes into a folder.

    Gives a function from a file's name to the path to write.
    """
    written: dict[Path, Path] = {}

    def place(name: str) -> Path:
        temporary = folder / f".{name}.{os.getpid()}.tmp"
        written[temporary] = folder / name
        return temporary

    made = [p for p in (folder, *folder.parents) if not p.exists()]  # the innermost first
    done = False
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.iterdir():
            if _TEMPORARY.fullmatch(path.name):
                path.unlink(missing_ok=True)
        yield place
        for temporary, final in written.items():
            os.replace(temporary, final)
        done = True
    finally:
        for temporary, final in written.items():
            temporary.unlink(missing_ok=True)
            if made and not done:
                final.unlink(missing_ok=True)
        for path in [] if done else made:
            with suppress(OSError):  # never made, or somebody else has put something there
                path.rmdir()


def path_of(name: str, path: object) -> Path:
    if not isinstance(path, (str, Path)):
        raise TypeError(f"{name}: expected a path as text or pathlib.Path, got {path!r}")
    return Path(path)


class Asked:
    """Tells whether tensors are in a file, ``None`` without one, and keeps the answers: saving gives the same ones."""

    def __init__(self, has: Callable[[str], bool | None]) -> None:
        self.has, self.answers = has, dict[str, bool | None]()

    def __call__(self, name: str) -> bool | None:
        return self.answers.setdefault(name, self.has(name))
