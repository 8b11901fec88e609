"""Failures that users of attention implementations reported: caches, batches, autograd modes."""

import pytest
import torch
from recipes import WIDE, close, drawn, leaves, made, paths, step_by_step

import regard
from regard.biases import Alibi
from regard.caches import KVCache, WindowCache
from regard.errors import BackendUnsupported, CacheFull
from regard.masks import Causal, Dilated, Window
from regard.nn import MultiHeadAttention, Projections, RMSNorm, Scores
from regard.positions import Rotary

KINDS = {
    "causal": {"mask": Causal(), "rotary": Rotary(4)},
    "window": {"mask": Window(5), "rotary": Rotary(4)},
    "dilated": {"mask": Dilated(3, 2), "rotary": Rotary(4)},
    "grouped, normed, sink": {
        "mask": Causal(),
        "kv_heads": 2,
        "rotary": Rotary(4),
        "projections": Projections(norm=RMSNorm, gate=True),
        "scores": Scores(sink=True, softcap=4.0),
    },
    "alibi": {"mask": Causal(), "bias": Alibi(4)},
    "window, alibi": {"mask": Window(5) & Causal(), "bias": Alibi(4)},
}


def built(kind: str, dtype: torch.dtype = WIDE) -> MultiHeadAttention:
    return drawn(MultiHeadAttention(16, 4, **KINDS[kind]), dtype)


@pytest.mark.parametrize("kind", KINDS)
def test_H27_several_tokens_into_a_filled_cache(kind):
    layer, x = built(kind), made(2, 20, 16)
    keep = torch.ones(2, 20, dtype=torch.bool)
    keep[1, :3] = False
    whole, padded = layer(x), layer(x, keep=keep)
    for splits in ([20], [7, 13], [1] * 20, [5, 1, 14], [2, 2, 16]):
        close(step_by_step(layer, x, splits), whole)
        close(step_by_step(layer, x, splits, keep=keep)[keep], padded[keep])


@pytest.mark.parametrize("kind", KINDS)
def test_H31_reordered_beams(kind):
    layer = built(kind)
    x, keep = made(3, 8, 16), torch.arange(8)[None] >= torch.tensor([[0], [2], [3]])
    cache = layer.init_cache(3, 12)
    layer(x, keep=keep, cache=cache)
    order = [2, 0, 0]
    cache.reorder(torch.tensor(order))
    step, after = made(3, 1, 16, seed=5), made(3, 2, 16, seed=6)
    out = [layer(step, cache=cache), layer(after, cache=cache)]
    for row, old in enumerate(order):
        fresh = torch.cat((x[old], step[row], after[row]))[None]
        real = torch.cat((keep[old], torch.ones(3, dtype=torch.bool)))[None]
        close(torch.cat(out, 1)[row], layer(fresh, keep=real)[0, 8:])
    # rows 1 and 2 come from one row and share no storage
    cache.k[1] += 1
    assert not torch.equal(cache.k[1], cache.k[2])
    cache.reorder([0])
    assert cache.batch == 1 and layer(made(1, 1, 16), cache=cache).shape == (1, 1, 16)


def test_H32_a_cache_that_is_full():
    layer = built("causal")
    assert isinstance(layer.init_cache(2, 8), KVCache) and isinstance(built("window").init_cache(2, 8), WindowCache)
    x = made(2, 17, 16)
    cache = layer.init_cache(2, 8)
    first = layer(x[:, :8], cache=cache)
    before = {name: tensor.clone() for name, tensor in (("k", cache.k), ("v", cache.v))}
    for more in (x[:, 8:9], x[:, 8:17]):
        with pytest.raises(CacheFull, match="8 of 8 tokens"):
            layer(more, cache=cache)
        assert cache.length == 8 and torch.equal(cache.k, before["k"]) and torch.equal(cache.v, before["v"])
    close(first, layer(x[:, :8]))
    cache.crop(7)
    close(layer(x[:, 7:8], cache=cache), first[:, 7:])
    fresh = layer.init_cache(2, 8)
    with pytest.raises(CacheFull, match="no room for 9"):
        layer(x[:, :9], cache=fresh)
    assert fresh.length == 0
    cache.reset()
    assert cache.length == 0
    assert torch.equal(layer(x[:, 9:14], cache=cache), layer(x[:, 9:14], cache=fresh))
    rolling = built("window")
    close(step_by_step(rolling, x, [8, 1, 8]), rolling(x))  # never full, by design


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_H33_a_row_does_not_depend_on_its_batch(dtype):
    ulp = {torch.float32: 1e-6, torch.bfloat16: 2**-8}[dtype]
    q, k, v = (made(1, heads, 40, 16, seed=n).to(dtype) for n, heads in enumerate((4, 2, 2)))
    others = [made(7, heads, 40, 16, seed=9).to(dtype) for heads in (4, 2, 2)]
    for options in ({}, {"mask": Causal()}, {"mask": Window(7), "bias": Alibi(4)}, {"softcap": 3.0}):
        for backend, alone in paths(q, k, v, **options):
            scale = float(alone.abs().max())
            repeated = regard.attention(*(x.repeat(8, 1, 1, 1) for x in (q, k, v)), backend=backend, **options)
            assert all(torch.equal(row, repeated[0]) for row in repeated)
            mixed = regard.attention(
                *(torch.cat((y, x)) for x, y in zip((q, k, v), others, strict=True)), backend=backend, **options
            )
            again = regard.attention(q, k, v, backend=backend, **options)
            assert torch.equal(alone, again)
            for row in (repeated[0], mixed[7]):
                assert float((row.double() - alone[0].double()).abs().max()) <= ulp * scale


