"""Reading a ``config.json``: every option is either read, known to change nothing, or refused by name."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from regard.errors import CheckpointError

__all__ = ["Config", "is_count", "is_finite", "naming"]

# Options that describe the file, its training or its use, never what a forward pass in evaluation computes.
INERT = frozenset(
    {
        "_attn_implementation",
        "_attn_implementation_autoset",
        "_attn_implementation_internal",
        "_commit_hash",
        "_flash_attn_2_enabled",
        "_from_model_config",
        "_name_or_path",
        "architectures",
        "attn_implementation",
        "auto_map",
        "bad_words_ids",
        "base_model_ep_plan",
        "base_model_pp_plan",
        "base_model_tp_plan",
        "begin_suppress_tokens",
        "bos_token_id",
        "cache_implementation",
        "custom_pipelines",
        "do_sample",
        "dtype",
        "early_stopping",
        "eos_token_id",
        "finetuning_task",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "gradient_checkpointing",
        "id2label",
        "initializer_range",
        "keys_to_ignore_at_inference",
        "label2id",
        "length_penalty",
        "max_length",
        "max_position_embeddings",
        "max_sequence_length",
        "min_length",
        "model_max_length",
        "model_type",
        "no_repeat_ngram_size",
        "num_beam_groups",
        "num_beams",
        "num_return_sequences",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "output_scores",
        "pad_token_id",
        "prefix",
        "pretraining_tp",
        "problem_type",
        "repetition_penalty",
        "return_dict",
        "return_dict_in_generate",
        "router_aux_loss_coef",
        "sep_token_id",
        "suppress_tokens",
        "task_specific_params",
        "temperature",
        "tf_legacy_loss",
        "tokenizer_class",
        "tokenizer_model_max_length",
        "top_k",
        "top_p",
        "torch_dtype",
        "torchscript",
        "transformers.js_config",
        "transformers_version",
        "typical_p",
        "unk_token_id",
        "unsloth_fixed",
        "unsloth_version",
        "use_cache",
        "use_flash_attn",
    }
)


# Options that are on in every model unless a file switches them off: for these, ``false`` changes the result.
ALWAYS_ON = frozenset({"is_causal", "scale_attn_weights", "use_rope", "use_rotary_embedding"})

_LARGEST = (2 - 2**-23) * 2.0**127  # the largest float32, the dtype in which models compute
_MOST = 2**53  # the greatest count that a float64 holds exactly
SIZE = "any other size"  # the key, among bounds of counts, for counts without a bound of their own
# Counts that are not sizes of tensors: distances between tokens, intervals between layers, numbers of choices.
UNSIZED = frozenset(
    {
        "attention_window",
        "attention_window_size",
        "block_size",
        "decoder_sparse_step",
        "full_attention_interval",
        "layer_group_size",
        "max_position_embeddings",
        "max_window_layers",
        "n_group",
        "num_expert_group",
        "num_experts_per_tok",
        "original_max_position_embeddings",
        "pretraining_tp",
        "sliding_window",
        "topk_group",
    }
)


@contextmanager
def naming(source: str) -> Iterator[None]:
    """Turns errors that come of unfit options into a CheckpointError that names their file.

    It backs up the checks of single options: valid ones may still not fit together, or not fit a tensor.
    """
    try:
        yield
    except CheckpointError:
        raise
    except (ValueError, TypeError, ArithmeticError, LookupError, AttributeError, RuntimeError) as e:
        said = next(iter(str(e).splitlines()), "")  # torch may append the place in its own code
        raise CheckpointError(f"{source}: its options cannot be used ({type(e).__name__}: {said})") from e


def is_finite(value: object) -> bool:
    """Whether a value of an option is a finite number, in float32 too."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return abs(value) <= _LARGEST


