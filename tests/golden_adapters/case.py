"""One golden case: its files, the peer's tensors in a dtype, and the comparison with what the peer recorded."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

# For a case that states no tolerance: where all its tensors are float64, and where they are not.
EXACT, ROUNDED = 1e-12, 1e-5
AXIS_OF_ROWS = {
    "out": 1,
    "attn_out": 1,
    "out_by_cache_steps": 1,
    "out_by_steps": 1,
    "attn_weights": -2,
    "weights": -2,
    "lse": -1,
}


class Refused(AssertionError):
    """A case has an option that its adapter does not understand and that may change the result."""


class Peer(dict[str, Tensor]):
    """The peer's tensors as `input.<name>` and `weight.<name>`; remembers which were read, and what is not compared."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        super().__init__(tensors)
        self.read: set[str] = set()
        self.given: set[str] = set()
        self.rows: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        self.read.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self else default

    def without_effect(self, *names: str) -> None:
        """Say that these tensors, if present, do not change the result."""
        self.read.update(names)

    def only_rows(self, name: str, rows: Tensor) -> None:
        """Say which rows (B, T) of an output to compare, where the case does not: the others belong to padding."""
        self.rows[name] = rows

    def outside(self, *names: str) -> None:
        """Say that these outputs are of other parts than attention, or only repeat what goes in."""
        self.given.update(names)


Way = Callable[[Peer, frozenset[str]], dict[str, Tensor]]  # (tensors, names of the wanted outputs) -> outputs
Paths = dict[str, Way]


@dataclass(frozen=True)
class Case:
    """A folder with `case.json` and `case.safetensors`."""

    folder: Path

    @cached_property
    def meta(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / "case.json").read_text())
        return found

    @property
    def family(self) -> str:
        return str(self.meta.get("family", self.folder.parent.name))

    @property
    def id(self) -> str:
        return f"{self.family}/{self.meta.get('case', self.folder.name)}"

    @property
    def config(self) -> dict[str, Any]:
        found: dict[str, Any] = self.meta.get("config") or {}
        return found

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        return load_file(self.folder / "case.safetensors")

    def names(self, kind: str) -> frozenset[str]:
        """The names after `kind.`: of outputs, gradients, inputs, weights."""
        return frozenset(name[len(kind) + 1 :] for name in self.tensors if name.startswith(kind + "."))

    def has(self, *names: str) -> bool:
        return all(name in self.tensors for name in names)

    def refuse_unless(self, understood: bool, what: str) -> None:
        if not understood:
            raise Refused(f"{self.id}: the adapter does not understand {what}")

    # ---- runs --------------------------------------------------------------------------------------------------------

    def runs(self) -> Iterator[Run]:
        """The float64 run, then the run in the dtypes that the case stores."""
        atol = self.meta.get("suggested_atol") or {}
        if self.names("output64"):
            yield Run(self, torch.float64, "output64", "grad64", atol.get("float64_vs_output64", EXACT))
        stored = {self.tensors[f"output.{name}"].dtype for name in self.names("output")}
        yield Run(self, None, "output", "grad", EXACT if stored == {torch.float64} else atol.get("float32", ROUNDED))

    @cached_property
    def real_rows(self) -> Tensor | None:
        """Which rows of the output (B, T) to compare, or None for all."""
        rule = self.meta.get("compare_only_rows")
        if rule is None or "as (T,B)" in rule:  # padded queries of those cases are answered as others are
            return None
        found = re.match(r"input\.(\w+) == (1|0|True|False)\b", rule)
        self.refuse_unless(found is not None, f"compare_only_rows: {rule!r}")
        assert found is not None
        return self.tensors[f"input.{found[1]}"] == (found[2] in ("1", "True"))


