"""Probabilities of the next token equal what transformers' processors make of the same logits."""

import itertools

import pytest
import torch

from regard.models import Sampling

transformers = pytest.importorskip("transformers")


def theirs(logits, ids, how):
    """transformers' processors, in the order of its own `generate`."""
    steps = []
    if "repetition_penalty" in how:
        steps.append(transformers.RepetitionPenaltyLogitsProcessor(how["repetition_penalty"]))
    steps.append(transformers.TemperatureLogitsWarper(how["temperature"]))
    for name, warper in (
        ("top_k", transformers.TopKLogitsWarper),
        ("top_p", transformers.TopPLogitsWarper),
        ("min_p", transformers.MinPLogitsWarper),
    ):
        if name in how:
            steps.append(warper(how[name]))
    return transformers.LogitsProcessorList(steps)(ids, logits).softmax(-1)


CHOICES = {"top_k": (None, 3), "top_p": (None, 0.8), "min_p": (None, 0.1), "repetition_penalty": (None, 1.7, 0.6)}
HOWS = [
    {"temperature": 0.7} | {name: value for name, value in zip(CHOICES, values, strict=True) if value is not None}
    for values in itertools.product(*CHOICES.values())
]


@pytest.mark.parametrize("how", HOWS, ids=lambda how: " ".join(f"{k}={v}" for k, v in how.items()))
def test_probabilities_equal_transformers(how):
    generator = torch.Generator().manual_seed(1)
    logits = 2 * torch.randn(6, 40, dtype=torch.float64, generator=generator)
    ids = torch.randint(40, (6, 9), generator=generator)
    seen = torch.zeros(6, 40, dtype=torch.bool).scatter(1, ids, True)
    got = Sampling(**how).probabilities(logits, seen)
    torch.testing.assert_close(got, theirs(logits, ids, how), rtol=1e-12, atol=1e-14)


def test_the_penalty_counts_the_prompt_and_what_was_chosen():
    choose = Sampling(repetition_penalty=4.0).chooser(2, [[1], [3, 0]])
    logits = torch.tensor([[2.0, 5.0, 3.0, 1.0], [-1.0, -2.0, -3.0, -0.5]])
    assert [choose(logits).tolist() for _ in range(3)] == [[2, 1], [0, 3], [1, 3]]


@pytest.mark.parametrize("value", [0, 1.01, -1, float("nan"), "x", True])
def test_min_p_out_of_range_is_named(value):
    with pytest.raises(ValueError, match=r"^min_p: expected a number above 0 and at most 1"):
        Sampling(min_p=value)


@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf"), "x", True])
def test_a_penalty_out_of_range_is_named(value):
    with pytest.raises(ValueError, match=r"^repetition_penalty: expected a positive number"):
        Sampling(repetition_penalty=value)
