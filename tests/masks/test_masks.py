"""Every mask against the table of its meaning, in all its forms: dense, blocks, predicate, picture."""

import copy
import itertools
import pickle

import pytest
import torch

from regard.masks import (
    Band,
    BlockColumns,
    Blocks,
    Buckets,
    Causal,
    Dense,
    Dilated,
    Edges,
    Full,
    Global,
    KeyLengths,
    KeyPadding,
    Mask,
    Predicate,
    Prefix,
    RandomBlocks,
    Segments,
    Window,
)
from regard.masks.base import tensors_of

BATCH, HEADS, Q, K = 2, 3, 7, 11
STARTS = (None, 0, 2, torch.tensor([0, 4]))


def drawn(*shape: int, least: float = 0.5) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(sum(shape))) > least


def numbers(high: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(sum(shape)))


KEEP, GRID, GRID4 = drawn(BATCH, K, least=0.3), drawn(8, 6), drawn(BATCH, HEADS, 8, 6)
IDS, Q_IDS, K_IDS = torch.arange(K) // 3, torch.arange(Q).expand(BATCH, -1) // 3, torch.arange(K) // 4
LENGTHS, EDGES = torch.tensor([3, 11]), numbers(11, 2, 30)
HASH_Q, HASH_K, TRUTH = numbers(3, BATCH, HEADS, Q), numbers(3, BATCH, HEADS, K), drawn(BATCH, 1, Q, K)
RANDOM = RandomBlocks(2, 2, 16, heads=HEADS, seed=1)
COLUMNS = numbers(9, HEADS, 8, 2) - 1

