"""Caches under random programs, and the ways in which a call might leave one half-changed."""

from __future__ import annotations

import random

import pytest
import torch

import regard
from regard.errors import CacheError
from regard.masks import Causal, Window
from regard.nn import MultiHeadAttention
from regard.positions import Rotary

DIM = 8


def layer_with(mask):
    return MultiHeadAttention(DIM, 2, mask=mask, rotary=Rotary(4)).double().eval()


def tokens(batch, length):
    return torch.randn(batch, length, DIM, dtype=torch.float64)


@pytest.mark.parametrize("seed", range(40))
def test_random_programs(seed):
    """Calls with and without keep and segments, looks, failures, crops and reorders, against one whole call."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    batch = rng.choice([1, 2, 3])
    layer = layer_with(rng.choice([Causal(), Window(1), Window(2), Window(3), Window(5)]))
    cache = layer.init_cache(batch, 64)
    x, keep = tokens(batch, 0), torch.ones(batch, 0, dtype=torch.bool)
    ids = torch.zeros(batch, 0, dtype=torch.long)
    with torch.set_grad_enabled(rng.random() < 0.5):
        for _ in range(12):
            if rng.random() < 0.2:
                with torch.no_grad():
                    regard.mixing_matrix(layer, tokens(batch, 2), cache=cache)
            if rng.random() < 0.2:
                with pytest.raises(ValueError, match="mask"):
                    layer(tokens(batch, 2), cache=cache, mask=torch.ones(5, 1, dtype=torch.bool))
            if rng.random() < 0.2 and cache.length:
                n = rng.randrange(cache.length + 1)
                try:
                    cache.crop(n)
                    x, keep, ids = x[:, :n], keep[:, :n], ids[:, :n]
                except CacheError:
                    assert cache.length == x.shape[1]
            if rng.random() < 0.2:
                order = torch.tensor([rng.randrange(batch) for _ in range(batch)])
                cache.reorder(order)
                x, keep, ids = x[order], keep[order], ids[order]
            length = rng.choice([0, 1, 1, 2, 4])
            part = tokens(batch, length)
            given_keep = torch.rand(batch, length) > 0.3 if rng.random() < 0.3 else None
            last = ids[:, -1:] if ids.shape[1] else torch.zeros(batch, 1, dtype=torch.long)
            given_ids = last + torch.randint(0, 2, (batch, length)).cumsum(1) if rng.random() < 0.3 else None
            got = layer(part, keep=given_keep, segments=given_ids, cache=cache)
            x = torch.cat([x, part], 1)
            keep = torch.cat(
                [keep, torch.ones(batch, length, dtype=torch.bool) if given_keep is None else given_keep], 1
            )
            ids = torch.cat([ids, last.expand(-1, length) if given_ids is None else given_ids], 1)
            want = layer(x, keep=keep, segments=ids)[:, x.shape[1] - length :]
            torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
            assert cache.length == x.shape[1]


def test_frozen_keys_with_trained_queries():
    layer = layer_with(Causal())
    layer.k_proj.requires_grad_(False)
    layer.v_proj.requires_grad_(False)
    x, cache = tokens(2, 6), layer.init_cache(2, 8)
    (layer(x[:, :4], cache=cache).sum() + layer(x[:, 4:], cache=cache).sum()).backward()
    got = layer.q_proj.weight.grad.clone()
    layer.zero_grad()
    layer(x).sum().backward()
    torch.testing.assert_close(got, layer.q_proj.weight.grad)


def test_wrong_caches_are_refused():
    layer = layer_with(Causal())
    with pytest.raises(TypeError, match="cache: expected what init_cache gives"):
        layer(tokens(1, 1), cache="x")
    with pytest.raises(ValueError, match="cache: made for keys of 4 heads of 2"):
        layer(tokens(1, 1), cache=MultiHeadAttention(DIM, 4, mask=Causal()).double().init_cache(1, 4))
    cache = layer.init_cache(2, 4)
    for index in ([0.9, 1.9], [2], [-1]):
        with pytest.raises(ValueError, match="index: expected"):
            cache.reorder(index)
    cache.reorder([1, 0, 1])
    assert cache.batch == 3 and "3 rows, 0 of 4 tokens" in repr(cache)
