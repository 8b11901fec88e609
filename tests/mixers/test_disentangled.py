"""Disentangled attention beyond the contract: the published buckets, a shared table, the three terms alone."""

import pytest
import torch

import regard
from regard.mixers.disentangled import log_buckets
from regard.nn import DisentangledAttention, RelativeEmbeddings


@pytest.mark.parametrize(
    ("buckets", "furthest", "table"),
    [
        (256, 512, {127: 127, 128: 128, 129: 129, 200: 169, 256: 192, 300: 207, 400: 233, 511: 255}),
        (32, 128, {16: 16, 17: 17, 20: 18, 32: 22, 64: 27, 100: 30, 127: 31}),
    ],
)
def test_published_buckets(buckets, furthest, table):
    distance = torch.tensor(list(table))
    assert log_buckets(distance, buckets, furthest).tolist() == list(table.values())
    assert log_buckets(-distance, buckets, furthest).tolist() == [-n for n in table.values()]
    assert log_buckets(torch.arange(-5, 6), buckets, furthest).tolist() == list(range(-5, 6))


def test_without_terms_it_is_plain_attention():
    layer = DisentangledAttention(8, 2, RelativeEmbeddings(8, 4), terms=()).double()
    x = torch.randn(2, 9, 8, dtype=torch.float64)
    q, k, v = (proj(x).unflatten(-1, (2, 4)).transpose(1, 2) for proj in (layer.q_proj, layer.k_proj, layer.v_proj))
    torch.testing.assert_close(layer.mixed(x), regard.attention(q, k, v))


def test_layers_share_a_table_and_its_gradient():
    table = RelativeEmbeddings(8, 4)
    layers = torch.nn.ModuleList(DisentangledAttention(8, 2, table) for _ in range(2))
    assert sum(p is table.rows for p in layers.parameters()) == 1
    x = torch.randn(1, 5, 8)
    layers[1](layers[0](x)).sum().backward()
    assert table.rows.grad.abs().sum() > 0


def test_places_beyond_the_span_are_the_last_ones():
    index = RelativeEmbeddings(8, 3).index(9, 9)
    assert index[8].tolist() == [5, 5, 5, 5, 5, 5, 5, 4, 3] and index[0].tolist() == [3, 2, 1, 0, 0, 0, 0, 0, 0]


@pytest.mark.parametrize(
    ("words", "make"),
    [
        ("terms: expected some of", lambda: DisentangledAttention(8, 2, RelativeEmbeddings(8, 3), terms=["p2p"])),
        ("relative: expected rows of 8 channels", lambda: DisentangledAttention(8, 2, RelativeEmbeddings(4, 3))),
        ("max_distance: expected an int of at least 9", lambda: RelativeEmbeddings(4, 9, max_distance=3)),
        ("heads: expected a divisor", lambda: DisentangledAttention(8, 3, RelativeEmbeddings(8, 3))),
    ],
)
def test_errors_name_the_argument(words, make):
    with pytest.raises(ValueError, match=words):
        make()
