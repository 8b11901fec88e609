"""Checks of a module as such: shapes, inputs, randomness, state, what a mask means, how far a window reaches."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from regard.testing.subject import Subject
from regard.testing.violation import ContractViolation

__all__ = [
    "averages",
    "dead_rows",
    "determinism",
    "evaluation",
    "inputs_unmodified",
    "no_grad",
    "polarity",
    "shapes",
    "stateless",
    "streams",
    "window",
]


def shapes(subject: Subject) -> None:
    """Every length, one and odd ones included, gives an answer of as many rows and tokens, finite."""
    layer = subject.layer()
    for batch, length in ((1, 1), (2, 2), (2, 3), (1, 7), (3, 13)):
        x = subject.tokens(batch, length)
        out = subject.run(layer, x)
        if out.shape[:2] != x.shape[:2] or (subject.call is None and out.shape != x.shape):
            raise ContractViolation(f"tokens of shape {tuple(x.shape)} gave an answer of shape {tuple(out.shape)}")
        if not torch.isfinite(out).all():
            raise ContractViolation(f"the answer to finite tokens of shape {tuple(x.shape)} is not finite")


def inputs_unmodified(subject: Subject) -> None:
    """No call changes the tokens or the flags of padding that it is given."""
    for training in (False, True):
        layer = subject.layer().train(training)
        x, keep = subject.tokens(2, 5), torch.tensor([[True] * 5, [True] * 3 + [False] * 2], device=subject.device)
        given = {"keep": keep} if subject.padded else {}
        kept = x.clone(), keep.clone()
        with torch.no_grad():
            subject.run(layer, x, **given)
        if not torch.equal(x, kept[0]):
            off = float((x - kept[0]).abs().max())
            mode = "training" if training else "evaluation"
            raise ContractViolation(f"the tokens were changed in place, in {mode} mode, by up to {off:.3g}", effect=off)
        if not torch.equal(keep, kept[1]):
            raise ContractViolation("the flags of padding were changed in place")


def determinism(subject: Subject) -> None:
    """Two copies of a layer, with torch's random numbers set alike, give the same answer."""
    layer = subject.layer()
    x = subject.tokens(2, 7)
    for training in (False, True):
        layer.train(training)
        outs = [subject.seeded(layer, x) for _ in range(3)]
        for out in outs[1:]:
            subject.close(
                f"the same call of two copies in {'training' if training else 'evaluation'} mode",
                out,
                outs[0],
                same_order=True,
            )


def evaluation(subject: Subject) -> None:
    """In evaluation mode nothing is random: dropout is off, whatever torch's seed."""
    layer = subject.layer()
    x = subject.tokens(2, 7)
    outs = [subject.seeded(layer, x, seed) for seed in (0, 1)]
    subject.close("the same call with another torch.manual_seed", outs[1], outs[0], same_order=True)


def stateless(subject: Subject) -> None:
    """A call without a cache leaves nothing behind: the next one gives what it would have given first."""
    layer = subject.layer()
    x, other = subject.tokens(2, 7), subject.tokens(3, 4, seed=9)
    first = subject.run(layer, x)
    subject.run(layer, other)
    subject.close("a call repeated after another one", subject.run(layer, x), first, same_order=True)


def no_grad(subject: Subject) -> None:
    """With and without gradients the answer is the same: fast paths compute what the others do."""
    layer = subject.layer()
    x = subject.tokens(3, 7)
    last = [True] + [False] * 6 if subject.lengths_alone else [False] * 3 + [True] * 4
    keep = torch.tensor([[True] * 7, [True] * 4 + [False] * 3, last], device=subject.device)
    for given in ({}, {"keep": keep}) if subject.padded else ({},):
        want = subject.run(layer, x, **given)
        with torch.no_grad():
            got = subject.run(layer, x, **given)
        mask = given.get("keep", torch.ones_like(keep))
        if got.shape[:2] != x.shape[:2]:
            raise ContractViolation(f"without gradients the answer has shape {tuple(got.shape)}")
        subject.close(f"without gradients{', padded' if given else ''}", got[mask], want[mask])


def streams(subject: Subject) -> None:
    """Two sequences decoded in turns, each with its own cache, give what each gives alone."""
    layer: Any = subject.layer()
    a, b = subject.tokens(2, 6), subject.tokens(2, 6, seed=9)
    pieces = (3, 1, 1, 1)
    want = [_decoded(subject, copy.deepcopy(layer), x, pieces) for x in (a, b)]
    caches = [layer.init_cache(2, 8) for _ in range(2)]
    context = subject.context_for(layer, a)
    got: list[list[Tensor]] = [[], []]
    for number, parts in enumerate(zip(a.split(pieces, 1), b.split(pieces, 1), strict=True)):
        for stream, part in enumerate(parts):
            got[stream].append(layer(part, cache=caches[stream], **(context if number == 0 else {})))
    for stream in range(2):
        subject.close(
            f"stream {stream} of two in turns, against the stream alone",
            torch.cat(got[stream], 1),
            want[stream],
            same_order=True,
        )


