"""The checks find what is wrong with a third party's module, and say so."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from regard.testing import Subject, run_checks


class Plain(nn.Module):
    """Causal attention as anybody writes it, without a cache; `leak` looks one token ahead."""

    def __init__(self, leak: int = 0):
        super().__init__()
        self.qkv, self.leak = nn.Linear(8, 24), leak

    def forward(self, x, *, keep=None, positions=None, segments=None, mask=None, cache=None):
        q, k, v = self.qkv(x).chunk(3, -1)
        allowed = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril(self.leak)
        return (q @ k.mT).masked_fill(~allowed, -torch.inf).softmax(-1) @ v


def results(make, **options):
    subject = Subject("theirs", make, 8, cached=False, **options)
    names = ["causality", "batch_independence", "left_padding", "mixing", "gradients"]
    return {result.name: result for result in run_checks(subject, only=names)}


def test_a_leak_is_found():
    good, bad = results(Plain), results(lambda: Plain(leak=1))
    assert good["causality"].passed and not bad["causality"].passed
    assert "after changing those from 1 on: off by" in bad["causality"].text
    assert good["batch_independence"].passed and good["gradients"].passed


def test_what_a_module_lacks_is_said_not_raised():
    found = results(Plain)
    assert found["mixing"].passed is None and "no mixing method" in found["mixing"].text
    assert found["left_padding"].passed is False  # it ignores keep

    class Bare(nn.Module):
        def forward(self, x):
            return x

    assert "it raised TypeError" in results(Bare)["left_padding"].text


def test_only_wants_names():
    subject = Subject("theirs", Plain, 8)
    with pytest.raises(TypeError, match="only: expected a list"):
        run_checks(subject, only="causality")
    with pytest.raises(ValueError, match=r"only: expected one of shapes, .*, got 'nonsense'"):
        run_checks(subject, only=["nonsense"])
