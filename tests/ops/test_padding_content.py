"""What stands at padding reaches nothing: no real token, no gradient of a token or parameter, no cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from regard.catalog import RECORDS, Record
from regard.testing import Subject

NAMES = [record.name for record in RECORDS if not record.context]


def _run(record: Record, layer: Any, x: Tensor, keep: Tensor, fill: float) -> tuple[Tensor, ...]:
    tokens = torch.where(keep[..., None], x, fill).requires_grad_()
    out = layer(tokens, keep=keep)
    gradients = torch.autograd.grad(out[keep].pow(2).sum(), (tokens, *layer.parameters()), allow_unused=True)
    found = [out, *(g for g in gradients if g is not None)]
    if record.cached:
        cache = layer.init_cache(x.shape[0], 32)
        layer(tokens, keep=keep, cache=cache)
        found.append(layer(x, cache=cache))
    return tuple(found)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("fill", [float("nan"), float("inf")])
def test_content_of_padding(name: str, fill: float) -> None:
    record = next(record for record in RECORDS if record.name == name)
    layer, x = Subject.of(record).layer(), Subject.of(record).tokens(2, 9)
    keep = torch.ones(2, 9, dtype=torch.bool)
    keep[0, :3] = keep[1, 6:] = False
    if not record.counts_slots:
        keep[1, 2] = False
    for got, want in zip(_run(record, layer, x, keep, fill), _run(record, layer, x, keep, 0.0), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0)


@pytest.mark.parametrize("fill", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", [record.name for record in RECORDS if record.context])
def test_content_of_padding_in_a_context(name: str, fill: float) -> None:
    record = next(record for record in RECORDS if record.name == name)
    subject = Subject.of(record)
    layer = subject.layer()
    x, keep = subject.tokens(2, 5), torch.ones(2, 7, dtype=torch.bool)
    context = subject.context_for(layer, x)["context"]
    keep[0, 4:] = keep[1, :2] = False
    found = []
    for content in (0.0, fill):
        layer.zero_grad()
        given = torch.where(keep[..., None], context, content)
        out = layer(x, given, keep=keep)
        out.pow(2).sum().backward()
        found.append([out, *(p.grad for p in layer.parameters())])
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0)
