"""The softmax layers: what the catalogue's checks don't ask."""

from __future__ import annotations

import pytest
import torch

import regard
from regard import nn
from regard.biases import Alibi
from regard.caches import KVCache, WindowCache
from regard.catalog import find
from regard.errors import CacheError, CacheFull
from regard.masks import Band, Causal, Full, Prefix, Window
from regard.nn import MultiHeadAttention, Projections, RelativePositionBias, RMSNorm, Scores, from_torch
from regard.positions import Rotary


def test_window_caches_only_where_no_older_token_is_needed():
    def kind(mask):
        return type(MultiHeadAttention(8, 2, mask=mask).init_cache(1, 5))

    assert kind(Window(3)) is WindowCache
    assert kind(Window(3) & Prefix(9)) is WindowCache
    assert kind(Band(2, 0)) is WindowCache
    for mask in (None, Full(), Causal(), Window(3) | Prefix(1), ~Window(3), Band(None, 0)):
        assert kind(mask) is KVCache


@pytest.mark.parametrize("mask", [Window(3) & ~Band(1, -1), Window(4) & Prefix(9), Window(3) & Causal()])
def test_a_window_cache_counts_slots_from_the_start(mask):
    layer = MultiHeadAttention(8, 2, mask=mask, bias=Alibi(2)).double()
    x = torch.randn(2, 12, 8, dtype=torch.float64)
    cache = layer.init_cache(2, 0)
    steps = torch.cat([layer(part, cache=cache) for part in x.split([5, 1, 1, 3, 2], 1)], 1)
    torch.testing.assert_close(steps, layer(x), rtol=0, atol=1e-12)
    assert cache.length == 12 and cache.k.shape[2] <= 4


@pytest.mark.parametrize("own", [Window(3), Causal()])
def test_a_mask_at_the_call_spans_every_token_seen(own):
    layer = MultiHeadAttention(8, 2, mask=own).double()
    x = torch.randn(1, 9, 8, dtype=torch.float64)
    mask = torch.rand(9, 9) > 0.4
    whole = layer(x, mask=mask)
    cache, outs, start = layer.init_cache(1, 9), [], 0
    for size in (4, 1, 1, 3):
        outs.append(layer(x[:, start : start + size], mask=mask[start : start + size, : start + size], cache=cache))
        start += size
    torch.testing.assert_close(torch.cat(outs, 1), whole, rtol=0, atol=1e-12)


def test_padding_a_whole_row_is_harmless():
    layer = MultiHeadAttention(8, 2, mask=Causal(), rotary=Rotary(4)).double()
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    keep = torch.tensor([[True] * 5, [False] * 5])
    cache = layer.init_cache(2, 8)
    out = layer(x, keep=keep, cache=cache)
    assert torch.isfinite(out).all()
    more = layer(x[:, :1], cache=cache)
    torch.testing.assert_close(more[1:], layer(x[1:, :1]), rtol=0, atol=1e-12)


def test_a_failed_call_leaves_the_cache_alone():
    layer = MultiHeadAttention(8, 2, mask=Causal()).double()
    x = torch.randn(1, 3, 8, dtype=torch.float64)
    for own in (Causal(), Window(2)):
        layer = MultiHeadAttention(8, 2, mask=own).double()
        cache = layer.init_cache(1, 4)
        layer(x, cache=cache)
        want = layer(x[:, :1], cache=cache.clone())
        for wrong in ({"mask": torch.ones(1, 9, dtype=torch.bool)}, {"keep": torch.ones(1, 2, dtype=torch.bool)}):
            with pytest.raises(ValueError, match=r"mask|keep"):
                layer(x[:, :1], cache=cache, **wrong)
        with pytest.raises(ValueError, match="segments"):
            layer(x[:, :1], cache=cache, segments=torch.tensor([[-1]]))
        assert cache.length == 3
        torch.testing.assert_close(layer(x[:, :1], cache=cache), want)


