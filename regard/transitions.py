"""How a matrix state moves from one token to the next, read by `regard.recurrence`: one of three transitions.

    Decay:             S_t = a_t * S_{t-1} + k_t v_t^T
    Delta:             S_t = a_t * S_{t-1} + beta_t k_t (v_t - (a_t * S_{t-1})^T k_t)^T
    GeneralizedDelta:  S_t = a_t * S_{t-1} + w_t (S_{t-1}^T r_t)^T + k_t v_t^T

with ``a_t = exp(log_decay_t)``: none, a constant per head, a number per head and token, or one per key channel as well.

>>> import torch
>>> Delta(torch.rand(1, 4, 10), torch.zeros(1, 4, 10)).kind
'scalar'
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from regard.checks import describe
from regard.coordinates import can_read

__all__ = ["TRANSITIONS", "Decay", "Delta", "GeneralizedDelta", "Transition", "check_log_decay"]

KINDS = {None: "none", 1: "constant", 3: "scalar", 4: "channel"}


def check_log_decay(name: str, log_decay: Tensor) -> None:
    """Raise unless `log_decay` is a floating tensor that is nowhere positive (values are read on the CPU, eagerly).

    NaN passes, as through torch's own operations: a training step that overflowed is found, and skipped, by its result.
    """
    if not isinstance(log_decay, Tensor) or not log_decay.is_floating_point():
        raise TypeError(f"{name}: expected a float tensor of log-decays <= 0, or None, got {describe(log_decay)}")
    if can_read(log_decay) and log_decay.numel():
        values = log_decay.detach() if log_decay.requires_grad else log_decay
        top = values.max().item()
        if math.isnan(top):  # it hides the others
            top = values.nan_to_num(nan=-math.inf, posinf=math.inf, neginf=-math.inf).max().item()
        if top > 0:
            raise ValueError(f"{name}: expected log-decays <= 0 (nats per token), got {top:.6g}")


@dataclass(frozen=True, eq=False)
class Decay:
    """The state decays, then a key and value are written: ``S_t = exp(log_decay_t) * S_{t-1} + k_t v_t^T``.

    Args:
        log_decay: nats per token, <= 0; None, or a float tensor ``(Hv,)`` constant in time, ``(B, Hv, T)``, or
            ``(B, Hv, T, Dk)`` for every key channel. -inf forgets everything before the token, exactly.

    Katharopoulos et al. 2020, arXiv:2006.16236 (none); Qin et al. 2024, arXiv:2401.04658 (constant); Dao and Gu 2024,
    arXiv:2405.21060 (scalar); Yang et al. 2023, arXiv:2312.06635 (channel).

    >>> Decay().kind
    'none'
    """

    log_decay: Tensor | None = None

    beta = read_key = write_key = None

    @property
    def kind(self) -> str:
        """ "none", "constant", "scalar" or "channel": what the decay depends on."""
        return KINDS[None if self.log_decay is None else self.log_decay.ndim]

    def check(self, batch: int, heads: int, tokens: int, key_dim: int) -> None:
        """Raise unless the shapes fit `heads` value heads and the decay is nowhere positive."""
        if self.log_decay is None:
            return
        check_log_decay("log_decay", self.log_decay)
        fitting = {1: (heads,), 3: (batch, heads, tokens), 4: (batch, heads, tokens, key_dim)}
        if tuple(self.log_decay.shape) != fitting.get(self.log_decay.ndim):
            raise ValueError(
                f"log_decay: expected {fitting[1]}, {fitting[3]} or {fitting[4]}, got {tuple(self.log_decay.shape)}"
            )


@dataclass(frozen=True, eq=False)
class Delta:
    """The state decays, then what it holds at the key moves towards the value: the (gated) delta rule.

    ``S' = exp(log_decay_t) * S_{t-1}``, ``S_t = S' + beta_t k_t (v_t - S'^T k_t)^T``. With ``|k| = 1`` and ``beta = 1``
    the value is stored exactly; it is stable for ``beta |k|^2 < 2``.

    Args:
        beta: ``(B, Hv, T)``, a float tensor.
        log_decay: as in `Decay`.

    Schlag et al. 2021, arXiv:2102.11174 (no decay); Yang et al. 2024, arXiv:2412.06464 (scalar); Kimi team 2025,
    arXiv:2510.26692 (channel).

    >>> import torch
    >>> Delta(torch.ones(1, 2, 5)).kind
    'none'
    """

    beta: Tensor
    log_decay: Tensor | None = None

    read_key = write_key = None
    kind = Decay.kind

    def check(self, batch: int, heads: int, tokens: int, key_dim: int) -> None:
        """Raise unless the shapes fit `heads` value heads and the decay is nowhere positive."""
        if not isinstance(self.beta, Tensor) or not self.beta.is_floating_point():
            raise TypeError(f"beta: expected a float tensor {(batch, heads, tokens)}, got {describe(self.beta)}")
        if tuple(self.beta.shape) != (batch, heads, tokens):
            raise ValueError(f"beta: expected {(batch, heads, tokens)}, got {tuple(self.beta.shape)}")
        Decay(self.log_decay).check(batch, heads, tokens, key_dim)


@dataclass(frozen=True, eq=False)
class GeneralizedDelta:
    """The state decays, what the old one held at one key is added at another, then a key and value are written.

    ``S_t = exp(log_decay_t) * S_{t-1} + w_t (S_{t-1}^T r_t)^T + k_t v_t^T``: a diagonal matrix plus one of rank one
    acts on the state ("DPLR"). The old state is read before it decays. RWKV-7 has ``r = -kappa`` and
    ``w = a * kappa``, with a removal key kappa of length 1 and a rate a in [0, 1] per channel. The delta rule is
    ``r = k, w = -beta k`` with ``beta v`` as the value. It is stable where the matrix
    ``diag(exp(log_decay)) + w r^T`` has no eigenvalue beyond 1 in size.

    Args:
        read_key, write_key: r and w, float tensors ``(B, Hv, T, Dk)``.
        log_decay: as in `Decay`.

    Runs in plain torch on every device: by chunks, or a token at a time in the reference.

    Peng et al. 2025, arXiv:2503.14456, sec. 4 (RWKV-7).

    >>> import torch, regard
    >>> q, k, v, r, w = (torch.randn(1, 2, 5, 4) for _ in range(5))
    >>> out, state = regard.recurrence(q, k, v, GeneralizedDelta(r, 0.1 * w, -torch.rand(1, 2, 5, 4)))
    >>> out.shape, state.shape
    (torch.Size([1, 2, 5, 4]), torch.Size([1, 2, 4, 4]))
    """

    read_key: Tensor
    write_key: Tensor
    log_decay: Tensor | None = None

    beta = None
    kind = Decay.kind

    def check(self, batch: int, heads: int, tokens: int, key_dim: int) -> None:
        """Raise unless the shapes fit `heads` value heads and the decay is nowhere positive."""
        shape = (batch, heads, tokens, key_dim)
        for name, key in (("read_key", self.read_key), ("write_key", self.write_key)):
            if not isinstance(key, Tensor) or not key.is_floating_point():
                raise TypeError(f"{name}: expected a float tensor {shape}, got {describe(key)}")
            if tuple(key.shape) != shape:
                raise ValueError(f"{name}: expected {shape}, got {tuple(key.shape)}")
        Decay(self.log_decay).check(batch, heads, tokens, key_dim)


Transition = Decay | Delta | GeneralizedDelta
TRANSITIONS = (Decay, Delta, GeneralizedDelta)
