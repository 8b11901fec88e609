"""From a call to what the kernels read: plain tensors and numbers, as csrc/regard.h names them.

Of the mask, terms of the outermost ``&`` that the kernels know by themselves stay what they are: one interval of
``i - j`` (with a prefix by ``|``), key lengths, key padding, segments, dense tensors. Any other term is evaluated into
one dense mask, whose empty tiles are skipped. Of the bias, what depends on ``j - i`` alone becomes one vector per head,
computed here in torch, so that autograd leads its gradient back to slopes and tables; the rest is dense.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from regard import biases, masks
from regard.backends.call import AttentionCall
from regard.backends.native.bias_operands import bias_operands
from regard.backends.native.mask_operands import mask_operands
from regard.coordinates import Coordinates
from regard.score_options import ScoreOptions

__all__ = ["Operands", "definition", "operands_of", "unfit"]

DENSE_LIMIT = 2**24  # entries of a mask or bias that is evaluated densely; a mask counts for one head
NO_BIAS = {"bias": None, "relative": None, "relative_zero": 0}


class Operands(NamedTuple):
    """The arguments of the kernels, and the schema of their torch operators. The first five may be trained."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None  # float32, 4-D, broadcasting
    relative: Tensor | None  # float32 (Hq, n): by j - i + relative_zero
    q_start: Tensor  # int64 (B,)
    prefix: Tensor | None  # int64 (B,)
    k_length: Tensor | None  # int64 (B,)
    keep: Tensor | None  # bool (B, Tk)
    q_segment: Tensor | None  # int64 (B, Tq)
    k_segment: Tensor | None  # int64 (B, Tk)
    mask: Tensor | None  # bool, 4-D, broadcasting
    layout: Tensor | None  # uint8, 4-D, broadcasting: tiles of `mask`
    seed: Tensor | None  # int64 ()
    scale: float
    softcap: float  # 0: none
    low: int
    high: int
    relative_zero: int
    dropout_p: float


def unfit(call: AttentionCall) -> str | None:
    """Why a call's scores, mask or bias cannot be given to the kernels, in one sentence."""
    for step in call.scores.steps:
        if step not in Operands._fields:
            return f"its kernels have no {step}"
    pairs = call.q.shape[2] * call.k.shape[2]
    if call.bias is None and (pairs <= DENSE_LIMIT or call.pattern != "other"):
        return None
    if call.mask_terms.others and pairs > DENSE_LIMIT:
        return f"it would hold this mask densely, over {DENSE_LIMIT:,} entries"
    terms = call.bias_terms
    if terms.others and pairs * call.q.shape[1] > DENSE_LIMIT:
        return f"it would hold this bias densely, over {DENSE_LIMIT:,} entries"
    if terms.by_distance and call.packing is None:
        starts = call.coordinates.start_range
        if starts is None:
            return "a bias by distance needs starts that are numbers, and these are traced"
        if starts[1] - starts[0] > DENSE_LIMIT:
            return f"the batch rows' starts lie over {DENSE_LIMIT:,} slots apart"
    return None


def operands_of(call: AttentionCall) -> Operands:
    """The kernels' arguments for a call that `unfit` lets pass."""
    return Operands(
        call.q,
        call.k,
        call.v,
        **(NO_BIAS if call.bias is None else bias_operands(call)),
        **mask_operands(call),
        seed=call.seed,
        scale=call.scale,
        softcap=call.scores.softcap or 0.0,
        dropout_p=call.dropout_p,
    )


def definition(operands: Operands) -> AttentionCall:
    """The same call for the reference backend: everything that is not q, k, v or a bias written out densely."""
    one, batch, q_heads = operands, operands.q.shape[0], operands.q.shape[1]
    q_len, k_len = one.q.shape[2], one.k.shape[2]
    coordinates = Coordinates(batch, q_heads, q_len, k_len, one.q_start)
    indices = coordinates.indices()
    distance = indices.i - indices.j
    allowed = (distance >= one.low) & (distance <= one.high)
    if one.prefix is not None:
        allowed = allowed | (indices.j < one.prefix.view(-1, 1, 1, 1))
    if one.k_length is not None:
        allowed = allowed & (indices.j < one.k_length.view(-1, 1, 1, 1))
    if one.keep is not None:
        allowed = allowed & one.keep[:, None, None, :]
    if one.q_segment is not None and one.k_segment is not None:
        allowed = allowed & (one.q_segment[:, None, :, None] == one.k_segment[:, None, None, :])
    if one.mask is not None:
        allowed = allowed & one.mask
    bias = one.bias
    if one.relative is not None:
        vector = one.relative[indices.h, one.relative_zero - distance]
        bias = vector if bias is None else bias + vector
    return AttentionCall(
        one.q,
        one.k,
        one.v,
        masks.Dense(allowed),
        None if bias is None else biases.Dense(bias),
        ScoreOptions(one.scale, one.softcap or None),
        None,
        one.dropout_p,
        coordinates,
        return_lse=True,
        seed=one.seed,
    )
