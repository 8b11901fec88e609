"""Checks of time: causality, splits, steps, padding, packing, batches, caches."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from regard.testing.subject import Subject
from regard.testing.violation import ContractViolation

__all__ = [
    "batch_independence",
    "cache_rules",
    "causality",
    "interior_padding",
    "left_padding",
    "packed",
    "prefixes",
    "reorder",
    "right_padding",
    "splits",
]

LENGTH = 11


def causality(subject: Subject) -> None:
    """Another future leaves the past alone, in training too (gradients miss leaks through a maximum or a sort)."""
    for training in (False, True):
        layer = subject.layer().train(training)
        for length, cuts in ((2, (1,)), (LENGTH, (1, 4, LENGTH - 1))):
            x = subject.tokens(2, length)
            before = subject.seeded(layer, x)
            for cut in cuts:
                for size in (50.0,) if training else (1.0, 50.0):
                    changed = torch.cat((x[:, :cut], subject.others(x[:, cut:], size)), 1)
                    subject.close(
                        f"tokens before {cut} of {length} after changing those from {cut} on"
                        + (", in training mode" if training else ""),
                        subject.seeded(layer, changed)[:, :cut],
                        before[:, :cut],
                        same_order=True,
                    )


def prefixes(subject: Subject) -> None:
    """A causal layer's answer at a token does not depend on how many tokens follow."""
    layer = subject.layer()
    x = subject.tokens(2, LENGTH)
    whole = subject.run(layer, x)
    for length in (1, 2, 5, LENGTH - 1):
        subject.close(
            f"the first {length} of {LENGTH} tokens, against these alone",
            whole[:, :length],
            subject.run(layer, x[:, :length]),
        )


def batch_independence(subject: Subject) -> None:
    """A row's result does not depend on the other rows, in training neither; equal rows give equal results."""
    layer = subject.layer()
    for training in (False, True):
        layer.train(training)
        x = subject.tokens(2, 3)
        changed = torch.cat((x[:1], subject.others(x[1:], 5.0)))
        subject.close(
            f"row 0 of 2 after changing row 1{', in training mode' if training else ''}",
            subject.seeded(layer, changed)[:1],
            subject.seeded(layer, x)[:1],
            same_order=True,
        )
    layer = subject.layer()
    x = subject.tokens(3, LENGTH)
    together = subject.run(layer, x)
    own = subject.call is None
    for row in range(3):
        subject.close(f"row {row} alone", subject.run(layer, x[row : row + 1]), together[row : row + 1], same_order=own)
    same = subject.run(layer, x[:1].expand(4, *x.shape[1:]).contiguous())
    # torch's own float32 products of many rows treat the last ones differently; its float64 ones do not
    if own and subject.dtype == torch.float64 and not torch.equal(same, same[:1].expand_as(same)):
        raise ContractViolation("equal rows of one batch differ")
    subject.close("equal rows of one batch", same, same[:1].expand_as(same), same_order=own)
    if own and not torch.equal(subject.run(layer, x), together):
        raise ContractViolation("the same call twice gave different bits")


def splits(subject: Subject) -> None:
    """Any split of a sequence into calls with a cache equals one call, single steps included."""
    layer: Any = subject.layer()
    x = subject.tokens(2, LENGTH)
    context = subject.context_for(layer, x)
    whole = subject.run(layer, x)
    splits = ([1] * LENGTH, [4, LENGTH - 4], [2, 2, LENGTH - 4], [LENGTH - 3, 1, 1, 1], [0, 3, 0, LENGTH - 3])
    for pieces in splits if subject.call is None else splits[:-1]:  # calls without tokens are the library's own
        cache = layer.init_cache(2, LENGTH)
        outs = []
        for number, part in enumerate(x.split(pieces, 1)):
            given = (context if number == 0 else {"context": None}) if subject.context else {}
            outs.append(layer(part, cache=cache, **given))
        subject.close(f"the calls {pieces} against one call", torch.cat(outs, 1), whole)
        if subject.call is None and not subject.context and cache.length != LENGTH:
            raise ContractViolation(f"the cache says it has seen {cache.length} tokens of {LENGTH}")


def _padded(subject: Subject, x: Tensor, keep: Tensor) -> Tensor:
    """Rows of real tokens spread over the places that `keep` marks, noise elsewhere."""
    out = subject.others(x.new_zeros(*keep.shape, *x.shape[2:]), 10.0)
    for row in range(keep.shape[0]):
        out[row, keep[row]] = x[row, : int(keep[row].sum())]
    return out


def _padding(subject: Subject, keep: Tensor) -> None:
    layer: Any = subject.layer()
    keep = keep.to(subject.device)
    lengths = keep.sum(1).tolist()
    real = subject.tokens(keep.shape[0], max(lengths))
    x = _padded(subject, real, keep)
    ids = not x.is_floating_point()
    x.requires_grad_(not ids)
    whole = layer(x, keep=keep)
    if whole.shape[:2] != x.shape[:2]:
        raise ContractViolation(f"padding changed the output's shape: {tuple(whole.shape)}")
    for row, length in enumerate(lengths):
        alone = layer(real[row : row + 1, :length])
        subject.close(f"row {row}, padded, against the row alone", whole[row : row + 1, keep[row]], alone)
    if not ids:
        (grad,) = torch.autograd.grad(whole[keep].sum(), x)
        reaching = float(grad[~keep].abs().max())
        if not reaching <= 0:
            raise ContractViolation(
                f"gradients reach padding tokens: up to {reaching:.3g}", effect=reaching, allowed=0.0
            )
    if not subject.cached:
        return
    for pieces in ([4, keep.shape[1] - 4], [1] * keep.shape[1]):
        cache = layer.init_cache(keep.shape[0], keep.shape[1])
        outs = [layer(a, keep=b, cache=cache) for a, b in zip(x.split(pieces, 1), keep.split(pieces, 1), strict=True)]
        subject.close(f"padded, in the calls {pieces}", torch.cat(outs, 1)[keep], whole[keep])


