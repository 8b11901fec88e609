"""An encoder and a decoder with cross-attention against torch.nn.Transformer, with caches, and on patches of images."""

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

import regard
from regard.errors import CacheFull
from regard.masks import Causal
from regard.models import (
    MLP,
    CrossPostNorm,
    CrossPreNorm,
    Decoder,
    Embedding,
    Encoder,
    EncoderDecoder,
    PostNorm,
    PreNorm,
)
from regard.nn import LinearCrossAttention, MultiHeadAttention, from_torch

DIM, HEADS, HIDDEN, LAYERS, READ, WRITTEN = 12, 3, 20, 2, 17, 19
CLOSE = {"rtol": 1e-11, "atol": 1e-11}


def theirs(norm_first):
    """torch's own, random in all its parameters; its fast path, which inference takes, is for other numbers."""
    layer = {"dim_feedforward": HIDDEN, "dropout": 0.0, "batch_first": True, "norm_first": norm_first}
    reading = nn.TransformerEncoderLayer(DIM, HEADS, **layer)
    encoder = nn.TransformerEncoder(reading, LAYERS, nn.LayerNorm(DIM), enable_nested_tensor=False)
    whole = nn.Transformer(DIM, HEADS, num_decoder_layers=LAYERS, custom_encoder=encoder, **layer).double()
    for p in whole.parameters():
        nn.init.normal_(p, std=0.4)
    return whole


def mlp(layer):
    ff = MLP(DIM, HIDDEN, nn.ReLU())
    ff.up_proj, ff.down_proj = layer.linear1, layer.linear2
    return ff


def causal(module):
    layer = from_torch(module)
    layer.mask = Causal()
    return layer


def ours(peer, norm_first):
    """The same from this library's parts, with the same parameters."""

    def reading(layer):
        block = PreNorm if norm_first else PostNorm
        return lambda i: block(from_torch(layer.self_attn), mlp(layer), layer.norm1, layer.norm2)

    def writing(layer):
        block = CrossPreNorm if norm_first else CrossPostNorm
        mixers = causal(layer.self_attn), from_torch(layer.multihead_attn)
        return lambda i: block(*mixers, mlp(layer), (layer.norm1, layer.norm2, layer.norm3))

    encoder = Encoder(Embedding(nn.Embedding(READ, DIM)), list(map(reading, peer.encoder.layers)), peer.encoder.norm)
    embedding = Embedding(nn.Embedding(WRITTEN, DIM))
    decoder = Decoder(embedding, list(map(writing, peer.decoder.layers)), peer.decoder.norm)
    return EncoderDecoder(encoder, decoder).double()


@pytest.fixture(params=[False, True], ids=["post-norm", "pre-norm"])
def pair(request):
    torch.manual_seed(0)
    peer = theirs(request.param)
    return peer, ours(peer, request.param)


@pytest.fixture
def call():
    """Sources padded at the end, and texts."""
    torch.manual_seed(1)
    source, ids = torch.randint(0, READ, (2, 7)), torch.randint(0, WRITTEN, (2, 6))
    keep = torch.ones_like(source, dtype=torch.bool)
    keep[1, 4:] = False
    return source, keep, ids


def answer(peer, model, source, keep, ids, target_keep=None):
    read, written = model.encoder.embedding.tokens, model.decoder.embedding.tokens
    hidden = peer(
        read(source),
        written(ids),
        tgt_mask=torch.ones(ids.shape[1], ids.shape[1]).triu(1).bool(),
        src_key_padding_mask=~keep,
        tgt_key_padding_mask=None if target_keep is None else ~target_keep,
        memory_key_padding_mask=~keep,
    )
    return hidden @ written.weight.T


def test_logits_and_gradients_are_torchs(pair, call):
    peer, model = pair
    source, keep, ids = call
    want = answer(peer, model, source, keep, ids)
    got = model(ids, source=source, source_keep=keep)
    torch.testing.assert_close(got, want, **CLOSE)
    weight = peer.decoder.layers[0].linear1.weight  # shared by both
    grads = [torch.autograd.grad(out.square().sum(), weight, retain_graph=True)[0] for out in (got, want)]
    torch.testing.assert_close(*grads, **CLOSE)


