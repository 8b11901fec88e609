"""`regard fill`: the words behind the masks of a text, as tables or as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Column, Table

__all__ = ["FillRequest", "run"]


@dataclass(frozen=True)
class FillRequest:
    """The text, the model's folder, and what is wanted of the words."""

    text: str
    model: Path
    top: int
    dtype: str | None
    as_json: bool


def run(request: FillRequest) -> None:
    """Finds the words and prints them.

    Raises:
        ValueError, TypeError, OSError, RegardError: for a model or a text that does not fit.
    """
    import torch

    from regard.models import Encoder, fill, load

    model = load(request.model, dtype=None if request.dtype is None else getattr(torch, request.dtype))
    if not isinstance(model, Encoder):
        expected = "an encoder with a head of masked words"
        raise ValueError(f"--model: expected {expected}, got {request.model}, which holds a {type(model).__name__}")
    masks = fill(model, request.text, top=request.top)
    if request.as_json:
        print(json.dumps([[asdict(candidate) for candidate in mask] for mask in masks], indent=2, ensure_ascii=False))
        return
    several = len(masks) > 1
    columns = [Column("mask", justify="right")] if several else []
    table = Table(
        *columns, Column("token", no_wrap=True), Column("probability", justify="right"), box=None, pad_edge=False
    )
    for number, mask in enumerate(masks, 1):
        for candidate in mask:
            table.add_row(
                *([str(number)] if several else []), repr(candidate.text)[1:-1], f"{candidate.probability:.4f}"
            )
    Console(highlight=False, markup=False).print(table)
