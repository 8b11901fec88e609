"""How far the Performer's estimate is from softmax attention, by the number of features: a table for the docs.

    python benchmarks/performer_error.py

Queries, keys and values from N(0, 1), 256 tokens, one head; the error is |estimate - exact| over |exact| (norms of all
outputs), the median over 20 projections.
"""

from __future__ import annotations

import torch

import regard
from regard.mixers.kernel_sums import divided, read, with_ones, written
from regard.random_features import PositiveFeatures, orthogonal_rows

FEATURES, DRAWS, TOKENS = (16, 64, 256, 1024, 4096), 20, 256


def error(dim: int, scale: float, features: int, orthogonal: bool) -> float:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, TOKENS, dim, generator=generator, dtype=torch.float64) for _ in range(3))
    q, k = q * scale, k * scale
    exact = regard.attention(q, k, v)
    found = []
    for seed in range(DRAWS):
        phi = PositiveFeatures(1, dim, features=features, seed=seed).double()
        if not orthogonal:
            phi.projection.copy_(torch.randn(features, dim, generator=generator, dtype=torch.float64))
        else:
            phi.projection.copy_(orthogonal_rows(features, dim, seed=seed))
        estimate = divided(read(phi.queries(q), written(phi.keys(k), with_ones(v))), 1e-300)
        found.append(float((estimate - exact).norm() / exact.norm()))
    return sorted(found)[DRAWS // 2]


def table() -> str:
    head = "| head size, entries of q and k | rows | " + " | ".join(f"M = {m}" for m in FEATURES) + " |"
    lines = [head, "|---|---|" + "--:|" * len(FEATURES)]
    for dim, scale in ((16, 1.0), (64, 1.0), (64, 0.5)):
        for orthogonal in (True, False):
            errors = [f"{error(dim, scale, m, orthogonal):.3f}" for m in FEATURES]
            kind = "orthogonal" if orthogonal else "independent"
            lines.append(f"| {dim}, N(0, {scale:g}²) | {kind} | {' | '.join(errors)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
