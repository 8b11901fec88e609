"""torch's scaled_dot_product_attention and ours: the same arguments, the same meanings."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F

from regard.nn.functional import scaled_dot_product_attention


@pytest.mark.parametrize(("q_len", "k_len"), [(5, 5), (3, 7), (7, 3), (1, 6)])
def test_masks_and_alignment(q_len, k_len):
    q = torch.randn(2, 4, q_len, 8, dtype=torch.float64)
    k, v = torch.randn(2, 4, k_len, 8, dtype=torch.float64), torch.randn(2, 4, k_len, 5, dtype=torch.float64)
    masks = [
        None,
        torch.rand(q_len, k_len) > 0.3,
        torch.rand(2, 1, q_len, k_len) > 0.3,
        torch.randn(4, q_len, k_len).double(),
    ]
    for mask, scale in itertools.product(masks, (None, 0.3)):
        want = F.scaled_dot_product_attention(q, k, v, mask, scale=scale)
        torch.testing.assert_close(scaled_dot_product_attention(q, k, v, mask, scale=scale), want)
    want = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # top-left, whatever the lengths
    torch.testing.assert_close(scaled_dot_product_attention(q, k, v, is_causal=True), want)


def test_grouped_heads_and_other_ranks():
    q, k = torch.randn(2, 6, 5, 8), torch.randn(2, 2, 5, 8)
    torch.testing.assert_close(
        scaled_dot_product_attention(q, k, k, enable_gqa=True), F.scaled_dot_product_attention(q, k, k, enable_gqa=True)
    )
    for shape in ((5, 8), (3, 5, 8), (2, 3, 4, 5, 8)):
        x = torch.randn(shape)
        torch.testing.assert_close(scaled_dot_product_attention(x, x, x), F.scaled_dot_product_attention(x, x, x))
    wide, one = torch.randn(2, 4, 5, 8), torch.randn(1, 4, 5, 8)
    torch.testing.assert_close(
        scaled_dot_product_attention(wide, one, one), F.scaled_dot_product_attention(wide, one, one)
    )


def test_gradients_of_a_bias():
    q = torch.randn(2, 3, 5, 8, dtype=torch.float64)
    bias = torch.randn(1, 3, 5, 5, dtype=torch.float64, requires_grad=True)
    grads = [
        torch.autograd.grad(f(q, q, q, bias).sin().sum(), bias)[0]
        for f in (scaled_dot_product_attention, F.scaled_dot_product_attention)
    ]
    torch.testing.assert_close(*grads)


def test_errors():
    q = torch.randn(1, 2, 3, 4)
    with pytest.raises(ValueError, match="is_causal"):
        scaled_dot_product_attention(q, q, q, torch.ones(3, 3, dtype=torch.bool), is_causal=True)
    with pytest.raises(ValueError, match="query, key, value"):
        scaled_dot_product_attention(q[0, 0, 0], q, q)
    with pytest.raises((ValueError, RuntimeError)):
        scaled_dot_product_attention(torch.randn(1, 6, 3, 4), q, q)
