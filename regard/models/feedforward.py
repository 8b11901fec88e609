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
    "GatedMLP",
    "MLP",
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
    """The elementwise activation of that name (the names of `ACTIVATIONS`).

    Raises:
        ValueError: for a name that is not known.
    """
    if name not in ACTIVATIONS:
        raise ValueError(f"activation: expected one of {', '.join(sorted(ACTIVATIONS))}, got {name!r}")
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
