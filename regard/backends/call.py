"""The record of one attention call: checked arguments in one place, which every backend reads."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

from regard.backends.terms import BiasTerms, MaskTerms, pattern_of, sorted_bias, sorted_mask
from regard.biases import Bias
from regard.coordinates import Coordinates, Packing
from regard.masks import Full, Mask
from regard.score_options import ScoreOptions

__all__ = [
    "AttentionCall",
    "inside_transform",
    "is_batched",
    "may_be_transformed",
    "recorded_gradients",
    "sink_share",
    "zero_unread",
]

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """What `regard.attention` was asked for. q (B, Hq, Tq, Dk), k (B, Hkv, Tk, Dk), v (B, Hkv, Tk, Dv)."""

    operation: ClassVar[str] = "attention"

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Mask | None
    bias: Bias | None
    scores: ScoreOptions  # what becomes of a product; its scale is a number
    sink: Tensor | None
    dropout_p: float
    coordinates: Coordinates  # where the queries and keys stand
    return_lse: bool
    seed: Tensor | None = None  # int64 (), drawn when dropout_p > 0 and the call runs
    _memo: dict[str, Any] = field(init=False, repr=False, default_factory=dict)

    @property
    def scale(self) -> float:
        """The factor on ``q . k``."""
        return self.scores.scale  # type: ignore[return-value]  # resolved

    @property
    def pattern(self) -> str:
        """What `pattern_of` says of the mask."""
        if "pattern" not in self._memo:
            self._memo["pattern"] = pattern_of(self.mask, self.coordinates)
        found: str = self._memo["pattern"]
        return found

    @property
    def mask_terms(self) -> MaskTerms:
        """The mask by kinds of terms; none where it allows everything."""
        mask = None if self.pattern == "full" else self.mask
        return self._remembered("mask_terms", lambda: sorted_mask(mask, self.packing))

    @property
    def bias_terms(self) -> BiasTerms:
        """The bias by kinds of summands."""
        return self._remembered("bias_terms", lambda: sorted_bias(self.bias, self.packing))

    def _remembered(self, name: str, make: Callable[[], T]) -> T:
        if name not in self._memo:  # torch.compile cannot read functools.cached_property
            self._memo[name] = make()
        found: T = self._memo[name]
        return found

    @property
    def sizes(self) -> tuple[int, int, int, int, int, int]:
        """B, Hq, Hkv, Tq, Tk, Dv."""
        batch, q_heads, q_len, _ = self.q.shape
        return batch, q_heads, self.k.shape[1], q_len, self.k.shape[2], self.v.shape[3]

    @property
    def device(self) -> torch.device:
        return self.q.device

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
        if not torch.is_grad_enabled():
            return False
        if self.q.requires_grad or self.k.requires_grad or self.v.requires_grad:
            return True
        return (self.sink is not None or self.bias is not None) and any(t.requires_grad for t in self.tensors)

    @property
    def transformed(self) -> bool:
        """Whether torch.func transforms (vmap, jvp, grad ...) run through the call, in eager mode."""
        return _wrapped(self.tensors)

    @property
    def under_derivatives(self) -> bool:
        """Whether forward-mode derivatives, or derivative transforms of torch.func, run through the call."""
        if torch.compiler.is_compiling():
            return False
        if torch._C._are_functorch_transforms_active() and any(map(_tracks_gradients, self.tensors)):
            return True
        return _dual(self.tensors)

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
    def wide_bias(self) -> Bias | None:
        """The bias with its tensors in at least the compute dtype: there the gradients of what broadcasts add up."""
        if self.bias is None:
            return None
        tensors = self.bias.tensors()
        wide = [t.to(torch.promote_types(t.dtype, self.compute_dtype)) for t in tensors]
        same = all(one is other for one, other in zip(wide, tensors, strict=True))
        return self.bias if same else self.bias.with_tensors(wide)

    @property
    def q_start(self) -> int | Tensor:
        """The key slot at which query 0 stands."""
        return self.coordinates.q_start

    @property
    def packing(self) -> Packing | None:
        """The packed lengths, when the slots are counted inside segments."""
        return self.coordinates.packing

    @property
    def effective_mask(self) -> Mask:
        """The mask, `Full` where none was given."""
        return Full() if self.mask is None else self.mask


def sink_share(lse: Tensor, sink: Tensor, low: Tensor | None = None) -> Tensor:
    """The share ``sum exp(S) / (sum exp(S) + exp(sink)) = sigmoid(lse - sink)`` that the sink leaves to the keys.

    `lse` (B, Hq, Tq), `sink` (Hq,) or as `lse`, `low` what `lse` lost by rounding. 0 where no key is allowed. So a sink
    is a factor on an ordinary softmax, in any kernel.
    """
    sink = sink.to(lse.dtype)
    sink = sink.view(1, -1, 1) if sink.ndim == 1 else sink
    dead = lse == -torch.inf
    above = torch.where(dead, 0.0, lse) - sink
    share = torch.sigmoid(above if low is None or not low.numel() else above + low.detach())
    return torch.where(dead, 0.0, share)


def recorded_gradients(
    run: Callable[[tuple[Tensor | None, ...]], Sequence[Tensor]],
    inputs: Sequence[Tensor | None],
    grads: Sequence[Tensor | None],
    wanted: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    """The gradients of those `inputs` that are wanted, differentiable again.

    For backends whose own backward pass cannot be recorded: `run` maps the inputs to the results in plain torch, and
    `grads` are the gradients of these, or None.
    """
    # views: of inputs that are one tensor, or come from one another, each gets its own share alone
    own = tuple(x.view_as(x) if want and x is not None else x for x, want in zip(inputs, wanted, strict=True))
    pairs = [(one, grad.to(one.dtype)) for one, grad in zip(run(own), grads, strict=True) if grad is not None]
    outputs, given = zip(*pairs, strict=True)
    chosen = [x for x, want in zip(own, wanted, strict=True) if want and x is not None]
    found: Any = iter(torch.autograd.grad(outputs, chosen, given, create_graph=True, allow_unused=True))
    return tuple(next(found) if want else None for want in wanted)


def is_batched(grads: Sequence[Tensor | None]) -> bool:
    """Whether gradients come many at once: ``is_grads_batched=True``, ``jacobian(vectorize=True)``, vmap over grad."""
    functorch = torch._C._functorch
    return any(
        grad is not None and (functorch.is_legacy_batchedtensor(grad) or functorch.is_functorch_wrapped_tensor(grad))
        for grad in grads
    )


def zero_unread(allowed: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """k and v with 0 where no query of the batch row may read: such a key may hold NaN, and ``0 * NaN`` is NaN.

    `allowed` is (B, Hq, Tq, Tk) whole.
    """
    read = allowed.any(2).any(1)[:, None, :, None]
    zero = torch.zeros((), dtype=k.dtype, device=k.device)
    return torch.where(read, k, zero), torch.where(read, v, zero)


def may_be_transformed() -> bool:
    """Whether any function transform or forward-mode derivative is under way, in eager mode."""
    if torch.compiler.is_compiling():
        return False
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def inside_transform(tensors: Iterable[Tensor]) -> bool:
    """Whether function transforms (vmap, jvp, grad ...) or forward-mode derivatives run through any, in eager mode."""
    tensors = tuple(tensors)
    return _wrapped(tensors) or _dual(tensors)


def _wrapped(tensors: Iterable[Tensor]) -> bool:
    if torch.compiler.is_compiling() or not torch._C._are_functorch_transforms_active():
        return False
    return any(map(torch._C._functorch.is_functorch_wrapped_tensor, tensors))


def _dual(tensors: Iterable[Tensor]) -> bool:
    dual = forward_ad._current_level >= 0 and not torch.compiler.is_compiling()
    return dual and any(forward_ad.unpack_dual(t).tangent is not None for t in tensors)


def _tracks_gradients(t: Tensor) -> bool:
    """Whether any wrapper around a tensor is of jvp, grad, jacrev ... rather than of vmap."""
    while torch._C._functorch.is_functorch_wrapped_tensor(t):
        if torch._C._functorch.is_gradtrackingtensor(t):
            return True
        t = torch._C._functorch.get_unwrapped(t)
    return False