def test_padding_in_both_texts(pair, call):
    peer, model = pair
    source, keep, ids = call
    target_keep = torch.ones_like(ids, dtype=torch.bool)
    target_keep[0, 4:] = False
    want = answer(peer, model, source, keep, ids, target_keep)
    got = model(ids, source=source, source_keep=keep, keep=target_keep)
    torch.testing.assert_close(got[target_keep], want[target_keep], **CLOSE)
    other = source.masked_fill(~keep, 3)
    torch.testing.assert_close(model(ids, source=other, source_keep=keep), model(ids, source=source, source_keep=keep))


@torch.no_grad()
@pytest.mark.parametrize("sizes", [[1] * 6, [3, 3], [4, 1, 1]], ids=str)
def test_decoding_step_by_step_is_the_whole_run(pair, call, sizes):
    _, model = pair
    source, keep, ids = call
    want = model(ids, source=source, source_keep=keep)
    cache = model.init_cache(2, 6, source=7)
    first, *others = ids.split(sizes, 1)
    pieces = [model(first, source=source, source_keep=keep, cache=cache)]
    model.encoder = None  # nothing of the source is read again
    pieces += [model(part, cache=cache) for part in others]
    torch.testing.assert_close(torch.cat(pieces, 1), want, **CLOSE)
    assert cache.length == 6


@torch.no_grad()
def test_caches_go_back_reorder_and_copy(pair, call):
    _, model = pair
    source, keep, ids = call
    want = model(ids, source=source, source_keep=keep)
    cache = model.init_cache(2, 6, source=7)
    model(ids[:, :4], source=source, source_keep=keep, cache=cache)
    again = cache.clone()
    cache.crop(2)
    torch.testing.assert_close(model(ids[:, 2:], cache=cache), want[:, 2:], **CLOSE)
    again.reorder([1, 0])
    copied = pytree.tree_map(lambda t: t.clone() if isinstance(t, torch.Tensor) else t, again)
    torch.testing.assert_close(model(ids[[1, 0], 4:], cache=again), want[[1, 0], 4:], **CLOSE)
    torch.testing.assert_close(model(ids[[1, 0], 4:], cache=copied), want[[1, 0], 4:], **CLOSE)
    again.reset()
    torch.testing.assert_close(model(ids, source=source, source_keep=keep, cache=again), want, **CLOSE)


@torch.no_grad()
def test_a_refused_call_leaves_the_cache_as_it_was(pair, call):
    _, model = pair
    source, _, ids = call
    cache = model.init_cache(2, 6, source=3)
    with pytest.raises(CacheFull):  # the source does not fit
        model(ids, source=source, cache=cache)
    assert cache.length == 0
    assert not any(own.has_context for own in cache)
    with pytest.raises(ValueError, match=r"^context: expected a tensor in the first call"):
        model(ids, cache=cache)
    model(ids[:, :2], source=source[:, :3], cache=cache)
    with pytest.raises(ValueError, match=r"^context: expected None, for the cache holds one"):
        model(ids[:, 2:], source=source[:, :3], cache=cache)
    with pytest.raises(CacheFull):
        model(ids, cache=cache)
    assert cache.length == 2
    torch.testing.assert_close(model(ids[:, 2:], cache=cache), model(ids, source=source[:, :3])[:, 2:], **CLOSE)


def test_calls_that_cannot_be(pair, call):
    _, model = pair
    source, keep, ids = call
    with pytest.raises(ValueError, match=r"^context: expected a tensor"):
        model(ids)
    with pytest.raises(ValueError, match=r"^source_keep: expected None"):
        model(ids, source_keep=keep)
    with pytest.raises(ValueError, match=r"^segments: expected None"):
        model.decoder(ids, context=model.encoder(source), segments=torch.zeros_like(ids))
    plain = Decoder(Embedding(nn.Embedding(WRITTEN, DIM)), [])
    with pytest.raises(ValueError, match=r"^context: expected None, for no block"):
        plain(ids, context=torch.zeros(2, 3, DIM))


