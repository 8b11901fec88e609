"""`accelerate` on transformers' tiny recurrent models: a prefill of 2,048 tokens against their own torch code.

    python benchmarks/bench_acceleration.py [--threads 1 2] [--rounds 5] [--write]

Models of the sizes in tests/checkpoints, with the weights there; the two take turns in one process; a ratio is the
peer's smallest time over regard's (above 1: regard is faster).
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import page
import torch
import transformers

from regard.integrations.transformers import accelerate

FOLDERS = Path(__file__).parent.parent / "tests" / "checkpoints"
NAMES = ("qwen3_next", "kimi_linear", "mamba2", "recurrent_gemma")
TOKENS = 2048


@torch.no_grad()
def prefill(model: transformers.PreTrainedModel, ids: torch.Tensor, rounds: int) -> tuple[float, float]:
    """The smallest seconds of (transformers, accelerated), taken in turns."""

    def seconds() -> float:
        start = time.perf_counter()
        model(ids, use_cache=False)
        return time.perf_counter() - start

    found: list[tuple[float, float]] = []
    for turn in range(rounds + 1):
        plain = seconds()
        with accelerate(model):
            pair = plain, seconds()
        if turn:
            found.append(pair)
    return min(a for a, _ in found), min(b for _, b in found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    lines = ["| model | " + " | ".join(f"× on {n} thread{'s' * (n > 1)} (ms)" for n in options.threads) + " |"]
    lines.append("|---" * (1 + len(options.threads)) + "|")
    print("\n".join(lines))
    ids = torch.randint(3, 97, (1, TOKENS), generator=torch.Generator().manual_seed(0))
    for name in NAMES:
        model = transformers.AutoModelForCausalLM.from_pretrained(FOLDERS / name, dtype=torch.float32).eval()
        cells = []
        for threads in options.threads:
            torch.set_num_threads(threads)
            theirs, ours = prefill(model, ids, options.rounds)
            cells.append(f"{theirs / ours:.2f} ({ours * 1e3:.1f})")
        lines.append(f"| {name} | {' | '.join(cells)} |")
        print(lines[-1], flush=True)
    if options.write:
        page.write("acceleration", lines)


if __name__ == "__main__":
    main()
