"""Which failure explains which others: the order of causes, written down once.

The checks run and are read in the order of `CHECKS`; a check explains later ones alone. A failure that an earlier one
explains may still have a cause of its own, which shows when the first one is mended.
"""

from __future__ import annotations

__all__ = ["EXPLAINS"]

_PADDING = ("right_padding", "left_padding", "interior_padding")
_CALLS = ("reorder", "cache_rules", *_PADDING, "packed")
_CACHES = ("streams", "splits", *_CALLS)
_TIME = ("prefixes", "window", *_CACHES, "mixing")
_NUMBERS = (
    *("no_grad", "backends_agree", "gradients", "second_gradients", "low_precision", "mixing", "copies"),
    *("compiled", "inductor"),
)
_ROWS = ("averages", "causality", *_TIME, "polarity", "dead_rows", *_NUMBERS)
_ALL = (
    "unwritten_memory",
    "strides",
    "batch_independence",
    *_ROWS,
    "native_runs",
    "empty_inputs",
    "meta_device",
    "error_texts",
)

EXPLAINS: dict[str, tuple[str, ...]] = {
    # A call that fails, or whose answer is not one of its tokens, is of no use to any check.
    "shapes": ("inputs_unmodified", "determinism", "evaluation", "stateless", *_ALL),
    # Tokens that change under the call: the second call of any check gets others.
    "inputs_unmodified": ("determinism", "evaluation", "stateless", *_ALL),
    # Answers that vary by themselves agree with nothing.
    "determinism": ("evaluation", "stateless", *_ALL),
    "evaluation": ("stateless", *_ALL),
    "stateless": _ALL,
    "unwritten_memory": ("strides", "batch_independence", *_ROWS),
    # Tokens cut out of a tensor, as any check of parts does, are read at other places of memory.
    "strides": ("batch_independence", *_ROWS),
    # Rows that read each other: nothing that compares a row with the row alone can agree.
    "batch_independence": _ROWS,
    # Weights over the wrong axis: the sum holds queries that come later, or padding.
    "averages": ("causality", *_TIME, "dead_rows", "no_grad"),
    # The future is read: it differs when it is cut off, padded, or has not come yet.
    "causality": _TIME,
    # The number of tokens counts, and a step with a cache has one.
    "prefixes": _CACHES,
    # How far a token reads depends on where it stands, or is not what a ring of that width holds.
    "window": _CACHES,
    # The state of one sequence is where another one finds it.
    "streams": ("splits", *_CALLS),
    # Decoding in calls is wrong already, and padded and packed sequences are decoded in calls too.
    "splits": _CALLS,
    # Real tokens are hidden: rows of padding have keys, real rows have none.
    "polarity": ("dead_rows", *_PADDING, "no_grad"),
    # What is not finite at padding goes on from there.
    "dead_rows": (*_PADDING, "no_grad"),
    # What is wrong with the simplest padding is wrong with any.
    "right_padding": ("left_padding", "interior_padding"),
    "left_padding": ("interior_padding",),
    # Two backends disagree: whatever compares one with the other does.
    "backends_agree": ("gradients", "second_gradients", "low_precision"),
    # A wrong first derivative makes a wrong second one.
    "gradients": ("second_gradients",),
    # What cannot be traced cannot be generated from the trace.
    "compiled": ("inductor",),
}
