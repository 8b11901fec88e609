"""Feed-forward parts: what stands beside the mixer in a block and treats every token alone.

All take and return ``(..., dim)``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = [
    "ACTIVATIONS",
    "ClampedSwiGLU",
    "GatedMLP",
    "MLP",
    "MixtureOfExperts",
    "StackedExperts",
    "TopKRouter",
    "activation",
]


class QuickGELU(nn.Module):
    """``x * sigmoid(1.702 x)`` (Hendrycks & Gimpel 2016, arXiv:1606.08415, the sigmoid approximation)."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(1.702 * x)


class SquaredReLU(nn.Module):
    """``relu(x)^2`` (So et al. 2021, arXiv:2109.08668)."""

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x).square()


ACTIVATIONS: Mapping[str, str] = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_accurate": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "relu2": "relu2",
    "relu6": "relu6",
    "silu": "silu",
    "swish": "silu",
    "mish": "mish",
    "hardswish": "hardswish",
    "leaky_relu": "leaky_relu",
    "sigmoid": "sigmoid",
    "tanh": "tanh",
    "linear": "linear",
}
"""The names that configuration files use, each with the function that it means."""

_MODULES: Mapping[str, Callable[[], nn.Module]] = {
    "gelu": nn.GELU,
    "gelu_tanh": partial(nn.GELU, approximate="tanh"),
    "quick_gelu": QuickGELU,
    "relu": nn.ReLU,
    "relu2": SquaredReLU,
    "relu6": nn.ReLU6,
    "silu": nn.SiLU,
    "mish": nn.Mish,
    "hardswish": nn.Hardswish,
    "leaky_relu": nn.LeakyReLU,
    "sigmoid": nn.Sigmoid,
    "tanh": nn.Tanh,
    "linear": nn.Identity,
}


def activation(name: str) -> nn.Module:
    """The elementwise activation of that name (the names of :data:`ACTIVATIONS`).

    Raises:
        ValueError: for a name that is not known.
    """
    if name not in ACTIVATIONS:
        raise ValueError(f"activation={name!r} is not known; accepted: {', '.join(sorted(ACTIVATIONS))}")
    return _MODULES[ACTIVATIONS[name]]()


class MLP(nn.Module):
    """``down(act(up(x)))``.

    >>> MLP(8, 32, activation("gelu"))(torch.ones(2, 3, 8)).shape
    torch.Size([2, 3, 8])
    """

    def __init__(self, dim: int, hidden: int, act: nn.Module, *, bias: bool = True) -> None:
        super().__init__()
        self.up_proj = nn.Linear(dim, hidden, bias=bias)
        self.down_proj = nn.Linear(hidden, dim, bias=bias)
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(self.act(self.up_proj(x)))
        return out


class GatedMLP(nn.Module):
    """``down(act(gate(x)) * up(x))`` (Shazeer 2020, arXiv:2002.05202).

    >>> GatedMLP(8, 24, activation("silu"))(torch.ones(2, 3, 8)).shape
    torch.Size([2, 3, 8])
    """

    def __init__(self, dim: int, hidden: int, act: nn.Module, *, bias: bool = False) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(dim, hidden, bias=bias)
        self.up_proj = nn.Linear(dim, hidden, bias=bias)
        self.down_proj = nn.Linear(hidden, dim, bias=bias)
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))
        return out


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


class TopKRouter(nn.Module):
    """Chooses ``k`` experts a token; their weights are the softmax over the chosen logits alone.

    ``x (N, dim)`` to weights and expert numbers, both ``(N, k)``.
    """

    def __init__(self, dim: int, experts: int, k: int, *, bias: bool = True) -> None:
        super().__init__()
        if not 1 <= k <= experts:
            raise ValueError(f"k={k} experts a token; accepted: 1 to experts={experts}")
        self.weight = nn.Parameter(torch.empty(experts, dim))
        self.bias = nn.Parameter(torch.zeros(experts)) if bias else None
        self.k = k
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits, chosen = F.linear(x, self.weight, self.bias).topk(self.k, dim=-1)
        return logits.softmax(-1), chosen


class StackedExperts(nn.Module):
    """Experts ``down_e(act(x up_e + b_e)) + c_e`` in stacked tensors; ``act`` maps ``2 hidden`` channels to ``hidden``.

    ``gate_up_proj (E, dim, 2 hidden)``, ``down_proj (E, hidden, dim)``: rows are inputs, so a token multiplies from
    the left. Only experts that a token chose are computed: cost ``O(N k dim hidden)``. Where the choice may not be read
    (while tracing for a compiler, under function transforms) all are: ``O(N E dim hidden)``, the same to rounding.
    """

    def __init__(self, dim: int, hidden: int, experts: int, act: nn.Module) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(experts, dim, 2 * hidden))
        self.gate_up_proj_bias = nn.Parameter(torch.zeros(experts, 2 * hidden))
        self.down_proj = nn.Parameter(torch.empty(experts, hidden, dim))
        self.down_proj_bias = nn.Parameter(torch.zeros(experts, dim))
        self.act = act
        for weight in (self.gate_up_proj, self.down_proj):
            nn.init.normal_(weight, std=0.02)

    def forward(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        if torch.compiler.is_compiling() or torch._C._functorch.is_functorch_wrapped_tensor(chosen):
            return self._all(x, weights, chosen)
        out = torch.zeros_like(x)
        for expert in chosen.unique().tolist():
            token, rank = (chosen == expert).nonzero(as_tuple=True)
            hidden = self.act(torch.addmm(self.gate_up_proj_bias[expert], x[token], self.gate_up_proj[expert]))
            y = torch.addmm(self.down_proj_bias[expert], hidden, self.down_proj[expert])
            out = out.index_add(0, token, y * weights[token, rank, None])
        return out

    def _all(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        share = x.new_zeros(x.shape[0], self.down_proj.shape[0]).scatter(1, chosen, weights)
        hidden = self.act(x @ self.gate_up_proj + self.gate_up_proj_bias[:, None])
        y = hidden @ self.down_proj + self.down_proj_bias[:, None]
        out: Tensor = (y * share.t()[..., None]).sum(0)
        return out


class MixtureOfExperts(nn.Module):
    """``sum over a token's experts of weight * expert(x)``; a router chooses, the experts compute.

    >>> moe = MixtureOfExperts(TopKRouter(8, 4, 2), StackedExperts(8, 16, 4, ClampedSwiGLU()))
    >>> moe(torch.ones(2, 3, 8)).shape
    torch.Size([2, 3, 8])
    """

    def __init__(self, router: nn.Module, experts: nn.Module) -> None:
        super().__init__()
        self.router = router
        self.experts = experts

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, x.shape[-1])
        out: Tensor = self.experts(tokens, *self.router(tokens))
        return out.view(x.shape)
