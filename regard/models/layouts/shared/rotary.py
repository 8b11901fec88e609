"""Rotary positions as configuration files state them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from regard.coordinates import plain_eager, plain_tensors
from regard.errors import CheckpointError
from regard.models.config import Config, is_finite, naming
from regard.position_scaling import Scaling
from regard.positions import LinearScaling, Llama3Scaling, Rotary, YarnScaling

__all__ = ["PairFactors", "RotaryWithinContext", "rotary_from_config"]


@dataclass(frozen=True)
class RotaryWithinContext(Rotary):
    """A rotary part whose frequencies would change past the trained context, kept within it.

    Up to ``max_positions`` such a checkpoint rotates like any other. Past it all frequencies depend on the length of
    the text. Those of "dynamic" scaling grow with it, so a sequence read in two calls would differ from the same
    sequence read in one; that is refused. "longrope" has a second set of factors, `beyond`, for every position of a
    longer text. It is taken where one call gives such a text whole, positions 0 to T - 1 in every row; a call that
    continues one, or holds only a part of it, is refused, since earlier keys may have been turned by the first set.

    Raises:
        ValueError: for a position past ``max_positions``, in compiled and exported programs too; with `beyond`, where
            a plain eager call does not give the whole text.
    """

    max_positions: int = 0
    beyond: Scaling | None = None

    def _form(self, positions: Tensor, dtype: torch.dtype, frequencies: Tensor | None = None) -> tuple[Tensor, Tensor]:
        if positions.numel():
            if not plain_eager(positions):  # whoever records the call keeps the check with it
                positions = positions + _none_past(positions.detach(), self.max_positions)
            elif self.beyond is not None and _is_whole(positions) and positions.shape[-1] > self.max_positions:
                frequencies = self.beyond.frequencies(self.dim, self.base, positions.device)
            else:
                _refuse_past(positions, self.max_positions, self.beyond is not None)
        return super()._form(positions, dtype, frequencies)


def _is_whole(positions: Tensor) -> bool:
    """Whether every row is a text from its first token on."""
    return bool((positions == torch.arange(positions.shape[-1], device=positions.device)).all())


def _refuse_past(positions: Tensor, stop: int, whole_only: bool = False) -> None:
    last = float(positions.max())
    if last > stop - 1:
        reason = "rotary scaling depends on how a text is split into calls"
        if whole_only:
            reason = "rotary factors are others for all of a text: give it whole, from position 0, in one call"
        raise ValueError(
            f"positions: expected at most {stop - 1}, got {last:g}: past its trained context, this checkpoint's "
            f"{reason}"
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


@dataclass(frozen=True)
class PairFactors(Scaling):
    """A factor for each pair, by which its frequency is divided, and one on cos and sin.

    LongRoPE's form, of which a checkpoint has two: for texts within the trained context, and for longer ones.
    Source: Ding et al. 2024, arXiv:2402.13753.

    >>> PairFactors((1.0, 4.0)).frequencies(4, 10000.0)
    tensor([1.0000, 0.0025], dtype=torch.float64)
    """

    factors: tuple[float, ...]
    attention_factor: float = 1.0

    @property
    def amplitude(self) -> float:
        return self.attention_factor

    def frequencies(self, dim: int, base: float, device: torch.device | None = None) -> Tensor:
        plain = LinearScaling(1.0).frequencies(dim, base, device)
        return plain / torch.tensor(self.factors, dtype=plain.dtype, device=device)


def rotary_from_config(
    c: Config,
    head_dim: int,
    *,
    base: float = 10000.0,
    partial: bool = False,
    fraction: float = 1.0,
    kinds: Mapping[str, str] | None = None,
) -> Rotary:
    """The rotary part from ``rope_parameters``, or from the older ``rope_scaling``, ``rope_theta``,
    ``partial_rotary_factor``.

    Args:
        base: the family's default for ``rope_theta``.
        partial: whether the family rotates only a part of each head where ``partial_rotary_factor`` says so.
        fraction: the family's default for ``partial_rotary_factor``.
        kinds: the family's other names of kinds of scaling.

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
    kind = (kinds or {}).get(kind, kind) if isinstance(kind, str) else kind
    if kind in ("llama3", "yarn", "longrope"):
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
    width = int(head_dim * fraction)
    if width < 2 or width % 2:
        share = "" if fraction == 1.0 else f" after partial_rotary_factor={fraction}"
        raise c.error("head_dim", head_dim, f"a size of which an even number of channels rotates{share}, not {width}")
    if not isinstance(kind, str) or kind not in SCALINGS:
        raise options.error("rope_type", kind, ", ".join(SCALINGS))
    scaling, limit, beyond = SCALINGS[kind](c, options, width)
    options.close()
    if limit is None:
        return _checked(Rotary(width, base=theta, scaling=scaling), where)
    if beyond is not None:
        _checked(Rotary(width, base=theta, scaling=beyond), where)
    limited = RotaryWithinContext(width, base=theta, scaling=scaling, max_positions=limit, beyond=beyond)
    return _checked(limited, where)


