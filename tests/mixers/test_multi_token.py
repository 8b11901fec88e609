"""Multi-token attention beyond the contract: it starts as plain attention, in memory linear in the length."""

import pytest
import torch

import regard
from regard.masks import Causal
from regard.mixers import multi_token
from regard.nn import MultiTokenAttention, TokenKernels


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


def filled(layer):
    layer = layer.double()
    with torch.no_grad():
        for n, parameter in enumerate(layer.parameters()):
            parameter.copy_(drawn(*parameter.shape, n + 1)[..., 0] / 2)
    return layer


EVERY = TokenKernels((3, 5), (2, 3), mix_before=True, mix_after=2)


@pytest.mark.parametrize(
    "kernels", [None, EVERY, TokenKernels((3, 4), (2, 2), mix_after="all", pad="left"), TokenKernels(None)]
)
def test_a_new_layer_is_plain_attention(kernels):
    layer = MultiTokenAttention(8, 2, kernels).double()
    x = drawn(2, 9, 8)
    q, k, v = (proj(x).unflatten(-1, (2, 4)).transpose(1, 2) for proj in (layer.q_proj, layer.k_proj, layer.v_proj))
    torch.testing.assert_close(layer.mixed(x), regard.attention(q, k, v, mask=Causal()))


def test_rows_some_at_a_time_are_the_same_and_train_the_same(monkeypatch):
    layer, x = filled(MultiTokenAttention(8, 2, EVERY)), drawn(2, 20, 8).requires_grad_()
    whole = layer(x)
    want = torch.autograd.grad(whole.square().sum(), [x, *layer.parameters()])
    monkeypatch.setattr(multi_token, "ROWS", 3)
    some = layer(x)
    torch.testing.assert_close(some, whole)
    for got, right in zip(torch.autograd.grad(some.square().sum(), [x, *layer.parameters()]), want, strict=True):
        torch.testing.assert_close(got, right)


def test_the_longest_saved_tensor_grows_with_the_length_alone(monkeypatch):
    monkeypatch.setattr(multi_token, "ROWS", 8)
    layer, sizes = filled(MultiTokenAttention(8, 2, TokenKernels((3, 5)))), []
    for length in (64, 128):
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, saved=saved: saved.append(t.numel()) or t, lambda t: t):
            layer(drawn(1, length, 8).requires_grad_())
        sizes.append(max(saved))
    assert sizes[1] <= 2 * sizes[0]


def test_convolutions_do_not_reach_over_packed_sequences():
    layer, parts = filled(MultiTokenAttention(8, 2, EVERY)), [drawn(1, n, 8) for n in (5, 9, 3)]
    segments = torch.repeat_interleave(torch.arange(3), torch.tensor([5, 9, 3]))[None]
    together = layer(torch.cat(parts, 1), segments=segments)
    torch.testing.assert_close(together, torch.cat([layer(part) for part in parts], 1))


@pytest.mark.parametrize(
    ("error", "words", "make"),
    [
        (ValueError, "before: expected an odd number of keys", lambda: TokenKernels((2, 4))),
        (TypeError, r"after: expected \(queries, keys\)", lambda: TokenKernels(after=3)),
        (ValueError, "pad: expected 'both' or 'left'", lambda: TokenKernels(pad="right")),
        (
            ValueError,
            "mix_after: expected a divisor of heads=2",
            lambda: MultiTokenAttention(8, 2, TokenKernels(mix_after=3)),
        ),
        (ValueError, "mask: expected None", lambda: MultiTokenAttention(8, 2)(torch.randn(1, 3, 8), mask=Causal())),
    ],
)
def test_errors_name_the_argument(error, words, make):
    with pytest.raises(error, match=words):
        make()


def test_a_long_text_under_function_transforms():
    layer = MultiTokenAttention(8, 2).double()
    x = torch.randn(1, 140, 8, dtype=torch.float64)
    found = torch.func.grad(lambda x: layer(x).square().sum())(x)
    leaf = x.clone().requires_grad_()
    (want,) = torch.autograd.grad(layer(leaf).square().sum(), leaf)
    torch.testing.assert_close(found, want, rtol=1e-9, atol=1e-9)
