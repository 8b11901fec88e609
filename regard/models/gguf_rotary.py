"""The rotary scaling of a GGUF file, which states it as metadata or as a tensor of factors."""

from __future__ import annotations

import math
from typing import Any

import torch

from regard.errors import CheckpointError
from regard.models.config import Config
from regard.models.gguf_file import GGUFSource
from regard.models.gguf_split import SplitGGUF
from regard.position_scaling import Llama3Scaling, plain_frequencies

__all__ = ["ROTARY_FACTORS", "as_written", "rotary_options"]

FACTORS, SHORT, LONG = "rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight"
ROTARY_FACTORS = (FACTORS, SHORT, LONG)
_LOW, _HIGH, _TRAINED = 1.0, 4.0, 8192  # of every Llama with such factors


def as_written(value: float) -> float:
    """The shortest decimal that rounds to this float32: what the configuration said before a converter rounded it.

    >>> as_written(9.999999974752427e-07)
    1e-06
    """
    import numpy as np

    narrow = np.float32(value)
    return float(str(narrow)) if float(narrow) == value else value


def rotary_options(c: Config, source: GGUFSource | SplitGGUF, width: int, context: int) -> dict[str, Any]:
    """``rope_parameters`` of a ``config.json``; `width` channels of each head rotate.

    Raises:
        CheckpointError: for factors beside another scaling, and for factors of another number.
    """
    base = c.amount("rope.freq_base", 10000.0)
    plain: dict[str, Any] = {"rope_type": "default", "rope_theta": base}
    kind, factor = c.get("rope.scaling.type"), c.positive("rope.scaling.factor", None)
    original = c.get("rope.scaling.original_context_length")
    amplitude = c.positive("rope.scaling.attn_factor", None)
    held = [name for name in (FACTORS, SHORT, LONG) if source.has(name)]
    if held and (kind not in (None, "none", "longrope") or factor is not None):
        raise c.error("rope.scaling.type", kind, f"none beside the factors in {held[0]}")
    if held in ([SHORT], [LONG]) or len(held) == 3 or (FACTORS in held and len(held) == 2):
        raise CheckpointError(
            f"{source.where}: expected {FACTORS} alone, or {SHORT} and {LONG}, got {' and '.join(held)}"
        )
    if held == [FACTORS]:
        if amplitude not in (None, 1.0):
            raise c.error("rope.scaling.attn_factor", amplitude, f"1.0 beside {FACTORS}")
        return plain | _from_factors(_factors(source, FACTORS, width), width, base, context)
    if held:
        trained = c.count("rope.scaling.original_context_length", context)
        options = {"rope_type": "longrope", "original_max_position_embeddings": trained}
        options |= {"short_factor": _factors(source, SHORT, width), "long_factor": _factors(source, LONG, width)}
        if not _is_default(amplitude or 1.0, context / trained, trained):
            options["attention_factor"] = amplitude or 1.0
        return plain | options
    if kind in (None, "none"):
        if amplitude not in (None, 1.0):
            raise c.error("rope.scaling.attn_factor", amplitude, "1.0 without a scaling")
        return plain
    if amplitude not in (None, 1.0):
        raise c.error("rope.scaling.attn_factor", amplitude, f"1.0 with {kind} scaling")
    return plain | {"rope_type": kind, "factor": factor, "original_max_position_embeddings": original}


def _factors(source: GGUFSource | SplitGGUF, name: str, width: int) -> list[float]:
    given = source.read(name)
    if given.shape != (width // 2,):
        raise CheckpointError(
            f"{source.where}: {name} is {tuple(given.shape)}, expected ({width // 2},): one factor a pair of channels"
        )
    return [as_written(x) for x in given.tolist()]


def _is_default(amplitude: float, stretch: float, trained: int) -> bool:
    """Whether a converter's float32 is what longrope's options mean without an ``attention_factor``."""
    own = math.sqrt(1 + math.log(stretch) / math.log(trained)) if stretch > 1 else 1.0
    return abs(own - amplitude) <= 2**-23 * own


def _from_factors(factors: list[float], width: int, base: float, context: int) -> dict[str, Any]:
    """Llama 3.1's options where the factors are theirs, up to float32; else the factors themselves, at any length."""
    given = torch.tensor(factors, dtype=torch.float64)
    plain = plain_frequencies(width, base)
    most = as_written(max(factors))
    kept = (1 / given - 1 / most) / (1 - 1 / most) if most != 1 else torch.ones_like(given)
    turns = _LOW + kept * (_HIGH - _LOW)  # of each pair over the trained context, where neither kept nor slowed whole
    between = (kept > 1e-4) & (kept < 1 - 1e-4)
    trained = {_TRAINED, *(round(float(n)) for n in (turns * 2 * math.pi / plain)[between])}
    for length in sorted(trained):
        ours = Llama3Scaling(most, _LOW, _HIGH, length)
        if torch.allclose(plain / ours.frequencies(width, base), given, rtol=1e-6, atol=0):
            options = {"factor": most, "low_freq_factor": _LOW, "high_freq_factor": _HIGH}
            return {"rope_type": "llama3", **options, "original_max_position_embeddings": length}
    same = {"short_factor": factors, "long_factor": factors, "attention_factor": 1.0}
    return {"rope_type": "longrope", **same, "original_max_position_embeddings": context}
