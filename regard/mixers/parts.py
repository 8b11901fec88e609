"""Parts that several mechanisms are built from."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.biases import RelativeBuckets
from regard.checks import is_factory, norm_eps, whole
from regard.mixers.sequence import TokenSequence
from regard.score_options import ScoreOptions

__all__ = [
    "GatedRMSNorm",
    "MambaConfig",
    "Projections",
    "RMSNorm",
    "RelativePositionBias",
    "Scores",
    "ShortConv",
    "fill_rates",
    "l2_normalized",
    "linear_with_start",
    "low_rank",
    "merge_heads",
    "split_heads",
]


LEAST_EPS = 1e-25  # the derivative of 1 / sqrt(eps) is a float32


def _rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight``, for any eps >= 0."""
    if eps >= LEAST_EPS:
        return F.rms_norm(x, (x.shape[-1],), weight, eps)
    normed = _direction(x, eps * x.shape[-1]) * math.sqrt(x.shape[-1])
    return normed if weight is None else normed * weight


def _direction(x: Tensor, eps: float) -> Tensor:
    """``x / sqrt(sum(x^2) + eps)``; with an eps near 0 a row of zeros gives 0, and finite gradients too."""
    size = x.detach().abs().amax(-1, keepdim=True)  # the direction of x / size is that of x, whatever size is
    empty = size == 0.0
    size = torch.where(empty, 1.0, size)
    part = x / size
    added = torch.where(empty, 1.0, eps / size / size)
    return part * torch.rsqrt(part.square().sum(-1, keepdim=True) + added)


class RMSNorm(nn.Module):
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last axis, or ``* (1 + weight)`` with `unit_offset`.

    Zhang and Sennrich 2019, arXiv:1910.07467. The offset form is Gemma's and Qwen3-Next's: their weights start at 0.

    >>> RMSNorm(4, eps=0.0)(torch.full((1, 4), 2.0)).tolist()
    [[1.0, 1.0, 1.0, 1.0]]
    """

    def __init__(self, dim: int, eps: float = 1e-6, unit_offset: bool = False) -> None:
        super().__init__()
        self.eps, self.unit_offset = norm_eps(eps), unit_offset
        self.weight = nn.Parameter(torch.empty(dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.weight, 0.0 if self.unit_offset else 1.0)

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == self.weight.dtype and x.dtype in (torch.float32, torch.float64):
            return _rms_norm(x, 1.0 + self.weight if self.unit_offset else self.weight, self.eps)
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        normed = _rms_norm(wide, None, self.eps)
        if self.unit_offset:
            return (normed * (1.0 + self.weight.to(wide.dtype))).to(x.dtype)
        return (normed.to(torch.promote_types(x.dtype, self.weight.dtype)) * self.weight).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}" + (", unit_offset=True" if self.unit_offset else "")


class GatedRMSNorm(nn.Module):
    """An RMS norm and a gate: ``rms(x) * weight * act(z)``, or ``rms(x * act(z)) * weight`` with `gate_first`.

    Args:
        dim: the last axis of x and z; a head's size, or all heads together.
        groups: equal parts of that axis which are normalised separately.
        eps: added to the mean square.
        gate: ``"silu"`` or ``"sigmoid"``.
        gate_first: the gate multiplies before the norm, not after it.

    Yang et al. 2024, arXiv:2412.06464 (norm first, per head); Dao and Gu 2024, arXiv:2405.21060 (gate first).

    >>> GatedRMSNorm(4, gate="sigmoid", eps=0.0)(torch.ones(1, 4), torch.zeros(1, 4)).tolist()
    [[0.5, 0.5, 0.5, 0.5]]
    """

    def __init__(
        self, dim: int, groups: int = 1, *, eps: float = 1e-5, gate: str = "silu", gate_first: bool = False
    ) -> None:
        super().__init__()
        if gate not in ("silu", "sigmoid"):
            raise ValueError(f"gate: expected 'silu' or 'sigmoid', got {gate!r}")
        if dim % whole("groups", groups, 1):
            raise ValueError(f"groups: expected a divisor of dim={dim}, got {groups}")
        self.groups, self.eps, self.gate, self.gate_first = groups, norm_eps(eps), gate, gate_first
        self.weight = nn.Parameter(torch.empty(dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        gate = (F.silu if self.gate == "silu" else torch.sigmoid)(z.to(wide))
        mixed = x.to(wide) * gate if self.gate_first else x.to(wide)
        if self.groups == 1:
            normed = _rms_norm(mixed, self.weight.to(wide), self.eps)
        else:
            parts = mixed.unflatten(-1, (self.groups, -1))
            normed = _rms_norm(parts, None, self.eps).flatten(-2) * self.weight.to(wide)
        return (normed if self.gate_first else normed * gate).to(z.dtype)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, groups={self.groups}, gate={self.gate!r}, gate_first={self.gate_first}"


class ShortConv(nn.Module):
    """A causal depthwise convolution of a few taps as a part of a recurrent layer, with SiLU after it or nothing.

    ``weight`` is (channels, conv_size), the last tap the current token's; ``bias`` (channels,). Its state is the last
    ``conv_size - 1`` inputs. A weight wider than the tokens widens them: the result is rounded once, after the SiLU, to
    the tokens' dtype. Layers give it widened tokens: what follows may normalise them before it rounds.
    """

    def __init__(self, channels: int, conv_size: int = 4, *, bias: bool = False, silu: bool = True) -> None:
        super().__init__()
        self.channels, self.conv_size, self.silu = channels, whole("conv_size", conv_size, 1), silu
        self.weight = nn.Parameter(torch.empty(channels, conv_size))
        self.bias = nn.Parameter(torch.empty(channels)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        bound = self.conv_size**-0.5
        nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    @property
    def state_shape(self) -> tuple[int, int]:
        """The state's shape, without the batch axis."""
        return self.conv_size - 1, self.channels

    def matrix_macs(self) -> int:
        """Multiply-accumulates of one token."""
        return self.weight.numel()

    def forward(self, seq: TokenSequence, x: Tensor, conv_state: Tensor | None) -> tuple[Tensor, Tensor]:
        """(the convolved tokens (B, T, channels), its new state)."""
        wide = x.to(torch.promote_types(x.dtype, self.weight.dtype))
        y, conv_state = seq.conv(wide, self.weight, self.bias, conv_state)
        return (F.silu(y) if self.silu else y).to(x.dtype), conv_state


