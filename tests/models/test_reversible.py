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


class Leaning(nn.Module):
    """Adds what the call brings."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor, *, more: torch.Tensor, keep: torch.Tensor | None = None) -> torch.Tensor:
        y = self.map(x) * more
        return y if keep is None else torch.where(keep[..., None], y, 0.0)


def test_gradients_of_further_arguments_and_of_parameters_that_stand_in_for_others():
    x = torch.randn(2, 5, DIM, dtype=torch.float64)
    found = []
    for recompute in (False, True):
        layers, more = stack(2, Leaning, recompute=recompute), torch.rand(DIM, dtype=torch.float64, requires_grad=True)
        torch.nn.init.constant_(more.data, 0.7)
        layers(x, more=more).square().sum().backward()
        others = {n: (2 * p).detach().requires_grad_() for n, p in layers.named_parameters()}
        out = torch.func.functional_call(layers, others, (x,), {"more": more.detach()})
        found.append([more.grad, *torch.autograd.grad(out.square().sum(), list(others.values()))])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_the_mode_and_the_arguments_of_the_call_hold_for_its_gradient():
    x, keep = torch.randn(2, 5, DIM, dtype=torch.float64), torch.ones(2, 5, dtype=torch.bool)
    found = []
    for recompute in (False, True):
        layers, leaf = stack(2, dropout=0.5, recompute=recompute).train(), x.clone().requires_grad_()
        torch.manual_seed(3)
        out = layers(leaf)
        layers.eval()
        found.append(torch.autograd.grad(out.square().sum(), leaf)[0])
        assert not any(module.training for module in layers.modules())
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-9)
    out = layers.train()(x, keep=keep)
    keep[0, 3:] = False
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
    out = layers(x)
    layers.blocks[0].ff.up_proj.weight = nn.Parameter(torch.zeros(16, DIM, dtype=torch.float64))
    with pytest.raises(RuntimeError, match="parameters were replaced"):
        out.sum().backward()


def test_hooks_on_a_block_run():
    layers, calls = stack(2), []
    layers.blocks[1].register_forward_hook(lambda *given: calls.append(1))
    layers(torch.randn(1, 3, DIM, dtype=torch.float64)).sum().backward()
    assert calls == [1]
