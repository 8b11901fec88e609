"""Cross-attention through a cache, over random programs: what a call gives is what one call without a cache gives."""

from __future__ import annotations

import random

import pytest
import torch

import regard
from regard.biases import Alibi
from regard.caches import KVCache, WindowCache
from regard.errors import CacheFull
from regard.masks import Band, Causal, Full, Global, KeyLengths, KeyPadding, Predicate, Prefix, Segments, Window
from regard.mixers.parts import RelativePositionBias
from regard.nn import LinearCrossAttention, MultiHeadAttention, Projections, RMSNorm, Scores

DIM, HEADS, MOST = 8, 2, 14
BOUNDED = [Window(1), Window(2), Window(3), Window(40), Band(0, 0), Band(2, 2), Band(-1, 3), Window(3) & ~Prefix(1)]
MASKS = [
    None,
    Causal(),
    Full(),
    Prefix(2),
    ~Causal(),
    Window(2) | Global([0]),
    Causal() | Prefix(3),
    Predicate(lambda b, h, i, j: (i + j + h) % 2 == 0),
    Predicate(lambda b, h, i, j: i >= j) & Window(4),
    *BOUNDED,
]
BIASES = [None, None, Alibi(HEADS), Alibi(HEADS, symmetric=True), "table"]


def tokens(batch: int, length: int, dim: int = DIM) -> torch.Tensor:
    return torch.randn(batch, length, dim, dtype=torch.float64)


def drawn_layer(rng: random.Random, context_dim: int) -> MultiHeadAttention:
    bias = rng.choice(BIASES)
    layer = MultiHeadAttention(
        DIM,
        HEADS,
        kv_heads=rng.choice([1, 2]),
        mask=rng.choice(MASKS),
        bias=RelativePositionBias(8, HEADS, max_distance=6) if bias == "table" else bias,
        projections=Projections(
            bias=rng.random() < 0.5,
            gate=rng.random() < 0.3,
            norm=rng.choice([None, RMSNorm]),
            context_dim=rng.choice([None, context_dim]) if context_dim == DIM else context_dim,
        ),
        scores=Scores(sink=rng.random() < 0.3, softcap=rng.choice([None, 3.0])),
    )
    return layer.double().eval()


def drawn_mask(rng: random.Random, batch: int, keys: int):
    """A mask given at a call, by keys and slots, so that it means the same in a call with more queries."""
    kind = rng.choice(["none", "none", "padding", "lengths", "band", "slots"])
    if kind == "padding":
        return KeyPadding(torch.rand(batch, keys) > 0.3)
    if kind == "lengths":
        return KeyLengths(torch.randint(0, keys + 1, (batch,)))
    if kind == "slots":  # by key slot: queries past the keys belong to nothing
        return Segments(torch.randint(0, 2, (batch, keys)).cumsum(1)) if keys else None
    return Band(3, 1) if kind == "band" else None


@pytest.mark.parametrize("seed", range(60))
def test_random_programs_of_cross_attention(seed):
    rng = random.Random(seed)
    torch.manual_seed(seed)
    batch, width = rng.choice([1, 2, 3]), rng.choice([DIM, DIM + 3])
    layer, cache = drawn_layer(rng, width), None
    cache = layer.init_cache(batch, MOST)
    with torch.set_grad_enabled(rng.random() < 0.5):
        for _ in range(2):
            keys = rng.choice([0, 1, 2, 5, 9, MOST])
            context, x = tokens(batch, keys, width), tokens(batch, 0)
            keep = torch.rand(batch, keys) > 0.3 if rng.random() < 0.5 else None
            for step in range(6):
                part = tokens(batch, rng.choice([0, 1, 1, 2, 7]))
                given = drawn_mask(rng, batch, context.shape[1])
                x = torch.cat((x, part), 1)
                if step and rng.random() < 0.3:
                    cache = cache.clone()
                if step and rng.random() < 0.2:
                    with torch.no_grad():
                        regard.mixing_matrix(layer, tokens(batch, 2), cache=cache)
                got = layer(part, None if step else context, keep=None if step else keep, mask=given, cache=cache)
                want = layer(x, context, keep=keep, mask=given)[:, x.shape[1] - part.shape[1] :]
                torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
                assert cache.length == context.shape[1] and cache.asked == x.shape[1]
                if rng.random() < 0.2:
                    order = torch.randint(0, batch, (batch,))
                    cache.reorder(order)
                    x, context, keep = x[order], context[order], None if keep is None else keep[order]
                if rng.random() < 0.15 and context.shape[1] > 1:
                    n = rng.randrange(1, context.shape[1] + 1)
                    cache.crop(n)
                    context, keep = context[:, :n], None if keep is None else keep[:, :n]
            cache.reset()
        if layer.context_dim == DIM and rng.random() < 0.5:  # the same storage then holds a sequence
            x = tokens(batch, 6)
            got = torch.cat([layer(part, cache=cache) for part in x.split([3, 1, 2], 1)], 1)
            if layer.mask is not None and not bool(layer.mask.dense(6, 6)[..., torch.ones(6, 6).triu(1).bool()].any()):
                torch.testing.assert_close(got, layer(x), rtol=0, atol=1e-12)


