"""Logits from which no token can be chosen: an error that says which row and what came, at every step."""

from pathlib import Path

import pytest
import torch
from torch import nn

from regard.models import Sampling, generate, load, stream

CHECKPOINTS = Path(__file__).parents[1] / "checkpoints"
INF, NAN = float("inf"), float("nan")
HOWS = [{}, {"temperature": 0.7, "seed": 1}, {"temperature": 1.0, "top_k": 2}, {"temperature": 1.0, "top_p": 0.5}]


class Spoiled(nn.Module):
    """Puts values into the logits of some rows from a given call on."""

    def __init__(self, value, rows, step):
        super().__init__()
        self.value, self.rows, self.step, self.calls = value, rows, step, 0

    def forward(self, logits):
        self.calls += 1
        if self.calls > self.step:
            logits = logits.clone()
            logits[self.rows] = torch.tensor(self.value).expand_as(logits[self.rows])
        return logits


def spoiled(value, rows=(0,), step=0, folder="llama", **options):
    model = load(CHECKPOINTS / folder, **options)
    model.finish = Spoiled(value, list(rows), step)
    return model


@pytest.mark.parametrize("how", HOWS, ids=["greedy", "sampled", "top_k", "top_p"])
@pytest.mark.parametrize(
    ("row", "words"),
    [
        ([NAN, 1.0, 2.0], "nan"),
        ([0.0, NAN, 2.0], "nan"),
        ([NAN, NAN, NAN], "nan"),
        ([0.0, INF, 2.0], "inf"),
        ([INF, INF, -INF], "inf"),
        ([-INF, -INF, -INF], "-inf for every token"),
        ([-INF, NAN, -INF], "nan"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_a_row_from_which_nothing_can_be_chosen(how, row, words, dtype):
    good = [3.0, -INF, 1.0]
    choose = Sampling(**how).chooser(2)
    for at, rows in enumerate(([row, good], [good, row])):
        with pytest.raises(ValueError, match=rf"^logits: .*got {words} in row {at}$"):
            choose(torch.tensor(rows, dtype=dtype))
    assert choose(torch.tensor([good, good], dtype=dtype)).shape == (2,)


@pytest.mark.parametrize("how", HOWS, ids=["greedy", "sampled", "top_k", "top_p"])
def test_tokens_that_cannot_come_may_stand_at_minus_infinity(how):
    logits = torch.full((50, 7), -INF)
    logits[:, 4] = -3e38
    assert (Sampling(**how).chooser(50)(logits) == 4).all()


@pytest.mark.parametrize("how", HOWS, ids=["greedy", "sampled", "top_k", "top_p"])
@pytest.mark.parametrize("step", [0, 1, 3])
@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_generate_names_the_row_and_the_step(how, step, value):
    prompts = [[5, 9], [7], [3, 3, 3]]
    with pytest.raises(ValueError, match=rf"logits: .*row 1, step {step}"):
        generate(spoiled(value, [1], step), prompts, max_tokens=5, end_ids=(), **how)
    model = spoiled(value, [0], step, folder="mistral")
    model.train()
    with pytest.raises(ValueError, match=rf"logits: .*row 0, step {step}"):
        generate(model, [5, 9], max_tokens=5, end_ids=(), **how)
    assert all(module.training for module in model.modules())
    assert len(generate(spoiled(value, [0], 5), [5, 9], max_tokens=5, end_ids=(), **how)[0].ids) == 5


@pytest.mark.parametrize("how", HOWS[:2], ids=["greedy", "sampled"])
def test_a_row_that_has_ended_is_not_looked_at(how):
    prompts = [[5, 9], [7]]
    free = generate(load(CHECKPOINTS / "llama"), prompts, max_tokens=6, end_ids=(), **how)
    end = free[1].ids[1]
    if end in free[0].ids or free[1].ids[0] == end:
        pytest.fail("choose other prompts: the rows have to end apart")
    got = generate(spoiled(NAN, [1], 2), prompts, max_tokens=6, end_ids=[end], **how)
    assert got[1].ids == free[1].ids[:2]
    assert got[0].ids == free[0].ids


def test_weights_that_are_not_finite():
    model = load(CHECKPOINTS / "llama")
    with torch.no_grad():
        model.head.weight[11] = NAN
    with pytest.raises(ValueError, match=r"logits: .*nan in row 0, step 0"):
        generate(model, [5, 9], max_tokens=2)


def test_float16_that_overflows():
    model = load(CHECKPOINTS / "llama", dtype=torch.float16)
    with torch.no_grad():
        model.head.weight.mul_(60000 / model.head.weight.abs().max())
        model.norm.weight.fill_(300.0)
    with pytest.raises(ValueError, match=r"logits: .*row 0, step 0"):
        generate(model, [5, 9], max_tokens=2)


@pytest.mark.parametrize("bad", [-1, 97, 10**12])
def test_end_ids_outside_the_vocabulary(bad):
    model = load(CHECKPOINTS / "llama")
    with pytest.raises(ValueError, match=rf"^end_ids: expected .*0 to 96.*, got .*{bad}"):
        generate(model, [5, 9], max_tokens=2, end_ids=[3, bad])


def test_streaming_gives_what_came_before():
    from tokenizers import Tokenizer as Backend
    from tokenizers.models import WordLevel

    from regard.models import Origin, Tokenizer

    model = spoiled(NAN, [0], 2)
    words = Tokenizer(Backend(WordLevel({f"w{i}": i for i in range(97)}, unk_token="w0")))
    model.origin = Origin(model.origin.layout, model.origin.config, words)
    running = stream(model, [5, 9], max_tokens=6, end_ids=())
    with pytest.raises(ValueError, match=r"logits: .*row 0, step 2"):
        list(running)
    assert len(running.ids) == 2
