"""Latent attention: against numpy, in both forms, its cache, the sizes of published models."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from oracles import latent as oracle

import regard
from regard import backends
from regard.errors import CacheFull
from regard.masks import Causal, Window
from regard.nn import LatentProjections, LatentSizes, MultiHeadAttention, MultiHeadLatentAttention, Scores
from regard.positions import Rotary, YarnScaling

DIM, HEADS = 12, 4
WIDE = torch.float64
SIZES = LatentSizes(16, 8, 4, 6)
YARN = YarnScaling(40.0, 64, mscale=0.707, mscale_all_dim=0.707)
SHARPER = (0.0707 * math.log(40) + 1) ** 2


def drawn(layer, seed=3):
    """The layer in float64 with random parameters."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator))
    return layer.to(WIDE).eval()


def tokens(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=WIDE)


def close(got, want, tolerance=1e-12):
    limit = tolerance * max(1.0, float(want.detach().abs().max()))
    torch.testing.assert_close(got, want, rtol=0, atol=limit)


def latent(sizes=SIZES, dim=DIM, heads=HEADS, **parts):
    return drawn(MultiHeadLatentAttention(dim, heads, sizes, **{"mask": Causal()} | parts))


MADE = {
    "interleaved": partial(latent, rotary=Rotary(4, style="interleaved")),
    "half-split, compressed queries": partial(latent, LatentSizes(5, 3, 4, 7, 9), rotary=Rotary(4)),
    "nothing turns": partial(latent, LatentSizes(16, 8, 3, 6)),
    "no shared channels": partial(latent, LatentSizes(4, 3, 0, 2, 2), projections=LatentProjections(bias=True)),
    "gated by channel": partial(latent, projections=LatentProjections(gate="channel"), rotary=Rotary(4)),
    "gated by head": partial(latent, projections=LatentProjections(gate="head"), rotary=Rotary(4)),
    "yarn": partial(latent, rotary=Rotary(4, style="interleaved", scaling=YARN)),
    "wide values": partial(latent, LatentSizes(3, 2, 2, 9), rotary=Rotary(2)),
}
TURNS = {"interleaved": "interleaved", "half-split, compressed queries": "half", "wide values": "half"}
TURNS |= dict.fromkeys(("gated by channel", "gated by head"), "half")


# ---- the formula, and its two forms ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in MADE if name != "yarn"])
def test_the_oracle(name):
    layer, x = MADE[name](), tokens(2, 7, DIM)
    weights = {key: value.numpy() for key, value in layer.state_dict().items()}
    s = layer.sizes
    sizes = {"rank": s.rank, "nope": s.nope_dim, "rope": s.rope_dim}
    for form in ("expanded", "absorbed"):
        layer.form = form
        with torch.no_grad():
            got = layer(x)
        for row in range(2):
            want = oracle.layer(x[row].numpy(), weights, HEADS, turn=TURNS.get(name), **sizes)
            close(got[row], torch.from_numpy(want))


@pytest.mark.parametrize("name", MADE)
@torch.no_grad()
def test_both_forms_agree(name):
    """For every number of new tokens behind a prefix, and with padding."""
    layer, x = MADE[name](), tokens(3, 11, DIM)
    keep = torch.ones(3, 11, dtype=torch.bool)
    keep[1, :4] = False
    whole = {}
    for form in ("expanded", "absorbed"):
        layer.form = form
        whole[form] = layer(x, keep=keep)
        for new in (1, 2, 5):
            cache = layer.init_cache(3, 11)
            steps = [
                layer(part, keep=k, cache=cache) for part, k in zip(x.split(new, 1), keep.split(new, 1), strict=True)
            ]
            close(torch.cat(steps, 1)[keep], whole[form][keep])
    close(whole["absorbed"][keep], whole["expanded"][keep])


@pytest.mark.parametrize("name", MADE)
def test_both_forms_have_the_same_gradients(name):
    layer, x = MADE[name](), tokens(2, 6, DIM).requires_grad_()
    found = []
    for form in ("expanded", "absorbed"):
        layer.form = form
        found.append(torch.autograd.grad(layer(x).sin().sum(), [x, *layer.parameters()]))
    for a, b in zip(*found, strict=True):
        close(a, b, 1e-11)


