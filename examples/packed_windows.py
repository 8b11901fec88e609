"""Train with a sliding window on documents packed into rows: no padding, and no document sees another.

    python examples/packed_windows.py

The documents are walks round a ring of letters; each begins somewhere else, so only its own past tells the next one.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.masks import Window
from regard.models import Decoder, Embedding, GatedMLP, PreNorm, activation, initialise
from regard.nn import MultiHeadAttention, RMSNorm
from regard.positions import Rotary

LETTERS, DIM, TOKENS = 16, 48, 64


def block(i: int) -> PreNorm:
    attention = MultiHeadAttention(DIM, 4, kv_heads=2, mask=Window(8), rotary=Rotary(DIM // 4))
    return PreNorm(attention, GatedMLP(DIM, 96, activation("silu")), RMSNorm(DIM), RMSNorm(DIM))


def packed(rows: int) -> tuple[Tensor, Tensor]:
    """Rows of whole documents end to end: ids and, for each token, the number of its document, (rows, TOKENS)."""
    ids, segments = torch.empty(rows, TOKENS, dtype=torch.long), torch.empty(rows, TOKENS, dtype=torch.long)
    for row in range(rows):
        at, number = 0, 0
        while at < TOKENS:
            length, first, step = (int(torch.randint(*span, ())) for span in ((6, 20), (0, LETTERS), (1, 4)))
            end = min(at + length, TOKENS)
            ids[row, at:end] = (first + step * torch.arange(end - at)) % LETTERS
            segments[row, at:end] = number
            at, number = end, number + 1
    return ids, segments


def loss_of(model: Decoder, ids: Tensor, segments: Tensor) -> Tensor:
    """Nats a token, of tokens with two or more of their own document before them."""
    logits = model(ids[:, :-1], segments=segments[:, :-1])
    told = segments[:, 2:] == segments[:, :-2]
    return F.cross_entropy(logits[:, 1:][told], ids[:, 2:][told])


def main(steps: int = 200) -> float:
    torch.manual_seed(0)
    model = initialise(Decoder(Embedding(torch.nn.Embedding(LETTERS, DIM)), [block] * 2, RMSNorm(DIM)), std=0.1)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    for step in range(steps):
        loss = loss_of(model, *packed(8))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0 or step + 1 == steps:
            print(f"step {step:4}  {loss.item():.3f} nats a token")

    ids, segments = packed(1)  # a document alone gives what it gives in its row
    inside = (segments == segments[0, 20])[0]
    alone = model(ids[:, inside])
    torch.testing.assert_close(model(ids, segments=segments)[:, inside], alone, rtol=1e-4, atol=1e-4)
    return loss.item()


if __name__ == "__main__":
    main()
