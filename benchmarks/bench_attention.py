"""Softmax attention against torch's own kernels: ratios taken in turns in one process, on one and two threads.

    python benchmarks/bench_attention.py [--threads 1 2] [--rounds 5] [--only TEXT] [--write]

A ratio is the peer's time over regard's (above 1: regard is faster), the median over rounds; on one thread CPU time
counts, on more wall time. `--write` puts the table into docs/benchmarks.md. Run it on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import page
import torch
import torch.nn.functional as F

import regard
from regard.biases import Alibi
from regard.masks import Causal, Window

NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


class Row(NamedTuple):
    """One comparison: what is done, against what, and the two callables."""

    work: str
    peer: str
    ours: Callable[[], object]
    theirs: Callable[[], object]


def tensors(heads: int, length: int, dim: int, dtype: torch.dtype, grad: bool = False) -> list[torch.Tensor]:
    return [torch.randn(1, heads, length, dim, dtype=dtype).requires_grad_(grad) for _ in range(3)]


def trained(f: Callable[[], torch.Tensor], inputs: list[torch.Tensor]) -> Callable[[], object]:
    cotangent = torch.randn_like(inputs[0])
    return lambda: torch.autograd.grad(f(), inputs, cotangent)


def causal(heads: int, length: int, dim: int, dtype: torch.dtype, grad: bool = False) -> Row:
    q, k, v = inputs = tensors(heads, length, dim, dtype, grad)

    def ours() -> torch.Tensor:
        return regard.attention(q, k, v, mask=Causal())

    def theirs() -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    name = f"causal {'forward + backward' if grad else 'forward'}, {NAMES[dtype]}, H={heads}, T={length}, D={dim}"
    return Row(name, "SDPA", *((trained(f, inputs) for f in (ours, theirs)) if grad else (ours, theirs)))


def full(length: int, dim: int) -> Row:
    q, k, v = tensors(8, length, dim, torch.float32)
    name = f"full forward, float32, H=8, T={length}, D={dim}"
    return Row(name, "SDPA", lambda: regard.attention(q, k, v), lambda: F.scaled_dot_product_attention(q, k, v))


def decode(dtype: torch.dtype, cached: int) -> Row:
    q = torch.randn(1, 32, 1, 128, dtype=dtype)
    k, v = (torch.randn(1, 8, cached, 128, dtype=dtype) for _ in range(2))
    name = f"decode, 32 query / 8 key heads, {NAMES[dtype]}, {cached:,} cached, D=128"
    return Row(
        name,
        "SDPA, enable_gqa",
        lambda: regard.attention(q, k, v, mask=Causal()),
        lambda: F.scaled_dot_product_attention(q, k, v, enable_gqa=True),
    )


def against_flex(name: str, dtype: torch.dtype, score_mod: object = None, **call: object) -> Row:
    """torch's kernel as its users call it: compiled, the block mask made once."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    q, k, v = tensors(8, 4096, 64, dtype)
    blocks = create_block_mask(call["mask"].mask_mod(), None, None, 4096, 4096, device="cpu")
    kernel = torch.compile(flex_attention, dynamic=False)

    def theirs() -> object:
        return kernel(q, k, v, score_mod=score_mod, block_mask=blocks)

    return Row(
        f"{name}, {NAMES[dtype]}, H=8, T=4096, D=64", "FlexAttention", lambda: regard.attention(q, k, v, **call), theirs
    )


def alibi(score: torch.Tensor, b: torch.Tensor, h: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
    return score + torch.exp2(-(h + 1.0)) * (j - i)


def softcap(score: torch.Tensor, b: torch.Tensor, h: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
    return 30.0 * torch.tanh(score / 30.0)


def window_trained() -> Row:
    q, k, v = inputs = tensors(8, 4096, 64, torch.float32, True)
    mask = Window(256)
    return Row(
        "window 256 forward + backward, float32, H=8, T=4096, D=64",
        "chunked",
        trained(lambda: regard.attention(q, k, v, mask=mask), inputs),
        trained(lambda: regard.attention(q, k, v, mask=mask, backend="chunked"), inputs),
    )


def rows() -> Iterator[Callable[[], Row]]:
    low, high = torch.bfloat16, torch.float32
    for dtype in (high, low):
        for dim in (64, 128):
            for length in (512, 2048, 4096):
                yield lambda dtype=dtype, dim=dim, length=length: causal(8, length, dim, dtype)
        yield lambda dtype=dtype: causal(64, 64, 64, dtype)
        yield lambda dtype=dtype: causal(16, 256, 64, dtype)
        for dim in (64, 128):
            for length in (1024, 4096):
                yield lambda dtype=dtype, dim=dim, length=length: causal(8, length, dim, dtype, True)
        yield lambda dtype=dtype: decode(dtype, 32768)
    for dim in (64, 128):
        for length in (1024, 4096):
            yield lambda dim=dim, length=length: full(length, dim)
    yield window_trained
    for dtype in (high, low):
        yield lambda dtype=dtype: against_flex("window 256 forward", dtype, mask=Window(256))
    yield lambda: against_flex("ALiBi causal forward", high, alibi, mask=Causal(), bias=Alibi(8))
    yield lambda: against_flex("softcap causal forward", high, softcap, mask=Causal(), softcap=30.0)


def measure(row: Row, rounds: int, clock: Callable[[], float]) -> tuple[float, float]:
    """(median ratio, our median milliseconds); the two take turns, each run long enough to time."""
    row.ours(), row.theirs()
    start = clock()
    row.ours()
    repeat = max(1, int(0.02 / max(clock() - start, 1e-6)))
    ratios, own = [], []
    for _ in range(rounds):
        taken = []
        for run in (row.ours, row.theirs):
            start = clock()
            for _ in range(repeat):
                run()
            taken.append((clock() - start) / repeat)
        ratios.append(taken[1] / taken[0])
        own.append(taken[0])
    return statistics.median(ratios), statistics.median(own) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="", help="rows whose text holds this")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    lines = ["| work | against | " + " | ".join(f"× on {n} thread{'s' * (n > 1)} (ms)" for n in options.threads) + " |"]
    lines.append("|---" * (2 + len(options.threads)) + "|")
    print("\n".join(lines))
    for make in rows():
        row = make()
        if options.only not in f"{row.work} {row.peer}":
            continue
        cells = []
        for threads in options.threads:
            torch.set_num_threads(threads)
            ratio, own = measure(row, options.rounds, time.process_time if threads == 1 else time.perf_counter)
            cells.append(f"{ratio:.2f} ({own:.2f})")
        lines.append(f"| {row.work} | {row.peer} | {' | '.join(cells)} |")
        print(lines[-1], flush=True)
    if options.write:
        page.write("attention", lines)


if __name__ == "__main__":
    main()