def test_the_two_forms_drop_the_same_weights():
    layer, x = latent(scores=Scores(dropout=0.4, sink=True, softcap=3.0)).train(), tokens(2, 9, DIM)
    found = []
    for form in ("expanded", "absorbed"):
        layer.form = form
        torch.manual_seed(5)
        found.append(layer(x))
    close(*found)
    assert not torch.allclose(found[0], layer.eval()(x))


def test_the_mixing_matrix():
    layer, x = MADE["yarn"](), tokens(2, 6, DIM)
    matrix, values = regard.mixing_matrix(layer, x)
    assert matrix.shape == (2, HEADS, 6, 6) and values.shape == (2, HEADS, 6, 6)
    close(layer.o_proj((matrix @ values).transpose(1, 2).flatten(2)), layer(x))
    cache = layer.init_cache(2, 6)
    layer(x[:, :4], cache=cache)
    later, _ = regard.mixing_matrix(layer, x[:, 4:], cache=cache)
    close(later, matrix[:, :, 4:])
    assert cache.length == 4


# ---- which form, at which price --------------------------------------------------------------------------------------


def test_prefill_expands_and_decoding_absorbs():
    layer = MultiHeadLatentAttention(DIM, HEADS, LatentSizes(512, 128, 64, 128))
    assert not layer.absorbs(2048, 2048)
    assert layer.absorbs(1, 4096) and layer.absorbs(2, 4096)
    sizes = layer.sizes
    assert sizes.absorbed_cost(1, 4096) == 4096 * 1088 + 512 * 256
    assert sizes.expanded_cost(1, 4096) == 4096 * (512 * 256 + 320)
    # 512 * 256 / 768 = 170.67 queries cost the same where there are many keys
    assert layer.absorbs(170, 10**9) and not layer.absorbs(171, 10**9)
    layer.form = "both"
    with pytest.raises(ValueError, match=r"^form: "):
        layer.absorbs(1, 1)


@torch.no_grad()
def test_decoding_forms_no_keys_and_values_of_heads(monkeypatch):
    """One key head of rank + rope_dim channels, whose first rank channels are the values: the cache's own memory."""
    layer, x = MADE["interleaved"](), tokens(2, 9, DIM)
    seen = []

    def looked_at(q, k, v, **options):
        seen.append((q.shape, k, v, options["scale"]))
        return regard.attention(q, k, v, **options)

    cache = layer.init_cache(2, 9)
    layer(x[:, :8], cache=cache)
    monkeypatch.setattr("regard.mixers.latent.attention", looked_at)
    monkeypatch.setattr(layer, "_expanded", None)
    layer(x[:, 8:], cache=cache)
    ((q, k, v, scale),) = seen
    assert q == (2, HEADS, 1, 20) and k.shape == (2, 1, 9, 20) and v.shape == (2, 1, 9, 16)
    assert k.data_ptr() == v.data_ptr() == cache.latent.data_ptr()
    assert scale == 12**-0.5


@torch.no_grad()
def test_the_choice_does_not_depend_on_the_batch(monkeypatch):
    layer, x = MADE["interleaved"](), tokens(5, 9, DIM)
    taken = []
    monkeypatch.setattr(layer, "absorbs", lambda *sizes: taken.append(sizes) or type(layer).absorbs(layer, *sizes))
    for rows in (1, 5):
        cache = layer.init_cache(rows, 9)
        for part in x[:rows].split([6, 1, 2], 1):
            layer(part, cache=cache)
    assert taken[:3] == taken[3:] == [(6, 6), (1, 7), (2, 9)]


# ---- reported elsewhere: two ways, a scale, a cache of the wrong size ------------------------------------------------


