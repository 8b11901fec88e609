"""The calls with a cache over which flash-attention is tested: a cache filled to another length in every row, new keys
appended, rotary positions that continue each row's, causal and local masks aligned to the end.

Dao 2023, arXiv:2307.08691. The cache is a plain tensor with room behind each row's length, as theirs; then it is the
library's own, whose rows are of one length.
"""

from __future__ import annotations

import pytest
import torch
from grids import DTYPES, made, on_each_backend, spread, uniform
from oracles import tensor_attention as oracle
from test_flash_attention_grid import HEADS, LOOKS, mask_of, spans, within

import regard
from regard.biases import Alibi
from regard.caches import KVCache
from regard.masks import KeyLengths, KeyPadding
from regard.positions import Rotary
from regard.tokens import resolve_tokens

PAIRS = ((1, 128), (1, 339), (3, 256), (3, 799), (64, 256), (16, 400), (128, 128), (8, 300))
LONG = ((3, 1024), (64, 800), (64, 2048), (16, 3000), (1, 8192), (16, 8192))
NAMES = ("heads", "look", "new", "rotary", "size", "pair", "left_pad", "alibi", "dtype")


def grid(count, seed, pairs):
    return spread(
        count,
        seed,
        heads=("mha", "mqa", "gqa"),
        look=LOOKS,
        new=("none", "one query each", "more than queries"),
        rotary=("none", "half of each", "half whole", "interleaved whole", "interleaved of each"),
        size=(32, 59, 64, 80, 96, 128, 192, 256),
        pair=pairs,
        left_pad=(False, False, True),
        alibi=(False, False, True),
        dtype=DTYPES,
    )


