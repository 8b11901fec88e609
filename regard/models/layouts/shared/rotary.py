"""Rotary positions as configuration files state them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.coordinates import plain_tensors
from regard.errors import CheckpointError
from regard.models.config import Config, naming
from regard.positions import LinearScaling, Llama3Scaling, Rotary, YarnScaling, plain_eager

__all__ = ["RotaryWithinContext", "rotary_from_config"]


@dataclass(frozen=True)
class RotaryWithinContext(Rotary):
    """A rotary part whose frequencies would change past the trained context ("dynamic" NTK scaling), kept within it.

    Up to ``max_positions`` such a checkpoint rotates like any other. Past it the base grows with the current length, so
    a sequence read in two calls would differ from the same sequence read in one; that is refused.

    Raises:
        ValueError: for a position past ``max_positions``, in compiled and exported programs too.
    """

    max_positions: int = 0

    def _form(self, positions: Tensor, dtype: torch.dtype, frequencies: Tensor | None = None) -> tuple[Tensor, Tensor]:
        if positions.numel():
            if plain_eager(positions):
                _refuse_past(positions, self.max_positions)
            else:  # whoever records the call keeps the check with it
                positions = positions + _none_past(positions.detach(), self.max_positions)
        return super()._form(positions, dtype, frequencies)


def _refuse_past(positions: Tensor, stop: int) -> None:
    last = float(positions.max())
    if last > stop - 1:
        raise ValueError(
            f"position {last:g} lies past max_position_embeddings={stop}, where this checkpoint's dynamic rotary "
            "scaling depends on how a text is split into calls; accepted: shorter texts"
        )


@torch.library.custom_op("regard::none_past", mutates_args=())
def _none_past(positions: Tensor, stop: int) -> Tensor:
    """Zeros, to be added to the positions, once each is known to lie below ``stop``."""
    _refuse_past(positions, stop)
    return torch.zeros_like(positions)


@_none_past.register_fake
def _(positions: Tensor, stop: int) -> Tensor:
    return torch.empty_like(positions)


@_none_past.register_vmap
def _(info: object, in_dims: tuple[int | None, None], positions: Tensor, stop: int) -> tuple[Tensor, int | None]:
    return _none_past(positions, stop), in_dims[0]


def rotary_from_config(
    c: Config, head_dim: int, *, base: float = 10000.0, partial: bool = False, fraction: float = 1.0
) -> Rotary:
    """The rotary part from ``rope_parameters``, or from the older ``rope_scaling``, ``rope_theta``,
    ``partial_rotary_factor``.

    Args:
        base: the family's default for ``rope_theta``.
        partial: whether the family rotates only a part of each head where ``partial_rotary_factor`` says so.
        fraction: the family's default for ``partial_rotary_factor``.

    Raises:
        CheckpointError: naming a kind of scaling, or an option of it, that is not known.
    """
    older, newer = c.table("rope_scaling"), c.table("rope_parameters")
    raw = older or newer
    where = f"{c.source}: rope_parameters"
    raw.setdefault("rope_theta", c.amount("rope_theta", base))
    raw.setdefault("partial_rotary_factor", c.amount("partial_rotary_factor", fraction))
    old = raw.pop("type", "default")
    kind = raw.pop("rope_type", old)
    if kind in ("llama3", "yarn"):
        outer = c.get("original_max_position_embeddings")
        raw.setdefault("original_max_position_embeddings", c.get("max_position_embeddings"))
        if outer is not None:
            raw["original_max_position_embeddings"] = outer
    options = Config({k: v for k, v in raw.items() if v is not None}, where)
    fraction = options.amount("partial_rotary_factor", 1.0)
    if fraction != 1.0 and not partial:
        raise options.error("partial_rotary_factor", fraction, "1.0: this family rotates whole heads")
    if fraction > 1.0:
        raise options.error("partial_rotary_factor", fraction, "a number above 0 and at most 1")
    theta = options.number("rope_theta", base)
    if theta <= 1.0:
        raise options.error("rope_theta", theta, "a number above 1")
    factor = options.positive("factor", None)
    width = int(head_dim * fraction)
    if width < 2 or width % 2:
        share = "" if fraction == 1.0 else f" after partial_rotary_factor={fraction}"
        raise c.error("head_dim", head_dim, f"a size of which an even number of channels rotates{share}, not {width}")
    scaling: LinearScaling | Llama3Scaling | YarnScaling | None = None
    if kind == "dynamic":
        _needed(options, "factor", factor)
        options.close()
        return _checked(
            RotaryWithinContext(width, base=theta, max_positions=c.count("max_position_embeddings", 0)), where
        )
    if kind == "default":
        pass
    elif kind == "linear":
        scaling = LinearScaling(_needed(options, "factor", factor))
    elif kind == "llama3":
        scaling = Llama3Scaling(
            factor=_needed(options, "factor", factor),
            low_freq_factor=_needed(options, "low_freq_factor", options.positive("low_freq_factor", None)),
            high_freq_factor=_needed(options, "high_freq_factor", options.positive("high_freq_factor", None)),
            original_max_positions=options.count("original_max_position_embeddings", 0),
        )
    elif kind == "yarn":
        original = options.count("original_max_position_embeddings", 0)
        scaling = YarnScaling(
            factor=c.count("max_position_embeddings", 0) / original if factor is None else factor,
            original_max_positions=original,
            beta_fast=options.number("beta_fast", 32.0, least=0.0) or 32.0,
            beta_slow=options.number("beta_slow", 1.0, least=0.0) or 1.0,
            truncate=options.flag("truncate", True),
            attention_factor=options.positive("attention_factor", None),
            mscale=options.number("mscale", 0.0, least=0.0),
            mscale_all_dim=options.number("mscale_all_dim", 0.0, least=0.0),
        )
    else:
        raise CheckpointError(
            f"{where}: rope_type={kind!r} is not supported; accepted: default, dynamic, linear, llama3, yarn"
        )
    options.close()
    return _checked(Rotary(width, base=theta, scaling=scaling), where)


def _checked(rotary: Rotary, where: str) -> Rotary:
    """The rotary part, once it has shown that it can give frequencies."""
    with naming(where), plain_tensors():
        usable = bool(rotary.frequencies().isfinite().all()) and math.isfinite(rotary.attention_factor)
    if not usable:
        raise CheckpointError(f"{where}: these options give frequencies that are not finite; accepted: finite ones")
    return rotary


def _needed(options: Config, name: str, value: float | None) -> float:
    if value is None:
        raise CheckpointError(f"{options.source}: {name} is missing")
    return value
