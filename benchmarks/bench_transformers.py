"""transformers models with ``attn_implementation="regard"``: a prefill of 2,048 tokens against "sdpa" and "eager".

    python benchmarks/bench_transformers.py [--threads 1 2] [--rounds 5] [--write]

Small models with random weights, 4 layers of 8 query and 4 key heads, head size 64. The three take turns in one
process; a ratio is the peer's smallest time over regard's (above 1: regard is faster).
"""

from __future__ import annotations

import argparse
import time

import page
import torch
import transformers

from regard.integrations.transformers import NAME  # importing it registers the implementation

TOKENS = 2048
SIZES = {
    "vocab_size": 512,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 4096,
}
KINDS = (NAME, "sdpa", "eager")


def models() -> dict[str, transformers.PreTrainedModel]:
    return {
        "Llama": transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)),
        "Mistral, window 512": transformers.MistralForCausalLM(transformers.MistralConfig(**SIZES, sliding_window=512)),
    }


@torch.no_grad()
def prefill(model: transformers.PreTrainedModel, ids: torch.Tensor, rounds: int) -> dict[str, float]:
    """The smallest seconds of each implementation, taken in turns."""
    times: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for turn in range(rounds + 1):
        for kind in KINDS:
            model.set_attn_implementation(kind)
            start = time.perf_counter()
            model(ids, logits_to_keep=1)
            if turn:
                times[kind].append(time.perf_counter() - start)
    return {kind: min(taken) for kind, taken in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(0)
    ids = torch.randint(0, SIZES["vocab_size"], (1, TOKENS))
    lines = [
        f"| {TOKENS}-token prefill | dtype | threads | regard, ms | × sdpa | × eager |",
        "|---|---|---|---|---|---|",
    ]
    for name, model in models().items():
        for dtype in (torch.float32, torch.bfloat16):
            own = model.eval().to(dtype)
            for threads in options.threads:
                torch.set_num_threads(threads)
                taken = prefill(own, ids, options.rounds)
                ours = taken["regard"]
                ratios = " | ".join(f"{taken[kind] / ours:.2f}" for kind in KINDS[1:])
                lines.append(f"| {name} | {str(dtype)[6:]} | {threads} | {ours * 1e3:.0f} | {ratios} |")
    print(f"transformers {transformers.__version__}")
    print("\n".join(lines))
    if options.write:
        page.write("transformers", lines)


if __name__ == "__main__":
    main()
