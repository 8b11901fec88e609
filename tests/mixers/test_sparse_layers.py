"""Longformer and BigBird beyond the contract: which paths run, ragged batches, the published behaviours by name."""

import copy

import pytest
import torch

import regard
from regard.backends.native import library
from regard.nn import BigBird, BlockPlan, Longformer, MultiHeadAttention, Projections, Scores


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


def filled(layer):
    layer = layer.double().eval()
    with torch.no_grad():
        for n, parameter in enumerate(layer.parameters()):
            parameter.copy_(drawn(*parameter.shape, n + 1)[..., 0] / 2)
    return layer


# ---- Longformer ------------------------------------------------------------------------------------------------------


def test_gathered_global_rows_are_those_of_the_whole_table():
    layer, x = filled(Longformer(8, 2, 3)), drawn(2, 30, 8)
    flags = torch.zeros(2, 30, dtype=torch.bool)
    flags[0, [0, 17]] = flags[1, 29] = True
    keep = torch.arange(30) < torch.tensor([[30], [25]])
    segments = (torch.arange(30) // 12).expand(2, -1)
    everything = torch.ones(30, 30, dtype=torch.bool)
    for options in ({}, {"keep": keep}, {"segments": segments}, {"keep": keep, "segments": segments}):
        found = layer(x, global_tokens=flags, **options)
        whole = layer(x, global_tokens=flags, mask=everything, **options)  # a mask takes the other path
        torch.testing.assert_close(found, whole)
        M, V = layer.mixing(x, global_tokens=flags, **options)
        torch.testing.assert_close(M @ V, layer.mixed(x, global_tokens=flags, **options))


@pytest.mark.parametrize("bias", [True, False])
def test_few_global_tokens_ask_the_tokens_themselves(bias):
    """Keys and values of all tokens are made only where many ask, or where the maps are not plain."""
    x, keep = drawn(2, 40, 16).requires_grad_(), torch.arange(40) < torch.tensor([[40], [33]])
    segments = (torch.arange(40) // 15).expand(2, -1)
    layer = filled(Longformer(16, 2, 3, globals_at=(0, 2), bias=bias, scores=Scores(scale=0.3)))
    hooked, calls = copy.deepcopy(layer), []
    hooked.v_global_proj.register_forward_hook(lambda *given: calls.append(1))
    for options in ({}, {"keep": keep}, {"keep": keep, "segments": segments}):
        found, want = layer(x, **options), hooked(x, **options)
        torch.testing.assert_close(found, want, rtol=1e-10, atol=1e-10)
        gradients = [
            torch.autograd.grad((out * out.detach().cos()).sum(), [x, *one.parameters()], allow_unused=True)
            for out, one in ((found, layer), (want, hooked))
        ]
        for mine, theirs in zip(*gradients, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)
    assert len(calls) == 3 and layer._folds(2, {"dropout_p": 0}) and not hooked._folds(2, {"dropout_p": 0})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_few_global_tokens_in_half_precision(dtype):
    layer, x = Longformer(64, 2, 3, globals_at=(0,)).eval(), drawn(2, 40, 64).float()
    want, half = layer(x), copy.deepcopy(layer).to(dtype)
    torch.testing.assert_close(half(x.to(dtype)).float(), want, rtol=0.03, atol=0.03)
    with torch.autocast("cpu", dtype):
        found = layer(x)
    assert found.dtype == dtype
    torch.testing.assert_close(found.float(), want, rtol=0.03, atol=0.03)


def test_without_global_tokens_it_is_window_attention_and_padding_asks_nothing():
    layer, x = filled(Longformer(8, 2, 3)), drawn(2, 30, 8)
    plain = MultiHeadAttention(8, 2, projections=Projections(bias=True), mask=regard.masks.Band(3, 3)).double()
    plain.load_state_dict({k: v for k, v in layer.state_dict().items() if "global" not in k})
    torch.testing.assert_close(layer(x), plain(x))
    keep = torch.arange(30) < torch.tensor([[30], [25]])
    assert (layer.mixed(x, keep=keep)[1, :, 25:] == 0).all()


def test_errors_of_longformer():
    layer = Longformer(8, 2, 3)
    with pytest.raises(ValueError, match=r"global_tokens: expected bool \(1, 5\), got"):
        layer(torch.randn(1, 5, 8), global_tokens=torch.zeros(1, 4, dtype=torch.bool))
    with pytest.raises(ValueError, match="heads: expected a divisor"):
        Longformer(8, 3, 3)


# ---- BigBird ---------------------------------------------------------------------------------------------------------


def pattern(layer: BigBird, tokens: int) -> torch.Tensor:
    mask = layer.plan.mask(layer.heads, tokens)
    return mask.dense(tokens, tokens, heads=layer.heads, q_start=0)[0]


def test_the_pattern_is_the_papers():
    block, random, blocks = 4, 2, 12
    layer = BigBird(8, 2, BlockPlan(block, random, seed=5, full_until=0))
    seen = pattern(layer, block * blocks).view(2, blocks, block, blocks, block)
    assert torch.equal(seen.any(4).any(2), seen.all(4).all(2))  # whole blocks
    table = seen[:, :, 0, :, 0]
    assert table[:, [0, -1]].all() and table[:, :, [0, -1]].all()
    for m in range(1, blocks - 1):
        assert table[:, m, m - 1 : m + 2].all()
        near = {0, blocks - 1, m - 1, m, m + 1}
        assert (table[:, m].sum(-1) == len(near) + random).all()
    assert not torch.equal(table[0], table[1])  # heads draw on their own
    assert torch.equal(pattern(BigBird(8, 2, BlockPlan(block, random, seed=5, full_until=0)), 48), pattern(layer, 48))
    assert not torch.equal(
        pattern(BigBird(8, 2, BlockPlan(block, random, seed=6, full_until=0)), 48), pattern(layer, 48)
    )


def test_short_sequences_are_read_whole_and_the_mode_changes_nothing():
    layer = filled(BigBird(8, 2, BlockPlan(4, 1)))
    plain = MultiHeadAttention(8, 2, projections=Projections(bias=True)).double()
    plain.load_state_dict(layer.state_dict())
    x = drawn(2, 28, 8)
    torch.testing.assert_close(layer(x), plain(x))
    longer = drawn(2, 29, 8)
    assert (layer(longer) - plain(longer)).abs().max() > 1e-3
    torch.testing.assert_close(layer.train()(longer), layer.eval()(longer))


def test_another_plan_takes_the_place_of_one():
    layer, x = filled(BigBird(8, 2, BlockPlan(4, 1, full_until=0, first_again=True))), drawn(1, 44, 8)
    first, other = layer(x), BlockPlan(4, 2, seed=3, full_until=0)
    layer.plan = other
    assert (layer(x) - first).abs().max() > 1e-3
    torch.testing.assert_close(layer(x), filled(BigBird(8, 2, other))(x))


@pytest.mark.parametrize("again", [False, True])
def test_a_ragged_batch_is_its_rows_alone(again):
    layer = filled(BigBird(8, 2, BlockPlan(4, 1, full_until=0, first_again=again)))
    x, lengths = drawn(4, 50, 8), [50, 31, 31, 7]
    keep = torch.zeros(4, 50, dtype=torch.bool)
    for row, length in enumerate(lengths):
        keep[row, 50 - length if row % 2 else 0 :][:length] = True
    found, (M, V) = layer(x, keep=keep), layer.mixing(x, keep=keep)
    torch.testing.assert_close(M @ V, layer.mixed(x, keep=keep))
    for row in range(4):
        torch.testing.assert_close(found[row, keep[row]], layer(x[row, keep[row]][None])[0])
    packed = torch.cat([x[row, keep[row]] for row in range(4)])[None]
    segments = torch.repeat_interleave(torch.arange(4), torch.tensor(lengths))[None]
    together = layer(packed, segments=segments)[0].split(lengths)
    for row, one in enumerate(together):
        torch.testing.assert_close(one, found[row, keep[row]])


def test_blocks_over_slots_are_the_published_way():
    layer = filled(BigBird(8, 2, BlockPlan(4, 1, count="slots", full_until=0)))
    x, keep = drawn(1, 40, 8), (torch.arange(40) < 33)[None]
    mask = layer.plan.mask(2, 40) & regard.masks.KeyPadding(keep)
    q, k, v = (proj(x).unflatten(-1, (2, 4)).transpose(1, 2) for proj in (layer.q_proj, layer.k_proj, layer.v_proj))
    want = regard.attention(q, k, v, mask=mask)
    torch.testing.assert_close(layer.mixed(x, keep=keep)[:, :, :33], want[:, :, :33])


@pytest.mark.parametrize(
    ("words", "make"),
    [
        ("block: expected an int of at least 1", lambda: BlockPlan(0)),
        ("count: expected 'tokens' or 'slots'", lambda: BlockPlan(4, count="rows")),
        ("mask: expected None", lambda: BigBird(8, 2, BlockPlan(4))(torch.randn(1, 5, 8), mask=regard.masks.Full())),
        (r"chosen: expected \(2, 8, 1\)", lambda: BlockPlan(4, 1, chosen=torch.zeros(2, 3, 1).long()).mask(2, 40)),
    ],
)
def test_errors_of_bigbird(words, make):
    with pytest.raises(ValueError, match=words):
        make()


# ---- speed and memory ------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif(library.REASON is not None, reason=f"native not built: {library.REASON}")
@pytest.mark.parametrize(
    "make", [lambda: Longformer(64, 2, 256, globals_at=(0,)), lambda: BigBird(64, 2, BlockPlan(64))]
)
def test_long_sequences_run_on_the_kernels(make):
    layer, x = make(), torch.randn(1, 16384, 64)
    with regard.backends.count_backends() as counts:
        layer(x).sum().backward()
    assert set(counts) == {"native"}