class Scaled(NamedTuple):
    """How frequencies are scaled; past how many positions that depends on the length of a text; how longer ones are."""

    scaling: Scaling | None = None
    limit: int | None = None
    beyond: Scaling | None = None


def _default(c: Config, options: Config, width: int) -> Scaled:
    options.positive("factor", None)  # stated even where nothing is scaled
    return Scaled()


def _linear(c: Config, options: Config, width: int) -> Scaled:
    return Scaled(LinearScaling(_needed(options, "factor")))


def _dynamic(c: Config, options: Config, width: int) -> Scaled:
    _needed(options, "factor")
    return Scaled(None, c.count("max_position_embeddings", 0))


def _llama3(c: Config, options: Config, width: int) -> Scaled:
    scaling = Llama3Scaling(
        factor=_needed(options, "factor"),
        low_freq_factor=_needed(options, "low_freq_factor"),
        high_freq_factor=_needed(options, "high_freq_factor"),
        original_max_positions=options.count("original_max_position_embeddings", 0),
    )
    return Scaled(scaling)


def _yarn(c: Config, options: Config, width: int) -> Scaled:
    options.flag("finetuned", False)  # that the weights were trained with the scaling, which changes nothing
    original = options.count("original_max_position_embeddings", 0)
    scaling = YarnScaling(
        factor=_stretch(c, options, original),
        original_max_positions=original,
        beta_fast=options.number("beta_fast", 32.0, least=0.0) or 32.0,
        beta_slow=options.number("beta_slow", 1.0, least=0.0) or 1.0,
        truncate=options.flag("truncate", True),
        attention_factor=options.positive("attention_factor", None),
        mscale=options.number("mscale", 0.0, least=0.0),
        mscale_all_dim=options.number("mscale_all_dim", 0.0, least=0.0),
    )
    return Scaled(scaling)


def _longrope(c: Config, options: Config, width: int) -> Scaled:
    original = options.count("original_max_position_embeddings", 0)
    factor, amplitude = _stretch(c, options, original), options.positive("attention_factor", None)
    if amplitude is None:
        amplitude = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    factors = {name: _pair_factors(options, name, width // 2) for name in ("short_factor", "long_factor")}
    short, long = factors["short_factor"], factors["long_factor"]
    if short == long:
        return Scaled(PairFactors(short, amplitude))
    return Scaled(PairFactors(short, amplitude), original, PairFactors(long, amplitude))


def _stretch(c: Config, options: Config, original: int) -> float:
    """How many times longer the context has become."""
    factor = options.positive("factor", None)
    return c.count("max_position_embeddings", 0) / original if factor is None else factor


def _pair_factors(options: Config, name: str, pairs: int) -> tuple[float, ...]:
    given = options.get(name)
    if not isinstance(given, list) or len(given) != pairs or not all(is_finite(x) and x > 0 for x in given):
        raise options.error(name, given, f"a list of {pairs} positive numbers, one for each pair of channels")
    return tuple(float(x) for x in given)


SCALINGS: Mapping[str, Callable[[Config, Config, int], Scaled]] = {
    "default": _default,
    "dynamic": _dynamic,
    "linear": _linear,
    "llama3": _llama3,
    "longrope": _longrope,
    "yarn": _yarn,
}
"""Called with the options, those of the scaling, and how many channels of a head rotate."""


def _checked(rotary: Rotary, where: str) -> Rotary:
    """The rotary part, once it has shown that it can give frequencies."""
    with naming(where), plain_tensors():
        usable = bool(rotary.frequencies().isfinite().all()) and math.isfinite(rotary.attention_factor)
    if not usable:
        raise CheckpointError(f"{where}: expected options that give finite frequencies")
    return rotary


def _needed(options: Config, name: str) -> float:
    value = options.positive(name, None)
    if value is None:
        raise CheckpointError(f"{options.source}: {name} is missing")
    return value
