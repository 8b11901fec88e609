"""Mixtures of experts: a router chooses a few experts for every token and adds up their weighted outputs.

Experts stand in stacked tensors. No expert has a capacity: what a token gets never depends on which experts the other
tokens of a batch choose. Shazeer et al. 2017, arXiv:1701.06538; Dai et al. 2024, arXiv:2401.06066 (shared experts).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.checks import whole
from regard.coordinates import has_values

__all__ = ["ClampedSwiGLU", "GatedExperts", "MixtureOfExperts", "Router", "Routing", "StackedExperts"]

SPARED = 2**21  # multiply-adds that take as long as sorting tokens by expert and back


@dataclass(frozen=True)
class Routing:
    """How a router weighs and chooses.

        s = score(x W^T + b),   the k largest s + correction in the best groups,   weights = factor s (/ sum of them)

    Args:
        experts: E.
        chosen: k, experts a token.
        score: ``"softmax"`` over all experts, or ``"sigmoid"`` of each.
        normalized: the weights of the chosen experts are divided by their sum.
        factor: multiplies the weights last.
        corrected: a bias that training sets by hand is added to the scores for the choice alone, never to the weights.
        groups: equal parts of the experts, of which only the best are open to a token.
        open_groups: how many are.

    A group is as good as its best expert with softmax scores, as its best two together with sigmoid scores: rules of
    DeepSeek-V2 (arXiv:2405.04434) and DeepSeek-V3 (arXiv:2412.19437), whose bias-corrected choice this is too.

    Raises ValueError where the numbers do not fit together.

    >>> Routing(256, 8, "sigmoid", normalized=True, factor=2.5, corrected=True, groups=8, open_groups=4).chosen
    8
    """

    experts: int
    chosen: int
    score: str = "softmax"
    normalized: bool = False
    factor: float = 1.0
    corrected: bool = False
    groups: int = 1
    open_groups: int = 1

    def __post_init__(self) -> None:
        for name in ("experts", "chosen", "groups", "open_groups"):
            whole(name, getattr(self, name), 1)
        if self.score not in ("softmax", "sigmoid"):
            raise ValueError(f"score: expected 'softmax' or 'sigmoid', got {self.score!r}")
        if self.experts % self.groups:
            raise ValueError(f"groups: expected a divisor of experts={self.experts}, got {self.groups}")
        if self.open_groups > self.groups:
            raise ValueError(f"open_groups: expected at most groups={self.groups}, got {self.open_groups}")
        if self.chosen > self.experts // self.groups * self.open_groups:
            most = self.experts // self.groups * self.open_groups
            raise ValueError(f"chosen: expected at most {most}, the experts that a token may choose, got {self.chosen}")


class Router(nn.Module):
    """Chooses experts for tokens ``x (N, dim)``: weights and expert numbers, both ``(N, k)``, by a `Routing`.

    Scores are in at least float32; `correction` (E) is a buffer, for no gradient reaches it.

    >>> weights, chosen = Router(8, Routing(4, 2, normalized=True))(torch.ones(3, 8))
    >>> weights.sum(-1).tolist(), chosen.shape
    ([1.0, 1.0, 1.0], torch.Size([3, 2]))
    """

    correction: Tensor | None

    def __init__(self, dim: int, routing: Routing, *, bias: bool = False) -> None:
        super().__init__()
        self.routing = routing
        self.weight = nn.Parameter(torch.empty(routing.experts, dim))
        self.bias = nn.Parameter(torch.empty(routing.experts)) if bias else None
        self.register_buffer("correction", torch.empty(routing.experts) if routing.corrected else None)
        self.reset_parameters()

    def reset_parameters(self, std: float = 0.02) -> None:
        nn.init.normal_(self.weight, std=std)
        for offset in (self.bias, self.correction):
            if offset is not None:
                nn.init.zeros_(offset)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        how, wide = self.routing, torch.promote_types(x.dtype, torch.float32)
        logits = F.linear(x.to(wide), self.weight.to(wide), None if self.bias is None else self.bias.to(wide))
        if how.score == "softmax" and how.normalized and how.groups == 1 and self.correction is None:
            best, chosen = logits.topk(how.chosen, dim=-1)  # the softmax over the chosen logits alone is the same
            return best.softmax(-1) * how.factor, chosen
        scores = logits.softmax(-1) if how.score == "softmax" else torch.sigmoid(logits)
        ranks = scores if self.correction is None else scores + self.correction.to(wide)
        if how.groups > 1:
            ranks = ranks.masked_fill(~self._open(ranks), -torch.inf)
        chosen = ranks.topk(how.chosen, dim=-1).indices
        weights = scores.gather(-1, chosen)
        if how.normalized:
            weights = weights / weights.sum(-1, keepdim=True).clamp_min(torch.finfo(wide).tiny)
        return weights * how.factor, chosen

    def _open(self, ranks: Tensor) -> Tensor:
        """The experts (N, E) in the groups that are open to each token."""
        parts = ranks.unflatten(-1, (self.routing.groups, -1))
        deciding = 1 if self.routing.score == "softmax" else min(2, parts.shape[-1])
        best = parts.topk(deciding, dim=-1).values.sum(-1).topk(self.routing.open_groups, dim=-1).indices
        allowed = torch.zeros(parts.shape[:-1], dtype=torch.bool, device=ranks.device).scatter(-1, best, True)
        return allowed.repeat_interleave(parts.shape[-1], -1)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[1]}, {self.routing}"


def all_are_cheaper(down_proj: Tensor, chosen: Tensor) -> bool:
    """Whether all of E experts for N tokens cost less than sorting tokens by the k experts that each chose (N, k).

    Counted are the wasted multiply-adds by one matrix (E, n, m); a few tokens are bound by memory instead.
    Not where gradients are recorded: those of an expert that no token chose may overflow.
    """
    experts, rows, columns = down_proj.shape
    return not torch.is_grad_enabled() and (experts - chosen.shape[1]) * rows * columns * max(len(chosen), 64) <= SPARED


def by_share(inner: Tensor, weights: Tensor, chosen: Tensor, asked: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Hidden channels of all experts (N, E, hidden) times each expert's weight for the token (N, E), and those weights.

    `asked` (N, E) tells which experts a token chose: no gradient of the others is formed.
    """
    share = weights.new_zeros(inner.shape[:2]).scatter(1, chosen, weights)
    inner = (inner * share[..., None]).to(inner.dtype)
    return inner if asked is None else _masked(inner, asked), share.to(inner.dtype)


