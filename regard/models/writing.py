"""Writing a model back as a Hugging Face folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from regard.errors import CheckpointError
from regard.models.files import path_of, replacing
from regard.models.model import Model, Origin
from regard.models.tables import listed, part_of, whole_name
from regard.models.tokenizer import Tokenizer

__all__ = ["write_folder"]


def write_folder(model: Model, folder: str | Path) -> None:
    """What `Model.save` does, for a model with an origin."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    assert model.origin is not None
    origin, folder = model.origin, path_of("folder", folder)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"folder: expected a folder, existing or not, got the file {str(folder)!r}")
    layout = origin.layout
    own = model.state_dict()
    plan = layout.read(origin.config, "the model's options", lambda name: origin.parts.get(name, True))
    wanted = {whole_name(name) for row in plan.rows for name in row.own}
    if wanted != set(own):
        raise CheckpointError(
            f"the model's parameters do not fit the layout {layout.model_type!r}: {listed(sorted(wanted ^ set(own)))}"
        )
    tensors = {
        row.stored.removeprefix(layout.prefix) if layout.headless and not plan.headed else row.stored: row.reshape.join(
            [part_of(own[whole_name(n)], n) for n in row.own]
        )
        for row in plan.rows
    }
    dtype = next(iter(own.values())).dtype
    tensors |= {entry.stored: entry.make().to(dtype) for entry in plan.computed}
    texts: dict[str, Any] = {
        **origin.extras,
        "config.json": _written_config(origin, own, plan.headed or layout.architecture),
    }
    with replacing(folder) as place:
        copies = {name: t.detach().contiguous().cpu() for name, t in tensors.items()}
        try:
            save_file(copies, str(place("model.safetensors")), metadata={"format": "pt"})
        except SafetensorError as e:
            raise OSError(f"{folder / 'model.safetensors'}: cannot be written ({e})") from e
        for name, value in texts.items():
            place(name).write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        if isinstance(origin.tokenizer, Tokenizer):
            place("tokenizer.json").write_text(origin.tokenizer.to_json(), encoding="utf-8")


def _written_config(origin: Origin, own: Mapping[str, Tensor], architecture: str) -> dict[str, Any]:
    config = {k: v for k, v in origin.config.items() if k != "torch_dtype"}
    dtype = str(next(iter(own.values())).dtype).removeprefix("torch.")
    return {
        **config,
        "architectures": [architecture],
        "model_type": origin.layout.model_type,
        "dtype": dtype,
    }
