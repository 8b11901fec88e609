"""Feed-forward parts and blocks against their formulas written out."""

import pytest
import torch
from torch import nn

from regard.models import (
    MLP,
    ClampedSwiGLU,
    Decoder,
    Embedding,
    Encoder,
    GatedMLP,
    MixtureOfExperts,
    ModelCache,
    NormedResidual,
    Parallel,
    PostNorm,
    PreNorm,
    Router,
    Routing,
    Sandwich,
    Softcap,
    StackedExperts,
    activation,
)
from regard.models.tables import RotaryPermuted, Transposed

DOUBLE = torch.float64


def randn(*shape):
    return torch.randn(*shape, dtype=DOUBLE)


def experts(count=4, k=2):
    moe = MixtureOfExperts(
        Router(6, Routing(count, k, normalized=True), bias=True), StackedExperts(6, 5, count, ClampedSwiGLU(limit=0.3))
    ).double()
    with torch.no_grad():
        for p in moe.parameters():
            p.normal_()
    return moe


def test_mixture_of_experts_token_by_token():
    moe, x = experts(), randn(2, 3, 6)
    e = moe.experts
    for b in range(2):
        for t in range(3):
            token = x[b, t]
            logits = moe.router.weight @ token + moe.router.bias
            chosen = logits.argsort(descending=True)[:2]
            weights = logits[chosen].softmax(0)
            want = torch.zeros(6, dtype=DOUBLE)
            for w, i in zip(weights, chosen, strict=True):
                h = token @ e.gate_up_proj[i] + e.gate_up_proj_bias[i]
                gate, up = h[0::2].clamp(max=0.3), h[1::2].clamp(-0.3, 0.3)
                act = (up + 1) * gate * torch.sigmoid(1.702 * gate)
                want += w * (act @ e.down_proj[i] + e.down_proj_bias[i])
            torch.testing.assert_close(moe(x)[b, t], want)


def test_experts_all_at_once_equal_the_chosen_ones():
    moe, x = experts(), randn(7, 6)
    weights, chosen = moe.router(x)
    torch.testing.assert_close(moe.experts.through_all(x, weights, chosen), moe.experts(x, weights, chosen))
    torch.testing.assert_close(torch.vmap(moe)(x[:, None])[:, 0], moe(x))


def test_mixture_of_experts_trains_and_takes_nothing():
    moe = experts()
    x = randn(1, 5, 6).requires_grad_()
    assert torch.autograd.gradcheck(moe, x)
    moe(x).sum().backward()
    assert all(p.grad is not None for p in moe.parameters())
    assert moe(randn(0, 3, 6)).shape == (0, 3, 6)
    assert moe(randn(2, 0, 6)).shape == (2, 0, 6)
    with pytest.raises(ValueError, match=r"^chosen: "):
        Routing(4, 5)


def test_activations_and_mlps():
    x = randn(2, 6)
    gated = GatedMLP(6, 4, activation("silu"), bias=True).double()
    up, gate = gated.up_proj(x), gated.gate_proj(x)
    torch.testing.assert_close(gated(x), gated.down_proj(gate * torch.sigmoid(gate) * up))
    plain = MLP(6, 4, activation("relu2")).double()
    torch.testing.assert_close(plain(x), plain.down_proj(plain.up_proj(x).clamp(min=0) ** 2))
    torch.testing.assert_close(activation("quick_gelu")(x), x * torch.sigmoid(1.702 * x))
    torch.testing.assert_close(Softcap(2.0)(x), 2 * torch.tanh(x / 2))
    with pytest.raises(ValueError, match=r"activation: expected one of gelu.*, got 'bump'"):
        activation("bump")
    with pytest.raises(ValueError, match="cap"):
        Softcap(0.0)


class Shift(nn.Module):
    """A mixer that takes the common arguments and can be told from the other parts."""

    def forward(self, x, **call):
        assert set(call) <= {"keep"}
        return x.roll(1, -1)


