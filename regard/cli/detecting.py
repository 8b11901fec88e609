"""`regard detect`: objects in pictures, as a table, as JSON, and drawn."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Column, Table

__all__ = ["DetectRequest", "run"]


@dataclass(frozen=True)
class DetectRequest:
    """The pictures, the model's folder, and what is wanted of what is found."""

    images: list[Path]
    model: Path
    threshold: float
    output: Path | None
    threads: int | None
    as_json: bool


def run(request: DetectRequest) -> None:
    """Finds, prints and draws; nothing is written where anything of the request does not fit.

    Raises:
        ValueError, OSError, RegardError: for files that are not there or do not fit.
    """
    targets = _targets(request)
    import torch

    from regard.models import load
    from regard.models.images.detecting import detect, draw
    from regard.models.images.detr import DETR
    from regard.models.images.pictures import open_picture

    pictures = [open_picture(path) for path in request.images]
    if request.threads is not None:
        torch.set_num_threads(request.threads)
    model = load(request.model, dtype=torch.float32)
    if not isinstance(model, DETR):
        raise ValueError(f"--model: expected a detector, got {request.model}, which holds a {type(model).__name__}")
    found = [detect(model, [picture], threshold=request.threshold)[0] for picture in pictures]
    for target, picture, objects in zip(targets, pictures, found, strict=False):
        target.parent.mkdir(parents=True, exist_ok=True)
        draw(picture, objects).save(target)
    rows = [
        {"image": str(path), "label": one.label, "score": one.score, "box": list(one.box)}
        for path, objects in zip(request.images, found, strict=True)
        for one in objects
    ]
    if request.as_json:
        print(json.dumps(rows, indent=2))
    else:
        _print(rows, request)


def _targets(request: DetectRequest) -> list[Path]:
    """Where drawings go, one a picture; empty where none are wanted."""
    if request.output is None:
        return []
    if len(request.images) == 1:
        if request.output.suffix.lower() != ".png":
            raise ValueError(f"--output: expected a file that ends in .png, got {request.output}")
        return [request.output]
    if request.output.suffix or (request.output.exists() and not request.output.is_dir()):
        raise ValueError(f"--output: expected a folder for {len(request.images)} pictures, got {request.output}")
    targets = [request.output / f"{path.stem}.png" for path in request.images]
    if len(set(targets)) < len(targets):
        raise ValueError("--output: expected pictures of different names, got two that would be written to one file")
    return targets


def _print(rows: list[dict[str, Any]], request: DetectRequest) -> None:
    names = ["image"] if len(request.images) > 1 else []
    numbers = ("score", "left", "top", "right", "bottom")
    columns = [Column(name, justify="right", no_wrap=True) for name in numbers]
    table = Table(*names, "label", *columns, box=None, pad_edge=False)
    for row in rows:
        cells = [row["image"]] if names else []
        table.add_row(*cells, row["label"], f"{row['score']:.3f}", *(f"{n:.1f}" for n in row["box"]))
    if rows:
        Console().print(table)
    else:
        print(f"nothing is surer than {request.threshold:g}")
