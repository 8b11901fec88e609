"""How fast a state forgets: every log-decay formula, once. All give nats per token, at most 0, in float32 or float64.

    softplus      -exp(A) softplus(x + b)                 Gated DeltaNet, KDA; Mamba in two: a step, and its decay
    bounded       low sigmoid(exp(A) (x + b))             KDA with a lower bound
    logsigmoid    log sigmoid(x) / tau                    GLA
    slopes        -slope_h, constant                      lightning attention, RetNet
    rglru         -c r softplus(p)                        RG-LRU
    lower-bounded log(low + (1 - low) sigmoid(x))         HGRN
    complement    log(1 - alpha)                          exponential moving averages

>>> import torch
>>> bool((softplus_decay(torch.randn(2, 5, 4), torch.zeros(4), torch.zeros(4)) <= 0).all())
True
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from regard.biases import alibi_slopes
from regard.masks.checks import whole

__all__ = [
    "bounded_decay",
    "complement_decay",
    "fixed_slopes",
    "lightning_slopes",
    "logsigmoid_decay",
    "lower_bounded_decay",
    "retention_slopes",
    "rglru_decay",
    "softplus_decay",
    "softplus_step",
    "step_bias",
    "step_decay",
]


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _softplus(x: Tensor) -> Tensor:
    """``log(1 + exp(x))``. Not torch's own, which is x above 20 and whose strides differ from what compilers assume."""
    x = _wide(x)
    return torch.logaddexp(x, torch.zeros((), dtype=x.dtype, device=x.device))


def _logsigmoid(x: Tensor) -> Tensor:
    return -_softplus(-x)


def softplus_step(x: Tensor, bias: Tensor | None = None, limits: tuple[float, float] = (0.0, float("inf"))) -> Tensor:
    """``softplus(x + bias)`` clamped to `limits`: Mamba's steps (dt), in tokens of its time.

    Gu and Dao 2023, arXiv:2312.00752; Dao and Gu 2024, arXiv:2405.21060. Raises ValueError unless
    ``0 <= low <= high``.

    >>> softplus_step(torch.zeros(1), limits=(0.0, 0.5)).item()
    0.5
    """
    low, high = limits
    if not 0.0 <= low <= high:
        raise ValueError(f"limits: expected numbers with 0 <= low <= high, got {limits}")
    step = _softplus(x if bias is None else _wide(x) + _wide(bias))
    return step if (low, high) == (0.0, float("inf")) else step.clamp(low, high)


def step_decay(step: Tensor, log_rate: Tensor) -> Tensor:
    """``-exp(log_rate) * step``, nats per token: what a state forgets in a step. `log_rate` is often called A_log.

    >>> step_decay(torch.ones(1), torch.zeros(1)).item()
    -1.0
    """
    return -torch.exp(_wide(log_rate)) * _wide(step)


def softplus_decay(x: Tensor, log_rate: Tensor, bias: Tensor) -> Tensor:
    """``-exp(log_rate) * softplus(x + bias)``, nats per token.

    `log_rate` (often called A_log) and `bias` (dt_bias) broadcast against x. Yang et al. 2024, arXiv:2412.06464; Kimi
    team 2025, arXiv:2510.26692.

    >>> softplus_decay(torch.zeros(1), torch.zeros(1), torch.zeros(1)).item()  # -log 2
    -0.6931471824645996
    """
    return step_decay(softplus_step(x, bias), log_rate)


def bounded_decay(x: Tensor, log_rate: Tensor, bias: Tensor, low: float = -5.0) -> Tensor:
    """``low * sigmoid(exp(log_rate) * (x + bias))``, between `low` < 0 and 0 nats per token: KDA of Kimi K3.

    Another function than `softplus_decay`, not a clamp of it. Raises ValueError unless ``low < 0``.

    >>> bounded_decay(torch.zeros(1), torch.zeros(1), torch.zeros(1)).item()
    -2.5
    """
    if not -float("inf") < low < 0:
        raise ValueError(f"low: expected a finite number < 0 (nats per token), got {low}")
    return low * torch.sigmoid(torch.exp(_wide(log_rate)) * (_wide(x) + _wide(bias)))


def logsigmoid_decay(x: Tensor, tau: float = 16.0, low: float | None = None) -> Tensor:
    """``log sigmoid(x) / tau``, nats per token, clamped from below at `low` if given: GLA.

    Yang et al. 2023, arXiv:2312.06635, sec. 4.4. Raises ValueError unless ``tau > 0``.

    >>> logsigmoid_decay(torch.zeros(1), tau=1.0).item()
    -0.6931471824645996
    """
    if not tau > 0:
        raise ValueError(f"tau: expected a number > 0, got {tau}")
    decay = _logsigmoid(x) / tau
    return decay if low is None else decay.clamp_min(low)


