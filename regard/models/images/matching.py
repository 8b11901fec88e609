"""The loss of a set of detections: each object is matched with one query, and the others are to say "no object".

    match:  one query an object, with the least sum of  -c_p p(label) + c_b |b - b'|_1 - c_g GIoU(b, b')
    loss:   w_p CE + (w_b sum |b - b'|_1 + w_g sum (1 - GIoU)) / objects

Carion et al. 2020, arXiv:2005.12872; generalised IoU: Rezatofighi et al. 2019, arXiv:1902.09630.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.checks import describe

__all__ = ["Detections", "Objects", "SetLoss", "SetLosses", "Weights", "corners", "generalised_iou", "overlap"]


class Detections(NamedTuple):
    """What a detector says of each query: ``logits (B, Q, classes + 1)`` and ``boxes (B, Q, 4)``.

    The last logit is that of no object. A box is (centre x, centre y, width, height) in shares of the image's sides.
    """

    logits: Tensor
    boxes: Tensor


class Objects(NamedTuple):
    """What is in one image: ``labels (N,)`` int64 and ``boxes (N, 4)`` as in `Detections`."""

    labels: Tensor
    boxes: Tensor


def corners(boxes: Tensor) -> Tensor:
    """(centre x, centre y, width, height) to (left, top, right, bottom), ``(..., 4)``.

    >>> corners(torch.tensor([0.5, 0.5, 0.5, 1.0])).tolist()
    [0.25, 0.0, 0.75, 1.0]
    """
    centre, half = boxes[..., :2], boxes[..., 2:] / 2
    return torch.cat([centre - half, centre + half], -1)


def _areas(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(what is common, in either, and in the least box round both) of boxes by corners, broadcast."""

    def area(sides: Tensor) -> Tensor:
        return sides.clamp(min=0).prod(-1)

    common = area(torch.minimum(a[..., 2:], b[..., 2:]) - torch.maximum(a[..., :2], b[..., :2]))
    either = area(a[..., 2:] - a[..., :2]) + area(b[..., 2:] - b[..., :2]) - common
    return common, either, area(torch.maximum(a[..., 2:], b[..., 2:]) - torch.minimum(a[..., :2], b[..., :2]))


def _share(part: Tensor, of: Tensor) -> Tensor:
    """The quotient, or 0 where the whole is empty."""
    return torch.where(of > 0, part / torch.where(of > 0, of, 1.0), 0.0)


def overlap(a: Tensor, b: Tensor) -> Tensor:
    """Intersection over union of boxes by corners ``(..., 4)``, broadcast to ``(...)``; 0 where both are empty.

    >>> overlap(torch.tensor([0.0, 0, 2, 2]), torch.tensor([1.0, 0, 3, 2])).item()
    0.3333333432674408
    """
    common, either, _ = _areas(a, b)
    return _share(common, either)


def generalised_iou(a: Tensor, b: Tensor) -> Tensor:
    """``IoU - (box round both - union) / box round both``, in -1 to 1; boxes as in `overlap`.

    >>> generalised_iou(torch.tensor([0.0, 0, 1, 1]), torch.tensor([2.0, 0, 3, 1])).item()
    -0.3333333432674408
    """
    common, either, around = _areas(a, b)
    return _share(common, either) - _share(around - either, around)


@dataclass(frozen=True)
class Weights:
    """How much classes, boxes' distances and their generalised IoU count."""

    classes: float = 1.0
    boxes: float = 5.0
    giou: float = 2.0

    def __post_init__(self) -> None:
        for name, value in (("classes", self.classes), ("boxes", self.boxes), ("giou", self.giou)):
            if not (isinstance(value, (int, float)) and math.isfinite(value) and value >= 0):
                raise ValueError(f"{name}: expected a finite number of 0 or more, got {value!r}")


class SetLosses(NamedTuple):
    """The weighted sum over all steps, and the parts of the last step before they are weighted."""

    total: Tensor
    classes: Tensor
    boxes: Tensor
    giou: Tensor


