"""Failures that users of attention implementations reported: heads, shapes, dtypes, strides, dropout."""

import pytest
import torch
from recipes import WIDE, close, drawn, leaves, made, paths

import regard
from regard.masks import Causal, KeyPadding, Window
from regard.nn import MultiHeadAttention, Scores
from regard.positions import Rotary, YarnScaling


@pytest.mark.parametrize(("q_heads", "kv_heads"), [(4, 2), (6, 3), (6, 1), (4, 4)])
@pytest.mark.parametrize("length", [3, 2])
def test_H07_which_key_head_a_query_head_reads(q_heads, kv_heads, length):
    group = q_heads // kv_heads
    values = 1.0 + torch.arange(kv_heads, dtype=WIDE)
    q, k = made(1, q_heads, length, 5), made(1, kv_heads, length, 5)
    for _, out in paths(q, k, values.view(1, -1, 1, 1).expand(1, kv_heads, length, 2).clone()):
        close(out[0, :, 0, 0], values.repeat_interleave(group))
    v = made(1, kv_heads, length, 2)
    own, copied = leaves(q, k, v), leaves(q, k, v)
    want = regard.attention(copied[0], *(x.repeat_interleave(group, 1) for x in copied[1:]), backend="reference")
    expected = torch.autograd.grad(want.square().sum(), copied)
    for _, out in paths(*own):
        close(out, want)
        for grad, one in zip(torch.autograd.grad(out.square().sum(), own), expected, strict=True):
            close(grad, one)


def test_H07_head_counts_that_do_not_divide():
    with pytest.raises(ValueError, match="Hq=5, Hkv=2"):
        regard.attention(made(1, 5, 3, 4), made(1, 2, 3, 4), made(1, 2, 3, 4))
    with pytest.raises(ValueError, match="kv_heads"):
        MultiHeadAttention(20, 5, kv_heads=2)


def test_H08_positions_and_caches_keep_the_dtype():
    rotary = Rotary(8, scaling=YarnScaling(4.0, 16))  # a scaling that multiplies cos and sin in float32
    q, k, v = (made(2, 2, 5, 8, seed=n).bfloat16() for n in range(3))
    where = torch.arange(5)
    turned = rotary(q, where), rotary(k, where)
    assert {x.dtype for x in turned} == {torch.bfloat16} and rotary.angles(where)[0].dtype == torch.float32
    for _, out in paths(*turned, v):
        assert out.dtype == v.dtype
    layer = drawn(MultiHeadAttention(16, 2, mask=Causal(), rotary=rotary), torch.float32)
    x = made(2, 5, 16).float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16
        assert regard.attention(q.float(), k, v).dtype == torch.bfloat16
    cache = layer.init_cache(2, 5, dtype=torch.bfloat16)
    stepped = torch.cat([layer(x[:, :3], cache=cache), layer(x[:, 3:], cache=cache)], 1)
    assert cache.k.dtype == torch.bfloat16 and stepped.dtype == torch.float32
    own_q, own_k, own_v = (p(x).view(2, 5, 2, 8).transpose(1, 2) for p in (layer.q_proj, layer.k_proj, layer.v_proj))
    stored = [rotary(own_k, where).bfloat16().float(), own_v.bfloat16().float()]  # rounded once, used in q's dtype
    want = regard.attention(rotary(own_q, where), *stored, mask=Causal())
    torch.testing.assert_close(stepped, layer.o_proj(want.transpose(1, 2).flatten(2)), rtol=1e-5, atol=1e-5)
    with pytest.raises(TypeError, match=r"torch\.float32, torch\.bfloat16, torch\.bfloat16"):
        regard.attention(q.float(), k, v)
    with pytest.raises(ValueError, match="got cpu, meta, cpu"):
        regard.attention(q, k.to("meta"), v)


def test_H09_strided_inputs():
    fused = made(2, 7, 3, 4, 8).float()
    forms = [
        [fused[:, :, n].transpose(1, 2) for n in range(3)],
        [made(2, 4, 8, 7, seed=n).float().mT for n in range(3)],
        [made(2, 4, 7, 16, seed=n).float()[..., ::2] for n in range(3)],
    ]
    expanded = (made(1, 7) > -0.8).expand(7, 7)
    transposed = (made(7, 7) > -0.8).mT
    for tensors in forms:
        for mask in (None, Causal(), expanded, transposed):
            packed = leaves(*(x.contiguous() for x in tensors))
            tight = mask.contiguous() if isinstance(mask, torch.Tensor) else mask
            before = [x.clone() for x in tensors]
            own = [x.detach().requires_grad_() for x in tensors]
            for backend, out in paths(*own, mask=mask):
                want = regard.attention(*packed, mask=tight, backend=backend)
                close(out, want, 1e-6)
                grads = torch.autograd.grad(out.square().sum(), own)
                for grad, one in zip(grads, torch.autograd.grad(want.square().sum(), packed), strict=True):
                    close(grad, one, 1e-5)
            assert all(torch.equal(x.detach(), y) for x, y in zip(own, before, strict=True))


