"""A mechanism of your own in forty lines, with a cache, padding, packing and its mixing matrix; then checked.

    python examples/custom_mechanism.py

A leaky memory per channel: h_t = f_t h_{t-1} + (1 - f_t) x_t with a gate f_t = sigmoid(W x_t), read through another.
`VectorStateLayer` makes a whole layer of the two methods below.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import regard
from regard.mixers.parts import merge_heads
from regard.mixers.sequence import TokenSequence
from regard.mixers.vector_state import VectorInputs, VectorStateLayer
from regard.testing import Subject, run_checks


class LeakyMemory(VectorStateLayer):
    """``(B, T, dim)`` in and out, causal, with a state of one number a channel."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = self.width = dim
        self.f_proj, self.r_proj = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.o_proj = nn.Linear(dim, dim, bias=False)

    def inputs(self, seq: TokenSequence, states: dict[str, Tensor]) -> VectorInputs:
        raw = self.f_proj(seq.x)
        return VectorInputs(torch.sigmoid(-raw) * seq.x, log_decay=F.logsigmoid(raw))  # what enters, how the rest fades

    def project_output(self, x: Tensor, mixed: Tensor, gate_input: Tensor | None) -> Tensor:
        out: Tensor = self.o_proj(merge_heads(mixed) * torch.sigmoid(self.r_proj(x)))
        return out


def main() -> None:
    layer, x = LeakyMemory(16).double(), torch.randn(2, 9, 16, dtype=torch.float64)
    cache = layer.init_cache(batch=2, capacity=0)  # a state is never full
    steps = torch.cat([layer(part, cache=cache) for part in x.split([5, 1, 3], 1)], 1)
    torch.testing.assert_close(steps, layer(x))
    M, V = regard.mixing_matrix(layer, x)
    torch.testing.assert_close((M @ V).reshape(2, 16, 9), layer.mixed(x).reshape(2, 16, 9))
    results = run_checks(Subject("leaky memory", lambda: LeakyMemory(16), 16))
    print(results)
    results.raise_if_failed()


if __name__ == "__main__":
    main()
