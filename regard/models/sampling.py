"""Choosing the next token from logits."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Chooser", "Sampling"]


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen.

    ``temperature=0`` takes the most probable token. Otherwise one is drawn from ``softmax(logits / temperature)``, cut
    to the ``top_k`` most probable tokens, then to the fewest most probable ones whose probabilities reach ``top_p``
    (Holtzman et al. 2019, arXiv:1904.09751).

    Args:
        seed: row ``r`` of a batch draws from a generator of its own, made from ``(seed, r)``; torch's global generator
            is not touched. ``None`` draws differently every time.

    Raises:
        ValueError: naming an argument out of its range.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        if not _is_number(self.temperature) or not 0 <= self.temperature <= sys.float_info.max:
            raise ValueError(f"temperature: expected 0 (greedy) or a positive number, got {self.temperature!r}")
        if self.top_k is not None and (
            isinstance(self.top_k, bool) or not isinstance(self.top_k, int) or self.top_k < 1
        ):
            raise ValueError(f"top_k: expected a positive integer, or None for all, got {self.top_k!r}")
        if self.top_p is not None and not (_is_number(self.top_p) and 0 < self.top_p <= 1):
            raise ValueError(f"top_p: expected a number above 0 and at most 1, or None for all, got {self.top_p!r}")
        if self.seed is not None and (isinstance(self.seed, bool) or not isinstance(self.seed, int) or self.seed < 0):
            raise ValueError(f"seed: expected an integer of 0 or more, or None, got {self.seed!r}")

    def chooser(self, rows: int) -> Chooser:
        """The drawing of one generation of ``rows`` texts."""
        return Chooser(self, rows)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


class Chooser:
    """Draws one token a row and call; its draws in a row do not depend on the other rows."""

    def __init__(self, how: Sampling, rows: int) -> None:
        self.how = how
        self._generators: list[torch.Generator] = []
        for row in range(rows if how.temperature else 0):
            generator = torch.Generator()
            if how.seed is None:
                generator.seed()
            else:
                generator.manual_seed((how.seed * 1_000_003 + row) % 2**63)
            self._generators.append(generator)

    def __call__(self, logits: Tensor, step: int | None = None) -> Tensor:
        """Token ids ``(B,)`` from logits ``(B, vocabulary)``; ``step`` is named by the error.

        Raises:
            ValueError: naming a row that holds NaN or infinity, or -infinity for every token (a single token may have
                it, and then never comes).
        """
        _check_logits(logits, step)
        if not self.how.temperature:
            return logits.argmax(-1)
        logits = logits.double()
        top = logits.amax(-1, keepdim=True)  # subtracted first: the quotient of a tiny temperature may only be -inf
        scores = torch.where(logits == top, 0.0, (logits - top) / self.how.temperature)
        kept = scores.shape[-1] if self.how.top_k is None else min(self.how.top_k, scores.shape[-1])
        scores, order = (
            scores.topk(kept, dim=-1) if kept < scores.shape[-1] else scores.sort(dim=-1, descending=True, stable=True)
        )
        probabilities = scores.softmax(-1)
        cumulated = probabilities.cumsum(-1)
        if self.how.top_p is not None:
            probabilities = probabilities.masked_fill(cumulated - probabilities >= self.how.top_p, 0.0)
            cumulated = probabilities.cumsum(-1)
        draws = torch.stack([torch.rand((), dtype=torch.float64, generator=g) for g in self._generators])
        aim = draws.to(cumulated.device)[:, None] * cumulated[:, -1:]
        place = torch.searchsorted(cumulated, aim, right=True).clamp(max=kept - 1)
        # rounding may aim past the last token that has a probability
        last = (probabilities > 0).sum(-1, keepdim=True) - 1
        return order.gather(-1, torch.minimum(place, last))[:, 0]


def _check_logits(logits: Tensor, step: int | None) -> None:
    top = logits.amax(-1)  # NaN where there is one, and -inf where there is nothing else
    usable = top.isfinite()
    if bool(usable.all()):
        return
    row = int((~usable).long().argmax())
    came = f"{top[row].item()}" if top[row] != -torch.inf else "-inf for every token"
    when = "" if step is None else f", step {step}"
    raise ValueError(
        f"logits: expected finite numbers, or -inf for tokens that cannot come, got {came} in row {row}{when}"
    )
