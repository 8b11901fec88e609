"""RWKV-6's reading before writing and the slots of gated slot attention, as compositions of `regard.recurrence`."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from oracles.gsa import gated_slots
from oracles.rwkv6 import rwkv6

import regard
from regard.mixers.gsa import slot_scores
from regard.mixers.rwkv6 import read_then_write
from regard.mixers.sequence import TokenSequence
from regard.nn import RWKV6, GatedSlotAttention
from regard.transitions import Decay

WIDE = torch.float64
NAN = float("nan")


def drawn(layer, seed=3):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator))
    return layer.to(WIDE).eval()


def tokens(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=WIDE)


def sequence(v, segments=None):
    batch, _, count, _ = v.shape
    return TokenSequence(v.transpose(1, 2).flatten(2), torch.arange(count).expand(batch, -1), segments=segments)


MADE = {
    "rwkv6": (lambda: RWKV6(12, 3, key_dim=5, value_dim=2, mix_rank=3, decay_rank=2, eps=1e-3), rwkv6, {"eps": 1e-3}),
    "gsa": (
        lambda: GatedSlotAttention(12, 3, slots=7, key_dim=5, value_dim=2, tau=2.0, eps=1e-3),
        gated_slots,
        {"tau": 2.0, "eps": 1e-3},
    ),
}


@pytest.mark.parametrize("name", MADE)
@torch.no_grad()
def test_other_sizes_than_the_catalogue_s(name):
    make, formula, options = MADE[name]
    layer, x = drawn(make()), tokens(2, 9, 12)
    weights = {key: value.numpy() for key, value in layer.state_dict().items()}
    for row, got in enumerate(layer(x)):
        np.testing.assert_allclose(got.numpy(), formula(x[row].numpy(), weights, 3, **options), rtol=1e-9, atol=1e-9)


def test_a_state_is_read_before_the_token_s_own_decay():
    """Two tokens by hand, from a state."""
    q, k, v = (tokens(1, 1, 2, size, seed=seed) for seed, size in ((1, 3), (2, 3), (3, 2)))
    g, u, before = -tokens(1, 1, 2, 3, seed=4).exp(), tokens(1, 3, seed=5), tokens(1, 1, 3, 2, seed=6)
    out, last = read_then_write(sequence(v), q, k, v, Decay(g), u, before, 0.5)
    state = before[0, 0]
    for t in range(2):
        key, value = k[0, 0, t], v[0, 0, t]
        own = torch.outer(u[0] * key, value)
        torch.testing.assert_close(out[0, 0, t], 0.5 * (state + own).T @ q[0, 0, t], rtol=0, atol=1e-12)
        state = g[0, 0, t].exp()[:, None] * state + torch.outer(key, value)
    torch.testing.assert_close(last[0, 0], state, rtol=0, atol=1e-12)


def test_what_follows_is_no_part_of_what_was_read():
    """A query that is not finite touches its own token alone, forwards and backwards, over a segment's start too."""
    q, k, v = (tokens(1, 1, 4, 3, seed=seed) for seed in (1, 2, 3))
    ids, u = torch.tensor([[0, 0, 1, 1]]), tokens(1, 3, seed=5)
    q[0, 0, 2] = NAN
    for x in (q, k, v):
        x.requires_grad_()
    out, _ = read_then_write(sequence(v, ids), q, k, v, Decay(), u, None, 1.0)
    others = [0, 1, 3]
    assert out[:, :, others].isfinite().all() and out[:, :, 2].isnan().all()
    for read in (others, [0, 1, 2, 3]):
        before = [g[:, :, :2] for g in torch.autograd.grad(out[:, :, read].sum(), (q, k, v), retain_graph=True)]
        assert all(g.isfinite().all() for g in before)


@pytest.mark.parametrize("pieces", [[1] * 6, [2, 0, 4], [0, 6]])
def test_pieces_and_states_are_the_whole(pieces):
    q, k, v, g = (tokens(2, 3, 6, 4, seed=seed) for seed in (1, 2, 3, 4))
    u, state = tokens(3, 4, seed=5), None
    whole, end = read_then_write(sequence(v), q, k, v, Decay(-g.exp()), u)
    outs = []
    for q_, k_, v_, g_ in zip(*(x.split(pieces, 2) for x in (q, k, v, -g.exp())), strict=True):
        out, state = read_then_write(sequence(v_), q_, k_, v_, Decay(g_), u, state)
        outs.append(out)
    torch.testing.assert_close(torch.cat(outs, 2), whole)
    torch.testing.assert_close(state, end)


def test_scores_of_slots_by_hand():
    q, k = (tokens(1, 2, 5, 3, seed=seed) for seed in (1, 2))
    share, g = torch.rand(1, 2, 5, 4, dtype=WIDE), -torch.rand(1, 2, 5, 4, dtype=WIDE)
    before = tokens(1, 2, 4, 3, seed=3)
    scores, last = slot_scores(sequence(k), q, k, share, g, before)
    keys = before.clone()
    for t in range(5):
        keys = g[:, :, t].exp()[..., None] * keys + share[:, :, t, :, None] * k[:, :, t, None]
        torch.testing.assert_close(scores[:, :, t], (keys @ q[:, :, t, :, None])[..., 0] * 3**-0.5)
    torch.testing.assert_close(last, keys)


@torch.no_grad()
def test_the_matrix_of_slots_mixes_what_is_left_of_each_token():
    """Its rows sum to what the slots have taken in: less than 1, and near it after many tokens of a fast layer."""
    layer = GatedSlotAttention(8, 2, slots=3, tau=0.1).double()
    matrix, values = regard.mixing_matrix(layer, tokens(1, 60, 8))
    assert bool((matrix >= 0).all()) and bool((matrix.sum(-1) <= 1 + 1e-12).all())
    assert float(matrix.sum(-1)[..., -1].min()) > 0.99
    torch.testing.assert_close(matrix @ values, layer.mixed(tokens(1, 60, 8)))


def test_plans_know_both():
    for name, label in (("rwkv6", "RWKV-6, 4 x 4 x 4"), ("gsa", "gated slot attention, 4 x 4 x 4 and 4 x 4 x 4")):
        layer = regard.catalog.find(name).build(16, 4)
        assert layer.label() == label
        assert layer.step_macs(10) == 3 * (64 if name == "rwkv6" else 128)
    assert regard.analysis.costs.footprint(regard.nn.RWKV6(16, 4)).conv_state == 16
