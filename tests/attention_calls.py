"""What the tests of attention share: small inputs, and every kind of mask and bias."""

import torch

from regard import masks
from regard.biases import Alibi, Bias, Dense, RelativeBuckets
from regard.masks import Band, Causal, Dilated, Full, KeyLengths, KeyPadding, Mask, Prefix, Segments, Window

WIDE = torch.float64
EAGER = ("reference", "chunked", "sdpa")  # flex compiles for many seconds: see the slow test at the end
BATCH, Q_HEADS, KV_HEADS, Q, K, DK, DV = 2, 4, 2, 6, 9, 3, 2


def made(*shape: int, dtype: torch.dtype = WIDE) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=dtype)


def inputs(q_len: int = Q, k_len: int = K, dtype: torch.dtype = WIDE) -> tuple[torch.Tensor, ...]:
    shapes = (BATCH, Q_HEADS, q_len, DK), (BATCH, KV_HEADS, k_len, DK), (BATCH, KV_HEADS, k_len, DV)
    return tuple(made(*shape, dtype=dtype) for shape in shapes)


def close(got: torch.Tensor, want: torch.Tensor, tolerance: float = 1e-11) -> None:
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


KEEP = torch.tensor([[True] * 7 + [False] * 2, [False] * 3 + [True] * 6])
MASKS: dict[str, Mask | None] = {
    "none": None,
    "full": Full(),
    "causal": Causal(),
    "window": Window(3),
    "band": Band(1, 2),
    "dilated": Dilated(2, 3),
    "prefix": Causal() | Prefix(2),
    "padded": Causal() & KeyPadding(KEEP),
    "documents": Causal() & Segments(torch.arange(K) // 4),
    "lengths, one of them 0": KeyLengths(torch.tensor([0, 4])),
    "dense": masks.Dense(made(BATCH, 1, Q, K) > 0.5),
    "by head": masks.Dense(made(1, Q_HEADS, Q, K) > 0),
}
BIASES: dict[str, Bias | None] = {
    "none": None,
    "alibi": Alibi(Q_HEADS),
    "buckets + alibi": RelativeBuckets(made(8, Q_HEADS), bidirectional=False, max_distance=20) + Alibi(Q_HEADS),
    "dense": Dense(made(1, Q_HEADS, 1, K)),
}
STARTS = (None, 0, torch.tensor([1, 5]))
SINK = made(Q_HEADS)
