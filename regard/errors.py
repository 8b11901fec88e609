"""Every error that regard raises on purpose.

::

    Exception
    └── RegardError
        ├── BackendUnsupported   (also NotImplementedError)  a backend asked for by name cannot run the call
        ├── CacheError           (also ValueError)           a cache operation that cannot be carried out
        │   └── CacheFull                                    more tokens than the cache has room for
        ├── CheckpointError      (also ValueError)           a file whose tensors or configuration do not fit
        └── NoTokenizer          (also ValueError, AttributeError)  a model that came without a tokenizer

Wrong arguments are plain ``ValueError`` and ``TypeError``; their text names the argument, what came and what is
accepted. All of them are raised before anything changes.
"""

from __future__ import annotations

__all__ = ["BackendUnsupported", "CacheError", "CacheFull", "CheckpointError", "NoTokenizer", "RegardError"]


class RegardError(Exception):
    """The root of regard's own errors."""


class BackendUnsupported(RegardError, NotImplementedError):
    """A backend was asked for by name and cannot run this call; the text says why, and which backends can."""


class CacheError(RegardError, ValueError):
    """A cache cannot do what was asked; it is unchanged."""


class CacheFull(CacheError):
    """The call brings more tokens than the cache has room for; the cache is unchanged."""


class CheckpointError(RegardError, ValueError):
    """A checkpoint's files, tensors or options do not fit the layout; nothing was loaded."""


class NoTokenizer(RegardError, ValueError, AttributeError):
    """A model has no tokenizer; an AttributeError too, so that ``hasattr(model, "tokenizer")`` is False."""
