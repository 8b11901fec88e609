"""Reversible layers: the gradients of the ordinary pass, in memory that does not grow with their number."""

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from regard.masks import Causal
from regard.mixers.reformer_published import Hashing, PublishedHashedAttention
from regard.models.feedforward import MLP, activation
from regard.models.reversible import ReversibleBlock, ReversibleLayers
from regard.nn import GatedDeltaNet, MultiHeadAttention
from regard.ops.reformer_chunks import Chunks

DIM = 8


def stack(blocks: int, mixer=None, dropout: float = 0.0, **options) -> ReversibleLayers:
    torch.manual_seed(0)

    def block(i: int) -> nn.Module:
        one = MultiHeadAttention(DIM, 2, mask=Causal()) if mixer is None else mixer()
        norms = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        ff = MLP(DIM, 16, activation("gelu"))
        return ReversibleBlock(one, ff, *norms, mixer_dropout=dropout, ff_dropout=dropout)

    return ReversibleLayers([block] * blocks, **options).double()


def gradients(layers: ReversibleLayers, x: torch.Tensor, **call) -> list[torch.Tensor]:
    torch.manual_seed(1)
    leaf = x.clone().requires_grad_()
    out = layers(leaf, **call)
    return [out, *torch.autograd.grad(out.sin().sum(), [leaf, *layers.parameters()])]


def hashed() -> nn.Module:
    return PublishedHashedAttention(DIM, 2, 4, Chunks(3), Hashing(2, [4], 0, 8), dropout=0.2)


@pytest.mark.parametrize("mixer", [None, lambda: GatedDeltaNet(DIM, 2), hashed], ids=["softmax", "delta", "hashed"])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_gradients_are_those_of_the_ordinary_pass(mixer, dropout):
    x = torch.randn(2, 9, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    keep = torch.ones(2, 9, dtype=torch.bool)
    keep[1, 6:] = False
    want = gradients(stack(3, mixer, dropout, recompute=False), x, keep=keep)
    state = torch.get_rng_state()
    found = gradients(stack(3, mixer, dropout), x, keep=keep)
    assert torch.equal(torch.get_rng_state(), state)  # random numbers go on as they would
    for a, b in zip(found, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def kept(layers: ReversibleLayers) -> int:
    """Bytes of activations that a pass keeps for its gradient."""
    own, seen = {p.untyped_storage().data_ptr() for p in layers.parameters()}, {}

    def pack(t: torch.Tensor) -> torch.Tensor:
        if t.untyped_storage().data_ptr() not in own:
            seen[t.untyped_storage().data_ptr()] = (t, t.untyped_storage().nbytes())
        return t

    with saved_tensors_hooks(pack, lambda t: t):
        out = layers(torch.randn(2, 50, DIM, dtype=torch.float64).requires_grad_())
    assert out.requires_grad
    return sum(size for _, size in seen.values())


def test_memory_does_not_grow_with_the_number_of_blocks():
    assert kept(stack(2)) == kept(stack(7)) == 2 * 50 * 2 * DIM * 8  # the output
    assert kept(stack(7, recompute=False)) > 20 * kept(stack(7))


def test_frozen_parts_and_one_part_twice():
    x = torch.randn(1, 5, DIM, dtype=torch.float64)
    for recompute in (False, True):
        layers = stack(3, recompute=recompute)
        layers.blocks[2] = layers.blocks[0]
        for p in layers.blocks[1].parameters():
            p.requires_grad_(False)
        layers(x).square().sum().backward()
        found = [p.grad for p in layers.parameters()]
        assert all((g is None) is not p.requires_grad for g, p in zip(found, layers.parameters(), strict=True))
        if not recompute:
            want = found
    for a, b in zip(found, want, strict=True):
        assert a is b or torch.allclose(a, b, rtol=1e-9, atol=1e-9)


def test_a_cache_of_every_block():
    layers = stack(3).eval()
    x = torch.randn(2, 7, DIM, dtype=torch.float64)
    cache = layers.init_cache(2, 7)
    with torch.no_grad():
        parts = torch.cat([layers(part, cache=cache) for part in x.split([3, 1, 3], 1)], 1)
        torch.testing.assert_close(parts, layers(x), rtol=1e-12, atol=1e-12)


def test_second_derivatives_are_an_error_and_transforms_take_the_ordinary_pass():
    layers, x = stack(2), torch.randn(1, 4, DIM, dtype=torch.float64)
    leaf = x.clone().requires_grad_()
    (grad,) = torch.autograd.grad(layers(leaf).sum(), leaf, create_graph=True)
    with pytest.raises(RuntimeError, match="does not require grad"):
        grad.sum().backward()
    found = torch.func.grad(lambda x: layers(x).sum())(x)
    torch.testing.assert_close(found, grad.detach(), rtol=1e-9, atol=1e-9)
    whole = torch.compile(layers, backend="aot_eager")
    torch.testing.assert_close(whole(x), layers(x))
