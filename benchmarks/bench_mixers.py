"""Images, DeBERTa, graphs, multi-token attention, Hyena and others against other code: CPU time on one thread.

    python benchmarks/bench_mixers.py [--rounds 5] [--write]

The peers: transformers' Swin stage (224 x 224, batch 4, width 96, windows of 7) and ViT-B/16 attention (batch 4), which
have the same weights; multi-token attention as its equations stand (batch 1, 8 heads of 64, kernels of 6 by 11, T =
2048); Hyena's convolution as plain FFT code (width 512, T = 8192); a layer of DeBERTa-v2 with a small feed-forward part
(T = 512); Linformer and bidirectional Performer against regard's own softmax attention (width 256, T = 2048). All but
these last two give the same numbers, which is checked first; they take turns in one process, and a ratio is the peer's
smallest time over regard's (above 1: regard is faster). PyTorch Geometric's GATConv and TransformerConv (100,000 nodes,
1,000,000 edges, 8 heads of 16; weights of their own) have rows where it is installed. For Mega in chunks of 128 and for
hashed attention (128 tokens of a bucket, 32 buckets) a row says how their own time grows with T.
"""

from __future__ import annotations

import argparse
import importlib.util
import tempfile
from collections.abc import Callable
from functools import partial

import page
import torch
import torch.nn.functional as F
import transformers
from bench_sparse import seconds, trained
from torch import Tensor
from transformers.models.vit.modeling_vit import ViTAttention

import regard
from regard.mixers.parts import Projections
from regard.nn import (
    GraphAttention,
    GraphTransformer,
    HashedAttention,
    LengthProjection,
    Linformer,
    MegaAttention,
    MegaSizes,
    MultiHeadAttention,
    MultiTokenAttention,
    Performer,
)

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


def deberta() -> tuple[tuple[Call, Call], Tensor]:
    config = transformers.DebertaV2Config(
        num_hidden_layers=1, hidden_size=768, num_attention_heads=12, intermediate_size=64, relative_attention=True,
        position_buckets=256, norm_rel_ebd="layer_norm", share_att_key=True, pos_att_type=["p2c", "c2p"],
        position_biased_input=False, type_vocab_size=0, vocab_size=100, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    peer, ids = transformers.DebertaV2Model(config).eval(), torch.randint(0, 100, (1, 512))
    with tempfile.TemporaryDirectory() as folder:
        peer.save_pretrained(folder)
        own = regard.load(folder).eval()

    def plain(x: Tensor) -> Tensor:
        return peer(inputs_embeds=x).last_hidden_state

    # both from the table's rows on, so that there is an input to differentiate
    return (lambda x: embedded(own, ids, x), plain), peer.embeddings.word_embeddings(ids).detach()


def embedded(model: torch.nn.Module, ids: Tensor, x: Tensor) -> Tensor:
    """What a model gives for these rows of its table."""
    hook = model.embedding.tokens.register_forward_hook(lambda part, given, rows: x)
    try:
        return model(ids)
    finally:
        hook.remove()


def linformer() -> tuple[tuple[Call, Call], Tensor]:
    both = Linformer(256, 4, LengthProjection(2048, 128, 4)).eval(), MultiHeadAttention(256, 4).eval()
    return both, torch.randn(1, 2048, 256)


def performer() -> tuple[tuple[Call, Call], Tensor]:
    both = Performer(256, 4, features=128, bidirectional=True).eval(), MultiHeadAttention(256, 4).eval()
    return both, torch.randn(1, 2048, 256)


def graph(kind: str) -> tuple[tuple[Call, Call], Tensor]:
    from torch_geometric.nn import GATConv, TransformerConv

    edges = torch.randint(0, 100_000, (2, 1_000_000))
    peer = TransformerConv(128, 16, heads=8) if kind == "transformer" else GATConv(128, 16, 8, add_self_loops=False)
    own = (GraphTransformer if kind == "transformer" else GraphAttention)(128, 16, 8)
    return (lambda x: own(x, edges), lambda x: peer(x, edges)), torch.randn(100_000, 128)


LIKE = "softmax attention"  # the peer computes something else
ROWS = {
    "Swin stage, windows of 7": swin,
    "ViT-B/16 attention": vit,
    "multi-token attention, T = 2048": multi_token,
    "Hyena's convolution, T = 8192": hyena,
    "DeBERTa-v2's layer, T = 512": deberta,
    f"Linformer, T = 2048, against {LIKE}": linformer,
    f"Performer, T = 2048, against {LIKE}": performer,
    "graph attention, against GATConv": partial(graph, "additive"),
    "graph transformer, against TransformerConv": partial(graph, "transformer"),
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
        if name.startswith("graph") and importlib.util.find_spec("torch_geometric") is None:
            continue
        both, x = make()
        with torch.no_grad():
            if "against" not in name:
                torch.testing.assert_close(both[0](x), both[1](x), rtol=0, atol=2e-4)
            one, other = seconds(both, x, options.rounds)
        line = f"| {name} | {one * 1e3:.0f} | {other / one:.2f} |"
        one, other = seconds((trained(both[0]), trained(both[1])), x, options.rounds)
        lines.append(f"{line} {one * 1e3:.0f} | {other / one:.2f} |")
        print(lines[-1], flush=True)
    for name, layer in (
        ("Mega in chunks", MegaAttention(256, MegaSizes(chunk=128))),
        ("hashed attention", HashedAttention(256, 4, buckets=32, reach=128)),
    ):
        with torch.no_grad():
            short, long = (
                seconds((layer.eval(),) * 2, torch.randn(1, tokens, 256), options.rounds)[0] for tokens in (2048, 8192)
            )
        lines.append(f"| {name}, T = 8192 | {long * 1e3:.0f} | {long / short:.2f} times its own at T = 2048 | | |")
        print(lines[-1])
    print(f"transformers {transformers.__version__}, {page.machine()}")
    if options.write:
        page.write("mixers", lines)


if __name__ == "__main__":
    main()
