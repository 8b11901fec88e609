"""Train a small DETR to find drawn shapes: boxes and names as a set, without anchors and without sorting out doubles.

    python examples/shapes.py --seconds 150 --output shapes.png --save shapes
    regard detect shapes/example.png --model shapes --output found.png

It needs 'regard[cli,images]'. The drawing shows what is found in pictures that were not trained on.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path

import torch
from PIL import Image, ImageDraw

from regard.models import from_config
from regard.models.images.detecting import draw, found_in
from regard.models.images.matching import Objects, corners, overlap

SIDE, NAMES = 64, ("square", "circle", "triangle")
OPTIONS = {
    "model_type": "detr",
    "id2label": dict(enumerate(NAMES)),
    "use_timm_backbone": False,
    "backbone_config": {
        "model_type": "resnet",
        "layer_type": "basic",
        "embedding_size": 24,
        "hidden_sizes": [24, 48],
        "depths": [1, 2],
    },
    "d_model": 64,
    "encoder_layers": 1,
    "decoder_layers": 3,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "num_queries": 8,
    "dropout": 0.0,
    "init_std": 0.1,
}
PREPROCESSING = {
    "image_processor_type": "DetrImageProcessor",
    "size": {"shortest_edge": SIDE, "longest_edge": 4 * SIDE},
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.25, 0.25, 0.25],
}


def picture(rng: random.Random) -> tuple[Image.Image, Objects]:
    """One to three shapes that do not touch, on a dark ground."""
    image = Image.new("RGB", (SIDE, SIDE), tuple(rng.randrange(60) for _ in range(3)))
    pen, labels, boxes = ImageDraw.Draw(image), [], []
    for _ in range(rng.randint(1, 3)):
        label, size = rng.randrange(len(NAMES)), rng.randint(12, 26)
        left, top = rng.randrange(SIDE - size), rng.randrange(SIDE - size)
        box = (left, top, left + size, top + size)
        if any(box[0] < b[2] and b[0] < box[2] and box[1] < b[3] and b[1] < box[3] for b in boxes):
            continue
        colour = tuple(rng.randrange(120, 256) for _ in range(3))
        inside = (left, top, left + size - 1, top + size - 1)
        if NAMES[label] == "square":
            pen.rectangle(inside, fill=colour)
        elif NAMES[label] == "circle":
            pen.ellipse(inside, fill=colour)
        else:
            pen.polygon([(left, inside[3]), (inside[2], inside[3]), (left + size // 2, top)], fill=colour)
        labels.append(label)
        boxes.append(box)
    share = torch.tensor(boxes).view(-1, 4) / SIDE
    centre = torch.cat([(share[:, :2] + share[:, 2:]) / 2, share[:, 2:] - share[:, :2]], 1)
    return image, Objects(torch.tensor(labels), centre)


def pixels(images: list[Image.Image]) -> torch.Tensor:
    raw = torch.frombuffer(bytearray(b"".join(image.tobytes() for image in images)), dtype=torch.uint8)
    return (raw.view(-1, SIDE, SIDE, 3).permute(0, 3, 1, 2) / 255 - 0.5) / 0.25


def quality(model: torch.nn.Module, number: int, seed: int) -> tuple[float, float]:
    """(mean IoU of each shape with the box that it is matched with, share of those that are named rightly)."""
    rng = random.Random(seed)
    images, objects = zip(*[picture(rng) for _ in range(number)], strict=True)
    model.eval()
    with torch.no_grad():
        found = model(pixels(list(images)))
    model.train()
    pairs = model.objective.match(found, objects)
    ious, named = [], []
    for n, ((queries, at), one) in enumerate(zip(pairs, objects, strict=True)):
        ious.append(overlap(corners(found.boxes[n, queries]), corners(one.boxes[at])))
        named.append((found.logits[n, queries].argmax(-1) == one.labels[at]).float())
    return float(torch.cat(ious).mean()), float(torch.cat(named).mean())


def main(arguments: list[str] | None = None) -> tuple[float, float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=150, help="of training, unless --steps come first")
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rate", type=float, default=5e-4)
    parser.add_argument("--output", type=Path, default=None, help="a .png with boxes drawn")
    parser.add_argument("--save", type=Path, default=None, help="a folder for the model, and a picture to try it on")
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    rng, model = random.Random(0), from_config(OPTIONS)
    torch.nn.init.normal_(model.queries.weight)  # as published: queries start apart
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.rate, weight_decay=1e-4)
    began, step = time.monotonic(), 0
    while step < options.steps and (spent := time.monotonic() - began) < options.seconds:
        done = max(spent / options.seconds, step / options.steps)
        for group in optimizer.param_groups:
            group["lr"] = options.rate * min(1.0, (step + 1) / 100) * (1.0 if done < 0.8 else 0.1)
        images, objects = zip(*[picture(rng) for _ in range(options.batch)], strict=True)
        losses = model.objective(model.steps(pixels(list(images))), objects)
        optimizer.zero_grad()
        losses.total.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 200 == 0:
            iou, named = quality(model, 64, 1)
            parts = ", ".join(f"{name} {value.item():.3f}" for name, value in losses._asdict().items())
            print(f"step {step}, {time.monotonic() - began:.0f} s: {parts}; IoU {iou:.3f}, named rightly {named:.1%}")
        step += 1
    iou, named = quality(model, 256, 2)
    print(f"after {step} steps: mean IoU {iou:.3f}, named rightly {named:.1%}, over 256 new pictures")
    model.eval()
    if options.output is not None:
        sheet = Image.new("RGB", (4 * SIDE, 2 * SIDE))
        for n in range(8):
            image, _ = picture(rng)
            with torch.no_grad():
                found = found_in(model(pixels([image])), [(SIDE, SIDE)], NAMES, threshold=0.7)[0]
            sheet.paste(draw(image, found), (n % 4 * SIDE, n // 4 * SIDE))
        sheet.resize((16 * SIDE, 8 * SIDE), Image.Resampling.NEAREST).save(options.output)
    if options.save is not None:
        model.save(options.save)
        picture(rng)[0].save(options.save / "example.png")
        (options.save / "preprocessor_config.json").write_text(json.dumps(PREPROCESSING, indent=2) + "\n")
    return iou, named


if __name__ == "__main__":
    main()