@pytest.mark.parametrize("scaling", [None, YARN], ids=["plain", "yarn"])
@torch.no_grad()
def test_materialised_and_absorbed_after_a_prefill(scaling):
    layer, x = latent(rotary=Rotary(4, style="interleaved", scaling=scaling)), tokens(2, 8, DIM)
    found = []
    for form in ("expanded", "absorbed"):
        layer.form = form
        cache = layer.init_cache(2, 8)
        parts = [layer(x[:, :5], cache=cache), *(layer(part, cache=cache) for part in x[:, 5:].split(1, 1))]
        found.append(torch.cat(parts, 1))
        assert cache.nbytes == 2 * 8 * (16 + 4) * 8
    close(*found)
    close(found[0], layer(x))
    plain = 12**-0.5
    assert layer.scale == (plain if scaling is None else pytest.approx(plain * SHARPER))
    cache = layer.init_cache(1, 8)  # only the last four channels turn with the position
    layer(x[:1, :1], cache=cache, positions=torch.tensor([[0]]))
    layer(x[:1, :1], cache=cache, positions=torch.tensor([[3]]))
    first, second = cache.latent[0, 0, :2]
    assert torch.equal(first[:16], second[:16]) and (first[16:] != second[16:]).all()


def test_the_cache_does_not_grow_with_the_heads():
    for heads in (1, 4, 128):
        cache = MultiHeadLatentAttention(DIM, heads, SIZES).init_cache(3, 10)
        assert cache.latent.shape == (3, 1, 10, 20) and cache.nbytes == 3 * 10 * 20 * 4


@pytest.mark.parametrize(("scaling", "factor"), [(YarnScaling(40.0, 64), 1.0), (YARN, SHARPER)])
def test_yarn_sharpens_by_mscale_all_dim_alone(scaling, factor):
    layer = MultiHeadLatentAttention(DIM, HEADS, SIZES, rotary=Rotary(4, scaling=scaling))
    assert layer.scale == pytest.approx(12**-0.5 * factor)
    given = MultiHeadLatentAttention(DIM, HEADS, SIZES, scores=Scores(scale=0.5), rotary=Rotary(4, scaling=scaling))
    assert given.scale == 0.5


@torch.no_grad()
def test_it_is_multi_head_attention_where_nothing_is_compressed():
    """A latent as wide as the token, no norm, no shared channels: the keys and values are two matrices."""
    sizes = LatentSizes(DIM, 3, 0, 3)
    layer = latent(sizes, projections=LatentProjections(norm=lambda width: torch.nn.Identity()))
    layer.kv_a_proj.weight.copy_(torch.eye(DIM))
    plain = MultiHeadAttention(DIM, HEADS, mask=Causal()).to(WIDE)
    rows = layer.kv_b_proj.weight.view(HEADS, 6, DIM)
    for mine, part in (("k_proj", rows[:, :3]), ("v_proj", rows[:, 3:])):
        getattr(plain, mine).weight.copy_(part.flatten(0, 1))
    plain.q_proj.weight.copy_(layer.q_proj.weight)
    plain.o_proj.weight.copy_(layer.o_proj.weight)
    x = tokens(2, 7, DIM)
    close(layer(x), plain(x))


# ---- the cache -------------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_padding_and_segments_stay_with_their_slots():
    layer, x = MADE["interleaved"](), tokens(2, 10, DIM)
    keep = torch.tensor([[True] * 10, [False, True, True, False, True, True, False, True, True, True]])
    ids = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 3, 3, 3], [0, 0, 2, 2, 2, 2, 2, 2, 4, 4]])
    whole = layer(x, keep=keep, segments=ids)
    for sizes in ([4, 6], [1] * 10, [9, 1]):
        cache = layer.init_cache(2, 10)
        parts = zip(*(t.split(sizes, 1) for t in (x, keep, ids)), strict=True)
        steps = torch.cat([layer(part, keep=k, segments=s, cache=cache) for part, k, s in parts], 1)
        close(steps[keep], whole[keep])


@torch.no_grad()
def test_crop_reorder_clone_and_a_full_cache():
    layer, x = MADE["interleaved"](), tokens(3, 8, DIM)
    cache = layer.init_cache(3, 8)
    layer(x, cache=cache)
    before = cache.latent.clone()
    with pytest.raises(CacheFull):
        layer(x[:, :1], cache=cache)
    assert torch.equal(cache.latent, before) and cache.length == 8
    cache.crop(5)
    kept = cache.clone()
    cache.reorder([2, 2])
    close(layer(x[2:].expand(2, -1, -1)[:, 5:], cache=cache), layer(x[2:])[:, 5:].expand(2, -1, -1))
    close(layer(x[:, 5:], cache=kept), layer(x)[:, 5:])


