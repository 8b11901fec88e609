"""Peak memory of causal attention, forward and backward, through the `chunked` backend: T=16384, H=8, D=64, float32.

    python benchmarks/bench_chunked.py [threads ...]

Each row is a process of its own: the memory is the process's peak above what it held with the inputs made.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import time

LIMIT_MB = 600.0


def measure(threads: int, tokens: int) -> None:
    import torch

    import regard
    from regard.masks import Causal

    torch.set_num_threads(threads)

    def run(length: int) -> float:
        q, k, v = (torch.randn(1, 8, length, 64, requires_grad=True) for _ in range(3))
        start = time.perf_counter()
        regard.attention(q, k, v, mask=Causal(), backend="chunked").sum().backward()
        return time.perf_counter() - start

    run(256)
    with open("/proc/self/statm", encoding="ascii") as pages:
        held = int(pages.read().split()[1]) * resource.getpagesize()
    seconds = run(tokens)
    inputs = 3 * 8 * tokens * 64 * 4
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - held - inputs
    flops = 3.5 * 2 * 2 * 8 * tokens**2 / 2 * 64
    print(f"{threads} threads  T={tokens}  peak extra {peak / 1e6:6.0f} MB (limit {LIMIT_MB:.0f})", end="  ")
    print(f"{seconds:6.1f} s  {flops / seconds / 1e9:5.0f} GFLOP/s (counting 3.5 x forward)")
    if peak / 1e6 > LIMIT_MB:
        raise SystemExit("over the limit")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("threads", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--here", action="store_true", help="measure in this process")
    options = parser.parse_args()
    for threads in options.threads:
        if options.here:
            measure(threads, options.tokens)
        else:
            command = [sys.executable, __file__, str(threads), "--tokens", str(options.tokens), "--here"]
            subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
