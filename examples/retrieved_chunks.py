"""Cross-attention over retrieved chunks: every query reads the chunks that were found for it, and no others.

    python examples/retrieved_chunks.py

Chunks of all queries lie in one context, so that one call reads them; a mask binds each query to its own. The task:
a question names a key, and one of the three chunks found for it holds the key beside its answer.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.masks import Segments
from regard.nn import MultiHeadAttention, Projections

NAMES, FOUND, DIM = 24, 3, 64


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.questions, self.keys, self.answers = (nn.Embedding(NAMES, DIM) for _ in range(3))
        self.attention = MultiHeadAttention(DIM, 4, projections=Projections(context_dim=DIM))
        self.head = nn.Linear(DIM, NAMES)

    def forward(self, asked: Tensor, keys: Tensor, answers: Tensor) -> Tensor:
        """Logits (B, Q, NAMES) of questions (B, Q), each with chunks (B, Q, FOUND)."""
        context = (self.keys(keys) + self.answers(answers)).flatten(1, 2)  # (B, Q FOUND, DIM)
        owner = torch.arange(asked.shape[1])
        own = Segments(owner, owner.repeat_interleave(FOUND))  # a query, and whose chunk a key is
        return self.head(self.attention(self.questions(asked), context, mask=own))


def batch(rows: int, queries: int = 5) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    keys = torch.rand(rows, queries, NAMES).topk(FOUND).indices  # different ones
    answers, chosen = torch.randint(NAMES, keys.shape), torch.randint(FOUND, (rows, queries, 1))
    return keys.gather(2, chosen)[..., 0], keys, answers, answers.gather(2, chosen)[..., 0]


def main(steps: int = 300) -> float:
    torch.manual_seed(0)
    model = Reader()
    optimizer = torch.optim.AdamW(model.parameters(), 5e-3)
    for step in range(steps):
        asked, keys, answers, wanted = batch(32)
        loss = F.cross_entropy(model(asked, keys, answers).flatten(0, 1), wanted.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 100 == 0 or step + 1 == steps:
            print(f"step {step:4}  loss {loss.item():.3f}")
    asked, keys, answers, wanted = batch(200)
    logits = model(asked, keys, answers)
    right = float((logits.argmax(-1) == wanted).float().mean())
    print(f"{right:.1%} answered rightly; a guess among the chunks found is right {1 / FOUND:.0%} of the time")
    keys[:, 1:], answers[:, 1:] = 0, 0  # the others' chunks
    torch.testing.assert_close(model(asked, keys, answers)[:, 0], logits[:, 0])
    return right


if __name__ == "__main__":
    main()
