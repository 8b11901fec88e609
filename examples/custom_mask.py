"""A mask of your own, by a rule; the same as a combination of the library's; and a bias of your own that is trained.

    python examples/custom_mask.py

Every third token is a landmark that all later tokens read; beside those a token reads its four latest neighbours.
"""

from __future__ import annotations

import torch

import regard
from regard.biases import Formula
from regard.masks import Causal, Dense, Predicate, Window

TOKENS = 12


def main() -> None:
    landmarks = Causal() & Predicate(lambda b, h, i, j: (j % 3 == 0) & (i >= 0))
    rule = Window(4) | landmarks
    print(rule.draw(TOKENS), "\n")

    table = (torch.arange(TOKENS) % 3 == 0).expand(TOKENS, TOKENS)  # the same keys, as a tensor of the call's size
    q, k, v = (torch.randn(1, 2, TOKENS, 8) for _ in range(3))
    one = regard.attention(q, k, v, mask=rule)
    torch.testing.assert_close(one, regard.attention(q, k, v, mask=Window(4) | (Causal() & Dense(table))))
    print(regard.explain(q, k, v, mask=rule), "\n")

    rate = torch.zeros(2, requires_grad=True)  # one number a head, to be learned
    far = Formula(lambda b, h, i, j, rate: -rate[h] * (i - j).clamp(min=0).sqrt(), (rate,))
    regard.attention(q, k, v, mask=rule, bias=far).square().sum().backward()
    print(f"the gradient of the bias's rates: {rate.grad.tolist()}")


if __name__ == "__main__":
    main()