def averages(subject: Subject) -> None:
    """Weights sum to one: a sequence of equal tokens gives at each of them what one token alone gives."""
    layer = subject.layer()
    one = subject.tokens(3, 1)
    want = subject.run(layer, one)
    for length in (2, 5):
        x = one.expand(-1, length, *one.shape[2:]).contiguous()
        subject.close(
            f"{length} equal tokens, against one of them alone", subject.run(layer, x), want.expand(-1, length, -1)
        )


def polarity(subject: Subject) -> None:
    """Flags of padding mean what is said: what they keep is read, and what they hide is not read instead."""
    layer = subject.layer()
    x = subject.tokens(2, 6)
    keep = torch.tensor([[True, True, True, False, True, True]] * 2, device=subject.device)
    before = subject.run(layer, x, keep=keep)

    def moves(*slots: int) -> Tensor:
        """By how much other tokens at these slots move the answer at each slot."""
        changed = x.clone()
        changed[:, list(slots)] = subject.others(x, 3.0)[:, list(slots)]
        return (subject.run(layer, changed, keep=keep) - before).detach().abs().amax((0, *range(2, before.ndim)))

    hidden, neighbour, kept = moves(3), moves(4), moves(0, 1, 2, 4, 5)
    from_others = float(hidden[5]) if not neighbour[5] > 0 else 0.0
    itself = float(hidden[3]) if not kept[keep[0]].max() > 0 else 0.0
    if (effect := max(from_others, itself)) > 0:
        raise ContractViolation(
            f"the flags are inverted: padding at slot 3 moves the answer by {effect:.3g}, real tokens move it by 0",
            effect=effect,
            allowed=0.0,
        )


def dead_rows(subject: Subject) -> None:
    """A row without any real token gives finite numbers and gradients, and leaves the other rows alone."""
    cases = {"a row of padding alone": [[True] * 6, [False] * 6, [True] * 3 + [False] * 3]}
    if not subject.lengths_alone:
        cases["padding before the tokens"] = [[True] * 6, [False] * 2 + [True] * 4]
    for what, rows in cases.items():
        layer, keep = subject.layer(), torch.tensor(rows, device=subject.device)
        x = subject.tokens(len(rows), 6)
        out = subject.run(layer, x, keep=keep)
        if not torch.isfinite(out).all():
            place = tuple((~torch.isfinite(out)).nonzero()[0].tolist())
            raise ContractViolation(
                f"{what}: the answer at row {place[0]}, token {place[1]} is not finite", place=place
            )
        subject.close(f"{what}: a row without padding, against the row alone", out[:1], subject.run(layer, x[:1]))
        out[keep].sum().backward()
        for name, parameter in layer.named_parameters():
            if parameter.grad is not None and not torch.isfinite(parameter.grad).all():
                raise ContractViolation(f"{what}: the gradient of {name} is not finite")


def window(subject: Subject) -> None:
    """A token reads as many tokens as its window says, itself included: the width is measured at several places."""
    stated = subject.promises.window
    assert stated is not None, "the check applies to windows alone"
    layer = subject.layer()
    found = set()
    with torch.no_grad():
        for length in sorted({2 * stated + step * stated // 4 + 1 for step in range(5)}):
            x = subject.tokens(3, length)
            before, changed = subject.run(layer, x)[:, -1], subject.others(x)
            low, high = 0, length  # it reads a token `low` or further back (or itself), and none `high` or further back
            while high - low > 1:
                middle = (low + high) // 2
                mixed = torch.cat((changed[:, : length - middle], x[:, length - middle :]), 1)
                reads = not torch.equal(subject.run(layer, mixed)[:, -1], before)
                low, high = (middle, high) if reads else (low, middle)
            found.add(low + 1)
    if found != {stated}:
        width = f"{min(found)} tokens" if len(found) == 1 else f"{min(found)} to {max(found)} tokens, by the place"
        off = max(found, key=lambda one: abs(one - stated)) - stated
        raise ContractViolation(
            f"a window of {stated} tokens was stated; a token reads {width}, itself included", effect=abs(off)
        )


def _decoded(subject: Subject, layer: Any, x: Tensor, pieces: tuple[int, ...]) -> Tensor:
    cache, context = layer.init_cache(x.shape[0], 8), subject.context_for(layer, x)
    outs = [layer(part, cache=cache, **({} if number else context)) for number, part in enumerate(x.split(pieces, 1))]
    return torch.cat(outs, 1)