@pytest.mark.parametrize(("batch", "q_len", "k_len"), [(0, 4, 4), (2, 0, 4), (2, 4, 0), (2, 0, 0)])
def test_H10_empty_tensors(batch, q_len, k_len):
    keep = torch.ones(batch, k_len, dtype=torch.bool)
    for mask in (None, Causal(), Window(2), KeyPadding(keep), torch.ones(q_len, k_len, dtype=torch.bool)):
        own = leaves(made(batch, 4, q_len, 3), made(batch, 2, k_len, 3), made(batch, 2, k_len, 5))
        for _, out in paths(*own, mask=mask):
            assert out.shape == (batch, 4, q_len, 5)
            assert k_len or (out == 0).all()
            for grad, leaf in zip(torch.autograd.grad(out.sum(), own), own, strict=True):
                assert grad.shape == leaf.shape and grad.isfinite().all()
                assert (k_len and q_len and batch) or (grad == 0).all()
    layer = drawn(MultiHeadAttention(8, 4, kv_heads=2))
    x, context = leaves(made(batch, q_len, 8), made(batch, k_len, 8))
    out = layer(x, context)
    assert out.shape == (batch, q_len, 8)
    out.sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())
    causal = drawn(MultiHeadAttention(8, 4, kv_heads=2, mask=Causal(), rotary=Rotary(2)))
    cache = causal.init_cache(batch, 4)
    assert causal(x, cache=cache).shape == (batch, q_len, 8) and cache.length == q_len


@pytest.mark.parametrize(("dk", "dv"), [(1, 1), (3, 5), (64, 32), (72, 257), (512, 64)])
def test_H11_head_sizes_and_scale(dk, dv):
    q, k, v = made(1, 8, 4, dk), made(1, 8, 6, dk), made(1, 8, 6, dv)
    exact = torch.softmax((q @ k.mT) * dk**-0.5, -1) @ v
    for _, out in paths(q, k, v):
        assert out.shape[-1] == dv
        close(out, exact)
    compiled = torch.compile(lambda q, k, v: regard.attention(q, k, v), fullgraph=True, backend="eager", dynamic=True)
    close(compiled(q, k, v), exact)


def test_H11_the_default_scale_is_of_the_head_size():
    ones = torch.ones(1, 8, 1, 32, dtype=WIDE)
    for backend in ("reference", "chunked"):
        _, lse = regard.attention(ones, ones, ones, return_lse=True, backend=backend)
        close(lse / 32, torch.full((1, 8, 1), 0.17677669529663687, dtype=WIDE))
    layer = drawn(MultiHeadAttention(256, 8))
    q, k = (p(made(1, 3, 256)).view(1, 3, 8, 32).transpose(1, 2) for p in (layer.q_proj, layer.k_proj))
    close(layer.mixing(made(1, 3, 256))[0], torch.softmax(q @ k.mT * 32**-0.5, -1))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_H12_the_raw_product_overflows_half_precision(dtype):
    q, k = torch.full((1, 1, 1, 64), 64.0, dtype=dtype), torch.full((1, 1, 2, 64), 64.0, dtype=dtype)
    v = torch.tensor([0.0, 1.0], dtype=dtype).view(1, 1, 2, 1)
    for mask in (None, torch.ones(1, 2, dtype=torch.bool)):
        own = leaves(q, k, v)
        for _, out in paths(*own, mask=mask):
            assert out.item() == 0.5
            assert all(grad.isfinite().all() for grad in torch.autograd.grad(out.sum(), own))


def test_H13_the_tail_of_a_very_long_row():
    length = 65537
    q, k, v = torch.zeros(1, 1, 1, 1), torch.randn(1, 1, length, 1), torch.zeros(1, 1, length, 1)
    v[..., -1, :] = 3.0
    own = leaves(q, k, v)
    for _, out in paths(*own):
        assert out.item() == pytest.approx(3 / length, rel=1e-5)
        assert torch.autograd.grad(out.sum(), own)[2][..., -1, :].item() == pytest.approx(1 / length, rel=1e-5)


def test_H14_dropout_of_a_module():
    layer = drawn(MultiHeadAttention(8, 2, scores=Scores(dropout=0.5)), torch.float32)
    plain = drawn(MultiHeadAttention(8, 2), torch.float32)
    x = made(2, 6, 8).float()
    assert torch.equal(layer(x), layer(x)) and torch.equal(layer(x), plain(x))
    layer.train()
    assert not torch.equal(layer(x), layer(x))


def test_H14_dropout_of_the_weights():
    q, k, v = torch.zeros(1, 1, 4, 2), torch.zeros(1, 1, 4096, 2), torch.ones(1, 1, 4096, 1)
    for backend in ("reference", "chunked"):
        outs = []
        for seed in range(30):
            torch.manual_seed(seed)
            outs.append(regard.attention(q, k, v, dropout_p=0.5, backend=backend))
        spread = (1 / 4096 / (4 * 30)) ** 0.5  # kept weights count 2 or 0, so one weight's variance is 1
        assert abs(float(torch.stack(outs).mean()) - 1) < 3 * spread
        state = torch.random.get_rng_state()
        regard.attention(q, k, v, dropout_p=0.0, backend=backend)
        assert torch.equal(state, torch.random.get_rng_state())
        assert (regard.attention(q, k, v, dropout_p=1.0, backend=backend) == 0).all()

        def call(*tensors, backend=backend):
            torch.manual_seed(7)
            return regard.attention(*tensors, dropout_p=0.5, backend=backend)

        assert torch.autograd.gradcheck(call, leaves(made(1, 2, 3, 2), made(1, 2, 4, 2), made(1, 2, 4, 2)))
