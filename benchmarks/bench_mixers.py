"""Images, multi-token attention, Hyena and Mega against other code: seconds of CPU time on one thread.

    python benchmarks/bench_mixers.py [--rounds 5] [--write]

The peers: transformers' Swin stage (224 x 224, batch 4, width 96, windows of 7) and ViT-B/16 attention (batch 4), which
have the same weights; multi-token attention as its equations stand (batch 1, 8 heads of 64, kernels of 6 by 11, T =
2048); Hyena's convolution as plain FFT code (width 512, T = 8192). All give the same numbers, which is checked first;
they take turns in one process, and a ratio is the peer's smallest time over regard's (above 1: regard is faster). For
Mega in chunks of 128 the row says how its own time grows from T = 2048 to 8192.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable

import page
import torch
import torch.nn.functional as F
import transformers
from bench_sparse import seconds, trained
from torch import Tensor
from transformers.models.vit.modeling_vit import ViTAttention

import regard
from regard.mixers.parts import Projections
from regard.nn import MegaAttention, MegaSizes, MultiHeadAttention, MultiTokenAttention

Call = Callable[[Tensor], Tensor]
SWIN = {"depths": [2], "num_heads": [3], "embed_dim": 96, "image_size": 224, "drop_path_rate": 0.0}


def swin() -> tuple[tuple[Call, Call], Tensor]:
    peer = transformers.SwinForImageClassification(transformers.SwinConfig(**SWIN)).eval()
    with tempfile.TemporaryDirectory() as folder:
        peer.save_pretrained(folder)
        own = regard.load(folder).stages[0].eval()
    theirs = peer.swin.encoder.layers[0]
    return (own, lambda x: theirs(x.flatten(1, 2), (56, 56))[0].unflatten(1, (56, 56))), torch.randn(4, 56, 56, 96)


def vit() -> tuple[tuple[Call, Call], Tensor]:
    peer = ViTAttention(transformers.ViTConfig(attn_implementation="sdpa")).eval()
    own = MultiHeadAttention(768, 12, projections=Projections(bias=True)).eval()
    own.load_state_dict(peer.state_dict())
    return (own, lambda x: peer(x)[0]), torch.randn(4, 197, 768)


def multi_token() -> tuple[tuple[Call, Call], Tensor]:
    layer = MultiTokenAttention(512, 8).eval()
    torch.nn.init.normal_(layer.conv_before, std=0.1)

    def plain(x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(2, (8, 64)).transpose(1, 2) for f in (layer.q_proj, layer.k_proj, layer.v_proj))
        may = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        scores = F.pad(torch.where(may, q @ k.mT / 8, 0.0), (5, 5, 5, 0))
        weights = torch.where(may, F.conv2d(scores, layer.conv_before[:, None], groups=8), -torch.inf).softmax(-1)
        groups = torch.einsum("bgiqk,gio->bgoqk", weights.unflatten(1, (4, 2)), layer.heads_after)
        mixed = layer.norm(groups.flatten(1, 2) @ v)
        return layer.o_proj(mixed.transpose(1, 2).flatten(2))

    return (layer, plain), torch.randn(1, 2048, 512)


def hyena() -> tuple[tuple[Call, Call], Tensor]:
    kernel = torch.randn(512, 8192) / 90

    def plain(x: Tensor) -> Tensor:
        y = torch.fft.irfft(torch.fft.rfft(x.mT, n=16384) * torch.fft.rfft(kernel, n=16384), n=16384)
        return y[..., :8192].mT

    return (lambda x: regard.long_conv(x, kernel), plain), torch.randn(1, 8192, 512)


ROWS = {
    "Swin stage, windows of 7": swin,
    "ViT-B/16 attention": vit,
    "multi-token attention, T = 2048": multi_token,
    "Hyena's convolution, T = 8192": hyena,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    lines = ["| what | forward, ms | × the peer | forward + backward, ms | × the peer |", "|---|---|---|---|---|"]
    for name, make in ROWS.items():
        both, x = make()
        with torch.no_grad():
            torch.testing.assert_close(both[0](x), both[1](x), rtol=0, atol=2e-4)
            one, other = seconds(both, x, options.rounds)
        line = f"| {name} | {one * 1e3:.0f} | {other / one:.2f} |"
        one, other = seconds((trained(both[0]), trained(both[1])), x, options.rounds)
        lines.append(f"{line} {one * 1e3:.0f} | {other / one:.2f} |")
        print(lines[-1], flush=True)
    layer = MegaAttention(256, MegaSizes(chunk=128)).eval()
    with torch.no_grad():
        short, long = (
            seconds((layer, layer), torch.randn(1, tokens, 256), options.rounds)[0] for tokens in (2048, 8192)
        )
    lines.append(f"| Mega in chunks, T = 8192 | {long * 1e3:.0f} | {long / short:.2f} times its own at T = 2048 | | |")
    print(lines[-1])
    print(f"transformers {transformers.__version__}, {page.machine()}")
    if options.write:
        page.write("mixers", lines)


if __name__ == "__main__":
    main()
