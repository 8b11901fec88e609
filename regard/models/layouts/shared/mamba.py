"""What the families with Mamba layers share: the parts of both generations with their tables."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import nn

from regard.mixers.parts import MambaConfig
from regard.models.config import Config
from regard.models.layouts.shared.parts import Part
from regard.models.layouts.shared.rows import MIXER, kinds
from regard.models.tables import Row, Squeezed, one_to_one
from regard.nn import Mamba, Mamba2

__all__ = ["MambaPart", "mamba2_part", "mamba_start", "read_limits", "read_rank"]


@dataclass(frozen=True)
class MambaPart:
    """Mamba of the first generation.

    Args:
        norm: makes the norms of steps, B and C from their widths; None for none.
        norms: what the file calls those that have weights, by "dt", "B" and "C".
    """

    dim: int
    width: int
    state: int
    rank: int
    shell: MambaConfig
    norm: Callable[[int], nn.Module] | None = None
    norms: Mapping[str, str] = field(default_factory=dict)

    def __call__(self) -> nn.Module:
        return Mamba(self.dim, width=self.width, state_dim=self.state, rank=self.rank, norm=self.norm, shell=self.shell)

    def part(self, stored: str) -> Part:
        """With its table."""
        names = {name: name for name in ("A_log", "D", "x_proj.weight", "dt_proj.weight", "dt_proj.bias")}
        names |= {f"{theirs}.weight": f"{ours}_norm.weight" for ours, theirs in self.norms.items()}
        return Part(self, _rows(stored, names, self.shell))


def mamba2_part(stored: str, shell: MambaConfig, *sizes: int, **options: Any) -> Part:
    """Mamba-2 with its table; `sizes` and `options` are the layer's own."""
    names = {name: name for name in ("A_log", "D", "dt_bias", "norm.weight")}
    return Part(partial(Mamba2, *sizes, shell=shell, **options), _rows(stored, names, shell))


def _rows(stored: str, names: Mapping[str, str], shell: MambaConfig) -> list[Row]:
    """A layer's own tensors, and those of its convolution and projections."""
    ends = {f"{name}_proj.{k}": f"{name}_proj.{k}" for name in ("in", "out") for k in kinds(shell.bias)}
    every = {**names, **ends, **({"conv1d.bias": "conv.bias"} if shell.conv_bias else {})}
    rows = one_to_one({f"{stored}.{theirs}": f"{MIXER}.{ours}" for theirs, ours in every.items()})
    return [*rows, Row(f"{stored}.conv1d.weight", (f"{MIXER}.conv.weight",), Squeezed(1))]


def read_rank(c: Config, option: str, dim: int) -> int:
    """The rank of the steps' projection: a sixteenth of the width, rounded up, where the option says "auto"."""
    return -(-dim // 16) if c.get(option, "auto") in ("auto", None) else c.count(option, 1)


def read_limits(c: Config) -> tuple[float, float]:
    """The two bounds of the steps; JSON has no infinity, so files write it in one of several ways."""
    given = c.get("time_step_limit")
    if given is None:
        return 0.0, math.inf
    bounds = [_number(entry) for entry in given] if isinstance(given, (list, tuple)) else []
    if len(bounds) != 2 or not 0.0 <= bounds[0] <= bounds[1]:
        raise c.error("time_step_limit", given, "two numbers with 0 <= first <= second")
    return bounds[0], bounds[1]


def _number(entry: Any) -> float:
    if isinstance(entry, dict) and list(entry) == ["__float__"]:
        entry = entry["__float__"]
    if entry in ("Infinity", "inf"):
        return math.inf
    return float(entry) if isinstance(entry, (int, float)) and not isinstance(entry, bool) else math.nan


def mamba_start(config: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Linear maps start as torch's; where the options say so, a layer's last is divided by the root of the layers."""
    c = Config(config, source)
    scaled = c.flag("rescale_prenorm_residual", False)
    return {"std": c.amount("initializer_range", 0.1), "depth_scaled": scaled, "linear_std": False}
