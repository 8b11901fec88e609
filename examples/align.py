"""Train a GRU encoder-decoder to reverse a word, letter by letter, and draw what each letter was read from.

    python examples/align.py --attention additive --task reverse

Bahdanau's decoder asks with its previous state, Luong's with its current one.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn

import regard

LETTERS, LENGTH, DIM = 12, 8, 48


class Translator(nn.Module):
    def __init__(self, attention: str) -> None:
        super().__init__()
        self.early = attention == "additive"  # asks before its step, not after it
        self.tokens = nn.Embedding(LETTERS + 1, DIM)  # the last one starts an answer
        self.encoder = nn.GRU(DIM, DIM // 2, batch_first=True, bidirectional=True)
        self.decoder = nn.GRUCell(2 * DIM if self.early else DIM, DIM)
        self.attention = regard.nn.AdditiveAttention(DIM) if self.early else regard.nn.LuongAttention(DIM)
        self.head = nn.Linear(DIM, LETTERS)

    def forward(self, source: Tensor, answer: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(logits (B, T, LETTERS), alignment (B, T, T)); answers itself where no answer is given."""
        context, last = self.encoder(self.tokens(source))
        state, token = last.transpose(0, 1).flatten(1), torch.full_like(source[:, 0], LETTERS)
        logits, alignment = [], []
        for t in range(source.shape[1]):
            x = self.tokens(token)
            if self.early:
                x = torch.cat([x, self.attention(state[:, None], context)[:, 0]], 1)
                alignment.append(self.attention.mixing(state[:, None], context)[0][:, 0, 0])
            state = self.decoder(x, state)
            read = state
            if not self.early:
                read = self.attention(state[:, None], context)[:, 0]
                alignment.append(self.attention.mixing(state[:, None], context)[0][:, 0, 0])
            logits.append(self.head(read))
            token = answer[:, t] if answer is not None else logits[-1].argmax(1)
        return torch.stack(logits, 1), torch.stack(alignment, 1)


def words(batch: int, task: str) -> tuple[Tensor, Tensor]:
    source = torch.randint(LETTERS, (batch, LENGTH))
    return source, source.flip(1) if task == "reverse" else source


def main(arguments: list[str] | None = None) -> float:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--attention", choices=("additive", "luong"), default="additive")
    parser.add_argument("--task", choices=("reverse", "copy"), default="reverse")
    parser.add_argument("--steps", type=int, default=1500)
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    model = Translator(options.attention)
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
    for step in range(options.steps):
        source, answer = words(64, options.task)
        logits, _ = model(source, answer)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), answer.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 100 == 0:
            print(f"step {step}: {loss.item():.3f} nats per letter")
    with torch.no_grad():
        source, answer = words(256, options.task)
        logits, alignment = model(source)
    right = float((logits.argmax(-1) == answer).float().mean())
    print(f"{right:.1%} of the letters are right; rows write, columns were read:")
    for row in alignment[0].tolist():
        print("".join(" .:-=+*#%@"[min(int(10 * weight), 9)] * 2 for weight in row))
    return right


if __name__ == "__main__":
    main()
