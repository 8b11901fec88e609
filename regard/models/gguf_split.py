"""A model that is split over several GGUF files, which are found by their names."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from regard.errors import CheckpointError
from regard.models.files import is_file
from regard.models.gguf_file import GGUFSource

__all__ = ["SplitGGUF", "open_gguf"]

_NAME = re.compile(r"(?P<stem>.*)-(?P<number>[0-9]{5})-of-(?P<count>[0-9]{5})\.gguf")
_NO, _COUNT, _TENSORS = "split.no", "split.count", "split.tensors.count"


class SplitGGUF:
    """The shards of one model as one source; the first one's metadata are the model's.

    Raises:
        CheckpointError: where shards hold a tensor twice, or a later one states what the first does not.
    """

    mapped = False  # as of each shard

    def __init__(self, shards: Sequence[GGUFSource]) -> None:
        first, *others = shards
        self.where = first.where
        self.metadata = first.metadata
        self._of: dict[str, GGUFSource] = {}
        for shard in shards:
            for name in shard.shapes():
                if name in self._of:
                    raise CheckpointError(f"{shard.where}: holds {name}, which {self._of[name].where} holds too")
                self._of[name] = shard
        for shard in others:
            for key, value in shard.metadata.items():
                own = key.startswith("split.") or key == "general.alignment"  # of each file's own
                if not own and (key not in self.metadata or self.metadata[key] != value):
                    raise CheckpointError(f"{shard.where}: states {key}, which {first.where} does not state so")

    def has(self, name: str) -> bool:
        return name in self._of

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        shards = dict.fromkeys(self._of.values())
        return {name: shape for shard in shards for name, shape in shard.shapes().items()}

    def foreign(self) -> Mapping[str, str]:
        shards = dict.fromkeys(self._of.values())
        return {name: kind for shard in shards for name, kind in shard.foreign().items()}

    def read(self, name: str) -> Tensor:
        return self._of[name].read(name)

    def read_once(self, name: str) -> Tensor:
        return self._of[name].read_once(name)


def open_gguf(path: Path) -> GGUFSource | SplitGGUF:
    """A GGUF file; where it is one of several that hold a model together, all of them, whichever is given.

    Raises:
        CheckpointError: where shards are absent, or are not what their names and their metadata say; and all that
            `GGUFSource` refuses.
    """
    given = GGUFSource(path)
    named = _NAME.fullmatch(path.name)
    count, by_name = _number(given, _COUNT, 1), 1 if named is None else int(named["count"])
    if max(count, by_name) <= 1:
        _check_tensors([given])
        return given
    if named is None or by_name != count:
        raise CheckpointError(
            f"{path}: split.count: expected the N of names that end in -00001-of-N.gguf to -N-of-N.gguf, N in five "
            f"digits, got {given.metadata.get(_COUNT)!r}"
        )
    paths = [path.with_name(f"{named['stem']}-{i + 1:05d}-of-{count:05d}.gguf") for i in range(count)]
    if absent := [p.name for p in paths if not is_file(p)]:
        more = f" and {len(absent) - 3} more" if len(absent) > 3 else ""
        raise CheckpointError(f"{path}: the model is split over {count} files; absent: {', '.join(absent[:3])}{more}")
    shards = [given if p == path else GGUFSource(p) for p in paths]
    for i, shard in enumerate(shards):
        for key, right in ((_NO, i), (_COUNT, count)):
            if _number(shard, key, -1) != right:
                raise CheckpointError(
                    f"{shard.where}: {key}: expected {right}, as its name says, got {shard.metadata.get(key)!r}"
                )
    _check_tensors(shards)
    return SplitGGUF(shards)


def _number(source: GGUFSource, key: str, default: int) -> int:
    value = source.metadata.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int):
        raise CheckpointError(f"{source.where}: {key}: expected an integer, got {value!r}")
    return value


def _check_tensors(shards: Sequence[GGUFSource]) -> None:
    """Raises where a file states another number of tensors than all hold together."""
    held = sum(len(shard.shapes()) for shard in shards)
    for shard in shards:
        if (stated := _number(shard, _TENSORS, held)) != held:
            raise CheckpointError(f"{shard.where}: {_TENSORS}={stated}, but there are {held} tensors")