def test_H33_the_same_sample_in_a_ragged_batch():
    layer = built("grouped, normed, sink", torch.float32)
    x = made(1, 9, 16).float()
    rows = torch.cat((made(2, 14, 16, seed=3).float(), torch.zeros(1, 14, 16)))
    rows[2, :9] = x
    keep = torch.arange(14)[None] < torch.tensor([[14], [4], [9]])
    alone = layer(x)
    close(layer(rows, keep=keep)[2:, :9], alone, 1e-5)
    assert torch.equal(layer(rows, keep=keep), layer(rows, keep=keep))


# ---- other autograd modes --------------------------------------------------------------------------------------------


def one_head() -> list[torch.Tensor]:
    return leaves(*(made(1, 1, 5, 3, seed=n) for n in range(3)))


def causal(q, k, v, backend=None):
    return regard.attention(q, k, v, mask=Causal(), backend=backend)


@pytest.mark.parametrize("backend", [None, "reference", "chunked"])
def test_H34_second_derivatives_and_subsets_of_inputs(backend):
    own = one_head()
    assert torch.autograd.gradgradcheck(lambda *x: causal(*x, backend=backend), own)
    whole = torch.autograd.grad(causal(*own, backend=backend).square().sum(), own)
    for wanted in ((0,), (1,), (2,), (0, 2)):
        got = torch.autograd.grad(causal(*own, backend=backend).square().sum(), [own[n] for n in wanted])
        for grad, n in zip(got, wanted, strict=True):
            close(grad, whole[n])


@pytest.mark.filterwarnings("ignore:`torch.jit.script`")  # torch's own, on its first forward-mode derivative
def test_H34_function_transforms():
    q, k, v = (x.detach() for x in one_head())
    directions = tuple(made(1, 1, 5, 3, seed=n) for n in (7, 8, 9))
    out, tangent = torch.func.jvp(causal, (q, k, v), directions)
    step = 1e-6
    ahead, behind = (causal(*(x + s * step * d for x, d in zip((q, k, v), directions, strict=True))) for s in (1, -1))
    torch.testing.assert_close(tangent, (ahead - behind) / (2 * step), rtol=1e-6, atol=1e-8)
    close(out, causal(q, k, v))
    rows = [made(4, 1, 5, 3, seed=n) for n in range(3)]
    lifted = torch.func.vmap(lambda *x: causal(*(y[None] for y in x))[0])(*rows)
    close(lifted, causal(*rows))
    jacobian = torch.func.jacrev(causal)(q, k, v)
    assert jacobian.shape == (1, 1, 5, 3, 1, 1, 5, 3)
    expected = torch.autograd.functional.jacobian(lambda x: causal(x, k, v), q)
    close(jacobian, expected)
    with pytest.raises(NotImplementedError, match=r"These can: .*reference"):
        torch.func.vmap(lambda x: causal(x, x, x, backend="chunked"))(q[None])
    for backend in ("sdpa", "chunked"):
        with pytest.raises(BackendUnsupported, match=r"derivatives|transforms"):
            torch.func.jvp(lambda *x, backend=backend: causal(*x, backend=backend), (q, k, v), directions)
    both = torch.func.jacfwd(lambda x: torch.func.vmap(lambda y: causal(y, y, y))(x[None])[0])(q)
    close(both, torch.func.jacrev(lambda x: causal(x, x, x))(q))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(q, directions[0])
        assert torch.autograd.forward_ad.unpack_dual(causal(dual, k, v)).tangent is not None


def test_H34_compiled_for_any_length():
    compiled = torch.compile(causal, fullgraph=True, backend="aot_eager", dynamic=True)
    for length in (5, 17, 33):
        own = [made(2, heads, length, 3, seed=n).float() for n, heads in enumerate((4, 2, 2))]
        close(compiled(*own), causal(*own), 1e-5)


def test_H34_exported_with_a_free_length():
    class Module(torch.nn.Module):
        def forward(self, q, k, v):
            return causal(q, k, v)

    free = torch.export.Dim("T", min=2, max=4096)
    own = [made(2, heads, 8, 4, seed=n).float() for n, heads in enumerate((4, 2, 2))]
    exported = torch.export.export(Module(), tuple(own), dynamic_shapes=[{2: free}] * 3).module()
    for length in (2, 23):
        own = [made(2, heads, length, 4, seed=n).float() for n, heads in enumerate((4, 2, 2))]
        close(exported(*own), causal(*own), 1e-5)