# name -> (the mask, its meaning on batch row, head, query slot, key slot, query row)
MASKS = {
    "full": (Full(), lambda b, h, i, j, r: True),
    "causal": (Causal(), lambda b, h, i, j, r: j <= i),
    "window": (Window(3), lambda b, h, i, j, r: 0 <= i - j < 3),
    "dilated": (Dilated(2, 3), lambda b, h, i, j, r: i - j in (0, 3)),
    "band": (Band(1, 2), lambda b, h, i, j, r: -1 <= j - i <= 2),
    "open band": (Band(None, 1), lambda b, h, i, j, r: j - i <= 1),
    "prefix": (Prefix(3), lambda b, h, i, j, r: j < 3),
    "prefixes": (Prefix(LENGTHS), lambda b, h, i, j, r: j < LENGTHS[b]),
    "key lengths": (KeyLengths(LENGTHS), lambda b, h, i, j, r: j < LENGTHS[b]),
    "key padding": (KeyPadding(KEEP), lambda b, h, i, j, r: KEEP[b, j]),
    "segments": (Segments(IDS), lambda b, h, i, j, r: 0 <= i < K and IDS[i] == IDS[j]),
    "segments of both": (Segments(Q_IDS, K_IDS), lambda b, h, i, j, r: Q_IDS[b, r] == K_IDS[j]),
    "blocks": (Blocks(GRID, 2), lambda b, h, i, j, r: GRID[i // 2, j // 2]),
    "blocks by head": (Blocks(GRID4, 2), lambda b, h, i, j, r: GRID4[b, h, i // 2, j // 2]),
    "global": (Global([0, 5]), lambda b, h, i, j, r: i in (0, 5) or j in (0, 5)),
    "global by row": (Global(KEEP), lambda b, h, i, j, r: KEEP[b, j] or (i < K and KEEP[b, i])),
    "random blocks": (RANDOM, lambda b, h, i, j, r: RANDOM.layout[0, h, i // 2, j // 2]),
    "block columns": (BlockColumns(COLUMNS, 2), lambda b, h, i, j, r: j // 2 in COLUMNS[h, i // 2]),
    "edges": (Edges(EDGES), lambda b, h, i, j, r: bool(((EDGES[0] == j) & (EDGES[1] == i)).any())),
    "buckets": (Buckets(HASH_Q, HASH_K), lambda b, h, i, j, r: HASH_Q[b, h, r] == HASH_K[b, h, j]),
    "dense": (Dense(TRUTH), lambda b, h, i, j, r: TRUTH[b, 0, r, j]),
    "predicate": (
        Predicate(lambda b, h, i, j: (i + j + h) % 2 == b % 2),
        lambda b, h, i, j, r: (i + j + h) % 2 == b % 2,
    ),
}


def dense(mask: Mask, q_start: object = None) -> torch.Tensor:
    return mask.dense(Q, K, batch=BATCH, heads=HEADS, q_start=q_start).expand(BATCH, HEADS, Q, K)


def slot(q_start: object, b: int, r: int) -> int:
    start = K - Q if q_start is None else int(q_start[b]) if isinstance(q_start, torch.Tensor) else q_start
    return start + r


def blocks_of(truth: torch.Tensor, rows: int, cols: int) -> torch.Tensor:
    """0 empty, 1 partial, 2 full, from the dense form."""
    lines = []
    for row in truth.split(rows, 2):
        tiles = [tile.flatten(2) for tile in row.split(cols, 3)]
        lines.append(torch.stack([tile.any(-1).int() + tile.all(-1).int() for tile in tiles], -1))
    return torch.stack(lines, 2).to(torch.int8)


@pytest.mark.parametrize("name", MASKS)
def test_dense_form_is_the_meaning(name):
    mask, meaning = MASKS[name]
    for q_start in STARTS:
        found = dense(mask, q_start)
        for b, h, r, j in itertools.product(range(BATCH), range(HEADS), range(Q), range(K)):
            assert found[b, h, r, j] == bool(meaning(b, h, slot(q_start, b, r), j, r)), (name, q_start, b, h, r, j)


@pytest.mark.parametrize("name", MASKS)
def test_combinations_are_logic(name):
    mask, _ = MASKS[name]
    assert torch.equal(dense(~mask), ~dense(mask))
    for other, _ in MASKS.values():
        assert torch.equal(dense(mask & other), dense(mask) & dense(other))
        assert torch.equal(dense(mask | ~other), dense(mask) | ~dense(other))


def check_layout(mask: Mask, q_start: object, rows: int, cols: int) -> None:
    found = mask.block_layout(Q, K, (rows, cols), batch=BATCH, heads=HEADS, q_start=q_start)
    want = blocks_of(dense(mask, q_start), rows, cols)
    assert torch.equal(found.expand_as(want), want), (mask, q_start, rows, cols)


@pytest.mark.parametrize("name", MASKS)
def test_block_layout_is_exact(name):
    mask, _ = MASKS[name]
    for one, q_start, sizes in itertools.product((mask, ~mask), STARTS, ((2, 3), (4, 4))):
        check_layout(one, q_start, *sizes)
    for other, _ in list(MASKS.values())[: list(MASKS).index(name)]:
        for one, q_start in itertools.product((mask & other, mask | ~other), STARTS[2:]):
            check_layout(one, q_start, 2, 3)


@pytest.mark.parametrize("name", MASKS)
def test_mask_mod_is_the_dense_form(name):
    mask, _ = MASKS[name]
    for q_start in STARTS:
        predicate = mask.mask_mod(K - Q if q_start is None else q_start)
        want = dense(mask, q_start)
        b, h, r, j = (torch.tensor(axis) for axis in zip(*itertools.product(*map(range, want.shape)), strict=True))
        assert torch.equal(predicate(b, h, r, j).expand(b.shape), want.flatten())


@pytest.mark.parametrize("name", MASKS)
def test_a_moved_mask_reads_later_columns(name):
    """What a ring of the latest keys needs: the same pairs, with the oldest columns gone."""
    mask, _ = MASKS[name]
    found = mask.shifted(4).dense(Q, K - 4, batch=BATCH, heads=HEADS, q_start=K - Q - 4)
    assert torch.equal(found.expand(BATCH, HEADS, Q, K - 4), dense(mask)[..., 4:])


@pytest.mark.parametrize("name", MASKS)
def test_masks_move_between_devices_and_through_copies(name):
    mask, _ = MASKS[name]
    assert mask.to("cpu") is mask
    both = mask & Causal()
    assert all(tensor.device.type == "meta" for tensor in tensors_of(both.to("meta")))
    again = [copy.deepcopy(both)]
    if name != "predicate":  # a lambda cannot be pickled, by Python's own rule
        again.append(pickle.loads(pickle.dumps(both)))
    for one in again:
        assert torch.equal(dense(one), dense(both))


def test_counts_of_allowed_pairs():
    docs = Segments(torch.tensor([0, 0, 0, 1, 1, 1]))
    chunks = Segments(torch.arange(6) // 2)
    counts = {
        Causal(): 21,
        Window(3): 15,
        Window(3) & Causal(): 15,
        Band(1, 1): 16,
        Causal() | Prefix(2): 22,
        Causal() & docs: 12,
        Causal() & chunks: 9,
        chunks: 12,
    }
    assert [int(mask.dense(6).sum()) for mask in counts] == list(counts.values())


def test_the_last_queries_see_bottom_right():
    assert Causal().dense(1, 9).all()
    assert Causal().draw(2, 5) == "####.\n#####"
    assert Window(3).draw(2, 6) == "..###.\n...###"
    assert Causal().draw(4, 2) == "..\n..\n#.\n##"  # more queries than keys: the first see nothing
    assert Window(1).draw(3) == "#..\n.#.\n..#"


def test_draw():
    assert (Causal() | Prefix(2)).draw(4) == "##..\n##..\n###.\n####"
    assert Buckets(HASH_Q, HASH_K).draw(Q, K, batch=1, head=2).count("#") == int(
        (HASH_Q[1, 2][:, None] == HASH_K[1, 2]).sum()
    )


def test_packed_lengths_count_inside_each_segment():
    packed = Causal() & Segments.from_lengths([3, 0, 2], [2, 4, 2])
    assert packed.draw(5, 8) == "........\n#.......\n##......\n......#.\n......##"
    assert torch.equal(
        (Window(1) & Segments.from_lengths(torch.tensor([3, 2]))).dense(5)[0, 0], torch.eye(5, dtype=torch.bool)
    )
    for mask in (packed, packed & Window(2), Band(0, 1) & Segments.from_lengths([3, 0, 2], [2, 4, 2])):
        want = blocks_of(mask.dense(5, 8), 2, 3)
        assert torch.equal(mask.block_layout(5, 8, (2, 3)), want)


def test_layouts_are_remembered_and_belong_to_the_caller():
    mask = Causal() & Window(300)
    first = mask.block_layout(1024)
    first.zero_()
    assert mask.block_layout(1024).any()
    calls = []

    class Watched(Causal):
        def bounds(self, box):
            calls.append(box)
            return super().bounds(box)

    watched = Watched()
    watched.block_layout(1024)
    seen = len(calls)
    watched.block_layout(1024)
    assert seen and len(calls) == seen


def test_analytic_layouts_need_no_dense_form(monkeypatch):
    """A million by a million slots: only the definition can answer that."""
    monkeypatch.setattr(Mask, "allows_at", None)
    layout = ((Causal() & Window(4096)) | Band(0, 0)).block_layout(2**20, 2**20, 2**18)
    assert layout[0, 0].tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]


def test_masks_compare_by_identity():
    assert Causal() != Causal() and (mask := Window(3)) == mask
    assert len({Causal(), Causal(), mask, mask}) == 3


def test_random_blocks_are_a_draw_kept_in_the_object():
    one, same, other = (RandomBlocks(2, 4, 64, heads=2, seed=seed) for seed in (7, 7, 8))
    assert torch.equal(one.layout, same.layout) and not torch.equal(one.layout, other.layout)
    assert (one.layout.sum(-1) == 2).all() and not torch.equal(one.layout[0, 0], one.layout[0, 1])
    state = torch.random.get_rng_state()
    RandomBlocks(1, 4, 64)
    assert torch.equal(state, torch.random.get_rng_state())
    assert torch.equal(one.to("cpu").layout, one.layout)


def test_allows_answers_single_pairs():
    assert bool(Window(3).allows(0, 0, 5, 3)) and not bool(Window(3).allows(0, 0, 5, 2))
    assert Causal().allows(0, 0, torch.tensor([1, 2]), torch.tensor([2, 1])).tolist() == [False, True]


@pytest.mark.parametrize(
    ("error", "text", "make"),
    [
        (ValueError, "w: expected an int of at least 1", lambda: Window(0)),
        (TypeError, "w: expected an int", lambda: Window(True)),
        (ValueError, "step: expected an int of at least 1", lambda: Dilated(2, 0)),
        (TypeError, "left: expected an int", lambda: Band(1.5, 0)),
        (ValueError, "n: expected an int of at least 0", lambda: Prefix(-1)),
        (ValueError, "n: expected an int or an integer tensor", lambda: KeyLengths(torch.ones(2))),
        (TypeError, "keep: expected", lambda: KeyPadding(torch.ones(2, 3))),
        (ValueError, "keep: expected", lambda: KeyPadding(torch.ones(3, dtype=torch.bool))),
        (ValueError, "3-D mask is ambiguous", lambda: Dense(torch.ones(2, 3, 3, dtype=torch.bool))),
        (TypeError, "pass it as bias=", lambda: Dense(torch.zeros(3, 3))),
        (TypeError, "mask: expected", lambda: Dense(torch.ones(3, 3, dtype=torch.long))),
        (ValueError, "layout: expected", lambda: Blocks(torch.ones(3, dtype=torch.bool), 2)),
        (ValueError, "layout: 9 keys", lambda: Blocks(torch.ones(5, 4, dtype=torch.bool), 2).dense(9)),
        (ValueError, "layout: 9 queries", lambda: Blocks(torch.ones(4, 5, dtype=torch.bool), 2).dense(9)),
        (ValueError, "index: expected slots", lambda: Edges(torch.tensor([[0], [-1]])).dense(3)),
        (ValueError, "per_row: expected", lambda: RandomBlocks(5, 4, 16)),
        (ValueError, "index: expected", lambda: Edges(torch.zeros(3, 2, dtype=torch.long))),
        (ValueError, "which: expected", lambda: Global([-1])),
        (ValueError, "one id for each of 4", lambda: Segments(torch.zeros(3, dtype=torch.long)).dense(4)),
        (ValueError, "k_lengths: expected 2", lambda: Segments.from_lengths([1, 2], [3])),
        (ValueError, "they sum to 3", lambda: (Causal() & Segments.from_lengths([1, 2])).dense(4)),
        (ValueError, "batch size 1", lambda: Segments.from_lengths([1, 2]).dense(3, batch=2)),
        (ValueError, "outermost &", lambda: (Causal() | Segments.from_lengths([1, 2])).dense(3)),
        (ValueError, "outermost &", lambda: (~Segments.from_lengths([1, 2])).dense(3)),
        (
            ValueError,
            "once in a mask",
            lambda: (Segments.from_lengths([3]) & Segments.from_lengths([3])).dense(3),
        ),
        (ValueError, "one per batch row", lambda: KeyLengths(torch.tensor([1, 2, 3])).dense(4, batch=2)),
        (TypeError, "expected a bool tensor", lambda: Predicate(lambda b, h, i, j: i - j).dense(3)),
        (TypeError, "unsupported operand", lambda: Causal() & True),
    ],
)
def test_errors_name_the_argument(error, text, make):
    with pytest.raises(error) as caught:
        make()
    assert text in str(caught.value)
