"""What every model has beside its forward pass: where it came from, and how it is written back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from regard.models.layouts import Layout
    from regard.models.tokenizer import Tokenizer

__all__ = ["Model", "Origin"]


@dataclass(frozen=True)
class Origin:
    """What a model was read from (or is to be written as).

    Args:
        layout: the family's table of options and tensor names.
        config: the options of ``config.json``.
        tokenizer: or, where the file has none that can be used, the reason as text.
        end_ids: the tokens that end a text.
        extras: further small JSON files of the folder, by name, that ``save`` writes back.
    """

    layout: Layout
    config: Mapping[str, Any]
    tokenizer: Tokenizer | str = "the checkpoint has no tokenizer.json"
    end_ids: tuple[int, ...] = ()
    extras: Mapping[str, Any] = field(default_factory=dict)


class Model(nn.Module):
    """A stack of blocks; loaded ones know their :class:`Origin`."""

    origin: Origin | None = None

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that came with the weights.

        Raises:
            ValueError: where there is none, with the reason.
        """
        if self.origin is None:
            raise ValueError("this model was not loaded from a checkpoint and has no tokenizer; accepted: token ids")
        if isinstance(self.origin.tokenizer, str):
            raise ValueError(f"no tokenizer: {self.origin.tokenizer}; accepted: token ids")
        return self.origin.tokenizer

    @property
    def end_ids(self) -> tuple[int, ...]:
        """The tokens that end a text: those of ``generation_config.json``, else of ``config.json``, and the tokenizer's
        own; in a GGUF file those of its metadata. May be empty."""
        return () if self.origin is None else self.origin.end_ids

    def save(self, folder: str | Path) -> None:
        """Writes the model as a Hugging Face folder; see :func:`regard.models.save`."""
        from regard.models.checkpoints import save

        save(self, folder)
