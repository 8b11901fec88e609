"""Time of Linformer and Performer against softmax attention, by the number of tokens: a table for the docs.

    python benchmarks/low_rank_time.py

CPU time of one thread for the forward pass of a layer, projections included: batch 1, 256 channels in 4 heads of 64,
float32, 128 compressed keys. Each round runs both layers; the number is the median ratio of 7 rounds.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from regard.masks import Causal
from regard.nn import LengthProjection, Linformer, MultiHeadAttention, Performer

TOKENS, FEATURES, ROUNDS, DIM, HEADS = (1024, 2048, 4096, 8192), (64, 128, 256), 7, 256, 4


def seconds(call: Callable[[], object]) -> float:
    start = time.process_time()
    call()
    return time.process_time() - start


@torch.no_grad()
def ratio(layer: torch.nn.Module, softmax: torch.nn.Module, x: torch.Tensor) -> float:
    """Time of the layer over the time of softmax attention."""
    seconds(lambda: layer(x)), seconds(lambda: softmax(x))
    return sorted(seconds(lambda: layer(x)) / seconds(lambda: softmax(x)) for _ in range(ROUNDS))[ROUNDS // 2]


def table() -> str:
    torch.manual_seed(0)
    plain, causal = MultiHeadAttention(DIM, HEADS), MultiHeadAttention(DIM, HEADS, mask=Causal())
    projection = LengthProjection(max(TOKENS), 128, HEADS)
    rows: dict[str, tuple[torch.nn.Module, torch.nn.Module]] = {
        "`Linformer`, of softmax over all tokens": (Linformer(DIM, HEADS, projection), plain),
    }
    for m in FEATURES:
        both = Performer(DIM, HEADS, features=m, bidirectional=True)
        rows[f"`Performer`, bidirectional, M = {m}, of the same"] = both, plain
    for m in FEATURES:
        rows[f"`Performer`, M = {m}, of causal softmax"] = Performer(DIM, HEADS, features=m), causal
    lines = ["| time | " + " | ".join(f"T = {t}" for t in TOKENS) + " |", "|---|" + "--:|" * len(TOKENS)]
    for name, (layer, softmax) in rows.items():
        found = [f"{ratio(layer, softmax, torch.randn(1, t, DIM)):.2f}" for t in TOKENS]
        lines.append(f"| {name} | {' | '.join(found)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(table())