@torch.no_grad()
def test_a_context_read_by_linear_attention_and_by_some_layers_only():
    torch.manual_seed(0)

    def norms(count):
        return tuple(nn.LayerNorm(DIM) for _ in range(count))

    def own():
        return MultiHeadAttention(DIM, HEADS, mask=Causal(), rotary=regard.positions.Rotary(4))

    def crossing(i):
        return CrossPreNorm(own(), LinearCrossAttention(DIM, HEADS, context_dim=5), MLP(DIM, 8, nn.ReLU()), norms(3))

    def plain(i):
        return PreNorm(own(), MLP(DIM, 8, nn.ReLU()), *norms(2))

    model = Decoder(Embedding(nn.Embedding(WRITTEN, DIM)), [plain, crossing]).double().eval()
    ids, context = torch.randint(0, WRITTEN, (2, 5)), torch.randn(2, 4, 5, dtype=torch.float64)
    keep = torch.tensor([[True] * 4, [True, True, False, False]])
    want = model(ids, context=context, context_keep=keep)
    cache = model.init_cache(2, 5)
    pieces = [model(ids[:, :2], context=context, context_keep=keep, cache=cache), model(ids[:, 2:], cache=cache)]
    torch.testing.assert_close(torch.cat(pieces, 1), want, **CLOSE)
    cache.crop(3)
    torch.testing.assert_close(model(ids[:, 3:], cache=cache), want[:, 3:], **CLOSE)


class Patches(nn.Module):
    """Squares of an image as tokens, with a learned vector for each place."""

    def __init__(self, side, places):
        super().__init__()
        self.proj = nn.Conv2d(3, DIM, kernel_size=side, stride=side)
        self.places = nn.Parameter(torch.randn(places, DIM))

    def forward(self, images):
        return self.proj(images).flatten(2).transpose(1, 2) + self.places


def vision(side=2, places=6):
    def reading(i):
        norms = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        return PreNorm(MultiHeadAttention(DIM, HEADS), MLP(DIM, HIDDEN, nn.GELU()), *norms)

    return Encoder(Patches(side, places), [reading] * LAYERS, nn.LayerNorm(DIM)).double()


def test_patches_of_images_enter_an_encoder():
    torch.manual_seed(0)
    model, images = vision(), torch.randn(2, 3, 4, 6, dtype=torch.float64)
    got = model(images)
    assert got.shape == (2, 6, DIM)
    squares = images.unfold(2, 2, 2).unfold(3, 2, 2).permute(0, 2, 3, 1, 4, 5).reshape(2, 6, 12)
    weight = model.embedding.proj.weight.reshape(DIM, 12)
    x = squares @ weight.T + model.embedding.proj.bias + model.embedding.places
    for layer in model.layers:
        x = layer(x)
    torch.testing.assert_close(got, model.norm(x), **CLOSE)
    keep = torch.tensor([[True] * 6, [True] * 3 + [False] * 3])
    changed = images.clone()
    changed[1, :, 2:] = 9.0  # the last three squares
    torch.testing.assert_close(model(changed, keep=keep)[keep], model(images, keep=keep)[keep], **CLOSE)


def test_a_decoder_describes_an_image():
    torch.manual_seed(0)
    peer = theirs(True)
    decoder = ours(peer, True).decoder
    model, images = EncoderDecoder(vision(), decoder), torch.randn(2, 3, 4, 6, dtype=torch.float64)
    ids = torch.randint(0, WRITTEN, (2, 4))
    want = decoder(ids, context=model.encoder(images))
    torch.testing.assert_close(model(ids, source=images), want, **CLOSE)


def test_embeddings_that_give_no_tokens_are_named():
    with pytest.raises(ValueError, match=r"^embedding: expected one that gives"):
        Encoder(nn.Flatten(), [])(torch.zeros(2, 3, 4))
    with pytest.raises(ValueError, match=r"^types: expected None"):
        Encoder(nn.Identity(), [])(torch.zeros(2, 3, DIM), types=torch.zeros(2, 3, dtype=torch.long))
