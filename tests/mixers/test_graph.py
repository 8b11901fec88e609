"""Attention along edges: against loops over edges, against dense masks, and what holds for every graph layer."""

import itertools

import pytest
import torch
from oracles import graph as oracle
from torch import nn

import regard
from regard.masks import Edges
from regard.nn import (
    EdgeGraphTransformer,
    GraphAttention,
    GraphAttentionV2,
    GraphOptions,
    GraphTransformer,
    edge_matrix,
    with_self_loops,
)
from regard.ops import edges as ops

NODES, DIM, HEADS, EDGE_DIM = 7, 6, 3, 4
PLAIN = GraphOptions(self_loops=False)
EDGES = torch.tensor([[0, 1, 2, 2, 5, 3, 3, 3, 1], [1, 1, 1, 0, 4, 4, 4, 2, 2]])  # 3 -> 4 twice; 3, 5, 6 get nothing


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


def filled(layer: nn.Module) -> nn.Module:
    """In float64, with no parameter at 0."""
    layer = layer.double()
    with torch.no_grad():
        for n, parameter in enumerate(layer.parameters()):
            parameter.copy_(drawn(*parameter.shape, n + 1)[..., 0])
    return layer


LAYERS = {
    "gat": (lambda: GraphAttention(DIM, 5, HEADS, options=PLAIN), False),
    "gat, all options": (
        lambda: GraphAttention(
            DIM, 5, HEADS, edge_dim=EDGE_DIM, options=GraphOptions(out="mean", residual=True, fill=0.5, slope=0.1)
        ),
        True,
    ),
    "gatv2": (lambda: GraphAttentionV2(DIM, 5, HEADS, edge_dim=EDGE_DIM, options=PLAIN), True),
    "gatv2, shared": (lambda: GraphAttentionV2(DIM, 5, HEADS, shared=True), False),
    "transformer": (lambda: GraphTransformer(DIM, 5, HEADS), False),
    "transformer, gated": (lambda: GraphTransformer(DIM, 5, HEADS, edge_dim=EDGE_DIM, skip="gate"), True),
    "transformer, no skip": (lambda: GraphTransformer(DIM, 5, HEADS, skip=None), False),
}
FEATURES = drawn(EDGES.shape[1], EDGE_DIM)


def call(name: str):
    make, featured = LAYERS[name]
    return filled(make()), FEATURES if featured else None


def weights_of(layer: nn.Module) -> dict:
    return {name: parameter.detach().numpy() for name, parameter in layer.named_parameters()}


def near(got: torch.Tensor, want: object, atol: float = 1e-12) -> None:
    torch.testing.assert_close(got.detach(), torch.as_tensor(want), rtol=0, atol=atol)


# ---- against loops over edges ----------------------------------------------------------------------------------------

PAIRS = [(int(j), int(i)) for j, i in EDGES.T]


def test_the_layers_are_the_papers_formulas():
    x = drawn(NODES, DIM)
    layer, _ = call("gat")
    near(layer(x, EDGES), oracle.gat(x.numpy(), PAIRS, weights_of(layer), HEADS))
    layer, features = call("gatv2")
    near(layer(x, EDGES, features), oracle.gatv2(x.numpy(), PAIRS, features.numpy(), weights_of(layer), HEADS))
    layer, features = call("transformer, gated")
    near(layer(x, EDGES, features), oracle.unimp(x.numpy(), PAIRS, features.numpy(), weights_of(layer), HEADS))


def test_the_transformer_that_carries_edges_along():
    layer, x, features = filled(EdgeGraphTransformer(DIM, HEADS)), drawn(NODES, DIM), drawn(EDGES.shape[1], DIM)
    want = oracle.dwivedi(x.numpy(), PAIRS, features.numpy(), weights_of(layer), HEADS)
    for got, right in zip(layer(x, EDGES, features), want, strict=True):
        near(got, right)


# ---- the operations --------------------------------------------------------------------------------------------------


