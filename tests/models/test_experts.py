"""Mixtures of experts: token by token, however they are computed, and what cannot be."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F

from regard.models import (
    ClampedSwiGLU,
    GatedExperts,
    GatedMLP,
    MixtureOfExperts,
    Router,
    Routing,
    StackedExperts,
    activation,
    experts,
)

WIDE = torch.float64

ROUTINGS = {
    "softmax": Routing(6, 2),
    "softmax, normalized": Routing(6, 3, normalized=True, factor=0.5),
    "softmax, groups": Routing(6, 2, factor=2.0, groups=3, open_groups=2),
    "sigmoid": Routing(6, 2, "sigmoid"),
    "sigmoid, corrected": Routing(6, 2, "sigmoid", normalized=True, factor=2.5, corrected=True),
    "sigmoid, corrected, groups": Routing(6, 3, "sigmoid", corrected=True, groups=2, open_groups=1),
    "sigmoid, groups of one": Routing(6, 2, "sigmoid", groups=6, open_groups=3),
    "one expert": Routing(1, 1, normalized=True),
}


def mixture(how, dim=5, seed=0, shared=True):
    torch.manual_seed(seed)
    act = activation("silu")
    gate = torch.nn.Linear(dim, 1, bias=False)
    parts = (GatedMLP(dim, 4, act), gate) if shared else (None, None)
    moe = MixtureOfExperts(Router(dim, how), GatedExperts(dim, 7, how.experts, act), *parts).to(WIDE)
    with torch.no_grad():
        for tensor in moe.state_dict().values():
            tensor.normal_()
    return moe


def by_hand(moe, token):
    """One token through the formula, choice by choice."""
    how, router, e = moe.router.routing, moe.router, moe.experts
    logits = router.weight @ token
    scores = logits.softmax(0) if how.score == "softmax" else torch.sigmoid(logits)
    ranks = scores + router.correction if how.corrected else scores
    size = how.experts // how.groups
    merit = []
    for g in range(how.groups):
        best = sorted((float(r) for r in ranks[g * size : (g + 1) * size]), reverse=True)
        merit.append(best[0] if how.score == "softmax" else sum(best[:2]))
    open_groups = sorted(range(how.groups), key=lambda g: -merit[g])[: how.open_groups]
    allowed = [i for i in range(how.experts) if i // size in open_groups]
    chosen = sorted(allowed, key=lambda i: -float(ranks[i]))[: how.chosen]
    total = sum(float(scores[i]) for i in chosen) if how.normalized else 1.0
    out = torch.zeros_like(token)
    for i in chosen:
        inner = F.silu(e.gate_proj[i] @ token) * (e.up_proj[i] @ token)
        out = out + how.factor * float(scores[i]) / total * (e.down_proj[i] @ inner)
    if moe.shared is not None:
        out = out + torch.sigmoid(moe.shared_gate(token)) * moe.shared(token)
    return out


@pytest.fixture(params=["sorted", "at once"])
def way(request, monkeypatch):
    """Tokens sorted by expert, or all experts for every token: what the sizes would decide."""
    if request.param == "at once":
        monkeypatch.setattr(experts, "all_are_cheaper", lambda *_: True)
    else:
        monkeypatch.setattr(experts, "SPARED", -1)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("name", ROUTINGS)
@torch.no_grad()
def test_experts_token_by_token(name):
    moe, x = mixture(ROUTINGS[name]), torch.randn(2, 8, 5, dtype=WIDE)
    got = moe(x)
    for b in range(2):
        for t in range(8):
            torch.testing.assert_close(got[b, t], by_hand(moe, x[b, t]), rtol=0, atol=1e-10)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("name", ROUTINGS)
@torch.no_grad()
def test_what_a_token_gets_does_not_depend_on_the_others(name):
    """However many tokens crowd one expert: none has a capacity."""
    moe, x = mixture(ROUTINGS[name], shared=False), torch.randn(9, 5, dtype=WIDE)
    crowd = torch.cat([x[:1].expand(200, -1), x])
    torch.testing.assert_close(moe(crowd)[200:], moe(x), rtol=0, atol=1e-12)
    torch.testing.assert_close(moe(x.flip(0)).flip(0), moe(x), rtol=0, atol=1e-12)
    for i in range(9):
        torch.testing.assert_close(moe(x[i : i + 1])[0], moe(x)[i], rtol=0, atol=1e-12)


@pytest.mark.usefixtures("way")
def test_all_experts_at_once_the_chosen_ones_and_gradients():
    moe, x = mixture(ROUTINGS["sigmoid, corrected"]), torch.randn(7, 5, dtype=WIDE).requires_grad_()
    weights, chosen = moe.router(x)
    torch.testing.assert_close(moe.experts.through_all(x, weights, chosen), moe.experts(x, weights, chosen))
    torch.testing.assert_close(torch.vmap(moe)(x[:, None])[:, 0], moe(x))
    assert torch.autograd.gradcheck(moe, x)
    moe(x).sum().backward()
    assert all(p.grad is not None for p in moe.parameters())
    assert "router.correction" in moe.state_dict() and moe.router.correction.grad_fn is None
    assert moe(x[:0]).shape == (0, 5)
    with torch.device("meta"):
        empty = MixtureOfExperts(Router(5, Routing(4, 2)), GatedExperts(5, 7, 4, activation("silu")))
    assert empty(torch.empty(2, 3, 5, device="meta")).shape == (2, 3, 5)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@torch.no_grad()
def test_experts_with_biases(dtype):
    """gpt-oss's experts against a loop in float64."""
    torch.manual_seed(1)
    moe, x = StackedExperts(6, 4, 3, ClampedSwiGLU()).to(dtype), torch.randn(9, 6, dtype=dtype)
    for tensor in moe.parameters():
        torch.nn.init.normal_(tensor)
    weights, chosen = torch.rand(9, 2), torch.rand(9, 3).topk(2).indices
    got, wide = moe(x, weights, chosen), copy.deepcopy(moe).double()
    for n in range(9):
        parts = [weights[n, j].double() * wide.one(x[n : n + 1].double(), int(chosen[n, j]))[0] for j in range(2)]
        allowed = 30 * torch.finfo(dtype).eps * float(sum(part.abs().max() for part in parts))
        torch.testing.assert_close(got[n].double(), sum(parts), rtol=0, atol=allowed)


