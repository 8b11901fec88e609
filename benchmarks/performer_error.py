"""How far the Performer's estimate is from softmax attention, by the number of features: a table and a picture.

    python benchmarks/performer_error.py [docs/mechanisms/performer_error.svg]

Queries, keys and values from N(0, 1), 256 tokens, one head; the error is |estimate - exact| over |exact| (norms of all
outputs), the median over 20 projections.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

import regard
from regard.analysis.plot import lines
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


def errors() -> dict[tuple[int, float, str], list[float]]:
    """(head size, scale of q and k, rows) -> the errors by the number of features."""
    return {
        (dim, scale, kind): [error(dim, scale, m, kind == "orthogonal") for m in FEATURES]
        for dim, scale in ((16, 1.0), (64, 1.0), (64, 0.5), (64, 0.25))
        for kind in ("orthogonal", "independent")
    }


def table(found: dict[tuple[int, float, str], list[float]]) -> str:
    head = "| head size, entries of q and k | rows | " + " | ".join(f"M = {m}" for m in FEATURES) + " |"
    rows = [head, "|---|---|" + "--:|" * len(FEATURES)]
    for (dim, scale, kind), row in found.items():
        rows.append(f"| {dim}, N(0, {scale:g}²) | {kind} | {' | '.join(f'{one:.3f}' for one in row)} |")
    return "\n".join(rows)


def picture(found: dict[tuple[int, float, str], list[float]]) -> str:
    """The errors of orthogonal rows, beside a line that falls as 1 / sqrt(M)."""
    curves = {
        f"D = {dim}, N(0, {scale:g}²)": list(zip(FEATURES, row, strict=True))
        for (dim, scale, kind), row in found.items()
        if kind == "orthogonal"
    }
    curves["1 / sqrt(M)"] = [(m, m**-0.5) for m in FEATURES]
    return lines(curves, "features M (orthogonal rows)", "relative error")


if __name__ == "__main__":
    measured = errors()
    print(table(measured))
    for path in sys.argv[1:2]:
        Path(path).write_text(picture(measured), encoding="utf-8")