def test_full_and_uncroppable_caches_say_so():
    layer = MultiHeadAttention(8, 2, mask=Window(2))
    cache = layer.init_cache(1, 1)
    layer(torch.randn(1, 6, 8), cache=cache)
    with pytest.raises(CacheError, match="cannot go back to 2 of 6"):
        cache.crop(2)
    assert cache.length == 6
    full = MultiHeadAttention(8, 2, mask=Causal()).init_cache(1, 4)
    with pytest.raises(CacheFull, match="0 of 4 tokens and has no room for 5"):
        full.room_for(5)


def test_segments_must_not_fall():
    layer = MultiHeadAttention(8, 2, mask=Causal())
    cache = layer.init_cache(1, 8)
    layer(torch.randn(1, 2, 8), cache=cache, segments=torch.tensor([[3, 4]]))
    with pytest.raises(ValueError, match="segments: the call's first id is smaller"):
        layer(torch.randn(1, 1, 8), cache=cache, segments=torch.tensor([[3]]))
    layer(torch.randn(1, 1, 8), cache=cache)
    assert cache.next_positions(1, 1).item() == 2  # the third token of segment 4


def test_positions_count_real_tokens_of_each_segment():
    layer = MultiHeadAttention(8, 2, mask=Causal())
    cache = layer.init_cache(2, 16)
    keep = torch.tensor([[True, True, False, True], [False, False, True, True]])
    segments = torch.tensor([[0, 0, 1, 1], [0, 0, 0, 0]])
    assert cache.next_positions(2, 4, keep, segments).tolist() == [[0, 1, 0, 0], [0, 0, 0, 1]]
    layer(torch.randn(2, 4, 8), keep=keep, segments=segments, cache=cache)
    assert cache.next_positions(2, 2).tolist() == [[1, 2], [2, 3]]


def test_caches_keep_their_dtype_and_answer_in_the_layers():
    layer = MultiHeadAttention(8, 2, mask=Causal())
    cache = layer.init_cache(1, 4, dtype=torch.bfloat16)
    x = torch.randn(1, 4, 8)
    steps = torch.cat([layer(x[:, :3], cache=cache), layer(x[:, 3:], cache=cache)], 1)
    assert cache.k.dtype == torch.bfloat16 and steps.dtype == torch.float32
    assert cache.nbytes == 2 * 2 * 4 * 4 * 2
    torch.testing.assert_close(steps, layer(x), rtol=0, atol=3e-2)
    fresh = layer.init_cache(1, 4, dtype=torch.bfloat16)
    torch.testing.assert_close(steps, layer(x, cache=fresh))  # rounded alike, whichever way they are written


def test_what_a_cache_stores_is_detached():
    layer = MultiHeadAttention(8, 2, mask=Causal())
    cache = layer.init_cache(1, 4)
    first, second = torch.randn(1, 2, 8, requires_grad=True), torch.randn(1, 2, 8, requires_grad=True)
    layer(first, cache=cache)
    out = layer(second, cache=cache)
    a, b = torch.autograd.grad(out.sum(), [first, second], allow_unused=True)
    assert a is None and b is not None and not cache.k.requires_grad


def test_caches_are_pytrees():
    from torch.utils import _pytree

    layer = MultiHeadAttention(8, 2, mask=Window(3))
    cache = layer.init_cache(1, 4)
    x = torch.randn(1, 5, 8)
    layer(x, cache=cache, keep=torch.tensor([[False, True, True, True, True]]))
    copy = _pytree.tree_map(lambda t: t.clone() if isinstance(t, torch.Tensor) else t, cache)
    assert type(copy) is WindowCache and copy.length == 5
    torch.testing.assert_close(layer(x[:, :1], cache=copy), layer(x[:, :1], cache=cache))


def test_a_context_is_written_once():
    layer = MultiHeadAttention(8, 2, projections=Projections(context_dim=6)).double()
    x, context = torch.randn(1, 4, 8, dtype=torch.float64), torch.randn(1, 5, 6, dtype=torch.float64)
    keep = torch.tensor([[True, True, True, False, True]])
    cache = layer.init_cache(1, 5)
    outs = [layer(x[:, :1], context, keep=keep, cache=cache), layer(x[:, 1:], cache=cache)]
    torch.testing.assert_close(torch.cat(outs, 1), layer(x, context, keep=keep), rtol=0, atol=1e-12)
    with pytest.raises(ValueError, match="context: the cache holds one already"):
        layer(x, context, cache=cache)
    with pytest.raises(ValueError, match="keep: it describes the context"):
        layer(x, cache=cache, keep=torch.ones(1, 4, dtype=torch.bool))
    with pytest.raises(ValueError, match="context: expected"):
        layer(x, context[..., :-1])


