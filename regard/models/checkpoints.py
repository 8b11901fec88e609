"""Loading a model from a folder or a GGUF file."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from regard.errors import CheckpointError
from regard.models.files import Asked, SafetensorsSource, Source, is_file, is_folder, path_of, read_json
from regard.models.layouts import Layout, Plan, layout_of
from regard.models.model import Model, Origin
from regard.models.tables import ComputedTensor, Row, listed, part_of, parts_of, whole_name
from regard.models.tokenizer import read_end_ids, read_extras, read_tokenizer

__all__ = ["DTYPES", "dtype_of", "load", "place", "read_options", "read_origin", "save", "stated_dtype", "torch_device"]

Progress = Callable[[int, int], None]
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_DTYPE_NAMES = ", ".join(map(str, DTYPES))


def load(
    path: str | Path,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    progress: Progress | None = None,
) -> Model:
    """Loads a model from a Hugging Face folder or a ``.gguf`` file, in evaluation mode.

    A folder holds ``config.json``, ``model.safetensors`` (or shards and their index) and, where it has one,
    ``tokenizer.json``. Of a model that is split over GGUF files any of them may be given. Files that run code when read
    (pickles) are never opened. Nothing is passed over: an option or a tensor that the family's layout does not know is
    an error, unless the layout lists it with a reason.

    Args:
        dtype: of the parameters; ``None`` for what the checkpoint says (float32 for GGUF). The few that a family keeps
            in float32 beside float16 or bfloat16 (rates of decay, corrections of experts' scores) stay so.
        device: where the parameters go; default the CPU. A tensor that needs no conversion stays mapped from its file.
        progress: called with the number of tensors read and their total.

    Raises:
        FileNotFoundError: where there is no such file or folder.
        CheckpointError: for a damaged file, one that may not be read, an unknown family or option, and for tensors that
            are missing, unused, misshapen, of a dtype that no parameter may have (integers, booleans, complex numbers,
            8-bit floats), or tied by the options but different in the file; the text lists them.
        TypeError, ValueError: for an argument of a wrong kind, a ``dtype`` that is not one of float16, bfloat16,
            float32, float64, and a ``device`` that torch does not know.

    >>> model = load("tests/checkpoints/llama")
    >>> model(torch.tensor([[1, 5, 9]])).shape
    torch.Size([1, 3, 97])
    """
    if dtype is not None and dtype not in DTYPES:
        raise TypeError(f"dtype: expected {_DTYPE_NAMES}, or None for the checkpoint's own, got {dtype!r}")
    path, device = path_of("path", path), torch_device(device)
    if is_folder(path):
        return _load_folder(path, dtype, device, progress)
    if not is_file(path):
        raise FileNotFoundError(f"path: expected a folder with config.json, or a .gguf file, got no file: {path}")
    if path.suffix != ".gguf":
        raise CheckpointError(f"path: expected a folder with config.json, or a .gguf file, got {path}")
    from regard.models.gguf import read_gguf

    source, origin, plan = read_gguf(path)
    return _fill(plan, origin, source, dtype or torch.float32, device, progress)


def torch_device(device: object) -> torch.device:
    if isinstance(device, (str, torch.device)) or device is None:
        try:
            return torch.device(device or "cpu")
        except RuntimeError as e:
            raise ValueError(f"device: expected one that torch knows, got {device!r} ({e})") from None
    raise TypeError(f"device: expected a torch.device, its name, or None for the CPU, got {device!r}")


def _load_folder(folder: Path, dtype: torch.dtype | None, device: torch.device, progress: Progress | None) -> Model:
    config, layout = read_options(folder)
    source = _Renamed(SafetensorsSource(folder), layout)
    origin = read_origin(folder, config, layout)
    asked = Asked(source.has)
    plan = layout.read(config, str(folder / "config.json"), asked, source.shapes())
    origin = dataclasses.replace(origin, parts=asked.answers)
    kind = dtype or stated_dtype(config, "config.json") or _largest_dtype(source)
    return _fill(plan, origin, source, kind, device, progress)


def read_options(folder: Path) -> tuple[dict[str, Any], Layout]:
    """The options of a folder, and the family that they name."""
    if not is_file(folder / "config.json"):
        raise CheckpointError(f"path: expected a folder with config.json, got {folder}, which has none")
    config = read_json(folder / "config.json")
    return config, layout_of(config, str(folder / "config.json"))


def read_origin(folder: Path, config: Mapping[str, Any], layout: Layout) -> Origin:
    """What a folder says of its model beside the tensors: the family, its options, its tokenizer."""
    extras = read_extras(folder)
    tokenizer = read_tokenizer(folder, config, extras)
    return Origin(
        layout=layout,
        config=config,
        tokenizer=tokenizer,
        end_ids=read_end_ids(folder, config, extras, tokenizer),
        extras=extras,
    )


def stated_dtype(config: Mapping[str, Any], where: str) -> torch.dtype | None:
    """The dtype that the options state, or ``None`` where they do not."""
    stated = config.get("dtype", config.get("torch_dtype"))
    if stated is None:
        return None
    dtype: torch.dtype | None = getattr(torch, str(stated).removeprefix("torch."), None)
    if dtype is None or dtype not in DTYPES:
        raise CheckpointError(f"{where}: dtype: expected float32, bfloat16, float16 or float64, got {stated!r}")
    return dtype


def _largest_dtype(source: Source) -> torch.dtype:
    """That of the largest tensor."""
    foreign = source.foreign()
    shapes = {name: shape for name, shape in source.shapes().items() if name not in foreign}
    largest = max(shapes, key=lambda n: torch.Size(shapes[n]).numel(), default=None)
    return torch.float32 if largest is None else source.read(largest).dtype


class _Renamed:
    """A file's tensors under the names of the layout's table: prefix present, old spellings replaced."""

    def __init__(self, source: Source, layout: Layout) -> None:
        self.where = source.where
        self.mapped = source.mapped
        self._source = source
        stored = source.shapes()
        whole = any(name.startswith(layout.prefix) for name in stored)
        self._names: dict[str, str] = {}
        for name in stored:
            own = name if whole or _headed(name, layout) else layout.prefix + name
            for old, new in layout.spellings.items():
                own = own.removesuffix(old) + new if own.endswith(old) else own
            if own in self._names:
                raise CheckpointError(f"{self.where}: {name} and {self._names[own]} are two spellings of one tensor")
            self._names[own] = name
        self._shapes = {own: stored[name] for own, name in self._names.items()}
        foreign = source.foreign()
        self._foreign = {own: foreign[name] for own, name in self._names.items() if name in foreign}

    def has(self, name: str) -> bool:
        return name in self._names

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    def foreign(self) -> Mapping[str, str]:
        return self._foreign

    def read(self, name: str) -> Tensor:
        return self._source.read(self._names[name])

    def read_once(self, name: str) -> Tensor:
        return self._source.read_once(self._names[name])


def _headed(name: str, layout: Layout) -> bool:
    """Whether a name belongs to a head, which has no prefix."""
    return name.startswith("lm_head.") or any(fnmatchcase(name, i.pattern) for i in layout.ignored)


def _fill(
    plan: Plan,
    origin: Origin,
    source: Source,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress | None,
) -> Model:
    """Builds the model without memory, checks every name and shape, then puts the file's tensors in their places."""
    with torch.device("meta"):
        model = plan.make()
    model.origin = origin
    layout = origin.layout
    assert isinstance(layout, Layout)
    names = _check(plan, model, layout, source)
    dtypes = partial(dtype_of, model, layout, dtype)
    for done, row in enumerate(plan.rows):
        name = names.get(row.stored, row.stored)
        copied = any(own != whole_name(own) for own in row.own)
        tensor = source.read_once(name) if copied else source.read(name)
        for own, part in zip(row.own, row.reshape.split(tensor), strict=True):
            if copied:
                part_of(_storage(model, whole_name(own), dtypes, device), own).copy_(part)
                continue
            placed = part.to(device=device, dtype=dtypes(own))
            mapped = source.mapped and placed.data_ptr() == part.data_ptr()
            place(model, own, placed if mapped else _output_major(placed))
        if progress is not None:
            progress(done + 1, len(plan.rows))
    return model.eval()


def dtype_of(model: nn.Module, layout: Layout, dtype: torch.dtype, name: str) -> torch.dtype:
    """The dtype of one tensor: at least float32 for those that the family keeps so, and for every buffer.

    A buffer (a router's correction) is compared with other numbers, and rounding could change the outcome.
    """
    parent, _, leaf = name.rpartition(".")
    buffer = leaf in model.get_submodule(parent)._buffers
    return torch.promote_types(dtype, torch.float32) if buffer else layout.dtype_of(name, dtype)


def _storage(model: nn.Module, name: str, dtypes: Callable[[str], torch.dtype], device: torch.device) -> Tensor:
    """The memory of a parameter that is filled part by part."""
    tensor = model.get_parameter(name)
    if tensor.is_meta:
        place(model, name, torch.empty(tensor.shape, dtype=dtypes(name), device=device))
    return model.get_parameter(name).data


def _output_major(weight: Tensor) -> Tensor:
    """The same matrix; a tall float32 one with its outputs next to each other in memory.

    A CPU's matrix library reads such a matrix about 1.6 times as fast for a single token, and as fast for many.
    """
    tall = weight.ndim == 2 and weight.shape[0] >= 2 * weight.shape[1]
    return (
        weight.t().contiguous().t()
        if tall and weight.device.type == "cpu" and weight.dtype == torch.float32
        else weight
    )


def _check(plan: Plan, model: Model, layout: Layout, source: Source) -> dict[str, str]:
    """Raises for every tensor that does not fit; returns the name under which the tied table is stored."""
    stored = source.shapes()
    described = [own for row in plan.rows for own in row.own]
    targets = parts_of(model.state_dict(), described)
    if sorted(described) != sorted(targets):
        odd = sorted(set(described) ^ set(targets))
        raise CheckpointError(
            f"layout {layout.model_type!r}: the table and the model differ in {odd}; this is a defect of regard"
        )
    tied = [name for name in plan.tied if name in stored]
    names = {plan.tied[0]: tied[0]} if tied else {}
    wanted = {row.stored for row in plan.rows}
    computed = {entry.stored: entry for entry in plan.computed if entry.stored in stored}
    missing = sorted(name for name in wanted if names.get(name, name) not in stored)
    known = wanted | set(tied) | set(computed)
    unused = sorted(
        name for name in stored if name not in known and not any(fnmatchcase(name, i.pattern) for i in layout.ignored)
    )
    shapes = [
        text for row in plan.rows for text in _misshapen(row, stored.get(names.get(row.stored, row.stored)), targets)
    ]
    foreign = [f"{name} is {kind}" for name, kind in sorted(source.foreign().items()) if name in known]
    different = [
        f"{first} and {other}"
        for first, other in itertools.pairwise(tied)
        if not foreign and (stored[first] != stored[other] or not torch.equal(source.read(first), source.read(other)))
    ]
    problems = [
        f"{kind}: {listed(keys)}"
        for kind, keys in (
            ("missing tensors", missing),
            ("unused tensors", unused),
            ("tensors of another shape", shapes),
            (f"tensors of a dtype that no parameter may have (expected {_DTYPE_NAMES})", foreign),
            ("tied by the options (tie_word_embeddings) but different in the file", different),
            ("not as the options say", [] if foreign else _contrary(computed, source)),
        )
        if keys
    ]
    if problems:
        raise CheckpointError(f"{source.where} does not fit the layout {layout.model_type!r}. " + "; ".join(problems))
    return names


def _contrary(computed: Mapping[str, ComputedTensor], source: Source) -> list[str]:
    """The tensors that should follow from the options and do not, beyond rounding."""
    found = []
    for name, entry in sorted(computed.items()):
        given = source.read_once(name)
        near = 8 * torch.finfo(given.dtype).eps
        if given.shape != entry.shape or not torch.allclose(
            given.double(), entry.make().double(), rtol=near, atol=near
        ):
            found.append(name)
    return found


def _misshapen(row: Row, shape: tuple[int, ...] | None, targets: Mapping[str, Tensor]) -> list[str]:
    if shape is None:
        return []
    wanted = [tuple(targets[own].shape) for own in row.own]
    try:
        got = [tuple(part.shape) for part in row.reshape.split(torch.empty(shape, device="meta"))]
    except (RuntimeError, ValueError, IndexError):
        got = []
    if got == wanted:
        return []
    joined = tuple(row.reshape.join([torch.empty(w, device="meta") for w in wanted]).shape)
    return [f"{row.stored} is {shape}, expected {joined}"]


def place(model: nn.Module, name: str, tensor: Tensor) -> None:
    """Puts a tensor in the place of a model's parameter or buffer of that name."""
    parent, _, leaf = name.rpartition(".")
    module = model.get_submodule(parent)
    if leaf in module._buffers:
        module._buffers[leaf] = tensor
    else:
        module._parameters[leaf] = nn.Parameter(tensor)


def save(model: Model, folder: str | Path) -> None:
    """Writes a loaded model as a Hugging Face folder; the same as ``model.save(folder)``, where the rules stand.

    Raises:
        CheckpointError, ValueError, OSError: as `Model.save`.
    """
    model.save(folder)
