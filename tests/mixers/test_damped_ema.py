"""Mega's moving average in blocks: what it gives is what the averages token by token give."""

import pytest
import torch
import torch.nn.functional as F

from regard.mixers.damped_ema import BLOCK
from regard.nn import DampedEMA

LENGTHS = (2, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 8)


def layer(**options):
    torch.manual_seed(0)
    return DampedEMA(5, 3, **options).double()


def tokens(length):
    x = torch.randn(3, length, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(length))
    keep = torch.ones(3, length, dtype=torch.bool)
    keep[1, : length // 3] = keep[2, length // 2 :] = False
    return x, keep


@pytest.mark.parametrize("options", [{}, {"bidirectional": True}, {"truncation": 7}], ids=str)
@pytest.mark.parametrize("length", LENGTHS)
def test_blocks_are_the_matrix(length, options):
    average, (x, keep) = layer(**options), tokens(length)
    for real in (None, keep):
        matrix, values = average.mixing(x, keep=real)
        exact, found = F.silu((matrix @ values)[..., 0].transpose(1, 2)), average(x, keep=real)
        rows = torch.ones_like(keep) if real is None else real
        torch.testing.assert_close(found[rows], exact[rows], rtol=0, atol=1e-12)


@torch.no_grad()
@pytest.mark.parametrize("options", [{}, {"truncation": 7}, {"truncation": 1}], ids=str)
@pytest.mark.parametrize("length", LENGTHS)
def test_pieces_with_a_cache(length, options):
    average, (x, keep) = layer(**options), tokens(length)
    whole, cache, outs = average(x, keep=keep), average.init_cache(3, 0), []
    for part in (slice(0, length // 3), slice(length // 3, length // 3 + 1), slice(length // 3 + 1, length)):
        outs.append(average(x[:, part], keep=keep[:, part], cache=cache))
    torch.testing.assert_close(torch.cat(outs, 1)[keep], whole[keep], rtol=0, atol=1e-13)


def test_gradients_through_blocks():
    average = layer(bidirectional=True)
    x = tokens(BLOCK + 2)[0][:1].requires_grad_()
    names, parameters = zip(*average.named_parameters(), strict=True)

    def called(*given):
        return torch.func.functional_call(average, dict(zip(names, given[1:], strict=True)), given[:1])

    assert torch.autograd.gradcheck(called, (x, *parameters), fast_mode=True)


def test_a_later_token_that_is_not_finite_touches_nothing_earlier():
    average, (x, _) = layer(), tokens(BLOCK + 9)
    right = average(x)
    x[:, 5] = float("nan")
    torch.testing.assert_close(average(x)[:, :5], right[:, :5], rtol=0, atol=0)


def test_no_tensor_holds_the_averages_of_every_token():
    average = DampedEMA(8, 32)
    x = torch.randn(2, 512, 8, requires_grad=True)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):
        average(x)
    assert max(saved) < 2 * 512 * 8 * 32 / 4


def test_the_published_truncation_cuts_lags():
    average = layer(truncation=4)
    matrix, _ = average.mixing(tokens(12)[0])
    distance = torch.arange(12)[:, None] - torch.arange(12)
    assert (matrix[:, :, distance >= 4] == 0).all() and (matrix[:, :, distance == 3] != 0).all()
