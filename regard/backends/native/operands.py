"""From a call to what the kernels read: plain tensors and numbers, and the struct of them (csrc/regard.h).

Of the mask, terms of the outermost ``&`` that the kernels know by themselves stay what they are: one interval of
``i - j`` (with a prefix by ``|``), key lengths, key padding, segments, dense tensors. Of other terms the kernels get
the tiles that they allow, in lists, where a mask can list them; else one dense mask, whose empty tiles are skipped. Of
the bias, what depends on ``j - i`` alone becomes one vector per head, computed here in torch, so that autograd leads
its gradient back to slopes and tables; the rest is dense.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from regard import biases, masks
from regard.backends.call import AttentionCall
from regard.backends.native.bias_operands import bias_operands
from regard.backends.native.mask_operands import lists_others, mask_operands
from regard.backends.native.operator import Outputs, address
from regard.backends.native.structs import ATTENTION
from regard.coordinates import Coordinates
from regard.masks.tiles import TileLists
from regard.score_options import ScoreOptions

__all__ = ["Operands", "definition", "operands_of", "strided", "struct_of", "unfit"]

DENSE_LIMIT = 2**24  # entries of a mask or bias that is evaluated densely; a mask counts for one head


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
    tile_lines: Tensor | None  # the tiles that hold allowed pairs, in lists (regard.masks.tiles.TileLists)
    tile_column: Tensor | None
    tile_bits: Tensor | None
    bits: Tensor | None
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
    if call.mask_terms.others and pairs > DENSE_LIMIT and not lists_others(call):
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
    *tensors, low, high = mask_operands(call)
    bias, relative, zero = (None, None, 0) if call.bias is None else bias_operands(call)
    scores = call.scores
    numbers = (call.scale, scores.softcap or 0.0, low, high, zero, call.dropout_p)
    return Operands._make((call.q, call.k, call.v, bias, relative, *tensors, call.seed, *numbers))


def struct_of(one: Operands, outputs: Outputs) -> tuple[bytes, tuple[Tensor, ...]]:
    """The struct of a call, and the tensors that its pointers need alive."""
    out, lse, kept = outputs
    (q, q_steps), (k, k_steps), (v, v_steps) = map(_with_unit_steps, (one.q, one.k, one.v))
    batch, q_heads, q_len, k_dim = q.shape
    _, kv_heads, k_len, v_dim = v.shape
    record = ATTENTION.pack(  # in the order of its fields
        *(batch, q_heads, kv_heads, q_len, k_len, k_dim, v_dim),
        *(q.dtype == torch.bfloat16, one.scale, one.softcap),
        *(q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), lse.data_ptr(), address(kept)),
        *(out.dtype == torch.float32, *q_steps[:3], *k_steps[:3], *v_steps[:3], *out.stride()[:3]),
        *(one.q_start.data_ptr(), one.low, one.high),
    )
    options = bytes(ATTENTION.parts[1].size) if _is_plain(one) else _options(one)
    return record + options, (q, k, v)


def _with_unit_steps(x: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """The tensor with neighbouring channels, copied where they lie apart, and its strides."""
    steps = x.stride()
    if steps[3] != 1 and x.shape[3] != 1:
        x = x.contiguous()
        steps = x.stride()
    return x, steps


def _is_plain(one: Operands) -> bool:
    """Whether a call has nothing that `_options` writes."""
    plain = one.prefix is one.k_length is one.keep is one.q_segment is one.mask is one.tile_lines is one.bias is None
    return plain and one.relative is None and one.dropout_p == 0.0


def _options(one: Operands) -> bytes:
    vector = one.relative
    return ATTENTION.parts[1].pack(
        *(address(one.prefix), address(one.k_length), address(one.keep)),
        *(address(one.q_segment), address(one.k_segment), *strided(one.mask)),
        *(*strided(one.tile_lines)[:3], address(one.tile_column), address(one.tile_bits), address(one.bits)),
        *strided(one.bias),
        *(address(vector), *((0, 0, 0) if vector is None else (vector.stride(0), one.relative_zero, vector.shape[1]))),
        *(one.dropout_p, 0 if one.seed is None else int(one.seed)),
    )


def strided(x: Tensor | None) -> tuple[int, ...]:
    """The address of a 4-D tensor and its strides, 0 along axes of one entry, which broadcast."""
    if x is None:
        return 0, 0, 0, 0, 0
    return x.data_ptr(), *(0 if size == 1 else step for size, step in zip(x.shape, x.stride(), strict=True))


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
    if one.tile_lines is not None and one.bits is not None:  # without bits the tiles are those of the dense mask
        assert one.tile_column is not None and one.tile_bits is not None
        lists = TileLists(one.tile_lines, one.tile_column, one.tile_bits, one.bits)
        allowed = allowed & lists.dense(q_len, k_len)
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
        ScoreOptions(scale=one.scale, softcap=one.softcap or None),
        None,
        one.dropout_p,
        coordinates,
        return_lse=True,
        seed=one.seed,
    )
