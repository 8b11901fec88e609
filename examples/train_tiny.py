"""Train a small hybrid language model on this project's own pages, on a CPU.

    python examples/train_tiny.py [--seconds 180]

Three layers of Gated DeltaNet to one of softmax attention, on bytes. It prints the loss in nats a byte, on a part of
the text that it never trains on; then it saves the model, loads it and lets it continue a text. With the defaults, two
cores and three minutes the loss falls from 5.5 to below 2.6.
"""

from __future__ import annotations

import argparse
import math
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import regard
from regard.models import Model, decoder, generate

GOAL = 2.6  # nats a byte on unseen text after three minutes on two cores
STACK = ["gated_deltanet", "gated_deltanet", "gated_deltanet", "gqa"]
PAGES = Path(__file__).parents[1]
PROMPT = "A layer with a state "


# ---- the text ----------------------------------------------------------------------------------------------------


def read_text() -> tuple[Tensor, Tensor]:
    """(what is trained on, what is not) as bytes: every eighth stretch of the project's pages is kept back."""
    pages = [PAGES / "README.md", PAGES / "CONTRIBUTING.md", *sorted((PAGES / "docs").rglob("*.md"))]
    text = b"\n".join(page.read_bytes() for page in pages)
    stretches = torch.frombuffer(bytearray(text), dtype=torch.uint8).long().split(1024)
    return torch.cat([s for i, s in enumerate(stretches) if i % 8]), torch.cat(stretches[::8])


def batches(text: Tensor, rows: int, tokens: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Inputs and the bytes that follow each, (rows, tokens), from random places, for ever."""
    while True:
        first = torch.randint(len(text) - tokens, (rows, 1))
        window = text[first + torch.arange(tokens + 1)]
        yield window[:, :-1], window[:, 1:]


# ---- the loop ----------------------------------------------------------------------------------------------------


def loss_of(model: Model, inputs: Tensor, targets: Tensor) -> Tensor:
    """Nats a byte."""
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


@torch.no_grad()
def held_out_loss(model: Model, text: Tensor, tokens: int) -> float:
    """The same over the whole of a text, cut into windows."""
    windows = text[: (len(text) - 1) // tokens * tokens].view(-1, tokens)
    following = text[1 : windows.numel() + 1].view(-1, tokens)
    model.eval()
    losses = [loss_of(model, *pair) for pair in zip(windows.split(16), following.split(16), strict=True)]
    model.train()
    return float(torch.stack(losses).mean())


def train(model: Model, text: Tensor, *, seconds: float, rows: int, tokens: int, rate: float = 3e-3) -> int:
    """AdamW with a short warm-up and a cosine decay over the time that there is; gives the number of steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.1)
    begin, steps = time.monotonic(), 0
    for inputs, targets in batches(text, rows, tokens):
        spent = (time.monotonic() - begin) / seconds
        if spent >= 1.0:
            break
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, (steps + 1) / 30) * (0.05 + 0.95 * (1 + math.cos(math.pi * spent)) / 2)
        loss = loss_of(model, inputs, targets)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if steps % 50 == 0:
            print(f"step {steps:5}  loss {loss.item():.3f}  {spent:4.0%}", flush=True)
        steps += 1
    return steps


def main(arguments: list[str] | None = None) -> float:
    """Trains, saves, loads, samples; gives the loss on unseen text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("seconds", 180.0), ("dim", 128), ("repeats", 1), ("rows", 8), ("tokens", 128)):
        parser.add_argument(f"--{name}", type=type(default), default=default)
    parser.add_argument("--folder", type=Path, help="where to keep the trained model")
    chosen = parser.parse_args(arguments)

    torch.manual_seed(0)
    model = decoder(256, chosen.dim, STACK * chosen.repeats, heads=4)
    text, unseen = read_text()
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(text):,} bytes of text")
    print(f"loss before: {held_out_loss(model, unseen, chosen.tokens):.3f}; of a guess: {math.log(256):.3f}")
    steps = train(model, text, seconds=chosen.seconds, rows=chosen.rows, tokens=chosen.tokens)
    loss = held_out_loss(model, unseen, chosen.tokens)
    print(f"loss after {steps} steps: {loss:.3f}")

    with tempfile.TemporaryDirectory() as temporary:
        folder = chosen.folder or Path(temporary) / "model"
        model.save(folder)
        loaded = regard.load(folder)
        more = generate(loaded, list(PROMPT.encode()), max_tokens=120, temperature=0.7, seed=0)[0].ids
    print(PROMPT + bytes(more).decode(errors="replace"))
    return loss


if __name__ == "__main__":
    main()
