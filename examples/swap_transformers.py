"""A transformers model on regard's kernels: the same logits, less time. Needs transformers.

    python examples/swap_transformers.py

Importing the integration makes the name "regard" known to transformers; nothing of the model is copied or trained anew.
"""

from __future__ import annotations

import time

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

import regard.integrations.transformers  # noqa: F401  makes the name known


def seconds(model: torch.nn.Module, ids: torch.Tensor) -> float:
    times = []
    for _ in range(3):
        start = time.perf_counter()
        model(ids)
        times.append(time.perf_counter() - start)
    return min(times)


@torch.no_grad()
def main(tokens: int = 1024) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "num_key_value_heads": 2}
    model = Qwen2ForCausalLM(Qwen2Config(vocab_size=1000, num_hidden_layers=4, **sizes)).eval()
    ids = torch.randint(0, 1000, (1, tokens))
    before, slow = model(ids).logits, seconds(model, ids)
    model.set_attn_implementation("regard")
    after, fast = model(ids).logits, seconds(model, ids)
    print(f"largest difference of logits {float((after - before).abs().max()):.1e}; {slow / fast:.2f} times as fast")
    torch.testing.assert_close(after, before, rtol=0, atol=1e-4)
    model.set_attn_implementation("sdpa")
    assert torch.equal(model(ids).logits, before)


if __name__ == "__main__":
    main()