@dataclass(frozen=True)
class Run:
    """A case in one dtype (None: the dtypes that it stores), and what the peer recorded for it."""

    case: Case
    dtype: torch.dtype | None
    outputs: str
    grads: str
    atol: float

    def cast(self, tensor: Tensor) -> Tensor:
        return tensor if self.dtype is None or not tensor.is_floating_point() else tensor.to(self.dtype)

    def peer(self) -> Peer:
        """Fresh copies of the peer's weights and inputs; they record gradients where the case has a cotangent."""
        wanted = {
            name: self.cast(tensor).clone()
            for name, tensor in self.case.tensors.items()
            if name.startswith(("input.", "weight.")) and name != "input.cotangent"
        }
        if self.case.has("input.cotangent"):
            for tensor in wanted.values():
                tensor.requires_grad_(tensor.is_floating_point())
        return Peer(wanted)

    def compare(self, found: dict[str, Tensor], wanted: frozenset[str], rows: dict[str, Tensor] | None = None) -> None:
        """Every output that the case stores; `rows` are those to compare, by output, beside what the case says."""
        missing = sorted(wanted - set(found))
        self.case.refuse_unless(not missing, f"the outputs {missing}")
        for name in sorted(wanted):
            only = (rows or {}).get(name, self.case.real_rows)
            self.compare_one(f"{self.outputs}.{name}", found[name].detach(), AXIS_OF_ROWS.get(name), only)

    def compare_one(self, name: str, ours: Tensor, axis: int | None = None, rows: Tensor | None = None) -> None:
        theirs, where = self.case.tensors[name], f"{self.case.id} {name} ({self.dtype or 'as stored'})"
        assert ours.shape == theirs.shape, f"{where}: shape {tuple(ours.shape)}, not {tuple(theirs.shape)}"
        ours, theirs = ours.double(), theirs.double()
        if axis is not None and rows is not None:
            axis %= ours.ndim
            assert ours.shape[axis] == rows.shape[1], f"{where}: its rows are not those of {tuple(rows.shape)}"
            ours, theirs = (x.movedim(axis, 1)[rows] for x in (ours, theirs))
        same = ours == theirs  # an infinity that both have (the log-sum-exp of no key) included
        assert (ours.isfinite() | same).all(), f"{where}: not finite"
        given = theirs.isfinite() | same
        if not given.all():
            assert self.peer_is_not_finite(name), f"{where}: the peer is not finite, and the case does not say so"
            if "weights" in name or not self.case.names("weight"):  # nothing comes after the attention
                assert (ours[~given] == 0).all(), f"{where}: a row that may attend to nothing is not 0"
            ours, theirs, same = ours[given], theirs[given], same[given]
        difference = float((ours - theirs)[~same].abs().max()) if not same.all() else 0.0
        allowed = max(self.atol, self.rounding_of(name))
        assert difference <= allowed, f"{where}: off by {difference:.3g}, allowed {allowed:.3g}"

    def rounding_of(self, name: str) -> float:
        """What two float32 runs may differ by in a gradient: 20 times the peer's own distance from its float64 run.

        That is the rule by which the cases' tolerances were made, but from their outputs alone; where a row's norm
        divides by almost nothing, gradients lose more digits, the peer's too (its own miss the stated tolerance).
        """
        spread = self.case.meta.get("float32_vs_float64", {}).get(name, {})
        return 20 * float(spread.get("max_abs", 0.0)) if self.dtype is None and name.startswith("grad.") else 0.0

    def peer_is_not_finite(self, name: str) -> bool:
        return name.replace("64.", ".") in {entry.replace("64.", ".") for entry in self.case.meta.get("non_finite", [])}

    def compare_gradients(self, out: Tensor, peer: Peer) -> None:
        """The gradient of ``sum(out * cotangent)`` in every tensor for which the case stores one."""
        cotangent = self.cast(self.case.tensors["input.cotangent"])
        names = sorted(self.case.names(self.grads))
        leaves = [dict.__getitem__(peer, name if name.startswith("weight.") else f"input.{name}") for name in names]
        grads = torch.autograd.grad((out * cotangent).sum(), leaves, allow_unused=True)
        for name, grad in zip(names, grads, strict=True):
            assert grad is not None, f"{self.case.id}: no gradient for {name}"
            self.compare_one(f"{self.grads}.{name}", grad)


def cases_below(root: Path) -> list[Case]:
    """Every case below a folder, by id."""
    return sorted((Case(path.parent) for path in root.rglob("case.json")), key=lambda case: case.id)
