"""Choosing the next token from logits."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["Chooser", "Sampling"]


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen from logits z.

    In this order, as in transformers:

        repetition penalty r, for tokens v of the prompt and of what follows it:   z_v := z_v / r if z_v >= 0 else z_v r
        temperature t:                                                             p = softmax(z / t)
        top k:   the k most probable tokens are kept
        top p:   token v is kept where sum of p_u over all u more probable than v is below top_p
        min p:   token v is kept where p_v >= min_p max_u p_u

    with p normalised again after each cut. ``temperature=0`` takes the most probable token, after the penalty.

    Sources: Keskar et al. 2019, arXiv:1909.05858 (the penalty; the rule for negative logits is transformers'); Fan et
    al. 2018, arXiv:1805.04833 (top k); Holtzman et al. 2019, arXiv:1904.09751 (top p); Nguyen et al. 2024,
    arXiv:2407.01082 (min p).

    Args:
        seed: row ``r`` of a batch draws from a generator of its own, made from ``(seed, r)``; torch's global generator
            is not touched. ``None`` draws differently every time.
        min_p: above 0 and at most 1; ``None`` cuts nothing.
        repetition_penalty: above 1 makes tokens rarer that have come before, below 1 more frequent; ``None`` is 1.

    Raises:
        ValueError: naming an argument out of its range.

    >>> Sampling(temperature=1.0, top_k=2).probabilities(torch.tensor([[0.0, 1.0, 1.0]]))
    tensor([[0.0000, 0.5000, 0.5000]], dtype=torch.float64)
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None

    def __post_init__(self) -> None:
        if not _is_number(self.temperature) or not 0 <= self.temperature <= sys.float_info.max:
            raise ValueError(f"temperature: expected 0 (greedy) or a positive number, got {self.temperature!r}")
        if self.top_k is not None and (
            isinstance(self.top_k, bool) or not isinstance(self.top_k, int) or self.top_k < 1
        ):
            raise ValueError(f"top_k: expected a positive integer, or None for all, got {self.top_k!r}")
        for name, value in (("top_p", self.top_p), ("min_p", self.min_p)):
            if value is not None and not (_is_number(value) and 0 < value <= 1):
                raise ValueError(f"{name}: expected a number above 0 and at most 1, or None for all, got {value!r}")
        penalty = self.repetition_penalty
        if penalty is not None and not (_is_number(penalty) and 0 < penalty <= sys.float_info.max):
            raise ValueError(f"repetition_penalty: expected a positive number, or None for 1, got {penalty!r}")
        if self.seed is not None and (isinstance(self.seed, bool) or not isinstance(self.seed, int) or self.seed < 0):
            raise ValueError(f"seed: expected an integer of 0 or more, or None, got {self.seed!r}")

    def probabilities(self, logits: Tensor, seen: Tensor | None = None) -> Tensor:
        """The probabilities ``(B, vocabulary)`` that tokens are drawn with, in float64.

        Args:
            logits: ``(B, vocabulary)``.
            seen: bool ``(B, vocabulary)``, the tokens that have come, which the repetition penalty is for.
        """
        logits = self._penalised(logits, seen)
        if not self.temperature:
            return F.one_hot(logits.argmax(-1), logits.shape[-1]).double()
        ranked, order = self._ranked(logits)
        ranked = ranked / ranked.sum(-1, keepdim=True)
        return torch.zeros_like(logits, dtype=torch.float64).scatter(-1, order, ranked)

    def chooser(self, rows: int, prompts: Sequence[Sequence[int]] | None = None) -> Chooser:
        """The drawing of one generation of ``rows`` texts, which continue ``prompts`` (for the repetition penalty)."""
        return Chooser(self, rows, prompts)

    def _penalised(self, logits: Tensor, seen: Tensor | None) -> Tensor:
        if seen is None or self.repetition_penalty in (None, 1):
            return logits
        logits, penalty = logits.double(), self.repetition_penalty
        return torch.where(seen, torch.where(logits < 0, logits * penalty, logits / penalty), logits)

    def _ranked(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Weights of the tokens that may come, the most probable first, 0 for those that are cut; and their ids."""
        logits = logits.double()
        top = logits.amax(-1, keepdim=True)  # subtracted first: the quotient of a tiny temperature may only be -inf
        scores = torch.where(logits == top, 0.0, (logits - top) / self.temperature)
        kept = scores.shape[-1] if self.top_k is None else min(self.top_k, scores.shape[-1])
        scores, order = (
            scores.topk(kept, dim=-1) if kept < scores.shape[-1] else scores.sort(dim=-1, descending=True, stable=True)
        )
        probabilities = scores.softmax(-1)
        least = probabilities[..., :1] * (self.min_p or 0.0)
        if self.top_p is not None:
            before = probabilities.cumsum(-1) - probabilities
            probabilities = probabilities.masked_fill(before >= self.top_p, 0.0)
        return probabilities.masked_fill(probabilities < least, 0.0), order


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


class Chooser:
    """Draws one token a row and call; its draws in a row do not depend on the other rows."""

    def __init__(self, how: Sampling, rows: int, prompts: Sequence[Sequence[int]] | None = None) -> None:
        self.how = how
        self._penalises = how.repetition_penalty not in (None, 1)
        self._prompts = prompts
        self._seen: Tensor | None = None  # made when the size of the vocabulary is known
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
        if not self._penalises:
            return self._choose(logits)
        if self._seen is None:
            self._seen = torch.zeros_like(logits, dtype=torch.bool)
            for row, ids in enumerate(self._prompts or ()):
                self._seen[row, torch.as_tensor(ids, dtype=torch.long, device=logits.device)] = True
        chosen = self._choose(self.how._penalised(logits, self._seen))
        self._seen.scatter_(-1, chosen[:, None], True)
        return chosen

    def _choose(self, logits: Tensor) -> Tensor:
        if not self.how.temperature:
            return logits.argmax(-1)
        probabilities, order = self.how._ranked(logits)
        cumulated = probabilities.cumsum(-1)
        draws = torch.stack([torch.rand((), dtype=torch.float64, generator=g) for g in self._generators])
        aim = draws.to(cumulated.device)[:, None] * cumulated[:, -1:]
        place = torch.searchsorted(cumulated, aim, right=True).clamp(max=order.shape[-1] - 1)
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