@pytest.mark.parametrize("mask", BOUNDED, ids=str)
def test_a_bounded_pattern_keeps_its_context_whole(mask):
    torch.manual_seed(0)
    layer = MultiHeadAttention(16, 4, mask=mask).double()
    x, context = tokens(2, 12, 16), tokens(2, 5, 16)
    keep = torch.tensor([[True, False, True, True, True], [False, True, True, False, True]])
    for given in (None, keep):
        cache = layer.init_cache(2, 5)
        parts = [layer(x[:, :1], context, keep=given, cache=cache)]
        parts += [layer(part, cache=cache) for part in x[:, 1:].split([3, 1, 7], 1)]
        torch.testing.assert_close(torch.cat(parts, 1), layer(x, context, keep=given), rtol=0, atol=1e-12)


def test_a_ring_is_a_ring_again_after_its_context():
    torch.manual_seed(0)
    layer = MultiHeadAttention(16, 4, mask=Window(3)).double()
    cache = layer.init_cache(1, 5)
    small = cache.nbytes
    assert isinstance(cache, WindowCache)
    layer(tokens(1, 1, 16), tokens(1, 50, 16), cache=cache)
    assert cache.nbytes > small and cache.length == 50
    cache.reset()
    assert cache.nbytes == small
    x = tokens(1, 9, 16)
    got = torch.cat([layer(part, cache=cache) for part in x.split([4, 1, 4], 1)], 1)
    torch.testing.assert_close(got, layer(x), rtol=0, atol=1e-12)


def test_a_layer_that_only_crosses_has_room_for_the_context_that_was_asked_for():
    layer = MultiHeadAttention(16, 4, mask=Window(3), projections=Projections(context_dim=20)).double()
    cache = layer.init_cache(1, 5)
    assert isinstance(cache, KVCache)
    with pytest.raises(CacheFull):
        layer(tokens(1, 1, 16), tokens(1, 6, 20), cache=cache)
    assert cache.length == 0 and not cache.context


@pytest.mark.parametrize("queries, keys", [(4, 3), (1, 3), (0, 3), (3, 0), (0, 0), (9, 2)])
def test_a_padded_context_with_any_number_of_queries(queries, keys):
    torch.manual_seed(0)
    layer = MultiHeadAttention(16, 4).double()
    x, context = tokens(1, queries, 16), tokens(1, keys, 16)
    keep = torch.arange(keys)[None] % 2 == 0
    cache = layer.init_cache(1, 3)
    torch.testing.assert_close(layer(x, context, keep=keep, cache=cache), layer(x, context, keep=keep))
    torch.testing.assert_close(layer(x, cache=cache), layer(torch.cat((x, x), 1), context, keep=keep)[:, queries:])


def test_an_empty_context_of_kernel_attention_is_one_too():
    torch.manual_seed(0)
    layer = LinearCrossAttention(16, 4).double()
    x, cache = tokens(2, 3, 16), layer.init_cache(2, 0)
    want = layer(x, tokens(2, 0, 16))
    torch.testing.assert_close(layer(x, tokens(2, 0, 16), cache=cache), want)
    torch.testing.assert_close(layer(x, cache=cache), want)
    with pytest.raises(ValueError, match="context: the cache holds one already"):
        layer(x, tokens(2, 4, 16), cache=cache)


class Breaks(torch.nn.Module):
    def forward(self, x):
        raise RuntimeError("broken")


@pytest.mark.parametrize("make", [lambda: MultiHeadAttention(8, 2, mask=Causal()), lambda: MultiHeadAttention(8, 2)])
def test_a_call_whose_last_projection_fails_stores_nothing(make):
    layer = make().double()
    layer.o_proj = Breaks()
    cache = layer.init_cache(1, 9)
    for context in (None, tokens(1, 3)):
        with pytest.raises(RuntimeError, match="broken"):
            layer(tokens(1, 2), context, cache=cache)
        assert cache.length == 0 and not cache.context and cache.asked == 0