def _masked(x: Tensor, asked: Tensor | None) -> Tensor:
    """x (N, E, ...), with 0 where the token did not choose the expert if `asked` (N, E) is given."""
    return x if asked is None else torch.where(asked[..., None], x, 0.0)


def at_once(inner: Tensor, weights: Tensor, chosen: Tensor, join: Callable[[Tensor, Tensor], Tensor]) -> Tensor | None:
    """The sum over all experts of such channels; None where it is not finite.

    Then an expert that no token chose may have overflowed, and the chosen ones must be computed alone.
    """
    out = join(*by_share(inner, weights, chosen))
    return out if math.isfinite(out.sum().item()) else None


def down_of_all(inner: Tensor, down_proj: Tensor) -> Tensor:
    """The sum over experts of ``down_e inner_e``: channels (N, E, hidden) and matrices (E, dim, hidden) to (N, dim)."""
    return F.linear(inner.flatten(1), down_proj.transpose(0, 1).flatten(1))


class _Experts(nn.Module):
    """Experts in stacked tensors; subclasses compute one of them, and all at once.

    Only experts that a token chose are computed, each for its tokens together. Where the choice may not be read (while
    tracing for a compiler, under function transforms, without memory), and where experts are so few and small that
    sorting tokens would cost more, all are, for every token; the same to rounding.
    """

    down_proj: nn.Parameter

    def one(self, x: Tensor, expert: int) -> Tensor:
        """What an expert makes of tokens (n, dim)."""
        raise NotImplementedError

    def inner(self, x: Tensor, asked: Tensor | None = None) -> Tensor:
        """The hidden channels of every expert for every token (N, dim): (N, E, hidden); 0 where not chosen."""
        raise NotImplementedError

    def joined(self, inner: Tensor, share: Tensor) -> Tensor:
        """The sum of all experts over such channels, which stand multiplied by the experts' shares (N, E): (N, dim)."""
        raise NotImplementedError

    def forward(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        if not has_values(chosen) or not chosen.numel():
            return self.through_all(x, weights, chosen)
        if all_are_cheaper(self.down_proj, chosen):
            out = at_once(self.inner(x), weights, chosen, self.joined)
            if out is not None:
                return out
        places = chosen.flatten().argsort(stable=True)  # a place is a token and one of its choices
        counts = chosen.flatten().bincount().tolist()
        tokens = x[places // chosen.shape[1]]
        parts = zip(tokens.split(counts), range(len(counts)), strict=True)
        made = torch.cat([self.one(part, expert) for part, expert in parts if len(part)])
        made = made[places.argsort()].unflatten(0, chosen.shape)
        mixed: Tensor = (made * weights[..., None]).sum(1)
        return mixed.to(x.dtype)

    def through_all(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """The same with every expert computed for every token: O(E / k) times the work, and no choice is read."""
        asked = torch.zeros(len(x), len(self.down_proj), dtype=torch.bool, device=x.device).scatter(1, chosen, True)
        return self.joined(*by_share(self.inner(x, asked), weights, chosen, asked))


class GatedExperts(_Experts):
    """Experts ``down_e(act(gate_e(x)) * up_e(x))`` (Shazeer 2020, arXiv:2002.05202): `GatedMLP`s without biases.

    ``gate_proj``, ``up_proj`` (E, hidden, dim) and ``down_proj`` (E, dim, hidden). Cost ``6 N k dim hidden`` FLOPs.
    """

    def __init__(self, dim: int, hidden: int, experts: int, act: nn.Module) -> None:
        super().__init__()
        self.gate_proj = nn.Parameter(torch.empty(experts, hidden, dim))
        self.up_proj = nn.Parameter(torch.empty(experts, hidden, dim))
        self.down_proj = nn.Parameter(torch.empty(experts, dim, hidden))
        self.act = act
        self.reset_parameters()

    def reset_parameters(self, std: float = 0.02) -> None:
        for weight in (self.gate_proj, self.up_proj, self.down_proj):
            nn.init.normal_(weight, std=std)

    def one(self, x: Tensor, expert: int) -> Tensor:
        inner = self.act(F.linear(x, self.gate_proj[expert])) * F.linear(x, self.up_proj[expert])
        return F.linear(inner, self.down_proj[expert])

    def inner(self, x: Tensor, asked: Tensor | None = None) -> Tensor:
        shape = self.gate_proj.shape[:2]
        gate, up = (F.linear(x, weight.flatten(0, 1)).unflatten(-1, shape) for weight in (self.gate_proj, self.up_proj))
        hidden: Tensor = self.act(_masked(gate, asked)) * _masked(up, asked)
        return hidden

    def joined(self, inner: Tensor, share: Tensor) -> Tensor:
        return down_of_all(inner, self.down_proj)


class ClampedSwiGLU(nn.Module):
    """The gate of gpt-oss's experts (OpenAI 2025, arXiv:2508.10925) on interleaved channels ``(g0, u0, g1, u1, ...)``.

    ``(clamp(u, -limit, limit) + 1) * g' * sigmoid(alpha g')`` with ``g' = min(g, limit)``; ``(..., 2 n)`` to ``(...,
    n)``.
    """

    def __init__(self, alpha: float = 1.702, limit: float = 7.0) -> None:
        super().__init__()
        self.alpha, self.limit = alpha, limit

    def forward(self, gate_up: Tensor) -> Tensor:
        gate = gate_up[..., ::2].clamp(max=self.limit)
        up = gate_up[..., 1::2].clamp(-self.limit, self.limit)
        return (up + 1) * (gate * torch.sigmoid(gate * self.alpha))


class StackedExperts(_Experts):
    """Experts ``down_e(act(x up_e + b_e)) + c_e``, gpt-oss's; ``act`` maps ``2 hidden`` channels to ``hidden``.

    ``gate_up_proj (E, dim, 2 hidden)``, ``down_proj (E, hidden, dim)``: rows are inputs, so a token multiplies from
    the left. Cost ``6 N k dim hidden`` FLOPs.
    """

    def __init__(self, dim: int, hidden: int, experts: int, act: nn.Module) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(experts, dim, 2 * hidden))
        self.gate_up_proj_bias = nn.Parameter(torch.empty(experts, 2 * hidden))
        self.down_proj = nn.Parameter(torch.empty(experts, hidden, dim))
        self.down_proj_bias = nn.Parameter(torch.empty(experts, dim))
        self.act = act
        self.reset_parameters()

    def reset_parameters(self, std: float = 0.02) -> None:
        for weight in (self.gate_up_proj, self.down_proj):
            nn.init.normal_(weight, std=std)
        for bias in (self.gate_up_proj_bias, self.down_proj_bias):
            nn.init.zeros_(bias)

    def one(self, x: Tensor, expert: int) -> Tensor:
        hidden = self.act(torch.addmm(self.gate_up_proj_bias[expert], x, self.gate_up_proj[expert]))
        return torch.addmm(self.down_proj_bias[expert], hidden, self.down_proj[expert])

    def inner(self, x: Tensor, asked: Tensor | None = None) -> Tensor:
        both = (x @ self.gate_up_proj + self.gate_up_proj_bias[:, None]).transpose(0, 1)
        hidden: Tensor = self.act(_masked(both, asked))
        return hidden

    def joined(self, inner: Tensor, share: Tensor) -> Tensor:
        return torch.addmm(share @ self.down_proj_bias, inner.flatten(1), self.down_proj.flatten(0, 1))


class MixtureOfExperts(nn.Module):
    """``sum over a token's experts of weight * expert(x)``, plus the output of shared experts, if there are any.

    Args:
        router: from tokens (N, dim) to weights and expert numbers (N, k): a `Router`.
        experts: from tokens, weights and numbers to (N, dim): `GatedExperts` or `StackedExperts`.
        shared: a feed-forward part for every token, whose output is added; None for none.
        shared_gate: from dim to 1: the shared part is multiplied by its sigmoid (Qwen3-Next).

    >>> moe = MixtureOfExperts(Router(8, Routing(4, 2)), GatedExperts(8, 16, 4, nn.SiLU()))
    >>> moe(torch.ones(2, 3, 8)).shape
    torch.Size([2, 3, 8])
    """

    def __init__(
        self,
        router: nn.Module,
        experts: nn.Module,
        shared: nn.Module | None = None,
        shared_gate: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.router = router
        self.experts = experts
        self.shared = shared
        self.shared_gate = shared_gate

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, x.shape[-1])
        out: Tensor = self.experts(tokens, *self.router(tokens))
        if self.shared is not None:
            always = self.shared(tokens)
            out = out + (always if self.shared_gate is None else torch.sigmoid(self.shared_gate(tokens)) * always)
        return out.view(x.shape)
