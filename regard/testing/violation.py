"""What a check raises, and how it compares two tensors."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["ContractViolation", "close"]


class ContractViolation(AssertionError):
    """A layer broke a promise of the contract; the text says which, on what input, and by how much.

    Args:
        text: what was done and found.
        effect: the size of the difference, where numbers were compared.
        allowed: the largest difference that would have passed.
        place: the index of the first entry that differs by more.
    """

    def __init__(
        self,
        text: str,
        *,
        effect: float | None = None,
        allowed: float | None = None,
        place: tuple[int, ...] | None = None,
    ) -> None:
        super().__init__(text)
        self.effect, self.allowed, self.place = effect, allowed, place


def _first(wrong: Tensor) -> tuple[int, ...]:
    return tuple(wrong.nonzero()[0].tolist())


def close(what: str, got: Tensor, want: Tensor, tolerance: float) -> tuple[float, float]:
    """How far two tensors are apart, and how far they may be: `tolerance` of the largest wanted entry (at least 1).

    Raises `ContractViolation` where they are further apart, differ in shape, or where `got` is not finite.
    """
    if got.shape != want.shape:
        raise ContractViolation(f"{what}: shapes {tuple(got.shape)} and {tuple(want.shape)} differ")
    finite = torch.isfinite(got)
    if not finite.all():
        raise ContractViolation(f"{what}: {int((~finite).sum())} entries are not finite", place=_first(~finite))
    if not torch.isfinite(want).all():
        raise ContractViolation(f"{what}: what it is compared with is not finite")
    if not got.numel():
        return 0.0, tolerance
    got, want = got.detach().double(), want.detach().double()
    off = float((got - want).abs().max())
    limit = tolerance * max(1.0, float(want.abs().max()))
    if off > limit:
        place = _first((got - want).abs() > limit)
        raise ContractViolation(
            f"{what}: off by {off:.3g}, allowed {limit:.3g}", effect=off, allowed=limit, place=place
        )
    return off, limit
