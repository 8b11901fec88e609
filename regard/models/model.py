"""What every model has beside its forward pass: where it came from, and how it is written back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from torch import nn

from regard.errors import CheckpointError, NoTokenizer

if TYPE_CHECKING:
    from regard.models.tokenizer import Tokenizer

__all__ = ["Family", "Model", "Origin"]


class Family(Protocol):
    """What a model's origin keeps of its family of checkpoints (`regard.models.layouts.Layout`)."""

    @property
    def model_type(self) -> str:
        """What ``config.json`` calls it."""

    @property
    def architecture(self) -> str:
        """The class that other software loads a saved folder with."""

    @property
    def prefix(self) -> str:
        """What leads the names of a file with a head."""

    @property
    def headless(self) -> bool:
        """Whether a folder is written without head and prefix."""

    def read(self, config: Mapping[str, Any], source: str, has: Callable[[str], bool | None]) -> Any:
        """What options say of a model's parts and tensors."""

    def save(self, model: Model, folder: str | Path) -> None:
        """Write a model of the family."""


@dataclass(frozen=True)
class Origin:
    """What a model was read from (or is to be written as).

    Args:
        layout: the family's table of options and tensor names.
        config: the options of ``config.json``.
        tokenizer: or, where the file has none that can be used, the reason as text.
        end_ids: the tokens that end a text.
        extras: further small JSON files of the folder, by name, that ``save`` writes back.
        parts: tensors that are there or not without an option saying so, by their names in the file; ``None`` without a
            file.
    """

    layout: Family
    config: Mapping[str, Any]
    tokenizer: Tokenizer | str = "the checkpoint has no tokenizer.json"
    end_ids: tuple[int, ...] = ()
    extras: Mapping[str, Any] = field(default_factory=dict)
    parts: Mapping[str, bool | None] = field(default_factory=dict)


class Model(nn.Module):
    """A stack of blocks; loaded ones know their `Origin`."""

    origin: Origin | None = None

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that came with the weights.

        Raises:
            NoTokenizer: where there is none, with the reason.
        """
        if self.origin is None or isinstance(self.origin.tokenizer, str):
            raise self._no_tokenizer()
        return self.origin.tokenizer

    def _no_tokenizer(self) -> NoTokenizer:
        reason = "this model was not loaded from a checkpoint" if self.origin is None else self.origin.tokenizer
        return NoTokenizer(f"no tokenizer: {reason}; pass token ids")

    def __getattr__(self, name: str) -> Any:
        if name == "tokenizer":  # Python comes here when the property raises an AttributeError, and forgets its text
            raise self._no_tokenizer()
        return super().__getattr__(name)

    @property
    def end_ids(self) -> tuple[int, ...]:
        """The tokens that end a text: those of ``generation_config.json``, else of ``config.json``, and the tokenizer's
        own; in a GGUF file those of its metadata. May be empty."""
        return () if self.origin is None else self.origin.end_ids

    def save(self, folder: str | Path) -> None:
        """Writes a model as a Hugging Face folder: ``config.json``, ``model.safetensors``, and its tokenizer's
        files.

        Other software that reads such folders gets the same tensors. A model from a GGUF file is written in its
        family's layout, dequantised. Files are written beside their places and moved there when all are complete;
        where that fails, the folder is as it was before, and one that did not exist is gone. One process at a time may
        write into a folder.

        Raises:
            CheckpointError: for a model assembled by hand, whose options have no written form, and for one whose
                parameters do not fit its layout.
            ValueError: where ``folder`` is a file.
            OSError: where the files cannot be written, on a full disk for one.
        """
        if self.origin is None:
            raise CheckpointError(
                "model: expected one that was loaded, or made by regard.models.decoder from names, or by from_config,"
                " got one of parts that no config.json describes; keep its state_dict() with torch.save or safetensors"
            )
        self.origin.layout.save(self, folder)
