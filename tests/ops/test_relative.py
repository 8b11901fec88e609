"""Scores with rows of a table that the relative place chooses."""

import pytest
import torch

from regard.ops.relative import relative_scores


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


@pytest.mark.parametrize("shape", [(9, 4), (3, 9, 4)])
def test_each_pair_has_the_product_with_its_row(shape):
    x, rows = drawn(2, 3, 5, 4).requires_grad_(), drawn(*shape).requires_grad_()
    index = (torch.arange(5)[:, None] - torch.arange(7)).clamp(-4, 4) + 4
    found = relative_scores(x, rows, index)
    table = rows if rows.ndim == 3 else rows.expand(3, -1, -1)
    want = torch.einsum("bhid,hijd->bhij", x, table[:, index])
    torch.testing.assert_close(found, want)
    grads = (torch.autograd.grad(y.sin().sum(), (x, rows), retain_graph=True) for y in (found, want))
    for got, right in zip(*grads, strict=True):
        torch.testing.assert_close(got, right)


def test_errors_name_the_argument():
    index = torch.zeros(5, 5, dtype=torch.long)
    with pytest.raises(ValueError, match=r"rows: expected \(R, D\)"):
        relative_scores(drawn(1, 1, 5, 4), drawn(3, 5), index)
    with pytest.raises(ValueError, match=r"index: expected int64 \(5, Tk\)"):
        relative_scores(drawn(1, 1, 5, 4), drawn(3, 4), index.int())