def left_padding(subject: Subject) -> None:
    """Padding before the real tokens changes nothing, its gradient is 0, and with a cache the same."""
    _padding(subject, torch.tensor([[True] * 9, [False] * 3 + [True] * 6, [False] * 8 + [True]]))


def right_padding(subject: Subject) -> None:
    """Padding after the real tokens changes nothing, its gradient is 0, and with a cache the same."""
    _padding(subject, torch.tensor([[True] * 9, [True] * 5 + [False] * 4, [True] + [False] * 8]))


def interior_padding(subject: Subject) -> None:
    """Padding anywhere changes nothing, where nothing counts slots."""
    _padding(subject, torch.tensor([[True] * 9, [True, False, True, True, False, False, True, False, True]]))


def packed(subject: Subject) -> None:
    """Segments in one row equal separate rows, whole and in calls, and no gradient crosses them."""
    layer: Any = subject.layer()
    ids = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 4, 4], [2, 3, 3, 3, 3, 3, 5, 5, 5]], device=subject.device)
    x = subject.tokens(2, 9)
    x.requires_grad_(x.is_floating_point())
    whole = layer(x, segments=ids)
    for row in range(2):
        for one in ids[row].unique().tolist():
            part = ids[row] == one
            subject.close(f"segment {one} of row {row}", whole[row : row + 1, part], layer(x[row : row + 1, part]))
    if x.requires_grad:
        last = ids == ids[:, -1:]
        (grad,) = torch.autograd.grad(whole[last].sum(), x)
        if bool((grad[~last] != 0).any()):
            raise ContractViolation("gradients cross from one segment into another")
    if not subject.cached:
        return
    for pieces in ([5, 4], [1] * 9):
        cache = layer.init_cache(2, 9)
        outs = [
            layer(a, segments=b, cache=cache) for a, b in zip(x.split(pieces, 1), ids.split(pieces, 1), strict=True)
        ]
        subject.close(f"packed, in the calls {pieces}", torch.cat(outs, 1), whole)


def reorder(subject: Subject) -> None:
    """After `reorder`, each row continues as the row it came from, alone, without shared storage."""
    layer: Any = subject.layer()
    x, more = subject.tokens(3, 5), subject.tokens(4, 2, seed=9)
    context = subject.context_for(layer, x)
    cache = layer.init_cache(3, 8)
    layer(x, cache=cache, **context)
    order = [2, 0, 0, 1]
    cache.reorder(torch.tensor(order, device=subject.device))
    got = torch.cat([layer(more[:, :1], cache=cache), layer(more[:, 1:], cache=cache)], 1)
    for row, old in enumerate(order):
        alone = layer.init_cache(1, 8)
        layer(x[old : old + 1], cache=alone, **{key: value[old : old + 1] for key, value in context.items()})
        subject.close(f"row {row} after reorder({order})", got[row : row + 1], layer(more[row : row + 1], cache=alone))


def cache_rules(subject: Subject) -> None:
    """`clone`, `reset`, `crop`, a full cache: as the contract says, and nothing changes when an error is raised."""
    layer: Any = subject.layer()
    x, more = subject.tokens(2, 6), subject.tokens(2, 1, seed=9)
    context = subject.context_for(layer, x)
    cache = layer.init_cache(2, 7)
    layer(x, cache=cache, **context)
    copy = cache.clone()
    step = layer(more, cache=cache)
    subject.close("the same step on a clone", layer(more, cache=copy), step, same_order=True)
    if not subject.context:
        _full(layer, cache, more)
        _crop(subject, layer, cache, more, step)
    cache.reset()
    if cache.length != 0:
        raise ContractViolation(f"reset left length {cache.length}")
    again = layer(x, cache=cache, **context)
    subject.close(
        "after reset, against a new cache", again, layer(x, cache=layer.init_cache(2, 7), **context), same_order=True
    )


def _full(layer: Any, cache: Any, more: Tensor) -> None:
    if cache.capacity is None:
        return
    snapshot = cache.clone()
    try:
        layer(more, cache=cache)
    except ValueError:
        pass
    else:
        raise ContractViolation(f"a cache of {cache.capacity} took token {cache.length}")
    if cache.length != snapshot.length:
        raise ContractViolation("a full cache changed before it raised")


def _crop(subject: Subject, layer: Any, cache: Any, more: Tensor, step: Tensor) -> None:
    cache.crop(cache.length + 5)  # more than it has: nothing happens
    try:
        cache.crop(-1)
    except ValueError:
        pass
    else:
        raise ContractViolation("crop(-1) did not raise ValueError")
    length = cache.length
    try:
        cache.crop(length - 1)
    except ValueError:
        if cache.length != length:
            raise ContractViolation("a crop that raised changed the cache") from None
        return
    subject.close("a step repeated after crop", layer(more, cache=cache), step, same_order=True)