@dataclass(frozen=True)
class MambaConfig:
    """What stands round the state space in a Mamba layer.

    Args:
        conv_size: of the short convolution.
        conv_bias: the convolution has a bias.
        bias: the input and output projections have biases.
        eps: of the norm before the output projection, where there is one.
    """

    conv_size: int = 4
    conv_bias: bool = True
    bias: bool = False
    eps: float = 1e-5

    def __post_init__(self) -> None:
        whole("conv_size", self.conv_size, 1)
        norm_eps(self.eps)


def l2_normalized(x: Tensor, eps: float = 1e-6) -> Tensor:
    """``x / sqrt(sum(x^2) + eps)`` over the last axis, in at least float32, in x's dtype.

    >>> l2_normalized(torch.tensor([3.0, 4.0]), eps=0.0).tolist()
    [0.6000000238418579, 0.800000011920929]
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    if eps < LEAST_EPS:
        return _direction(wide, eps).to(x.dtype)
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + eps)).to(x.dtype)


def low_rank(dim: int, rank: int | None, out: int, *, bias: bool = False) -> nn.Module:
    """A linear map from `dim` to `out` channels through `rank` of them, or one whole matrix where `rank` is None.

    A bias is added at the end. ``0.weight`` (rank, dim) and ``1.weight`` (out, rank), or ``weight`` (out, dim).

    >>> [tuple(w.shape) for w in low_rank(8, 2, 6, bias=True).state_dict().values()]
    [(2, 8), (6, 2), (6,)]
    """
    if rank is None:
        return nn.Linear(dim, out, bias=bias)
    return nn.Sequential(nn.Linear(dim, whole("rank", rank, 1), bias=False), nn.Linear(rank, out, bias=bias))


def linear_with_start(inputs: int, outputs: int, start: Callable[[nn.Linear], None], *, bias: bool = True) -> nn.Linear:
    """A linear map whose `reset_parameters` is `start` of it, and which starts so.

    It is an ``nn.Linear`` and no subclass: quantisers and adapters find maps by their class.
    """
    with torch.device("meta"):  # torch's own start would draw in vain
        linear = nn.Linear(inputs, outputs, bias=bias)
    linear.weight = nn.Parameter(torch.empty(outputs, inputs))
    if bias:
        linear.bias = nn.Parameter(torch.empty(outputs))
    linear.reset_parameters = partial(start, linear)  # type: ignore[method-assign]
    linear.reset_parameters()
    return linear


def fill_rates(log_rates: Tensor, low: float, high: float) -> None:
    """Logarithms of rates of decay that are uniform between `low` and `high`, written over a tensor."""
    with torch.no_grad():
        log_rates.uniform_(low, high).log_()


@dataclass(frozen=True)
class Projections:
    """How queries, keys, values and the output of an attention layer are made.

    Args:
        bias: q, k, v projections have biases.
        key_bias: the k projection has one; as `bias` by default.
        out_bias: the output projection has one; as `bias` by default.
        out: there is an output projection at all (BERT's self-attention module has none of its own).
        context_dim: width of the context that keys and values are made from; the layer's own by default.
        gate: the output is multiplied by ``sigmoid(gate_proj(x))``, per head and channel, before the output projection.
        norm: a module factory; ``norm(width)`` normalises queries, and another keys, after the projection, before
            rotation.
        norm_over: ``"head"`` normalises each head, ``"all"`` the whole projection.
        clip: q, k, v are clamped to ``[-clip, clip]`` after the projection.
    """

    bias: bool = False
    key_bias: bool | None = None
    out_bias: bool | None = None
    out: bool = True
    context_dim: int | None = None
    gate: bool = False
    norm: Callable[[int], nn.Module] | None = None
    norm_over: str = "head"
    clip: float | None = None

    def __post_init__(self) -> None:
        if self.norm_over not in ("head", "all"):
            raise ValueError(f"norm_over: expected 'head' or 'all', got {self.norm_over!r}")
        if self.clip is not None and not self.clip > 0:
            raise ValueError(f"clip: expected a number > 0 or None, got {self.clip}")
        if self.context_dim is not None:
            whole("context_dim", self.context_dim, 1)
        if self.norm is not None:
            is_factory("norm", self.norm)


@dataclass(frozen=True)
class Scores(ScoreOptions):
    """What happens to a layer's scores, as in `regard.attention`; `sink` is a learned logit per head."""

    sink: bool = False
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.dropout <= 1.0:
            raise ValueError(f"dropout: expected a number in [0, 1], got {self.dropout}")
        self.check()


class RelativePositionBias(nn.Module):
    """T5's learned table of relative position biases, as a layer's ``bias``: ``forward()`` gives `RelativeBuckets`.

    ``weight`` is (buckets, heads). Layers that share it, as T5's do, are given the same module.

    Raffel et al. 2020, arXiv:1910.10683.

    >>> RelativePositionBias(32, 8)().head_count()
    8
    """

    def __init__(self, buckets: int, heads: int, *, bidirectional: bool = True, max_distance: int = 128) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(buckets, heads))
        self.bidirectional, self.max_distance = bidirectional, max_distance
        self.reset_parameters()

    def reset_parameters(self, std: float = 0.02) -> None:
        nn.init.normal_(self.weight, std=std)

    def forward(self) -> RelativeBuckets:
        return RelativeBuckets(self.weight, self.bidirectional, self.max_distance)


def split_heads(x: Tensor, heads: int) -> Tensor:
    """(B, T, heads * D) as (B, heads, T, D), a view."""
    batch, tokens, width = x.shape
    return x.view(batch, tokens, heads, width // heads).transpose(1, 2)


def merge_heads(x: Tensor) -> Tensor:
    """(B, heads, T, D) as (B, T, heads * D)."""
    return x.transpose(1, 2).flatten(2)