@dataclass(frozen=True)
class SetLoss:
    """The loss of detections that are a set.

    Args:
        cost: weights of the matching.
        loss: weights of the loss.
        no_object: the weight of the class "no object" in the cross-entropy, for most queries are to say so.

    Sums are formed in at least float32. Cost: SciPy's assignment on the CPU, O(queries^3) an image at most.

    >>> logits, boxes = torch.zeros(1, 3, 5), torch.rand(1, 3, 4)
    >>> objects = Objects(torch.tensor([2]), boxes[0, 1:2])
    >>> SetLoss().match(Detections(logits, boxes), [objects])
    [(tensor([1]), tensor([0]))]
    """

    cost: Weights = field(default_factory=Weights)
    loss: Weights = field(default_factory=Weights)
    no_object: float = 0.1

    def match(self, found: Detections, objects: Sequence[Objects]) -> list[tuple[Tensor, Tensor]]:
        """For each image the queries, ascending, and the objects that they are matched with.

        Where there are more objects than queries, some objects are left out.

        Raises:
            ValueError, TypeError: for objects that do not fit the detections, and detections that are not finite.
            ModuleNotFoundError: without SciPy.
        """
        _check(found, objects)
        try:
            from scipy.optimize import linear_sum_assignment
        except ModuleNotFoundError as e:
            raise ModuleNotFoundError(
                "matching detections needs the package scipy: pip install 'regard[images]'", name="scipy"
            ) from e
        pairs = []
        for logits, boxes, one in zip(found.logits.detach(), found.boxes.detach(), objects, strict=True):
            costs = self._costs(_wide(logits), _wide(boxes), one).cpu()
            if not costs.isfinite().all():
                raise ValueError("found: expected finite logits and boxes, got some that are not")
            queries, matched = linear_sum_assignment(costs.double().numpy())
            where = logits.device
            pairs.append((torch.as_tensor(queries, device=where), torch.as_tensor(matched, device=where)))
        return pairs

    def __call__(
        self, steps: Detections | Sequence[Detections], objects: Sequence[Objects], *, count: float | None = None
    ) -> SetLosses:
        """The loss of detections, or the sum over several layers' (each is matched alone), and the parts of the last.

        Args:
            steps: of a model's ``forward``, or of its ``steps``.
            objects: one entry an image, on the detections' device; may be empty.
            count: what boxes' losses are divided by: the batch's objects, at least 1, by default. Of a batch that is
                spread over processes, pass their mean.

        Raises:
            As `match`; ValueError for a `count` that is not above 0.
        """
        layers = [steps] if isinstance(steps, Detections) else list(steps)
        if not layers:
            raise ValueError("steps: expected detections of one layer or more, got none")
        number = float(max(sum(len(one.labels) for one in objects), 1)) if count is None else count
        if not number > 0:
            raise ValueError(f"count: expected a number above 0, got {count!r}")
        parts = [self._parts(found, objects, number) for found in layers]
        w = self.loss
        total = torch.stack([w.classes * p[0] + w.boxes * p[1] + w.giou * p[2] for p in parts]).sum()
        return SetLosses(total, *parts[-1])

    def _costs(self, logits: Tensor, boxes: Tensor, one: Objects) -> Tensor:
        """(Q, N)."""
        theirs, c = one.boxes.to(boxes.dtype), self.cost
        by_class = -logits.softmax(-1)[:, one.labels]
        distance = (boxes[:, None] - theirs).abs().sum(-1)
        giou = generalised_iou(corners(boxes)[:, None], corners(theirs))
        return c.classes * by_class + c.boxes * distance - c.giou * giou

    def _parts(self, found: Detections, objects: Sequence[Objects], number: float) -> tuple[Tensor, Tensor, Tensor]:
        pairs = self.match(found, objects)
        logits, boxes = _wide(found.logits), _wide(found.boxes)
        classes = logits.shape[-1] - 1
        wanted = torch.full(logits.shape[:2], classes, device=logits.device)
        rows = [torch.full_like(queries, n) for n, (queries, _) in enumerate(pairs)]
        row, query = torch.cat(rows), torch.cat([queries for queries, _ in pairs])
        wanted[row, query] = torch.cat([one.labels[at] for one, (_, at) in zip(objects, pairs, strict=True)])
        theirs = torch.cat([one.boxes[at] for one, (_, at) in zip(objects, pairs, strict=True)]).to(boxes.dtype)
        weight = torch.ones(classes + 1, dtype=logits.dtype, device=logits.device)
        weight[-1] = self.no_object
        matched = boxes[row, query]
        return (
            F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), weight),
            (matched - theirs).abs().sum() / number,
            (1 - generalised_iou(corners(matched), corners(theirs))).sum() / number,
        )


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _check(found: Detections, objects: Sequence[Objects]) -> None:
    logits, boxes = found
    if logits.ndim != 3 or logits.shape[-1] < 2 or boxes.shape != (*logits.shape[:2], 4):
        raise ValueError(
            "found: expected logits (B, Q, classes + 1) and boxes (B, Q, 4), got"
            f" {describe(logits)} and {describe(boxes)}"
        )
    if len(objects) != len(logits):
        raise ValueError(f"objects: expected {len(logits)}, one entry an image, got {len(objects)}")
    for n, (labels, theirs) in enumerate(objects):
        if labels.dtype != torch.int64 or labels.ndim != 1:
            raise TypeError(f"objects[{n}].labels: expected int64 (N,), got {describe(labels)}")
        if theirs.shape != (len(labels), 4) or not theirs.is_floating_point():
            raise ValueError(f"objects[{n}].boxes: expected floating ({len(labels)}, 4), got {describe(theirs)}")
        if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < logits.shape[-1] - 1:
            raise ValueError(f"objects[{n}].labels: expected 0 to {logits.shape[-1] - 2}, got {labels.tolist()}")
        if not theirs.isfinite().all() or bool((theirs[:, 2:] < 0).any()):
            raise ValueError(
                f"objects[{n}].boxes: expected finite boxes with sides of 0 or more, got {theirs.tolist()}"
            )
