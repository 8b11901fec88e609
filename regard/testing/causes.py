"""Which failure explains which others: the order of causes, written down once.

The checks run and are read in the order of `CHECKS`; a check explains later ones alone. A failure that an earlier one
explains may still have a cause of its own, which shows when the first one is mended.
"""

from __future__ import annotations

__all__ = ["EXPLAINS"]

_CACHES = ("splits", "reorder", "cache_rules")
_PADDING = ("right_padding", "left_padding", "interior_padding")
_NUMBERS = ("gradients", "second_gradients", "mixing", "copies", "compiled", "inductor")

EXPLAINS: dict[str, tuple[str, ...]] = {
    # Rows that read each other: nothing that compares a row with the row alone can agree.
    "batch_independence": ("causality", *_CACHES, *_PADDING, "packed", "mixing"),
    # The future is read: it differs when it is cut off, padded, or has not come yet.
    "causality": (*_CACHES, *_PADDING, "packed", "mixing"),
    # Decoding in calls is wrong already, and padded and packed sequences are decoded in calls too.
    "splits": ("reorder", "cache_rules", *_PADDING, "packed"),
    # What is wrong with the simplest padding is wrong with any.
    "right_padding": ("left_padding", "interior_padding"),
    "left_padding": ("interior_padding",),
    # Two backends disagree: whatever compares one with the other does.
    "backends_agree": ("low_precision", "gradients", "second_gradients"),
    # A wrong first derivative makes a wrong second one.
    "gradients": ("second_gradients",),
    # Memory that was never written holds anything, at each call something else.
    "unwritten_memory": _NUMBERS,
    # What cannot be traced cannot be generated from the trace.
    "compiled": ("inductor",),
}
