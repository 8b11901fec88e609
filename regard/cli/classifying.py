"""`regard classify`: the classes that pictures show, as a table or as JSON."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

__all__ = ["ClassifyRequest", "run"]


@dataclass(frozen=True)
class ClassifyRequest:
    """The pictures, the model's folder, and how many classes of each are shown."""

    images: list[Path]
    model: Path
    top: int
    threads: int | None
    as_json: bool


def run(request: ClassifyRequest) -> None:
    """Classifies every picture and prints.

    Raises:
        ValueError, OSError, RegardError: for files that are not there or do not fit.
    """
    import torch

    from regard.models import load
    from regard.models.images.classifying import classify, is_classifier
    from regard.models.images.pictures import open_picture

    pictures = [open_picture(path) for path in request.images]
    if request.threads is not None:
        torch.set_num_threads(request.threads)
    model = load(request.model, dtype=torch.float32)
    if not is_classifier(model):
        raise ValueError(
            f"--model: expected a classifier of images, got {request.model}, whose {type(model).__name__} has no"
            " classes of images"
        )
    rows = [
        {"image": str(path), "label": guess.label, "probability": guess.probability}
        for path, picture in zip(request.images, pictures, strict=True)
        for guess in classify(model, picture, top=request.top)[0]
    ]
    if request.as_json:
        print(json.dumps(rows, indent=2))
    else:
        _print(rows, len(request.images) > 1)


def _print(rows: list[dict[str, Any]], several: bool) -> None:
    names = ["image"] if several else []
    table = Table(*names, "label", Column("probability", justify="right", no_wrap=True), box=None, pad_edge=False)
    for row in rows:
        words = [Text(row[name]) for name in (*names, "label")]  # brackets in a name are no markup
        table.add_row(*words, f"{row['probability']:.4f}")
    Console().print(table)
