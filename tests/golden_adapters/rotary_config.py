"""The peer's `rope_parameters` as a `Rotary`."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from golden_adapters.case import Case
from regard.positions import LinearScaling, Llama3Scaling, NTKScaling, Rotary, YarnScaling

KEYS = {
    "default": set(),
    "linear": {"factor"},
    "dynamic": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    "yarn": {
        *("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "truncate", "attention_factor"),
        *("mscale", "mscale_all_dim"),
    },
}


def rotary_of(
    case: Case, given: dict[str, Any] | None, head_dim: int, positions: Tensor, *, max_positions: int, partial: bool
) -> Rotary | None:
    """None where there are no rotary positions. `partial`: whether the family reads `partial_rotary_factor` at all."""
    if given is None:
        return None
    options = {name: value for name, value in given.items() if value is not None}
    kind = options.pop("rope_type", options.pop("type", "default"))
    base = float(options.pop("rope_theta", 10000.0))
    fraction = float(options.pop("partial_rotary_factor", 1.0))
    case.refuse_unless(kind in KEYS, f"rope_type {kind!r}")
    case.refuse_unless(set(options) <= KEYS[kind], f"rope_parameters {sorted(set(options) - KEYS[kind])}")
    width = int(head_dim * fraction) if partial or kind != "default" else head_dim
    original = int(options.pop("original_max_position_embeddings", max_positions))
    factor = float(options.pop("factor", max_positions / original))
    scaling: Any = None
    if kind == "linear":
        scaling = LinearScaling(factor)
    elif kind == "llama3":
        scaling = Llama3Scaling(factor, original_max_positions=original, **options)
    elif kind == "yarn":
        scaling = YarnScaling(factor, original, **options)
    elif kind == "dynamic":
        # the peer's base follows the length of the whole input; within one input that is NTK scaling by a fixed factor
        length = max(int(positions.max()) + 1, max_positions)
        stretch = factor * length / max_positions - (factor - 1)
        scaling = NTKScaling(stretch) if stretch != 1 else None
    return Rotary(width, base=base, scaling=scaling)


def tables(
    case: Case, wanted: frozenset[str], rotary: Rotary | None, positions: Tensor, like: Tensor
) -> dict[str, Tensor]:
    """`rope_cos` and `rope_sin`, each frequency once or twice, for all rows or for one, as the peer lays them out."""
    names = wanted & {"rope_cos", "rope_sin"}
    if not names or rotary is None:
        return {}
    cos, sin = rotary.angles(positions, like.dtype)
    found = {}
    for name, table in (("rope_cos", cos), ("rope_sin", sin)):
        if name in names:
            rows, _, width = case.tensors[f"output.{name}"].shape
            found[name] = table[:rows].repeat(1, 1, 2 if width == rotary.dim else 1).to(like.dtype)
    return found