def test_wirings():
    x, mixer, ff = randn(2, 3, 6), Shift(), nn.Tanh()
    a, b, c, d = (nn.LayerNorm(6).double() for _ in range(4))
    for norm in (a, b, c, d):
        nn.init.normal_(norm.weight)

    def mixed(y):
        return y.roll(1, -1)

    y = x + mixed(a(x))
    torch.testing.assert_close(PreNorm(mixer, ff, a, b)(x, keep=None), y + torch.tanh(b(y)))
    y = b(a(x) + mixed(a(x)))
    torch.testing.assert_close(NormedResidual(mixer, ff, a, b)(x), y + torch.tanh(y))
    torch.testing.assert_close(Parallel(mixer, ff, a)(x), x + mixed(a(x)) + torch.tanh(a(x)))
    torch.testing.assert_close(Parallel(mixer, ff, a, b)(x), x + mixed(a(x)) + torch.tanh(b(x)))
    y = x + b(mixed(a(x)))
    torch.testing.assert_close(Sandwich(mixer, ff, (a, b), (c, d))(x), y + d(torch.tanh(c(y))))
    y = a(x + mixed(x))
    torch.testing.assert_close(PostNorm(mixer, ff, a, b)(x), b(y + torch.tanh(y)))


def test_dropout_is_for_training_only():
    block = PreNorm(Shift(), nn.Tanh(), nn.Identity(), nn.Identity(), mixer_dropout=0.5, ff_dropout=0.5)
    x = randn(2, 3, 6)
    assert not torch.equal(block(x), block(x))
    block.eval()
    assert torch.equal(block(x), block(x))


def test_embedding():
    ids, positions = torch.tensor([[1, 2], [3, 0]]), torch.tensor([[0, 1], [0, 1]])
    tokens, places, types = nn.Embedding(4, 6), nn.Embedding(8, 6), nn.Embedding(2, 6)
    whole = Embedding(tokens, scale=6**0.5, places=places, types=types, norm=nn.LayerNorm(6)).double()
    kinds = torch.tensor([[0, 1], [1, 1]])
    want = tokens.weight[ids] * 6**0.5 + places.weight[positions] + types.weight[kinds]
    torch.testing.assert_close(whole(ids, positions, kinds), whole.norm(want))
    torch.testing.assert_close(whole(ids, positions), whole(ids, positions, torch.zeros_like(ids)))
    # the scale is rounded as the table is
    half = Embedding(nn.Embedding(4, 3072), scale=3072**0.5).bfloat16()
    assert torch.equal(half(ids, positions), half.tokens.weight[ids] * torch.tensor(55.5, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="ids: expected 0 to 3, the vocabulary, got -1 to 3"):
        whole(ids - 1 + (ids == 3), positions)
    with pytest.raises(ValueError, match="types: expected None, for this model has no token types"):
        Embedding(tokens)(ids, positions, kinds)


def test_stacks_refuse_what_is_no_batch_of_ids():
    for model in (Decoder(Embedding(nn.Embedding(4, 6)), []), Encoder(Embedding(nn.Embedding(4, 6)), [])):
        with pytest.raises(ValueError, match=r"ids: expected shape \(B, T\), got \(3,\)"):
            model(torch.tensor([1, 2, 3]))
        with pytest.raises(TypeError, match="ids: expected a tensor of integers"):
            model(torch.ones(2, 3))
        with pytest.raises(TypeError, match="keep"):
            model(torch.tensor([[1, 2]]), keep=torch.tensor([[1, 1]]))


def test_reshapes_go_both_ways():
    w = randn(8, 3)
    (turned,) = RotaryPermuted(2).split(w)
    assert torch.equal(RotaryPermuted(2).join([turned]), w)
    assert turned[:4].tolist() == w[[0, 2, 1, 3]].tolist()
    (other,) = Transposed().split(w)
    assert torch.equal(other, w.t())
    assert torch.equal(Transposed().join([other]), w)


def test_model_caches_are_pytrees():
    from torch.utils import _pytree as pytree

    from regard.masks import Causal
    from regard.nn import MultiHeadAttention

    layers = [MultiHeadAttention(8, 2, mask=Causal()) for _ in range(2)]
    cache = ModelCache([layer.init_cache(2, 4) for layer in layers])
    for layer, own in zip(layers, cache, strict=True):
        layer(torch.randn(2, 3, 8), cache=own)
    again = pytree.tree_map(lambda t: t.clone() if isinstance(t, torch.Tensor) else t, cache)
    assert isinstance(again, ModelCache)
    assert (again.length, again.nbytes, again.capacity, again.batch) == (3, cache.nbytes, 4, 2)
    assert "2 layers of KVCache, batch=2, length=3" in repr(cache)
