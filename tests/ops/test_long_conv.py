"""Convolutions as long as the sequence: right at any length, and blind to what comes later."""

import pytest
import torch

import regard
from regard.ops.long_conv import toeplitz


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


@pytest.mark.parametrize("tokens", [0, 1, 2, 63, 64, 65, 130, 1000])
@pytest.mark.parametrize("lags", [1, 3, 70, 2000])
def test_it_is_the_sum_over_earlier_tokens(tokens, lags):
    x, kernel = drawn(2, tokens, 3), drawn(3, lags)
    want = torch.einsum("cts,bsc->btc", toeplitz(kernel, tokens), x)
    torch.testing.assert_close(regard.long_conv(x, kernel), want)
    half = tokens // 3
    torch.testing.assert_close(regard.long_conv(x[:, half:], kernel, state=x[:, :half]), want[:, half:])


@pytest.mark.parametrize("later", [1e30, torch.inf, torch.nan])
def test_a_later_token_changes_no_bit(later):
    x, kernel = drawn(1, 300, 2).float(), drawn(2, 300).float()
    before = regard.long_conv(x, kernel)
    for place in (10, 63, 64, 150, 299):
        changed = x.clone()
        changed[:, place:] = later
        assert torch.equal(regard.long_conv(changed, kernel)[:, :place], before[:, :place])


def test_gradients():
    x, kernel, state = drawn(1, 70, 2).requires_grad_(), drawn(2, 70).requires_grad_(), drawn(1, 3, 2).requires_grad_()
    assert torch.autograd.gradcheck(lambda x, k, s: regard.long_conv(x, k, state=s), (x, kernel, state))
    small = drawn(1, 66, 1).requires_grad_(), drawn(1, 2).requires_grad_()
    assert torch.autograd.gradgradcheck(regard.long_conv, small)


def test_errors_name_the_argument():
    with pytest.raises(ValueError, match=r"kernel: expected \(C, K\)"):
        regard.long_conv(drawn(1, 5, 2), drawn(3, 5))
    with pytest.raises(ValueError, match=r"state: expected \(B, P, C\)"):
        regard.long_conv(drawn(1, 5, 2), drawn(2, 5), state=drawn(1, 3, 3))


def test_autocast_changes_nothing_and_states_are_checked():
    x, kernel = torch.randn(1, 300, 3), torch.randn(3, 300)
    want = regard.long_conv(x, kernel)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(regard.long_conv(x, kernel), want)
    with pytest.raises(TypeError, match="state"):
        regard.long_conv(x, kernel, state=5)