def test_along_edges_it_is_attention_under_the_mask_of_the_edges():
    codes = torch.randperm(NODES * NODES, generator=torch.Generator().manual_seed(0))[:20]
    edges = torch.stack([codes % NODES, codes // NODES])  # none twice
    q, k, v = (drawn(NODES, 2, 3 + n).requires_grad_() for n in range(3))
    k = k[..., :3].detach().requires_grad_()
    found = regard.edge_attention(q, k, v, edges, scale=0.7)
    rows = [x.transpose(0, 1)[None] for x in (q, k, v)]
    want = regard.attention(*rows, mask=Edges(edges), scale=0.7)[0].transpose(0, 1)
    near(found, want.detach())
    grads = (torch.autograd.grad(y.sin().sum(), (q, k, v)) for y in (found, want))
    for got, right in zip(*grads, strict=True):
        near(got, right)
    assert torch.autograd.gradcheck(lambda *x: regard.edge_attention(*x, edges), (q, k, v))
    assert torch.autograd.gradgradcheck(lambda *x: regard.edge_attention(*x, edges), (q, k, v))


def test_messages_some_at_a_time_are_the_same(monkeypatch):
    q, k, v = (drawn(NODES, 2, 3).requires_grad_() for _ in range(3))
    whole = regard.edge_attention(q, k, v, EDGES)
    monkeypatch.setattr(ops, "AT_ONCE", 13)
    some = regard.edge_attention(q, k, v, EDGES)
    near(some, whole.detach())
    grads = (torch.autograd.grad(y.sin().sum(), (q, k, v)) for y in (some, whole))
    for got, right in zip(*grads, strict=True):
        near(got, right)


def test_weights_of_huge_scores_and_of_scores_left_out():
    scores = torch.tensor([[1e4], [1e4], [-1e30], [-torch.inf], [-torch.inf]], requires_grad=True)
    weights = regard.edge_softmax(scores, torch.tensor([0, 0, 1, 0, 2]), 4)
    assert weights.flatten().tolist() == [0.5, 0.5, 1.0, 0.0, 0.0]
    (grad,) = torch.autograd.grad(weights.square().sum(), scores)
    assert grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_rounds_once(dtype):
    q, k, v = (drawn(NODES, 2, 8).to(dtype) for _ in range(3))
    found = regard.edge_attention(q, k, v, EDGES)
    want = regard.edge_attention(q.double(), k.double(), v.double(), EDGES)
    assert found.dtype == dtype
    near(found.double(), want, atol=torch.finfo(dtype).eps * float(want.abs().max()))


@pytest.mark.filterwarnings("ignore:`torch.jit.script")  # torch's own, on the first jvp
def test_under_function_transforms():
    q, k, v = (drawn(NODES, 2, 3) for _ in range(3))
    many = torch.stack([q, 2 * q])
    found = torch.func.vmap(lambda one: regard.edge_attention(one, k, v, EDGES))(many)
    near(found[1], regard.edge_attention(2 * q, k, v, EDGES))
    _, slope = torch.func.jvp(lambda one: regard.edge_attention(one, k, v, EDGES), (q,), (q,))
    assert slope.isfinite().all()


# ---- what holds for every layer --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LAYERS)
def test_the_order_of_edges_and_the_names_of_nodes_do_not_matter(name):
    layer, features = call(name)
    x, order, names = drawn(NODES, DIM), torch.randperm(EDGES.shape[1]), torch.randperm(NODES)
    want = layer(x, EDGES, features)
    near(layer(x, EDGES[:, order], None if features is None else features[order]), want.detach())
    renamed = torch.empty_like(x)
    renamed[names] = x
    near(layer(renamed, names[EDGES], features)[names], want.detach())


@pytest.mark.parametrize("name", LAYERS)
def test_weights_sum_to_one_and_nodes_without_edges_get_their_rest_alone(name):
    layer, features = call(name)
    x = drawn(NODES, DIM)
    edges, weights = layer.edge_weights(x, EDGES, features)
    rows = edge_matrix(weights, edges, NODES, NODES).sum(-1)
    reached = torch.zeros(NODES).index_fill(0, edges[1], 1.0)
    near(rows, reached.double().expand(HEADS, -1))
    nothing = layer(x, EDGES[:, :0], None if features is None else features[:0])
    assert nothing.isfinite().all()


@pytest.mark.parametrize("name", LAYERS)
def test_far_nodes_do_not_matter(name):
    layer, features = call(name)
    x = drawn(NODES, DIM).requires_grad_()
    (grad,) = torch.autograd.grad(layer(x, EDGES, features)[4].sum(), x)
    assert grad[[3, 4, 5]].abs().sum(1).min() > 0 or name.startswith("transformer")
    assert (grad[[0, 1, 2, 6]] == 0).all()


@pytest.mark.parametrize("name", LAYERS)
def test_gradients(name):
    layer, features = call(name)
    x = drawn(NODES, DIM).requires_grad_()
    inputs = (x,) if features is None else (x, features.clone().requires_grad_())
    assert torch.autograd.gradcheck(lambda *given: layer(given[0], EDGES, *given[1:]), inputs)
    loss = layer(inputs[0], EDGES, *inputs[1:]).square().sum()
    assert all(g is not None for g in torch.autograd.grad(loss, list(layer.parameters()), allow_unused=True))


def test_gat_ranks_sources_alike_for_every_target_and_gatv2_does_not():
    edges = torch.tensor(list(itertools.product(range(NODES), range(NODES)))).T.contiguous()
    x = 3 * drawn(NODES, DIM)
    best = {}
    for name, layer in {
        "gat": GraphAttention(DIM, 5, HEADS, options=PLAIN),
        "gatv2": GraphAttentionV2(DIM, 5, HEADS, options=PLAIN),
    }.items():
        weights = filled(layer).edge_weights(x, edges)[1]
        best[name] = edge_matrix(weights, edges, NODES, NODES).argmax(-1)
    assert (best["gat"] == best["gat"][:, :1]).all()
    assert not (best["gatv2"] == best["gatv2"][:, :1]).all()


@pytest.mark.parametrize("fill", ["mean", "add", "min", "max", "mul", 2.0])
def test_features_of_self_loops(fill):
    edges = torch.tensor([[0, 1, 1, 2], [1, 1, 0, 0]])
    features = torch.tensor([[1.0], [9.0], [3.0], [4.0]])
    found, filled_in = with_self_loops(edges, features, 3, 3, fill)
    assert found.tolist() == [[0, 1, 2, 0, 1, 2], [1, 0, 0, 0, 1, 2]]
    right = {"mean": [3.5, 1, 0], "add": [7, 1, 0], "min": [3, 1, 0], "max": [4, 1, 0], "mul": [12, 1, 0]}
    assert filled_in[3:].flatten().tolist() == right.get(fill, [2, 2, 2])


def test_two_kinds_of_nodes():
    layer = filled(GraphAttention((DIM, 4), 5, HEADS, options=PLAIN))
    found = layer((drawn(NODES, DIM), drawn(3, 4)), torch.tensor([[0, 6], [2, 0]]))
    assert found.shape == (3, 15)
    near(found[1], layer.bias.detach())


@pytest.mark.parametrize(
    ("error", "words", "run"),
    [
        (TypeError, "edges: expected an int64 tensor", lambda la, x: la(x, EDGES.int())),
        (ValueError, r"edges: expected \(2, E\)", lambda la, x: la(x, EDGES.T)),
        (ValueError, "sources: expected nodes from 0 to 6, got 7", lambda la, x: la(x, torch.tensor([[7], [0]]))),
        (ValueError, "targets: expected nodes from 0 to 6, got -1", lambda la, x: la(x, torch.tensor([[0], [-1]]))),
        (ValueError, r"x: expected sources \(N, 6\)", lambda la, x: la(x[:, :4], EDGES)),
        (ValueError, "features: expected none", lambda la, x: la(x, EDGES, FEATURES)),
        (TypeError, "x: expected float64", lambda la, x: la(x.float(), EDGES)),
        (ValueError, "out: expected 'concat' or 'mean'", lambda la, x: GraphOptions(out="sum")),
        (ValueError, "fill: expected a number", lambda la, x: GraphOptions(fill="median")),
        (ValueError, "shared: expected one width", lambda la, x: GraphAttentionV2((3, 4), 5, shared=True)),
        (ValueError, "skip: expected 'add'", lambda la, x: GraphTransformer(3, 4, skip="mul")),
        (ValueError, "weights: expected one row", lambda la, x: ops.edge_sum(x[:2, :1], x[:, None], EDGES, NODES)),
    ],
)
def test_errors_name_the_argument(error, words, run):
    layer, _ = call("gat")
    with pytest.raises(error, match=words):
        run(layer, drawn(NODES, DIM))