def test_a_shared_bias_gets_the_gradient_of_both_layers():
    table = RelativePositionBias(8, 2, max_distance=20).double()
    layers = [MultiHeadAttention(8, 2, bias=table, scores=Scores(scale=1.0)).double() for _ in range(2)]
    x = torch.randn(1, 6, 8, dtype=torch.float64)
    layers[1](layers[0](x)).sum().backward()
    assert table.weight.grad is not None and bool((table.weight.grad != 0).any())
    assert layers[0].bias is layers[1].bias


def test_dropout_only_in_training():
    layer = MultiHeadAttention(8, 2, scores=Scores(dropout=0.5))
    x = torch.randn(1, 6, 8)
    layer.eval()
    before = torch.get_rng_state()
    assert torch.equal(layer(x), layer(x)) and torch.equal(before, torch.get_rng_state())
    layer.train()
    assert not torch.equal(layer(x), layer(x))


@pytest.mark.parametrize("options", [{}, {"bias": False}, {"kdim": 6, "vdim": 5}, {"add_zero_attn": True}])
def test_converted_from_torch(options):
    theirs = torch.nn.MultiheadAttention(12, 3, batch_first=True, **options).double().eval()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter)
    x = torch.randn(2, 5, 12, dtype=torch.float64)
    key = torch.randn(2, 7, options.get("kdim", 12), dtype=torch.float64)
    value = torch.randn(2, 7, options["vdim"], dtype=torch.float64) if "vdim" in options else key
    blocked = torch.rand(2, 7) > 0.6
    blocked[:, 0] = False
    want, weights = theirs(x, key, value, key_padding_mask=blocked, average_attn_weights=False)
    layer = from_torch(theirs)
    context = torch.cat([key, value], -1) if "kdim" in options else key
    torch.testing.assert_close(layer(x, context, keep=~blocked), want, rtol=0, atol=1e-10)
    matrix, _ = regard.mixing_matrix(layer, x, context=context, keep=~blocked)
    torch.testing.assert_close(matrix, weights[..., :7], rtol=0, atol=1e-10)


def test_torch_modules_without_a_counterpart_are_refused():
    with pytest.raises(ValueError, match="add_bias_kv"):
        from_torch(torch.nn.MultiheadAttention(8, 2, add_bias_kv=True))
    with pytest.raises(TypeError, match="module: expected a torch"):
        from_torch(torch.nn.Linear(8, 8))


def test_the_mixing_matrix_is_what_the_layer_mixes():
    layer = MultiHeadAttention(
        8, 4, kv_heads=2, mask=Causal(), rotary=Rotary(2), projections=Projections(gate=True)
    ).double()
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    keep = torch.tensor([[True] * 5, [False, False, True, True, True]])
    matrix, values = regard.mixing_matrix(layer, x, keep=keep)
    mixed = (matrix @ values).transpose(1, 2).flatten(2) * torch.sigmoid(layer.gate_proj(x))
    torch.testing.assert_close(layer.o_proj(mixed), layer(x, keep=keep), rtol=0, atol=1e-12)
    with pytest.raises(TypeError, match="module: expected"):
        regard.mixing_matrix(torch.nn.Linear(2, 2), x)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"kv_heads": 3}, "kv_heads: expected a divisor"),
        ({"heads": 5}, "heads: expected a divisor"),
        ({"mask": torch.ones(2, 2, dtype=torch.bool)}, "mask: expected a Mask"),
        ({"bias": torch.ones(2, 2)}, "bias: expected a Bias"),
        ({"heads": 0}, "heads: expected an int of at least 1"),
    ],
)
def test_constructor_errors(wrong, text):
    with pytest.raises((ValueError, TypeError), match=text):
        MultiHeadAttention(**({"dim": 8, "heads": 4} | wrong))