def lightning_slopes(
    heads: int, layer: int | None = None, layers: int | None = None, *, geometric: bool = False
) -> Tensor:
    """ALiBi's slopes (heads,), float64, as decay rates (the log-decay is minus the slope); scaled down with depth.

    They are ``2 ** (-8 (h + 1) / heads)`` where `heads` is a power of two, and with `geometric` for any number. With
    `layer` (from 0) of `layers`, times ``1 - layer / (layers - 1 + 1e-5) + 1e-5``: MiniMax-01. Qin et al. 2024,
    arXiv:2401.04658; MiniMax 2025, arXiv:2501.08313. Raises ValueError for a layer that there isn't.

    >>> lightning_slopes(2).tolist()
    [0.0625, 0.00390625]
    """
    steps = torch.arange(1, whole("heads", heads, 1) + 1, dtype=torch.float64)
    slopes = torch.exp2(-8.0 * steps / heads) if geometric else alibi_slopes(heads)
    if layer is None and layers is None:
        return slopes
    count = whole("layers", layers, 1)
    if not 0 <= whole("layer", layer, 0) < count:
        raise ValueError(f"layer: expected a layer from 0 to {count - 1}, got {layer}")
    assert layer is not None
    return slopes * (1 - layer / (count - 1 + 1e-5) + 1e-5)


def retention_slopes(heads: int) -> Tensor:
    """``-log(1 - 2^(-5 - h))`` for head h from 0, (heads,), float64: RetNet's decay rates.

    Sun et al. 2023, arXiv:2307.08621, eq. 8.

    >>> retention_slopes(1).item()
    0.0317486983145803
    """
    return -torch.log1p(-torch.exp2(-5.0 - torch.arange(whole("heads", heads, 1), dtype=torch.float64)))


def fixed_slopes(slopes: Tensor | Sequence[float], heads: int) -> tuple[float, ...]:
    """Decay rates that a layer keeps as plain numbers, so that no cast of the layer rounds them: one per head, >= 0.

    Raises ValueError for another count, and for a rate that is negative or not finite.

    >>> fixed_slopes([0.5, 0.25], 2)
    (0.5, 0.25)
    """
    found = tuple(float(slope) for slope in (slopes.tolist() if isinstance(slopes, Tensor) else slopes))
    if len(found) != heads or not all(0.0 <= slope < math.inf for slope in found):
        raise ValueError(f"slopes: expected {heads} finite decay rates >= 0 (nats per token), got {list(found)}")
    return found


def rglru_decay(gate: Tensor, p: Tensor, c: float = 8.0) -> Tensor:
    """``-c * gate * softplus(p)``, nats per token: RG-LRU, with `gate` in [0, 1] the recurrence gate.

    De et al. 2024, arXiv:2402.19427, eq. 3-4 (p is minus the paper's Lambda).

    >>> rglru_decay(torch.ones(1), torch.zeros(1)).item()
    -5.545177459716797
    """
    return -c * _wide(gate) * _softplus(p)


def lower_bounded_decay(x: Tensor, low: Tensor | float = 0.0) -> Tensor:
    """``log(low + (1 - low) * sigmoid(x))`` with `low` in [0, 1): HGRN's forget gate.

    Qin et al. 2023, arXiv:2311.04823, eq. 5.

    >>> lower_bounded_decay(torch.zeros(1), 0.5).exp().item()
    0.75
    """
    if not isinstance(low, Tensor) and low == 0.0:
        return _logsigmoid(x)
    low = _wide(low) if isinstance(low, Tensor) else low
    return torch.log(low + (1 - low) * torch.sigmoid(_wide(x)))


def complement_decay(alpha: Tensor) -> Tensor:
    """``log(1 - alpha)`` with `alpha` in [0, 1]: what an exponential moving average keeps of the past.

    >>> complement_decay(torch.tensor([1.0])).item()
    -inf
    """
    return torch.log1p(-_wide(alpha))


def step_bias(count: int, low: float = 1e-3, high: float = 0.1, floor: float = 1e-4) -> Tensor:
    """Biases (count,) whose softplus is log-uniform between `low` and `high`, at least `floor`: Mamba's steps.

    Gu and Dao 2023, arXiv:2312.00752, sec. 3.6.

    >>> 1e-4 <= _softplus(step_bias(1)).item() <= 0.11
    True
    """
    step = torch.exp(torch.empty(count).uniform_(math.log(low), math.log(high))).clamp_min(floor)
    return step + torch.log(-torch.expm1(-step))
