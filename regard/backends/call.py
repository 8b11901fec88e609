"""The record of one attention call: checked arguments in one place, which every backend reads."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.biases import Bias
from regard.masks import Full, Mask
from regard.sites import Frame, Packing

__all__ = ["AttentionCall", "sink_share"]


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """What `regard.attention` was asked for. q (B, Hq, Tq, Dk), k (B, Hkv, Tk, Dk), v (B, Hkv, Tk, Dv)."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Mask | None
    bias: Bias | None
    scale: float
    softcap: float | None
    sink: Tensor | None
    dropout_p: float
    frame: Frame  # where the queries and keys stand
    return_lse: bool
    seed: Tensor | None = None  # int64 (), drawn when dropout_p > 0 and the call runs

    @property
    def sizes(self) -> tuple[int, int, int, int, int, int]:
        """B, Hq, Hkv, Tq, Tk, Dv."""
        batch, q_heads, q_len, _ = self.q.shape
        return batch, q_heads, self.k.shape[1], q_len, self.k.shape[2], self.v.shape[3]

    @property
    def group(self) -> int:
        """Query heads per key head."""
        return self.q.shape[1] // self.k.shape[1] if self.k.shape[1] else 1

    @property
    def compute_dtype(self) -> torch.dtype:
        """Scores and sums: float64 for float64 inputs, else float32."""
        return torch.float64 if self.q.dtype == torch.float64 else torch.float32

    @property
    def wants_grad(self) -> bool:
        """Whether autograd will record this call."""
        return torch.is_grad_enabled() and any(t.requires_grad for t in self.tensors)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Every tensor that a gradient may be wanted for: q, k, v, the sink, those of the bias."""
        sink = () if self.sink is None else (self.sink,)
        return (self.q, self.k, self.v, *sink, *(self.bias.tensors() if self.bias is not None else ()))

    def with_tensors(self, tensors: tuple[Tensor, ...]) -> AttentionCall:
        """The same call on other tensors, in the order of `tensors`."""
        q, k, v, *rest = tensors
        sink = rest.pop(0) if self.sink is not None else None
        bias = self.bias.with_tensors(rest) if self.bias is not None else None
        return dataclasses.replace(self, q=q, k=k, v=v, sink=sink, bias=bias)

    @property
    def q_start(self) -> int | Tensor:
        """The key slot at which query 0 stands."""
        return self.frame.q_start

    @property
    def packing(self) -> Packing | None:
        """The packed lengths, when the slots are counted inside segments."""
        return self.frame.packing

    @property
    def effective_mask(self) -> Mask:
        """The mask, `Full` where none was given."""
        return Full() if self.mask is None else self.mask

    @property
    def squarely_causal(self) -> bool:
        """Whether the mask is exactly ``Causal`` with query r at key r, which torch's kernels call is_causal."""
        offsets = self.effective_mask.offsets()
        square = self.q.shape[2] == self.k.shape[2] and not isinstance(self.q_start, Tensor) and self.q_start == 0
        return square and self.packing is None and offsets is not None and offsets.ranges == ((0, float("inf")),)

    @property
    def reads_everything(self) -> bool:
        """Whether every query may attend to every key, by the mask's definition alone."""
        if self.mask is None:
            return True
        offsets = self.mask.offsets()
        if offsets is None or self.packing is not None or isinstance(self.q_start, Tensor):
            return False
        return offsets.meet(self.q_start - self.k.shape[2] + 1, self.q_start + self.q.shape[2] - 1)[1]


def sink_share(lse: Tensor, sink: Tensor) -> Tensor:
    """The share ``sum exp(S) / (sum exp(S) + exp(sink)) = sigmoid(lse - sink)`` that the sink leaves to the keys.

    `lse` (B, Hq, Tq), `sink` (Hq,). 0 where no key is allowed. So a sink is a factor on an ordinary softmax, in any
    kernel.
    """
    sink = sink.to(lse.dtype).view(1, -1, 1)
    dead = lse == -torch.inf
    share = torch.sigmoid(torch.where(dead, 0.0, lse) - sink)
    return torch.where(dead, 0.0, share)
