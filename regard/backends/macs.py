"""The closed forms of what operations multiply and add, in multiply-accumulates (two FLOPs each) of tokens meeting.

`regard.mixers.costs` explains them, and layers say which they follow; the native operators tell torch's counter.
"""

from __future__ import annotations

from regard.backends.recurrent.matrices import CHUNK

__all__ = ["attention_macs", "delta_macs", "matrix_step_macs", "state_macs"]


def attention_macs(heads: int, key_dim: int, value_dim: int, pairs: int) -> int:
    """Scores, and sums of values, over pairs of a query and a key."""
    return heads * (key_dim + value_dim) * pairs


def state_macs(key_heads: int, heads: int, key_dim: int, value_dim: int, tokens: int) -> int:
    """A matrix state with or without a decay, in chunks: products inside them, reads and writes of the state between.

    >>> state_macs(64, 64, 128, 128, 1000) == 64 * 1000 * (2 * CHUNK * 128 + 2 * 128 * 128)  # lightning attention
    True
    """
    chunk = min(CHUNK, tokens)
    return tokens * (key_heads * chunk * key_dim + heads * (chunk * value_dim + 2 * key_dim * value_dim))


def delta_macs(heads: int, key_dim: int, value_dim: int, tokens: int) -> int:
    """The delta rule in chunks: the same and a triangular solve."""
    chunk = min(CHUNK, tokens)
    inner = chunk * (3 * key_dim + 2 * value_dim) + 3 * key_dim * value_dim
    return heads * tokens * inner + heads * tokens * chunk * chunk // 3


def matrix_step_macs(heads: int, key_dim: int, value_dim: int, *, decays: bool, delta: bool = False) -> int:
    """One token of a matrix state: a write and a read, a decay of every number, and what the delta rule reads before.

    >>> matrix_step_macs(2, 4, 8, decays=True), matrix_step_macs(2, 4, 8, decays=True, delta=True)
    (192, 256)
    """
    return (2 + decays + delta) * heads * key_dim * value_dim
