"""How fast a state forgets: every log-decay formula, once. All give nats per token, at most 0, in float32 or float64.

    softplus      -exp(A) softplus(x + b)                 Gated DeltaNet, KDA, Mamba-2; Mamba has the step alone
    bounded       low sigmoid(exp(A) (x + b))             KDA with a lower bound
    logsigmoid    log sigmoid(x) / tau                    GLA
    slopes        -slope_h, constant                      lightning attention, RetNet
    rglru         -c sigmoid(x) softplus(p)               RG-LRU
    lower-bounded log(low + (1 - low) sigmoid(x))         HGRN
    complement    log(1 - sigmoid(x))                     exponential moving averages
    damped        log(1 - sigmoid(d) sigmoid(a))          Mega's damped moving averages

x is what a projection gives, before any sigmoid: a gate that is rounded to 1 no longer says how far from 1 it was.
The formulas are float64 inside and rounded once, so values and gradients are right wherever their dtype can hold them.
A log-decay beyond the dtype's range is -inf (or the largest number of float64): both forget everything.

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
from regard.checks import positive, whole

__all__ = [
    "bounded_decay",
    "complement_decay",
    "complement_decay_from_logit",
    "damped_decay",
    "fill_step_bias",
    "fixed_slopes",
    "lightning_slopes",
    "logsigmoid_decay",
    "lower_bounded_decay",
    "lower_bounded_input",
    "retention_slopes",
    "rglru_decay",
    "rglru_decay_from_logit",
    "sigmoid",
    "softplus_decay",
    "softplus_step",
    "state_rate",
    "step_bias",
    "step_decay",
]

LARGEST = torch.finfo(torch.float64).max
FAR = -40.0  # below, softplus is exp to float64's precision
STEEPEST_RATE = 1400.0  # the exponential of a half is a float64; past it, whatever is multiplied is 0 or too large


def _rounded(value: Tensor, *given: Tensor | None) -> Tensor:
    """A float64 result in the widest dtype of what was given, at least float32."""
    wide = any(x is not None and x.dtype == torch.float64 for x in given)
    return value if wide else value.to(torch.float32)


def _sum(x: Tensor, bias: Tensor | None) -> Tensor:
    return x.double() if bias is None else x.double() + bias.double()


def _softplus(x: Tensor) -> Tensor:
    """``log(1 + exp(x))`` of float64 numbers; exp far below 0, where its derivatives are too."""
    near = torch.logaddexp(x.clamp(min=FAR), torch.zeros((), dtype=x.dtype, device=x.device))
    return torch.where(x < FAR, torch.exp(x.clamp(max=FAR)), near)


def _log_softplus(x: Tensor) -> Tensor:
    """``log(softplus(x))`` of float64 numbers: x itself far below 0."""
    near = torch.logaddexp(x.clamp(min=FAR), torch.zeros((), dtype=x.dtype, device=x.device))
    return torch.where(x < FAR, x, torch.log(near))


def _logaddexp(x: Tensor, y: Tensor) -> Tensor:
    """torch's for terms <= 0; its second derivative is no number where they are very far apart."""
    return torch.logaddexp(torch.maximum(x, 2.0 * y - 300.0), torch.maximum(y, 2.0 * x - 300.0))


def _times_exp(x: Tensor, rate: Tensor, limit: float) -> Tensor:
    """``x * exp(rate)`` of float64 numbers, held within ``-limit`` and `limit`; nothing between over- or underflows."""
    half = torch.exp(rate.clamp(-STEEPEST_RATE, STEEPEST_RATE) / 2)
    bound = (limit / half).detach()
    return (x * half).clamp(-bound, bound) * half


def sigmoid(x: Tensor) -> Tensor:
    """``1 / (1 + exp(-x))`` in at least float32; its derivatives keep their precision at both ends.

    >>> sigmoid(torch.zeros(1)).item()
    0.5
    """
    return _rounded(torch.exp(-_softplus(-x.double())), x)


def softplus_step(x: Tensor, bias: Tensor | None = None, limits: tuple[float, float] = (0.0, float("inf"))) -> Tensor:
    """``softplus(x + bias)`` clamped to `limits`: Mamba's steps (dt), in tokens of its time.

    Gu and Dao 2023, arXiv:2312.00752; Dao and Gu 2024, arXiv:2405.21060. Raises ValueError unless
    ``0 <= low <= high``.

    >>> softplus_step(torch.zeros(1), limits=(0.0, 0.5)).item()
    0.5
    """
    step = _softplus(_sum(x, bias))
    return _rounded(step.clamp(*limits) if _limited(limits) else step, x, bias)


