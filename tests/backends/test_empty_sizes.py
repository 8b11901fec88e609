"""No batch rows, queries, keys or channels, with every mask, bias and kind of start: right shapes, zeros, gradients."""

import itertools

import pytest
import torch

import regard
from regard import biases, masks
from regard.backends.native import library
from regard.biases import Alibi, RelativeBuckets, RelativeTable
from regard.masks import (
    Band,
    Blocks,
    Causal,
    Edges,
    Global,
    KeyLengths,
    KeyPadding,
    Predicate,
    Prefix,
    Segments,
    Window,
)

BIASES = {
    "none": None,
    "alibi": Alibi(2),
    "table": RelativeTable(torch.ones(31, 2), (16,)),
    "grid": RelativeTable(torch.ones(35, 2), (3, 4)),
    "buckets": RelativeBuckets(torch.ones(8, 2), max_distance=20),
    "number": biases.Dense(torch.zeros(())),
    "sum": Alibi(2) + biases.Dense(torch.zeros(())),
}


def every_mask(batch, q_len, k_len):
    ids = torch.zeros(q_len, dtype=torch.long), torch.zeros(k_len, dtype=torch.long)
    found = {
        "none": None,
        "causal": Causal(),
        "window": Window(2),
        "intervals": Band(0, 0) | Band(-3, -3),
        "prefix": Causal() | Prefix(2),
        "lengths": KeyLengths(torch.zeros(batch, dtype=torch.long)),
        "padding": KeyPadding(torch.ones(batch, k_len, dtype=torch.bool)),
        "segments": Segments(*ids),
        "dense": masks.Dense(torch.ones(q_len, k_len, dtype=torch.bool)),
        "not": ~Causal(),
        "global": Global([0]) | Causal(),
        "blocks": Blocks(torch.ones(2, 2, dtype=torch.bool), 3),
        "predicate": Predicate(lambda b, h, i, j: i >= j),
        "edges": Edges(torch.zeros(2, 0, dtype=torch.long)),
    }
    return found | ({"packed": Segments.from_lengths([q_len], [k_len])} if batch == 1 else {})


@pytest.mark.parametrize("backend", ["native", "chunked", "reference"])
@pytest.mark.parametrize("batch", [0, 1])
def test_every_mask_and_bias(backend, batch):
    if backend == "native" and library.REASON:
        pytest.skip(f"native not built: {library.REASON}")
    for q_len, k_len, dim, v_dim in itertools.product((0, 3), (0, 3), (0, 4), (0, 4)):
        chosen = every_mask(batch, q_len, k_len)
        for mask, bias in [(name, "none") for name in chosen] + [(m, b) for b in BIASES for m in ("none", "causal")]:
            for start in (None, torch.zeros(batch, dtype=torch.long)) if mask != "packed" else (None,):
                q = torch.randn(batch, 2, q_len, dim, requires_grad=True)
                k = torch.randn(batch, 1, k_len, dim, requires_grad=True)
                v = torch.randn(batch, 1, k_len, v_dim, requires_grad=True)
                out, lse = regard.attention(
                    q, k, v, mask=chosen[mask], bias=BIASES[bias], q_start=start, return_lse=True, backend=backend
                )
                assert out.shape == (batch, 2, q_len, v_dim) and lse.shape == (batch, 2, q_len), (mask, bias)
                assert bool(out.isfinite().all()) and (k_len or not out.any())
                out.sum().backward()
                assert all(x.grad is not None and bool(x.grad.isfinite().all()) for x in (q, k, v)), (mask, bias)


def test_a_layer_with_a_bias_by_distance_and_no_tokens():
    for bias in BIASES.values():
        layer = regard.nn.MultiHeadAttention(8, 2, bias=bias)
        assert layer(torch.zeros(1, 0, 8)).shape == (1, 0, 8)
        assert layer(torch.zeros(0, 3, 8)).shape == (0, 3, 8)
