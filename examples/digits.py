"""Train a small vision transformer on scikit-learn's handwritten digits, 8 by 8 pixels, on a CPU.

    python examples/digits.py digits [--model vit]
    regard classify digits/example.png --model digits

It needs 'regard[cli,images]' and scikit-learn; the learning curve is drawn where matplotlib is installed. A quarter of
the 1797 digits is kept back, and over 96 % of them are named rightly after a minute or two on two cores.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.progress import track
from torch import Tensor

from regard.models import Model, from_config

GOAL = 0.96  # of the digits that were not trained on
CLASSES = {"id2label": {n: str(n) for n in range(10)}, "num_channels": 1, "image_size": 8}
MODELS = {
    "vit": {
        "model_type": "vit",
        **CLASSES,
        "patch_size": 2,
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "intermediate_size": 128,
        "initializer_range": 0.1,
    },
    "swin": {
        "model_type": "swin",
        **CLASSES,
        "patch_size": 1,
        "embed_dim": 32,
        "depths": [2, 2],
        "num_heads": [2, 4],
        "window_size": 4,
        "mlp_ratio": 2.0,
        "drop_path_rate": 0.0,
        "initializer_range": 0.1,
    },
}
PREPROCESSING = {
    "image_processor_type": "ViTImageProcessor",
    "size": {"height": 8, "width": 8},
    "image_mean": [0.3],
    "image_std": [0.4],
}


# ---- the digits --------------------------------------------------------------------------------------------------


def read_digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(images and labels that are trained on, those that are not): (N, 1, 8, 8) in steps of 0 to 255, and (N,)."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = (torch.tensor(digits.images).view(-1, 1, 8, 8) * 255 / 16).round().to(torch.uint8)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    images, labels = images[order], torch.tensor(digits.target)[order]
    kept = len(images) // 4
    return images[kept:], labels[kept:], images[:kept], labels[:kept]


def pixels(images: Tensor) -> Tensor:
    """What the model reads, as PREPROCESSING says."""
    return (images / 255 - PREPROCESSING["image_mean"][0]) / PREPROCESSING["image_std"][0]


def shifted(images: Tensor) -> Tensor:
    """Each image shifted by up to one pixel along both axes, with nothing beyond its edges."""
    wide = F.pad(images, (1, 1, 1, 1))
    rows, columns = (torch.randint(3, (len(images), 1, 1)) + torch.arange(8) for _ in range(2))
    return wide[torch.arange(len(images))[:, None, None], 0, rows.transpose(1, 2), columns][:, None]


# ---- the loop ----------------------------------------------------------------------------------------------------


@torch.no_grad()
def accuracy(model: Model, images: Tensor, labels: Tensor) -> float:
    model.eval()
    share = (model(pixels(images)).argmax(-1) == labels).float().mean()
    model.train()
    return float(share)


def train(model: Model, epochs: int, rate: float, batch: int) -> list[tuple[float, float]]:
    """(the mean loss, the accuracy on digits that are not trained on) after each epoch."""
    images, labels, unseen, answers = read_digits()
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.05)
    steps, began, curve, step = epochs * math.ceil(len(images) / batch), time.monotonic(), [], 0
    for epoch in track(range(epochs), "training", transient=True):
        losses = []
        for part in torch.randperm(len(images)).split(batch):
            warm, left = min(1.0, (step + 1) / 50), 0.5 + 0.5 * math.cos(math.pi * step / steps)
            for group in optimizer.param_groups:
                group["lr"] = rate * warm * left
            loss = F.cross_entropy(model(pixels(shifted(images[part]))), labels[part])
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.item())
            step += 1
        curve.append((sum(losses) / len(losses), accuracy(model, unseen, answers)))
        if epoch % 10 == 9 or epoch + 1 == epochs:
            text = f"epoch {epoch + 1} of {epochs}, {time.monotonic() - began:.0f} s: loss {curve[-1][0]:.3f}"
            print(f"{text}, {curve[-1][1]:.1%} of unseen digits named rightly")
    return curve


def draw(curve: list[tuple[float, float]], path: Path) -> None:
    """The learning curve as a picture, where matplotlib is."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        print("no learning curve: it needs matplotlib")
        return
    figure = Figure(figsize=(6, 3.5), layout="constrained")
    left = figure.subplots()
    right = left.twinx()
    epochs = range(1, len(curve) + 1)
    left.plot(epochs, [loss for loss, _ in curve], color="tab:gray")
    right.plot(epochs, [share for _, share in curve], color="tab:blue")
    left.set(xlabel="epoch", ylabel="loss in training (grey)")
    right.set(ylabel="named rightly, of unseen digits (blue)", ylim=(0, 1))
    figure.savefig(path, dpi=120)


def main(arguments: list[str] | None = None) -> float:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="for the model, its learning curve, and a digit to try it on")
    parser.add_argument("--model", choices=MODELS, default="vit")
    parser.add_argument("--epochs", type=int, default=120)
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--batch", type=int, default=64)
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    model = from_config(MODELS[options.model])
    curve = train(model, options.epochs, options.rate, options.batch)
    model.eval().save(options.folder)
    (options.folder / "preprocessor_config.json").write_text(json.dumps(PREPROCESSING, indent=2) + "\n")
    draw(curve, options.folder / "learning_curve.png")
    from PIL import Image

    _, _, unseen, answers = read_digits()
    Image.frombytes("L", (8, 8), bytes(unseen[0].flatten().tolist())).save(options.folder / "example.png")
    print(f"{options.folder}/example.png shows a {int(answers[0])}")
    return curve[-1][1]


if __name__ == "__main__":
    main()
