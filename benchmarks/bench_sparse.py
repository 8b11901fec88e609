"""Longformer's and BigBird's attention against transformers' modules: seconds of CPU time on one thread, and memory.

    python benchmarks/bench_sparse.py [--lengths 4096 16384] [--rounds 3] [--write]

Width 512, 8 heads, float32, batch 1; 256 tokens on either side, with one global token and without; blocks of 64 with 3
random ones. Both have the same weights and give the same numbers, which is checked first (but for BigBird's random
blocks: transformers draws none in evaluation and takes the first block in their place). They take turns in one process;
a ratio is the peer's smallest time over regard's (above 1: regard is faster). Memory is what the peak of a process of
its own grows by during forward + backward.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import page
import torch
import transformers
from torch import nn
from transformers.models.big_bird import modeling_big_bird
from transformers.models.longformer import modeling_longformer

from regard.mixers.parts import merge_heads
from regard.nn import BigBird, BlockPlan, Longformer

DIM, HEADS, REACH, BLOCK, RANDOM = 512, 8, 256, 64, 3
KINDS = ("Longformer, w = 256", "Longformer, w = 256, one global token", "BigBird, blocks of 64, 3 random")
Call = Callable[[torch.Tensor], torch.Tensor]


def longformer(tokens: int, some: bool) -> tuple[Call, Call]:
    config = transformers.LongformerConfig(hidden_size=DIM, num_attention_heads=HEADS, attention_window=[2 * REACH])
    peer = modeling_longformer.LongformerSelfAttention(config, 0).eval()
    layer = Longformer(DIM, HEADS, REACH, globals_at=(0,) if some else ()).eval()
    copy(peer, layer, ("", "_global"))
    mask = torch.zeros(1, tokens)
    if some:
        mask[0, 0] = 10000.0
    flags, none = mask > 0, torch.zeros(1, tokens, dtype=torch.bool)

    def theirs(x: torch.Tensor) -> torch.Tensor:
        return peer(x, mask, is_index_masked=none, is_index_global_attn=flags, is_global_attn=some)[0]

    return lambda x: merge_heads(layer.mixed(x)), theirs


def bigbird(tokens: int, checked: bool) -> tuple[Call, Call]:
    config = transformers.BigBirdConfig(
        hidden_size=DIM, num_attention_heads=HEADS, block_size=BLOCK, num_random_blocks=RANDOM,
        max_position_embeddings=tokens,
    )  # fmt: skip
    peer = modeling_big_bird.BigBirdBlockSparseAttention(config).eval()
    layer = BigBird(DIM, HEADS, BlockPlan(BLOCK, RANDOM, first_again=checked)).eval()
    copy(peer, layer, ("",))
    masks = modeling_big_bird.BigBirdModel.create_masks_for_block_sparse_attn(torch.ones(1, tokens), BLOCK)
    blocked, band, asks, read = masks
    return lambda x: merge_heads(layer.mixed(x)), lambda x: peer(x, band, asks, read, blocked, blocked)[0]


def copy(peer: nn.Module, layer: nn.Module, kinds: tuple[str, ...]) -> None:
    for name in ("query", "key", "value"):
        for kind in kinds:
            getattr(layer, f"{name[0]}{kind}_proj").load_state_dict(getattr(peer, f"{name}{kind}").state_dict())


def calls(kind: str, tokens: int, checked: bool = False) -> tuple[Call, Call]:
    return bigbird(tokens, checked) if kind == KINDS[2] else longformer(tokens, kind == KINDS[1])


def trained(call: Call) -> Call:
    def run(x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        call(x).sum().backward()
        return x

    return run


def seconds(both: tuple[Call, Call], x: torch.Tensor, rounds: int) -> tuple[float, float]:
    """The smallest CPU time of each, taken in turns after one call of each."""
    times: tuple[list[float], list[float]] = ([], [])
    for turn in range(rounds + 1):
        for call, taken in zip(both, times, strict=True):
            start = time.process_time()
            call(x)
            if turn:
                taken.append(time.process_time() - start)
    return min(times[0]), min(times[1])


def grown(kind: str, tokens: int, which: int) -> float:
    """MiB by which forward + backward raise the peak of a new process."""
    code = f"import bench_sparse; bench_sparse.report({kind!r}, {tokens}, {which})"
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parent, capture_output=True, text=True, check=True
    )
    return float(run.stdout)


def report(kind: str, tokens: int, which: int) -> None:
    torch.set_num_threads(1)
    call, x = trained(calls(kind, tokens)[which]), torch.randn(1, tokens, DIM)
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak starts anew
    before = peak()
    call(x)
    print(peak() - before)


def peak() -> float:
    """MiB that this process has held at most."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 16384])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    lines = ["| layer | T | what | regard, ms | × transformers | MiB, regard | MiB, transformers |"]
    lines.append("|---|---|---|---|---|---|---|")
    for kind in KINDS:
        with torch.no_grad():
            x = torch.randn(1, 4096, DIM)
            ours, theirs = (call(x) for call in calls(kind, 4096, checked=True))
            torch.testing.assert_close(ours, theirs.reshape(ours.shape), rtol=0, atol=1e-4)
        for tokens in options.lengths:
            both, x = calls(kind, tokens), torch.randn(1, tokens, DIM)
            with torch.no_grad():
                ours_s, theirs_s = seconds(both, x, options.rounds)
            lines.append(f"| {kind} | {tokens} | forward | {ours_s * 1e3:.0f} | {theirs_s / ours_s:.2f} | | |")
            ours_s, theirs_s = seconds((trained(both[0]), trained(both[1])), x, options.rounds)
            memory = " | ".join(f"{grown(kind, tokens, which):.0f}" for which in (0, 1))
            what = "forward + backward"
            lines.append(f"| {kind} | {tokens} | {what} | {ours_s * 1e3:.0f} | {theirs_s / ours_s:.2f} | {memory} |")
    print(f"transformers {transformers.__version__}, {page.machine()}")
    print("\n".join(lines))
    if options.write:
        page.write("sparse", lines)


if __name__ == "__main__":
    main()
