"""Biases: numbers added to the scores, after scale and softcap and before the mask; they combine with ``+``.

A bias gives its values on a tile of positions (`Bias.scores`) and sums a tile of score gradients into the gradients of
its tensors (`Bias.accumulate`), so no backend ever holds a whole ``(Tq, Tk)`` bias that was not given as one.

>>> from regard.biases import Alibi
>>> Alibi(2).dense(2)[0, 0]  # slope of head 0 is 1/16
tensor([[ 0.0000,  0.0625],
        [-0.0625,  0.0000]], dtype=torch.float64)
"""

from regard.biases.alibi import Alibi, alibi_slopes
from regard.biases.base import Bias, Dense, Sum, as_bias
from regard.biases.formula import Formula
from regard.biases.relative import ClassTable, RelativeBuckets, RelativeTable, relative_bucket

__all__ = [
    "Alibi",
    "Bias",
    "ClassTable",
    "Dense",
    "Formula",
    "RelativeBuckets",
    "RelativeTable",
    "Sum",
    "alibi_slopes",
    "as_bias",
    "relative_bucket",
]