def _limited(limits: tuple[float, float]) -> bool:
    """Whether steps are clamped at all; raise unless they can be."""
    low, high = limits
    if not 0.0 <= low <= high:
        raise ValueError(f"limits: expected numbers with 0 <= low <= high, got {limits}")
    return (low, high) != (0.0, float("inf"))


def state_rate(log_rate: Tensor) -> Tensor:
    """``-exp(log_rate)``, in at least float32; the largest finite number where it is beyond the range.

    Mamba's A and RWKV-6's log-decay.

    >>> state_rate(torch.tensor([0.0, 1000.0])).isfinite().all().item()
    True
    """
    largest = torch.finfo(torch.promote_types(log_rate.dtype, torch.float32)).max
    return _rounded(-torch.exp(log_rate.double().clamp(max=math.log(largest))), log_rate)


def step_decay(step: Tensor, log_rate: Tensor) -> Tensor:
    """``-exp(log_rate) * step``, nats per token: what a state forgets in a step. `log_rate` is often called A_log.

    Where the step is a softplus, `softplus_decay` is exact for steps that are too small to be held.

    >>> step_decay(torch.ones(1), torch.zeros(1)).item()
    -1.0
    """
    return _rounded(-_times_exp(step.double(), log_rate.double(), LARGEST), step, log_rate)


def softplus_decay(
    x: Tensor, log_rate: Tensor, bias: Tensor | None = None, limits: tuple[float, float] = (0.0, float("inf"))
) -> Tensor:
    """``-exp(log_rate) * softplus(x + bias)``, nats per token; the softplus is clamped to `limits`.

    `log_rate` (often called A_log) and `bias` (dt_bias) broadcast against x. Yang et al. 2024, arXiv:2412.06464; Kimi
    team 2025, arXiv:2510.26692; with limits Dao and Gu 2024, arXiv:2405.21060. Raises ValueError unless
    ``0 <= low <= high``.

    >>> softplus_decay(torch.zeros(1), torch.zeros(1), torch.zeros(1)).item()  # -log 2
    -0.6931471824645996
    """
    step = _log_softplus(_sum(x, bias))
    if _limited(limits):
        step = step.clamp(*(math.log(limit) if limit else -math.inf for limit in limits))
    log = log_rate.double() + step
    return _rounded(-torch.exp(log.clamp(max=math.log(LARGEST))), x, log_rate, bias)


def bounded_decay(x: Tensor, log_rate: Tensor, bias: Tensor, low: float = -5.0) -> Tensor:
    """``low * sigmoid(exp(log_rate) * (x + bias))``, between `low` < 0 and 0 nats per token: KDA of Kimi K3.

    Another function than `softplus_decay`, not a clamp of it. Raises ValueError unless ``low < 0``.

    >>> bounded_decay(torch.zeros(1), torch.zeros(1), torch.zeros(1)).item()
    -2.5
    """
    if not -float("inf") < low < 0:
        raise ValueError(f"low: expected a finite number < 0 (nats per token), got {low}")
    inner = _times_exp(_sum(x, bias), log_rate.double(), 800.0)  # past 745 a sigmoid is 0 or 1
    return _rounded(low * sigmoid(inner), x, log_rate, bias)


def logsigmoid_decay(x: Tensor, tau: float = 16.0, low: float | None = None) -> Tensor:
    """``log sigmoid(x) / tau``, nats per token, clamped from below at `low` if given: GLA.

    Yang et al. 2023, arXiv:2312.06635, sec. 4.4. Raises ValueError for a tau that float32 does not hold.

    >>> logsigmoid_decay(torch.zeros(1), tau=1.0).item()
    -0.6931471824645996
    """
    positive("tau", tau)
    decay = -_softplus(-x.double()) / tau
    return _rounded(decay if low is None else decay.clamp_min(low), x)


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
    return _rounded(-c * gate.double() * _softplus(p.double()), gate, p)


def rglru_decay_from_logit(x: Tensor, p: Tensor, c: float = 8.0) -> Tensor:
    """``-c * sigmoid(x) * softplus(p)``: `rglru_decay` from what the gate's projection gives.

    >>> rglru_decay_from_logit(torch.zeros(1), torch.zeros(1)).item()
    -2.7725887298583984
    """
    return _rounded(-c * sigmoid(x.double()) * _softplus(p.double()), x, p)


