"""Check a module of your own: causal attention as it is often written, with a fault that gradients hide.

    python examples/check_your_module.py          # the faulty module, and what is found
    python examples/check_your_module.py --sound  # the same one mended

Tokens are measured by the largest number of the whole sequence, the future included. Of the future, only the token that
holds it has a gradient, so a test by gradients at any other reads 0; changing the future shows the leak. It needs torch
alone.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn

from regard.testing import Call, PaddingArgument, check


class Attention(nn.Module):
    """One head; `sound=False` measures tokens by the largest of the sequence."""

    def __init__(self, dim: int, sound: bool) -> None:
        super().__init__()
        self.qkv, self.sound = nn.Linear(dim, 3 * dim), sound

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        top = x.abs().amax(-1 if self.sound else (1, 2), keepdim=True)
        q, k, v = self.qkv(x / top).chunk(3, -1)
        may = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        if attention_mask is not None:
            may = may & attention_mask[:, None]
        scores = (q @ k.mT / x.shape[-1] ** 0.5).masked_fill(~may, torch.finfo(x.dtype).min)
        return scores.softmax(-1).masked_fill(~may, 0) @ v


def main(arguments: list[str] | None = None) -> int:
    """Check one of the two and print what is found; 1 where a promise is broken."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sound", action="store_true", help="check the mended module")
    sound = parser.parse_args(arguments).sound
    torch.manual_seed(0)
    call = Call(padding=PaddingArgument("attention_mask", means="keep"))
    results = check(Attention(16, sound), call, dim=16, causal=True, averages=True, counts_slots=False)
    print(results)
    for failure in results.causes:
        print("\n" + results.describe(failure))
    return 0 if results.ok else 1


if __name__ == "__main__":
    raise SystemExit(main())