def is_count(value: object) -> bool:
    """Whether a value of an option is a positive integer, of the size that sides of images may have."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**31


def _is_off(name: str, value: object) -> bool:
    """Whether an unknown option changes nothing with this value: it is null or empty, or it switches something off."""
    if name in ALWAYS_ON:
        return value in (None, True)
    return value in (None, False, [], {}, "")


class Config:
    """The options of one checkpoint, as a layout reads them.

    Reading marks an option as understood. `close` then refuses every option that was neither read nor is known to
    be without influence, unless it is switched off (``None``, ``False``, or empty): an option that would change the
    result is never passed over in silence.

    ``synonyms`` maps the family's other spellings to the name that the layout asks for. ``most`` bounds counts, by what
    the file's tensors can fill where there are some, so that no loop runs, and no table is formed, for a number that
    only a file made up. ``holds`` tells which tensors the file has; without it, none; ``shapes`` are theirs, where they
    are known.

    >>> c = Config({"n_head": 4, "shear": 2.0}, "config.json", synonyms={"n_head": "num_attention_heads"})
    >>> c.count("num_attention_heads", 8)
    4
    >>> c.close()
    Traceback (most recent call last):
    ...
    regard.errors.CheckpointError: config.json: unknown option shear=2.0; this layout does not know what it changes
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        source: str,
        synonyms: Mapping[str, str] | None = None,
        most: Mapping[str, int] | None = None,
        holds: Callable[[str], bool | None] | None = None,
        shapes: Mapping[str, tuple[int, ...]] | None = None,
    ) -> None:
        self.source = source
        self.shapes = shapes or {}
        self._holds = holds
        self.most = most or {}
        self.values: dict[str, Any] = {}
        self._read: set[str] = set()
        self._spelled: dict[str, str] = {}  # names as the file writes them
        for name, value in values.items():
            proper = (synonyms or {}).get(name, name)
            if proper in self.values and self.values[proper] != value:
                raise CheckpointError(f"{source}: {name}={value!r} contradicts {proper}={self.values[proper]!r}")
            self.values[proper] = value
            self._spelled[proper] = name

    def holds(self, name: str, *, new: bool = True) -> bool:
        """Whether the file has a tensor of that name, for a part that is there or not without an option saying so.

        `new` is the answer for a model without a file.
        """
        found = False if self._holds is None else self._holds(name)
        return new if found is None else found

    def error(self, name: str, value: object, expected: str) -> CheckpointError:
        """A refusal of one option that names it, what is expected and what came."""
        spelled = self._spelled.get(name, name)
        return CheckpointError(f"{self.source}: {spelled}: expected {expected}, got {value!r}")

    def get(self, name: str, default: Any = None) -> Any:
        """The raw value, ``null`` included; ``default`` only where the option is absent."""
        self._read.add(name)
        return self.values.get(name, default)

    def count(self, name: str, default: int) -> int:
        """A positive integer; ``null`` counts as absent."""
        value = self._or_default(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.error(name, value, "a positive integer")
        if value > _MOST:
            raise self.error(name, value, f"at most {_MOST}")
        room = self.most.get(name, _MOST if name in UNSIZED else self.most.get(SIZE, _MOST))
        if value > room:
            raise self.error(name, value, f"at most {room}, the most that there is room for")
        return value

    def pair(self, name: str, default: int) -> tuple[int, int]:
        """(rows, columns) of images or patches: one number for both, or a list of two."""
        given = self.get(name, default)
        if isinstance(given, (list, tuple)):
            if len(given) != 2 or not all(is_count(n) for n in given):
                raise self.error(name, given, "a positive integer, or two of them")
            return given[0], given[1]
        side = self.count(name, default)
        return side, side

    def number(self, name: str, default: float, *, least: float = -math.inf) -> float:
        """A finite number of at least ``least``; ``null`` counts as absent."""
        value = self._or_default(name, default)
        if not is_finite(value) or value < least:
            raise self.error(name, value, "a finite number" + ("" if least == -math.inf else f" of {least:g} or more"))
        return float(value)

    def amount(self, name: str, default: float) -> float:
        """A finite number above 0; ``null`` counts as absent."""
        value = self._or_default(name, default)
        if not is_finite(value) or value <= 0:
            raise self.error(name, value, "a positive number")
        return float(value)

    def positive(self, name: str, default: float | None) -> float | None:
        """A positive number, or ``None`` where the option is ``null`` (or absent with that default)."""
        value = self.get(name, default)
        if value is None:
            return None
        if not is_finite(value) or value <= 0:
            raise self.error(name, value, "a positive number, or null for none")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        """A boolean; ``null`` counts as false, as in code that tests ``if config.name``."""
        value = self.get(name, default)
        value = False if value is None else value
        if not isinstance(value, bool):
            raise self.error(name, value, "true or false")
        return value

    def dropout(self, name: str, default: float = 0.0) -> float:
        """A dropout probability."""
        value = self.number(name, default)
        if not 0.0 <= value <= 1.0:
            raise self.error(name, value, "a probability from 0 to 1")
        return value

    def name(self, name: str, default: str, known: Collection[str]) -> str:
        """One of the known names."""
        value = self._or_default(name, default)
        if not isinstance(value, str) or value not in known:
            raise self.error(name, value, ", ".join(sorted(known)))
        return value

    def only(self, name: str, accepted: Sequence[Any], why: str = "") -> None:
        """Refuses every value of an option but those that mean what the layout does anyway."""
        value = self.get(name, accepted[0])
        if value not in accepted:
            raise self.error(name, value, " or ".join(repr(a) for a in accepted) + (f" ({why})" if why else ""))

    def table(self, name: str) -> dict[str, Any]:
        """A copy of an object of further options; ``null`` or absent is empty."""
        value = self.get(name)
        if value is not None and not isinstance(value, dict):
            raise self.error(name, value, "an object of options, or null")
        return dict(value or {})

    def close(self, inert: Iterable[str] = (), *, false_is_off: bool = True) -> None:
        """Refuses the options that nobody has read; with `false_is_off`, those that are switched off pass."""
        known = self._read | INERT | set(inert)
        unknown = {k: v for k, v in self.values.items() if k not in known and not (false_is_off and _is_off(k, v))}
        if unknown:
            names = ", ".join(f"{k}={v!r}" for k, v in sorted(unknown.items()))
            plural, it = ("s", "they change") if len(unknown) > 1 else ("", "it changes")
            raise CheckpointError(f"{self.source}: unknown option{plural} {names}; this layout does not know what {it}")

    def _or_default(self, name: str, default: Any) -> Any:
        value = self.get(name, default)
        return default if value is None else value