def lower_bounded_decay(x: Tensor, low: Tensor | float = 0.0) -> Tensor:
    """``log(low + (1 - low) * sigmoid(x))`` with `low` in [0, 1): HGRN's forget gate.

    Qin et al. 2023, arXiv:2311.04823, eq. 5.

    >>> lower_bounded_decay(torch.zeros(1), 0.5).exp().item()
    0.75
    """
    x, given = x.double(), (x, low if isinstance(low, Tensor) else None)
    if not isinstance(low, Tensor) and low == 0.0:
        return _rounded(-_softplus(-x), *given)
    low = low.double() if isinstance(low, Tensor) else torch.tensor(low, dtype=x.dtype, device=x.device)
    lost = (1.0 - low) * sigmoid(-x)
    # Where more than half is lost, the sum has no cancellation; without a bound it falls on as exp(x) below its range.
    kept = torch.log(low + (1.0 - low) * sigmoid(x.clamp(min=-700.0)))
    kept = kept + torch.where(low == 0.0, (x + 700.0).clamp(max=0.0), 0.0)
    return _rounded(torch.where(lost < 0.5, torch.log1p(-lost.clamp(max=0.5)), kept), *given)


def lower_bounded_input(x: Tensor, low: Tensor | float = 0.0) -> Tensor:
    """``(1 - low) * sigmoid(-x)``: 1 less the forget gate of `lower_bounded_decay`, the share of what enters.

    >>> lower_bounded_input(torch.zeros(1), 0.5).item()
    0.25
    """
    if not isinstance(low, Tensor):
        return _rounded((1.0 - low) * sigmoid(-x.double()), x)
    return _rounded((1.0 - low.double()) * sigmoid(-x.double()), x, low)


def complement_decay(alpha: Tensor) -> Tensor:
    """``log(1 - alpha)`` with `alpha` in [0, 1]: what an exponential moving average keeps of the past.

    Where alpha is 1 it is -inf, with the gradient 0. A sigmoid is rounded to 1 early (in float32 from 17 on):
    `complement_decay_from_logit` has the right value and gradient there too.

    >>> complement_decay(torch.tensor([1.0])).item()
    -inf
    """
    whole = alpha == 1.0
    return _rounded(torch.where(whole, -torch.inf, torch.log1p(-torch.where(whole, 0.0, alpha.double()))), alpha)


def complement_decay_from_logit(x: Tensor) -> Tensor:
    """``log(1 - sigmoid(x)) = -softplus(x)``: `complement_decay` of a learned weight ``sigmoid(x)``.

    >>> complement_decay_from_logit(torch.tensor([200.0])).item()
    -200.0
    """
    return _rounded(-_softplus(x.double()), x)


def damped_decay(delta: Tensor, alpha: Tensor) -> Tensor:
    """``log(1 - sigmoid(delta) * sigmoid(alpha))``: a moving average that forgets a part of what it could.

    Ma et al. 2022, arXiv:2209.10655, eq. 2.

    >>> damped_decay(torch.zeros(1), torch.zeros(1)).exp().item()
    0.75
    """
    p, a = delta.double(), alpha.double()
    written = -_softplus(-p) - _softplus(-a)  # the logarithm of what is forgotten
    less = torch.log1p(-torch.exp(written.clamp(max=-math.log(2.0))))
    more = _logaddexp(-_softplus(p), -_softplus(-p) - _softplus(a))  # (1 - p) + p (1 - a): no cancellation here
    return _rounded(torch.where(written < -math.log(2.0), less, more), delta, alpha)


def step_bias(count: int, low: float = 1e-3, high: float = 0.1, floor: float = 1e-4) -> Tensor:
    """Biases (count,) whose softplus is log-uniform between `low` and `high`, at least `floor`: Mamba's steps.

    Gu and Dao 2023, arXiv:2312.00752, sec. 3.6.

    >>> 1e-4 <= softplus_step(step_bias(1)).item() <= 0.11
    True
    """
    return fill_step_bias(torch.empty(count), low, high, floor)


def fill_step_bias(bias: Tensor, low: float = 1e-3, high: float = 0.1, floor: float = 1e-4) -> Tensor:
    """`step_bias` written over a tensor, in place.

    >>> 1e-4 <= softplus_step(fill_step_bias(torch.empty(1))).item() <= 0.11
    True
    """
    with torch.no_grad():
        step = bias.uniform_(math.log(low), math.log(high)).exp_().clamp_min_(floor)
        return bias.add_(torch.log(-torch.expm1(-step)))
