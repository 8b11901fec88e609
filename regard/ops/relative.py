"""Scores of queries, or keys, with rows of a table that the pair's relative place chooses."""

from __future__ import annotations

import torch
from torch import Tensor

from regard.checks import describe, is_dense, is_number_type

__all__ = ["relative_scores"]


def relative_scores(x: Tensor, rows: Tensor, index: Tensor) -> Tensor:
    """``s_ij = x_i . rows_index(i, j)``: what Shaw's, Transformer-XL's and DeBERTa's relative places add to scores.

    Args:
        x: (B, H, T, D), queries (for a term of the keys give keys, the transposed index, and transpose the result).
        rows: (R, D), or (H, R, D) for heads apart.
        index: int64 (T, Tk), rows of the table.

    Returns:
        (B, H, T, Tk), float32 at least: a bias for `regard.attention`. The products (B, H, T, R) are formed once and
        their entries gathered, never (T, Tk, D) numbers.

    Raises TypeError and ValueError for tensors that do not fit. Cost 2 B H T R D FLOPs. (Shaw, Uszkoreit, Vaswani 2018,
    arXiv:1803.02155, section 3.3; Dai et al. 2019, arXiv:1901.02860, appendix B.)

    >>> distance = torch.arange(5)[:, None] - torch.arange(5)
    >>> relative_scores(torch.randn(1, 2, 5, 8), torch.randn(9, 8), distance + 4).shape
    torch.Size([1, 2, 5, 5])
    """
    for name, one in (("x", x), ("rows", rows)):
        is_dense(name, one)
        is_number_type(name, one)
    if x.ndim != 4 or rows.ndim not in (2, 3) or rows.shape[-1] != x.shape[-1]:
        raise ValueError(f"rows: expected (R, D) or (H, R, D) for x (B, H, T, D), got {describe(rows)}, {describe(x)}")
    if index.ndim != 2 or index.dtype != torch.int64 or index.shape[0] != x.shape[2]:
        raise ValueError(f"index: expected int64 ({x.shape[2]}, Tk), got {describe(index)}")
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    products = x.to(wide) @ rows.to(wide).mT
    return products.gather(3, index.expand(*x.shape[:2], -1, -1))
