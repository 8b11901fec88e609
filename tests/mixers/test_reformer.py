"""Hashed attention beyond the contract: exact among all tokens of a bucket, and the leak of the released chunks."""

import pytest
import torch

import regard
from regard.masks import Causal
from regard.nn import HashedAttention
from regard.ops.lsh import factored_buckets, hash_buckets, hashed_attention
from regard.ops.reformer_chunks import Chunks, published_hashed_attention
from regard.testing import Subject, run_checks


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


@pytest.mark.parametrize("causal", [True, False])
def test_with_one_bucket_and_no_limit_it_is_attention_over_the_others(causal):
    q, v = drawn(2, 3, 20, 8), drawn(2, 3, 20, 5)
    buckets = torch.zeros(2, 3, 1, 20, dtype=torch.long)
    found = hashed_attention(q, q, v, buckets, 20, causal=causal, scale=1.0)
    others = ~torch.eye(20, dtype=torch.bool)
    mask = regard.masks.Dense(others) & Causal() if causal else regard.masks.Dense(others)
    want = regard.attention(q, q, v, mask=mask, scale=1.0)
    if causal:
        want[:, :, 0] = v[:, :, 0]  # itself, where there are no others
    torch.testing.assert_close(found, want)


def test_rounds_of_one_hash_are_one_round():
    q, v = drawn(1, 2, 30, 8), drawn(1, 2, 30, 8)
    buckets = hash_buckets(q, drawn(2, 8, 1, 2))
    one = hashed_attention(q, q, v, buckets, 4)
    torch.testing.assert_close(hashed_attention(q, q, v, buckets.expand(-1, -1, 3, -1), 4), one)


def test_gradients_reach_queries_and_values():
    q, v = drawn(1, 2, 12, 4).requires_grad_(), drawn(1, 2, 12, 3).requires_grad_()
    buckets = hash_buckets(q, drawn(2, 4, 2, 2))
    assert torch.autograd.gradcheck(lambda q, v: hashed_attention(q, 0.5 * q, v, buckets, 3), (q, v))


class _Published(HashedAttention):
    """The released code's chunks in the same layer."""

    def _mix(self, view, tokens):
        q, k, buckets, _ = self._hashed(view, tokens)
        edge = -tokens % 2
        q, k, v = (torch.nn.functional.pad(x, (0, 0, 0, edge)) for x in (q, k, view.v))
        buckets = torch.nn.functional.pad(buckets, (0, edge))
        return published_hashed_attention(q, k, v, buckets, Chunks(2), most=4, causal=True)[:, :, :tokens]


def test_the_released_chunks_leak_and_these_windows_do_not():
    for name, make, sound in (("ours", HashedAttention, True), ("released", _Published, False)):
        subject = Subject(name, lambda make=make: make(16, 2, 4, 2), 16)
        assert run_checks(subject, ["causality"])[0].passed is sound


def test_a_long_sequence_is_linear_on_the_kernels():
    layer = HashedAttention(16, 2, buckets=16, reach=8)
    with regard.backends.count_backends() as counts:
        layer(torch.randn(1, 2000, 16))
    assert counts["native"] or regard.backends.without_kernels()


def chunked(tokens: int) -> torch.Tensor:
    x = drawn(1, 1, tokens, 2)
    return published_hashed_attention(x, x, x, torch.zeros(1, 1, 1, tokens, dtype=torch.long), Chunks(2), most=1)


@pytest.mark.parametrize(
    ("words", "make"),
    [
        ("buckets: expected an even number", lambda: HashedAttention(8, 2, 3, 4)),
        ("mask: expected None", lambda: HashedAttention(8, 2, 4, 4)(torch.randn(1, 3, 8), mask=Causal())),
        ("rotations: expected", lambda: hash_buckets(drawn(1, 2, 3, 4), drawn(3, 4, 1, 2))),
        ("size: expected a divisor", lambda: chunked(5)),
        (
            "rotations: expected half of even factors",
            lambda: factored_buckets(drawn(1, 2, 3, 4), drawn(2, 4, 1, 2), [3]),
        ),
    ],
)
def test_errors_name_the_argument(words, make):
    with pytest.raises(ValueError, match=words):
        make()
