"""Lists of tiles: exactly the pairs of the dense form, in memory of the number of tiles."""

import random

import pytest
import torch

from regard.masks import (
    Band,
    BlockColumns,
    Blocks,
    Causal,
    Dense,
    Dilated,
    Edges,
    Full,
    Global,
    KeyLengths,
    KeyPadding,
    Predicate,
    Prefix,
    RandomBlocks,
    Segments,
    Window,
)
from regard.masks.tiles import TileGrid, tile_lists

BATCH, HEADS = 2, 3
SIZES = [
    (1, 64, 63),
    (5, 257, 0),
    (63, 65, 2),
    (64, 64, 0),
    (65, 100, 35),
    (130, 130, 0),
    (200, 257, -10),
    (200, 1, 64),
]


def listed(q_len: int, k_len: int) -> list:
    """Masks that list their tiles, for slots up to 400."""
    length, size = 400, random.choice([7, 16, 64, 96, 128])
    blocks = -(-length // size)
    return [
        *(Full(), Causal(), Window(5), Window(100), Band(30, 70), Dilated(4, 9)),
        *(Global(torch.rand(length) > 0.98), Global(torch.rand(BATCH, length) > 0.98), Global([0, 5]), Global([])),
        *(Blocks(torch.rand(blocks, blocks) > 0.7, size), Blocks(torch.rand(BATCH, 1, blocks, blocks) > 0.8, size)),
        *(RandomBlocks(2, size, length, heads=HEADS, seed=3), RandomBlocks(0, size, length)),
        BlockColumns(torch.tensor([[0, -1]] * blocks), size),
        *(Edges(torch.randint(0, 300, (2, 50))), Edges(torch.zeros(2, 0, dtype=torch.long))),
        *(Prefix(37), Prefix(torch.tensor([10, 150])), KeyLengths(0)),
        KeyPadding(torch.rand(BATCH, k_len) > 0.3) & Window(20),
        Window(90) & Dense(torch.rand(1, HEADS, q_len, k_len) > 0.5),
        Segments(torch.arange(k_len) // 20) & Predicate(lambda b, h, i, j: (i + j + h) % 3 != b) & Band(9, 9),
    ]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_lists_hold_the_pairs_of_the_dense_form(sizes):
    q_len, k_len, q_start = sizes
    random.seed(q_len), torch.manual_seed(k_len)
    masks = listed(q_len, k_len)
    pairs = [random.sample(masks, 3) for _ in range(24)]
    combined = [form for a, b, c in pairs for form in (a | b, a & b, (a & b) | c, ~a & b)]
    for mask in masks + combined:
        assert mask.lists_tiles
        found = tile_lists(mask.tiles(TileGrid(BATCH, HEADS, q_len, k_len, q_start)), [mask.allows_at])
        want = mask.dense(q_len, k_len, batch=BATCH, heads=HEADS, q_start=q_start)
        shape = BATCH, HEADS, q_len, k_len
        assert torch.equal(found.dense(q_len, k_len).expand(shape), want.expand(shape)), mask
        assert found.bits is not None and len(found.bits) == int((found.numbers >= 0).sum())


def test_what_is_allowed_whole_keeps_no_bits():
    layout = torch.rand(20, 20) > 0.5
    found = tile_lists(Blocks(layout, 64).tiles(TileGrid(1, 1, 1280, 1280, 0)), [Blocks(layout, 64).allows_at])
    assert len(found.columns) == int(layout.sum()) and not len(found.bits)


def test_a_list_grows_with_its_tiles_alone():
    counts = []
    for length in (4096, 16384, 65536):
        mask = Band(128, 128) | Global([0, 70]) | RandomBlocks(3, 64, length)
        found = tile_lists(mask.tiles(TileGrid(1, 1, length, length, 0)), [mask.allows_at])
        counts.append(len(found.columns))
    assert counts[2] < 4.3 * counts[1] < 4.3 * 4.3 * counts[0]


@pytest.mark.parametrize("mask", [~Causal(), KeyPadding(torch.ones(1, 4) > 0), Window(3) | ~Window(9)], ids=str)
def test_masks_that_cannot(mask):
    if not mask.lists_tiles:
        with pytest.raises(NotImplementedError):
            mask.tiles(TileGrid(1, 1, 4, 4, 0))
