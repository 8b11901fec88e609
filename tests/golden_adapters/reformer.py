"""Reformer's hashed attention as its released code has it."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from golden_adapters.case import Case, Paths, Peer
from golden_adapters.compositions import heads_of, joined, linear
from regard.ops.lsh import factored_buckets
from regard.ops.reformer_chunks import Chunks, published_hashed_attention

Outputs = dict[str, Tensor]


def hashed(case: Case, peer: Peer, wanted: frozenset[str]) -> Outputs:
    config, x = case.config["config"], peer["input.hidden"]
    heads, chunk, stated = config["num_attention_heads"], config["lsh_attn_chunk_length"], config["num_buckets"]
    factors = [stated] if isinstance(stated, int) else stated
    buckets = math.prod(factors)
    q, v = heads_of(linear(peer, "query_key", x), heads), heads_of(linear(peer, "value", x), heads)
    keep = peer["input.attention_mask"] > 0 if "input.attention_mask" in peer else None
    found = factored_buckets(q, peer["input.rotations"], factors)
    padded = keep is not None and not bool(keep.all())
    if padded:
        found = torch.where(keep[:, None, None], found, buckets)
    stored = found + torch.arange(found.shape[2])[:, None] * (buckets + padded)
    normed = q * torch.rsqrt(q.square().mean(-1, keepdim=True) + 1e-6)
    case.refuse_unless(x.shape[1] > chunk, "a sequence of one chunk")
    out = published_hashed_attention(
        q,
        normed * q.shape[-1] ** -0.5,
        v,
        found,
        Chunks(chunk, config["lsh_num_chunks_before"], config["lsh_num_chunks_after"]),
        most=buckets + padded,
        causal=config["is_decoder"],
        keep=keep if padded else None,
    )
    return {"out": joined(out), "buckets": stored}


def paths(case: Case) -> Paths | None:
    """One way."""
    return {"function": lambda peer, wanted: hashed(case, peer, wanted)} if case.has("input.rotations") else None