def check(heads, look, new, rotary, size, pair, left_pad, alibi, dtype):
    (rows, columns), (q_heads, kv_heads), batch = pair, HEADS[heads], 3
    q = made(batch, q_heads, rows, size, dtype=dtype)
    k_cache, v_cache = (made(batch, kv_heads, columns, size, dtype=dtype, seed=n) for n in (1, 2))
    fresh = min({"none": 0, "one query each": rows, "more than queries": rows + 3}[new], columns)
    seen_most = columns - fresh
    seen = (uniform(batch, seed=rows) * (seen_most + 1)).long().clamp(min(rows, seen_most), seen_most)
    total = seen + fresh
    first = (uniform(batch, seed=5) * total).long() if left_pad else None
    k_new, v_new = (made(batch, kv_heads, fresh, size, dtype=dtype, seed=n) for n in (3, 4))
    causal, window = spans(look, columns, size)
    slopes = 0.3 * uniform(q_heads, dtype=torch.float32, seed=6) if alibi else None

    # theirs: a query's position counts from the row's length; without a causal or local mask all have the same one
    moving = torch.arange(rows) if look != "full" else torch.zeros(rows, dtype=torch.long)
    q_positions = seen[:, None] + moving
    k_positions = seen[:, None] + torch.arange(fresh)
    turned = 0 if rotary == "none" else size // 2 * 2 if "whole" in rotary else size // 4 * 2
    style = "interleaved" if "interleaved" in rotary else "half"
    if turned:
        rotate = Rotary(turned, style=style)
        ours_q, ours_k = rotate(q, q_positions), rotate(k_new, k_positions)
        for ours, x, positions in ((ours_q, q, q_positions), (ours_k, k_new, k_positions)):
            right = oracle.rotated(x.double(), positions, turned, style == "interleaved")
            eps = torch.finfo(dtype).eps
            torch.testing.assert_close(ours.double(), right, rtol=eps, atol=4 * torch.finfo(torch.float32).eps)
        q, k_new = ours_q, ours_k

    k, v = k_cache.clone(), v_cache.clone()
    for row in range(batch):
        k[row, :, seen[row] : total[row]], v[row, :, seen[row] : total[row]] = k_new[row], v_new[row]
        k[row, :, total[row] :], v[row, :, total[row] :] = torch.nan, torch.nan  # room that nobody may read
    clean = [torch.where(torch.arange(columns)[:, None] < total.view(-1, 1, 1, 1), x, 0.0) for x in (k, v)]
    theirs = {"causal": causal, "window": window, "slopes": slopes, "k_lengths": total, "k_first": first}
    want, want_lse = oracle.attention(*(x.double() for x in (q, *clean)), **theirs)
    plain, _ = oracle.attention(q, *clean, **theirs)

    mask = mask_of(causal, window)
    mask = KeyLengths(total) if mask is None else mask & KeyLengths(total)
    if first is not None:
        mask = mask & KeyPadding(torch.arange(columns) >= first[:, None])
    bias = None if slopes is None else Alibi(slopes, symmetric=True)
    options = {"mask": mask, "bias": bias, "q_start": total - rows}
    with torch.no_grad():
        for _, out in on_each_backend(lambda: regard.attention(q, k, v, **options), expected=("native",)):
            within(out, want, plain, dtype, 2)
        for _, (out, lse) in on_each_backend(
            lambda: regard.attention(q, k, v, return_lse=True, **options), expected=("native",)
        ):
            within(out, want, plain, dtype, 2)
            torch.testing.assert_close(lse.double(), want_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(NAMES, grid(60, 21, PAIRS))
def test_a_cache_of_rows_of_their_own_length(heads, look, new, rotary, size, pair, left_pad, alibi, dtype):
    check(heads, look, new, rotary, size, pair, left_pad, alibi, dtype)


@pytest.mark.slow
@pytest.mark.parametrize(NAMES, grid(240, 22, PAIRS + LONG))
def test_more_caches(heads, look, new, rotary, size, pair, left_pad, alibi, dtype):
    check(heads, look, new, rotary, size, pair, left_pad, alibi, dtype)


OWN = ("heads", "look", "size", "style", "pieces", "dtype")


@pytest.mark.parametrize(
    OWN,
    spread(
        24,
        23,
        heads=("mha", "mqa", "gqa"),
        look=("causal", "causal and local"),
        size=(32, 64, 80, 128),
        style=("half", "interleaved"),
        pieces=((128, 1, 1), (100, 3, 64), (1, 147), (7, 1, 130, 1)),
        dtype=DTYPES,
    ),
)
def test_the_librarys_own_cache(heads, look, size, style, pieces, dtype):
    """Fed in pieces, rotated as it grows: every piece's output is its part of the whole sequence's."""
    (q_heads, kv_heads), batch, tokens = HEADS[heads], 2, sum(pieces)
    q = made(batch, q_heads, tokens, size, dtype=dtype)
    k, v = (made(batch, kv_heads, tokens, size, dtype=dtype, seed=n) for n in (1, 2))
    positions = torch.arange(tokens)[None].expand(batch, -1)
    rotate = Rotary(size, style=style)
    q, k = rotate(q, positions), rotate(k, positions)
    causal, window = spans(look, tokens, size)
    want, _ = oracle.attention(q.double(), k.double(), v.double(), causal=causal, window=window)
    plain, _ = oracle.attention(q, k, v, causal=causal, window=window)
    mask = mask_of(causal, window)

    def run():
        cache, outs = KVCache(batch, tokens, kv_heads, size, size, dtype), []
        for part in zip(*(x.split(pieces, 2) for x in (q, k, v)), strict=True):
            count = part[0].shape[2]
            placed = resolve_tokens(batch, count, q.device, history=cache.history, length=cache.length)
            held = cache.extend(part[1], part[2], placed)
            outs.append(regard.attention(part[0], held.k, held.v, mask=mask))
            cache.commit(*held.fresh)
        assert cache.length == tokens
        return torch.cat(outs, 2)

    with torch.no_grad():
        for _, out in on_each_backend(run, expected=("native",)):
            within(out, want, plain, dtype, 2)
