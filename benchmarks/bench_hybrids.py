"""Latent attention decoding in its two forms, and whole tiny hybrids against the same in transformers.

    python benchmarks/bench_hybrids.py [--threads 1 2] [--rounds 5] [--write]

The expanded form makes per-head keys and values from the latents again at each step, as transformers does; where these
do not fit in the machine's free memory the row says so. Hybrids are the tiny models of tests/checkpoints: a prefill of
2,048 tokens, and 32 single steps behind it. What is compared takes turns in one process; a ratio is the peer's time over
regard's (above 1: regard is faster).
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import page
import torch
import transformers
from bench_attention import Row, measure

import regard
from regard.masks import Causal
from regard.mixers.latent import LatentSizes, MultiHeadLatentAttention
from regard.positions import Rotary

FOLDERS = Path(__file__).parent.parent / "tests" / "checkpoints"
NAMES = ("qwen3_next", "kimi_linear")
PROMPT, STEPS = 2048, 32
SIZES = LatentSizes(512, 128, 64, 128)  # DeepSeek-V2's, of 128 heads
HEADS = 128


def room(cached: int) -> bool:
    """Whether keys and values of all heads, and a copy of each while they are made, fit in free memory."""
    needed = 2 * 4 * cached * HEADS * (SIZES.nope_dim + SIZES.rope_dim + SIZES.value_dim)
    return needed < os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def latent(cached: int) -> Row:
    """One step of DeepSeek-V2's heads (128 of 128 + 64, latents of 512), 1,024 wide, with its projections."""
    layer = MultiHeadLatentAttention(1024, HEADS, SIZES, mask=Causal(), rotary=Rotary(64)).eval()
    cache = layer.init_cache(1, cached + 1)
    cache.latent.normal_()
    x = torch.randn(1, 1, 1024)

    def step(form: str) -> Callable[[], object]:
        def run() -> object:
            layer.form, cache.length = form, cached
            return layer(x, cache=cache)

        return run

    name = f"latent attention, one step, {cached:,} cached, DeepSeek-V2's heads: absorbed"
    return Row(name, "expanded from latents", step("absorbed"), step("expanded"))


def prefills(name: str) -> Row:
    ours, theirs = models(name)
    ids = torch.randint(3, 97, (1, PROMPT), generator=torch.Generator().manual_seed(0))
    return Row(f"{name}, prefill of {PROMPT:,} tokens", "transformers", lambda: ours(ids), lambda: theirs(ids))


def steps(name: str) -> Row:
    ours, theirs = models(name)
    ids = torch.randint(3, 97, (1, PROMPT), generator=torch.Generator().manual_seed(0))
    cache = ours.init_cache(1, 100 * PROMPT)
    ours(ids, cache=cache)
    past: Any = theirs(ids, use_cache=True).past_key_values

    def mine() -> None:
        for t in range(STEPS):
            ours(ids[:, t : t + 1], cache=cache)

    def peer() -> None:
        for t in range(STEPS):
            theirs(ids[:, t : t + 1], past_key_values=past, use_cache=True)

    return Row(f"{name}, {STEPS} steps behind them", "transformers", mine, peer)


def models(name: str) -> tuple[regard.models.Decoder, transformers.PreTrainedModel]:
    theirs = transformers.AutoModelForCausalLM.from_pretrained(FOLDERS / name, dtype=torch.float32).eval()
    return regard.load(FOLDERS / name).eval(), theirs


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    lines = ["| work | against | " + " | ".join(f"× on {n} thread{'s' * (n > 1)} (ms)" for n in options.threads) + " |"]
    lines.append("|---" * (2 + len(options.threads)) + "|")
    print("\n".join(lines))
    makes: list[Callable[[], Row]] = [lambda: latent(4096)]
    if room(32768):
        makes.append(lambda: latent(32768))
    else:
        lines.append("| latent attention, one step, 32,768 cached | expanded from latents | no room for the latter |")
    for name in NAMES:
        makes += [lambda name=name: prefills(name), lambda name=name: steps(name)]
    for make in makes:
        cells = []
        for threads in options.threads:
            torch.set_num_threads(threads)
            row = make()
            ratio, own = measure(row, options.rounds, time.process_time if threads == 1 else time.perf_counter)
            cells.append(f"{ratio:.1f} ({own:.2f})")
        lines.append(f"| {row.work} | {row.peer} | {' | '.join(cells)} |")
        print(lines[-1], flush=True)
    if options.write:
        page.write("hybrids", lines)


if __name__ == "__main__":
    main()
