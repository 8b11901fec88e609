"""The loss of a set of detections: by every assignment, areas counted pixel by pixel, and transformers' loss."""

import itertools
import math
import sys

import pytest
import torch

from regard.models.images.matching import Detections, Objects, SetLoss, Weights, corners, generalised_iou, overlap


def box(*numbers):
    return torch.tensor(numbers, dtype=torch.float64)


def drawn(batch=2, queries=5, classes=3, numbers=(2, 4), seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(batch, queries, classes + 1, generator=generator, dtype=torch.float64) * 2
    boxes = torch.rand(batch, queries, 4, generator=generator, dtype=torch.float64) * 0.5 + 0.1
    objects = [
        Objects(
            torch.randint(classes, (n,), generator=generator),
            torch.rand(n, 4, generator=generator, dtype=torch.float64) * 0.5 + 0.1,
        )
        for n in numbers
    ]
    return Detections(logits, boxes), objects


# ---- plain formulas --------------------------------------------------------------------------------------------------


def plain_giou(a, b):
    """Of two boxes (centre x, centre y, width, height), number by number."""
    (l, t, r, u), (m, s, q, v) = ((x - w / 2, y - h / 2, x + w / 2, y + h / 2) for x, y, w, h in (a, b))
    common = max(0.0, min(r, q) - max(l, m)) * max(0.0, min(u, v) - max(t, s))
    either = (r - l) * (u - t) + (q - m) * (v - s) - common
    around = (max(r, q) - min(l, m)) * (max(u, v) - min(t, s))
    return common / either - (around - either) / around


def plain_cost(logits, b, label, other, w):
    exps = [math.exp(x - max(logits)) for x in logits]
    distance = sum(abs(x - y) for x, y in zip(b, other, strict=True))
    return -w.classes * exps[label] / sum(exps) + w.boxes * distance - w.giou * plain_giou(b, other)


def plain_costs(logits, boxes, one, w):
    return [
        [
            plain_cost(lo, b, label, other, w)
            for label, other in zip(one.labels.tolist(), one.boxes.tolist(), strict=True)
        ]
        for lo, b in zip(logits.tolist(), boxes.tolist(), strict=True)
    ]


def least(costs, number):
    """The least sum over all assignments of so many objects to queries."""
    orders = itertools.permutations(range(len(costs)), number)
    return min(sum(costs[q][n] for n, q in enumerate(order)) for order in orders)


def plain_loss(found, objects, loss, matched):
    total = sum(len(one.labels) for one in objects)
    ce = weights = distance = giou = 0.0
    for logits, boxes, one, pairs in zip(found.logits, found.boxes, objects, matched, strict=True):
        said = {q: int(one.labels[n]) for n, q in pairs.items()}
        for q, row in enumerate(logits.tolist()):
            label = said.get(q, len(row) - 1)
            weight = 1.0 if q in said else loss.no_object
            ce -= weight * (row[label] - math.log(sum(math.exp(x) for x in row)))
            weights += weight
        for n, q in pairs.items():
            mine, theirs = boxes[q].tolist(), one.boxes[n].tolist()
            distance += sum(abs(a - b) for a, b in zip(mine, theirs, strict=True))
            giou += 1 - plain_giou(mine, theirs)
    return ce / weights, distance / max(total, 1), giou / max(total, 1)


LOSSES = [SetLoss(), SetLoss(Weights(2, 1, 0), Weights(0.5, 3, 1), 0.4), SetLoss(Weights(1, 0, 0))]


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("numbers", [(2, 4), (0, 5), (1, 1), (0, 0)])
def test_the_loss_is_the_best_of_all_assignments(loss, numbers):
    for seed in range(5):
        found, objects = drawn(numbers=numbers, seed=seed)
        pairs = [dict(zip(n.tolist(), q.tolist(), strict=True)) for q, n in loss.match(found, objects)]
        for chosen, logits, boxes, one in zip(
            pairs, *found, objects, strict=True
        ):  # other assignments may cost the same
            costs = plain_costs(logits, boxes, one, loss.cost)
            assert set(chosen) == set(range(len(one.labels)))
            assert sum(costs[q][n] for n, q in chosen.items()) == pytest.approx(
                least(costs, len(one.labels)), rel=1e-12
            )
        losses, want = loss(found, objects), plain_loss(found, objects, loss, pairs)
        assert [part.item() for part in losses[1:]] == pytest.approx(want, rel=1e-12)
        weights = (loss.loss.classes, loss.loss.boxes, loss.loss.giou)
        assert losses.total.item() == pytest.approx(sum(w * x for w, x in zip(weights, want, strict=True)), rel=1e-12)


def test_more_objects_than_queries():
    found, objects = drawn(batch=1, queries=2, numbers=(4,))
    ((queries, matched),) = SetLoss().match(found, objects)
    assert queries.tolist() == [0, 1] and len(set(matched.tolist())) == 2
    assert SetLoss()(found, objects).total.isfinite()


def test_layers_are_matched_alone_and_summed():
    (first, objects), (last, _) = drawn(seed=1), drawn(seed=2)
    loss = SetLoss()
    both = loss([first, last], objects)
    assert both.total == loss(first, objects).total + loss(last, objects).total
    assert both[1:] == loss(last, objects)[1:]
    halved = loss(last, objects, count=12)
    torch.testing.assert_close(halved.boxes, loss(last, objects).boxes / 2)  # six objects


def test_gradients():
    found, objects = drawn(queries=3, numbers=(2, 0))
    inputs = [part.clone().requires_grad_() for part in found]
    assert torch.autograd.gradcheck(lambda *parts: SetLoss()(Detections(*parts), objects).total, inputs)
    found, empty = [part.clone().requires_grad_() for part in found], [objects[1], objects[1]]
    SetLoss()(Detections(*found), empty).total.backward()
    assert all(part.grad.isfinite().all() for part in found) and not found[1].grad.any()


def test_low_precision_is_summed_in_float32():
    found, objects = drawn()
    low = Detections(*(part.bfloat16() for part in found))
    wide = Detections(*(part.float() for part in low))
    got, want = SetLoss()(low, objects), SetLoss()(wide, objects)
    assert got.total.dtype == torch.float32 and got.total == want.total


# ---- boxes -----------------------------------------------------------------------------------------------------------


def test_areas_are_those_of_pixels():
    """Boxes with corners on a grid of 8 by 8: common and joint pixels are counted."""
    generator = torch.Generator().manual_seed(3)
    y, x = torch.meshgrid(torch.arange(8), torch.arange(8), indexing="ij")
    for _ in range(50):
        inside, sides = [], []
        for _ in range(2):
            (l, r), (t, b) = (sorted(torch.randperm(9, generator=generator)[:2].tolist()) for _ in range(2))
            inside.append((x >= l) & (x < r) & (y >= t) & (y < b))
            sides.append(box(l, t, r, b))
        common, either = (inside[0] & inside[1]).sum().item(), (inside[0] | inside[1]).sum().item()
        ys, xs = (inside[0] | inside[1]).nonzero().T
        around = ((ys.max() - ys.min() + 1) * (xs.max() - xs.min() + 1)).item()
        assert overlap(*sides).item() == pytest.approx(common / either)
        assert generalised_iou(*sides).item() == pytest.approx(common / either - (around - either) / around)


def test_by_hand():
    assert generalised_iou(box(0, 0, 2, 2), box(0, 0, 2, 2)).item() == 1
    assert generalised_iou(box(0, 0, 2, 2), box(1, 1, 3, 3)).item() == pytest.approx(1 / 7 - 2 / 9)
    assert generalised_iou(box(0, 0, 1, 1), box(9, 0, 10, 1)).item() == pytest.approx(-0.8)
    assert corners(box(3, 4, 2, 6)).tolist() == [2, 1, 4, 7]


def test_empty_boxes_have_gradients():
    for a, b in (
        (box(1, 1, 1, 1), box(1, 1, 1, 1)),
        (box(1, 1, 1, 1), box(0, 0, 2, 2)),
        (box(0, 0, 0, 1), box(0, 0, 0, 1)),
    ):
        a.requires_grad_()
        value = generalised_iou(a, b)
        value.backward()
        assert value.isfinite() and a.grad.isfinite().all()


# ---- another implementation ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("auxiliary", [False, True])
def test_against_transformers(auxiliary):
    losses = pytest.importorskip("transformers.loss.loss_for_object_detection")
    transformers = pytest.importorskip("transformers")
    config = transformers.DetrConfig(
        num_labels=3, class_cost=2, bbox_cost=4, giou_cost=3, bbox_loss_coefficient=3, giou_loss_coefficient=1,
        eos_coefficient=0.2, auxiliary_loss=auxiliary, decoder_layers=2, backbone_config=transformers.ResNetConfig(),
        use_timm_backbone=False,
    )  # fmt: skip
    (first, objects), (last, _) = drawn(seed=4), drawn(seed=5)
    first, last = (Detections(*(part.float() for part in one)) for one in (first, last))
    objects = [Objects(one.labels, one.boxes.float()) for one in objects]
    theirs, parts, _ = losses.ForObjectDetectionLoss(
        last.logits,
        [{"class_labels": one.labels, "boxes": one.boxes} for one in objects],
        torch.device("cpu"),
        last.boxes,
        config,
        torch.stack([first.logits, last.logits]),
        torch.stack([first.boxes, last.boxes]),
    )
    ours = SetLoss(Weights(2, 4, 3), Weights(1, 3, 1), 0.2)([first, last] if auxiliary else last, objects)
    torch.testing.assert_close(ours.total, theirs)
    torch.testing.assert_close(
        torch.stack(ours[1:]), torch.stack([parts[n] for n in ("loss_ce", "loss_bbox", "loss_giou")])
    )


# ---- what is refused -------------------------------------------------------------------------------------------------


def test_what_does_not_fit():
    found, objects = drawn()
    loss = SetLoss()
    with pytest.raises(ValueError, match="objects: expected 2, one entry an image, got 1"):
        loss(found, objects[:1])
    with pytest.raises(ValueError, match=r"objects\[0\].labels: expected 0 to 2, got \[3\]"):
        loss(found, [Objects(torch.tensor([3]), torch.ones(1, 4)), objects[1]])
    with pytest.raises(TypeError, match=r"objects\[1\].labels: expected int64"):
        loss(found, [objects[0], Objects(torch.tensor([1.0]), torch.ones(1, 4))])
    with pytest.raises(ValueError, match=r"objects\[1\].boxes: expected floating \(1, 4\)"):
        loss(found, [objects[0], Objects(torch.tensor([1]), torch.ones(2, 4))])
    with pytest.raises(ValueError, match=r"objects\[0\].boxes: expected finite boxes"):
        loss(found, [Objects(torch.tensor([1]), torch.tensor([[0.5, 0.5, -1.0, 0.1]])), objects[1]])
    with pytest.raises(ValueError, match="found: expected finite"):
        loss(Detections(found.logits * torch.nan, found.boxes), objects)
    with pytest.raises(ValueError, match=r"found: expected logits"):
        loss(Detections(found.logits, found.boxes[:, :2]), objects)
    with pytest.raises(ValueError, match="steps: expected"):
        loss([], objects)
    with pytest.raises(ValueError, match="count: expected a number above 0"):
        loss(found, objects, count=0)
    with pytest.raises(ValueError, match="boxes: expected a finite number of 0 or more, got -1"):
        Weights(boxes=-1)


def test_without_scipy(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    found, objects = drawn()
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'regard\[images\]'"):
        SetLoss().match(found, objects)
