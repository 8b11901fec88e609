"""How much of the machine softmax attention uses: multiply-adds, read bandwidth, memory, all measured in one run.

    python benchmarks/bench_machine.py [--threads 1 2] [--rounds 5] [--write]

- The share of the multiply-add rate that registers alone reach, for causal attention of H=8, T=4096, D=64 (useful
  operations: 4 D for each pair that may attend).
- The share of the bandwidth of a plain `sum` over as many bytes, for decoding: 32 query and 8 key heads, D=128, 32,768
  cached. Both are the best of several turns.
- The peak of a fresh process's memory above what it held before the call, beside the size of the call's results.
"""

from __future__ import annotations

import argparse
import ctypes
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import page
import torch

import regard
from regard.backends.native import library
from regard.masks import Causal, Mask, Window

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
MEMORY = ("causal forward", "causal forward + backward", "window 256 forward + backward", "decode 32k")


def seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def best(runs: list[Callable[[], object]], rounds: int) -> list[float]:
    """The smallest seconds of each, taken in turns."""
    for run in runs:
        run()
    return [min(times) for times in zip(*([seconds(run) for run in runs] for _ in range(rounds)), strict=True)]


def operations(dtype: torch.dtype) -> Callable[[], float]:
    count = library.LIBRARY.regard_multiply_adds
    count.restype, count.argtypes = ctypes.c_double, [ctypes.c_int32, ctypes.c_int64]
    return lambda: count(int(dtype == torch.bfloat16), 1_000_000)


def compute(dtype: torch.dtype, rounds: int) -> tuple[float, float]:
    """(GFLOP/s of causal attention on one thread, GFLOP/s of registers alone)."""
    heads, length, dim = 8, 4096, 64
    q, k, v = (torch.randn(1, heads, length, dim, dtype=dtype) for _ in range(3))
    peak = operations(dtype)
    ours, plain = best([lambda: regard.attention(q, k, v, mask=Causal()), peak], rounds)
    return heads * length * (length + 1) / 2 * 4 * dim / ours / 1e9, peak() / plain / 1e9


def bandwidth(dtype: torch.dtype, rounds: int) -> tuple[float, float]:
    """(GB/s of decoding, GB/s of a sum over as many bytes)."""
    q = torch.randn(1, 32, 1, 128, dtype=dtype)
    k, v = (torch.randn(1, 8, 32768, 128, dtype=dtype) for _ in range(2))
    size = 2 * k.numel() * k.element_size()
    other = torch.ones(size // 4)
    ours, plain = best([lambda: regard.attention(q, k, v, mask=Causal()), other.sum], rounds)
    return size / ours / 1e9, size / plain / 1e9


def memory_here(work: str, dtype: torch.dtype) -> tuple[float, float]:
    """(MB that one call's peak lies above what the process held, MB of its results)."""
    few = work.startswith("decode")
    trained = "backward" in work
    mask: Mask = Window(256) if work.startswith("window") else Causal()
    heads, length = (32, 32768) if few else (8, 8192)
    q = torch.randn(1, heads, 1 if few else length, 64, dtype=dtype).requires_grad_(trained)
    k, v = (torch.randn(1, 8, length, 64, dtype=dtype).requires_grad_(trained) for _ in range(2))
    tiny = [x[:, :, :4].detach().requires_grad_(trained) for x in (q, k, v)]

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> object:
        out = regard.attention(q, k, v, mask=mask)
        return torch.autograd.grad(out, (q, k, v), torch.ones_like(out)) if trained else out

    run(*tiny)  # code and threads, which stay
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak starts anew
    before = _status("VmRSS")
    results = run(q, k, v)
    peak = _status("VmHWM") - before
    tensors = results if isinstance(results, tuple) else (results,)
    return peak, sum(x.numel() * x.element_size() for x in tensors) / 1e6


def _status(name: str) -> float:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    (line,) = [line for line in lines if line.startswith(name)]
    return int(line.split()[1]) * 1024 / 1e6


def memory(work: str, name: str, threads: int) -> tuple[float, float]:
    command = [sys.executable, __file__, "--here", work, name, str(threads)]
    peak, results = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    return float(peak), float(results)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--here", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here:
        work, name, threads = options.here
        torch.set_num_threads(int(threads))
        print(*memory_here(work, DTYPES[name]))
        return
    lines = ["| what | dtype | threads | reached | of | share |", "|---|---|---|---|---|---|"]
    for name, dtype in DTYPES.items():
        torch.set_num_threads(1)
        ours, peak = compute(dtype, options.rounds)
        lines.append(f"| causal forward | {name} | 1 | {ours:.0f} GFLOP/s | {peak:.0f} GFLOP/s | {ours / peak:.0%} |")
        for threads in options.threads:
            torch.set_num_threads(threads)
            ours, peak = bandwidth(dtype, 3 * options.rounds)
            lines.append(f"| decoding | {name} | {threads} | {ours:.1f} GB/s | {peak:.1f} GB/s | {ours / peak:.0%} |")
    lines += ["", "| work, H=8, T=8192, D=64 | dtype | threads | peak above what was held, MB | its results, MB |"]
    lines.append("|---|---|---|---|---|")
    for work in MEMORY:
        for name in DTYPES:
            for threads in options.threads:
                peak, size = memory(work, name, threads)
                lines.append(f"| {work} | {name} | {threads} | {peak:.1f} | {size:.1f} |")
    print("\n".join(lines))
    if options.write:
        page.write("machine", lines)


if __name__ == "__main__":
    main()