def test_what_is_stored_is_detached_and_gradients_flow_through_the_call():
    layer, x = MADE["interleaved"](), tokens(1, 6, DIM)
    cache = layer.init_cache(1, 6)
    layer(x[:, :5], cache=cache)
    assert not cache.latent.requires_grad
    last = x[:, 5:].clone().requires_grad_()
    out = layer(last, cache=cache)
    (grad,) = torch.autograd.grad(out.sum(), last)
    whole = x.clone().requires_grad_()
    (want,) = torch.autograd.grad(layer(whole)[:, 5:].sum(), whole)
    close(grad[0], want[0, 5:])


@torch.no_grad()
def test_a_cache_of_fewer_bits():
    layer, x = MADE["interleaved"](), tokens(2, 9, DIM)
    cache = layer.init_cache(2, 9, dtype=torch.bfloat16)
    assert cache.nbytes == 2 * 9 * 20 * 2
    got = torch.cat([layer(part, cache=cache) for part in x.split([5, 4], 1)], 1)
    assert got.dtype == WIDE and 0 < float((got - layer(x)).abs().max()) < 0.05 * float(got.abs().max())


@torch.no_grad()
def test_a_window_of_its_own():
    layer, x = latent(mask=Window(3), rotary=Rotary(4)), tokens(2, 9, DIM)
    changed = x.clone()
    changed[:, :4] += 1.0
    assert torch.equal(layer(x)[:, 6:], layer(changed)[:, 6:])
    cache = layer.init_cache(2, 9)
    close(torch.cat([layer(part, cache=cache) for part in x.split(1, 1)], 1), layer(x))


def test_unfit_arguments():
    layer, x = MADE["interleaved"](), tokens(2, 3, DIM)
    other = latent(LatentSizes(12, 8, 8, 6)).init_cache(2, 4)
    for call, words in (
        (lambda: layer(x, x), "^context: "),
        (lambda: layer(x, cache=object()), "^cache: expected what init_cache gives"),
        (lambda: layer(x, cache=other), "^cache: made for latents of rank 12"),
        (lambda: layer(x, cache=layer.init_cache(3, 4)), "^cache: made for 3 rows"),
        (lambda: layer(x, cache=latent(LatentSizes(16, 8, 6, 6)).init_cache(2, 4)), "^cache: made for latents of 22"),
        (lambda: LatentSizes(0, 1, 1, 1), "^rank: "),
        (lambda: LatentSizes(1, 1, -1, 1), "^rope_dim: "),
        (lambda: LatentSizes(1, 1, 1, 1, 0), "^q_rank: "),
        (lambda: LatentProjections(gate="tanh"), "^gate: "),
        (lambda: MultiHeadLatentAttention(DIM, 4, (1, 2, 3, 4)), "^sizes: "),
        (lambda: MultiHeadLatentAttention(DIM, 4, SIZES, rotary=Rotary(6)), "^rotary: "),
        (lambda: MultiHeadLatentAttention(DIM, 4, SIZES, mask=torch.ones(2, 2).bool()), "^mask: "),
        (lambda: MultiHeadLatentAttention(DIM, 0, SIZES), "^heads: "),
    ):
        with pytest.raises((ValueError, TypeError), match=words):
            call()


# ---- published sizes -------------------------------------------------------------------------------------------------


def test_parameters_of_a_layer_of_deepseek_v2():
    with torch.device("meta"):
        layer = MultiHeadLatentAttention(5120, 128, LatentSizes(512, 128, 64, 128, 1536))
    assert sum(p.numel() for p in layer.parameters()) == 149_227_520


@torch.no_grad()
def test_decoding_runs_on_every_backend():
    layer, x = latent(heads=2, rotary=Rotary(4)).float(), tokens(2, 7, DIM).float()
    whole = layer(x)
    for name in backends.names():
        if name == "flex":  # compiles for many seconds
            continue
        cache = layer.init_cache(2, 7)
        with regard.use_backend(name):
            try:
                steps = torch.cat([layer(part, cache=cache) for part in x.split([5, 1, 1], 1)], 1)
            except regard.errors.BackendUnsupported:
                assert name == "native"
                continue
        torch.testing.assert_close(steps, whole, rtol=0, atol=2e-5)