@pytest.mark.parametrize("wrong", [3, 0, "", (), Projections, torch.nn.Linear(2, 2)])
@pytest.mark.parametrize(
    ("make", "part"),
    [
        (lambda **part: MultiHeadAttention(8, 4, **part), "projections"),
        (lambda **part: MultiHeadAttention(8, 4, **part), "scores"),
        (lambda **part: MultiHeadAttention(8, 4, **part), "mask"),
        (lambda **part: MultiHeadAttention(8, 4, **part), "rotary"),
        (lambda **part: nn.MultiHeadLatentAttention(8, 4, nn.LatentSizes(4, 2, 2, 2), **part), "projections"),
        (lambda **part: nn.MultiHeadLatentAttention(8, 4, nn.LatentSizes(4, 2, 2, 2), **part), "scores"),
        (lambda **part: nn.MultiHeadLatentAttention(8, 4, nn.LatentSizes(4, 2, 2, 2), **part), "mask"),
        (lambda **part: nn.MultiHeadLatentAttention(8, 4, nn.LatentSizes(4, 2, 2, 2), **part), "rotary"),
        (lambda sizes: nn.MultiHeadLatentAttention(8, 4, sizes), "sizes"),
        (lambda **part: nn.KimiDeltaAttention(8, 4, **part), "gates"),
        (lambda **part: nn.GatedLinearAttention(8, 2, **part), "decay"),
        (lambda **part: nn.Retention(8, 2, **part), "rotary"),
        (lambda **part: nn.Mamba(8, **part), "shell"),
        (lambda **part: nn.Mamba2(8, 4, **part), "shell"),
    ],
)
def test_parts_of_another_kind_are_named(make, part, wrong):
    with pytest.raises(TypeError, match=f"^{part}: expected "):
        make(**{part: wrong})


@pytest.mark.parametrize("wrong", [3, "norm", ()])
@pytest.mark.parametrize(
    ("make", "part"),
    [
        (lambda norm: Projections(norm=norm), "norm"),
        (lambda norm: nn.LatentProjections(norm=norm), "norm"),
        (lambda norm: nn.GatedDeltaNet(8, 4, norm=norm), "norm"),
        (lambda norm: nn.Mamba(8, norm=norm), "norm"),
        (lambda norm: nn.LinearAttention(8, 4, feature_map=norm), "feature_map"),
        (lambda norm: nn.GriffinRecurrent(8, 4, activation=norm), "activation"),
    ],
)
def test_factories_that_cannot_be_called_are_named(make, part, wrong):
    with pytest.raises(TypeError, match=f"^{part}: expected "):
        make(wrong)


def test_an_error_names_the_class_of_what_came_once():
    layer, x = MultiHeadAttention(8, 4, mask=Causal()), torch.randn(1, 2, 8)
    both = Causal() & Window(2)
    with pytest.raises(ValueError, match=r"got And\(parts=\(Causal\(\), Window\(w=2\)\)\)$"):
        nn.DeltaNet(8, 2)(x, mask=both)
    with pytest.raises(TypeError, match=r"^cache: .*, got Window\(w=2\)$"):
        layer(x, cache=Window(2))
    with pytest.raises(TypeError, match=r"^mask: .*, got int 3$"):
        MultiHeadAttention(8, 4, mask=3)


def test_parts_errors():
    with pytest.raises(ValueError, match="norm_over"):
        Projections(norm_over="both")
    with pytest.raises(ValueError, match="dropout"):
        Scores(dropout=1.5)
    with pytest.raises(ValueError, match="softcap"):
        Scores(softcap=0.0)
    with pytest.raises(ValueError, match="name: expected one of mha"):
        find("nothing")


def test_rms_norm_offset_form():
    x = torch.randn(2, 6, dtype=torch.float64)
    a, b = RMSNorm(6).double(), RMSNorm(6, unit_offset=True).double()
    torch.testing.assert_close(a(x), b(x))