@pytest.mark.usefixtures("way")
@torch.no_grad()
def test_an_expert_that_overflows_reaches_only_who_asked_for_it():
    moe = GatedExperts(4, 4, 2, activation("silu"))
    moe.gate_proj[1] = 1e38
    x, chosen = torch.ones(3, 4), torch.tensor([[0], [1], [0]])
    got = moe(x, torch.ones(3, 1), chosen)
    assert got[[0, 2]].isfinite().all() and not got[1].isfinite().all()
    traced = torch.compile(moe, fullgraph=True, backend="aot_eager")(x, torch.ones(3, 1), chosen)
    torch.testing.assert_close(traced[[0, 2]], got[[0, 2]])


def test_experts_under_a_compiler():
    moe, x = mixture(ROUTINGS["sigmoid, corrected, groups"]).float(), torch.randn(6, 5)
    fast = torch.compile(moe, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(fast(x), moe(x), rtol=1e-5, atol=1e-5)


def test_scores_are_at_least_float32():
    router = mixture(ROUTINGS["sigmoid, corrected"]).router.bfloat16()
    weights, _ = router(torch.randn(3, 5, dtype=torch.bfloat16))
    assert weights.dtype == torch.float32


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"experts": 0, "chosen": 1}, "^experts: "),
        ({"experts": 4, "chosen": 5}, "^chosen: expected at most 4"),
        ({"experts": 4, "chosen": 3, "groups": 2}, "^chosen: expected at most 2"),
        ({"experts": 4, "chosen": 1, "groups": 3}, "^groups: "),
        ({"experts": 4, "chosen": 1, "groups": 2, "open_groups": 3}, "^open_groups: "),
        ({"experts": 4, "chosen": 1, "score": "tanh"}, "^score: "),
    ],
)
def test_routings_that_cannot_be(arguments, words):
    with pytest.raises(ValueError, match=words):
        Routing(**arguments)


def test_gradients_of_experts_that_nobody_asked_for_do_not_overflow():
    """In float16 with a scaled loss; eager and compiled."""
    torch.manual_seed(0)
    moe = GatedExperts(16, 16, 4, activation("silu")).half()
    for tensor in moe.parameters():
        torch.nn.init.normal_(tensor, std=0.3)
    with torch.no_grad():
        moe.up_proj[3], moe.down_proj[3] = 3e4, 6e4
    chosen, weights = torch.arange(8)[:, None] % 3, torch.full((8, 1), 0.5)
    for run in (moe, torch.compile(moe, fullgraph=True, backend="aot_eager")):
        x = torch.randn(8, 16).half().requires_grad_()
        grads = torch.autograd.grad((run(x, weights, chosen) * 16).sum(), [x, *moe.parameters()])
        assert all(g.isfinite().all() for g in grads)
