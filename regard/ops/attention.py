"""Softmax attention: `attention`, `attention_weights`, `explain`."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, TypedDict

import torch
from torch import Tensor

from regard import backends
from regard.backends import AttentionCall, Explanation, reference
from regard.backends.call import sink_share
from regard.backends.dropout import draw_seed
from regard.biases import Bias, as_bias
from regard.checks import describe, is_dense, is_number_type, real
from regard.coordinates import Coordinates
from regard.masks import Mask, as_mask, split_packing
from regard.ops.checks import autocasting, without_autocast
from regard.score_options import ScoreOptions

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["attention", "attention_weights", "explain"]


class AttentionOptions(TypedDict, total=False):
    """The options of `attention`, for the functions that take the same."""

    mask: Mask | Tensor | None
    bias: Bias | Tensor | None
    scale: float | None
    softcap: float | None
    sink: Tensor | None
    dropout_p: float
    q_start: int | Tensor | None
    return_lse: bool
    backend: str | None


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Mask | Tensor | None = None,
    bias: Bias | Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sink: Tensor | None = None,
    dropout_p: float = 0.0,
    q_start: int | Tensor | None = None,
    return_lse: bool = False,
    backend: str | None = None,
) -> Any:
    """Softmax attention, ``softmax(softcap(scale * Q K^T) + bias, over allowed keys) V``.

    ``S = softcap * tanh(scale * Q K^T / softcap) + bias``, then the mask, then a softmax over the keys (with
    ``exp(sink_h)`` added to the denominator), then dropout, then V. Sums are kept in float32, or float64 for float64
    inputs.

    Args:
        q, k, v: ``(B, Hq, Tq, Dk)``, ``(B, Hkv, Tk, Dk)``, ``(B, Hkv, Tk, Dv)``, one floating dtype, any strides.
            Query head h reads key head ``h // (Hq // Hkv)``; heads are never copied.
        mask: a `regard.masks` object, or a bool tensor ``(Tq, Tk)`` or one that broadcasts to ``(B, Hq, Tq, Tk)``;
            True = may attend.
        bias: a `regard.biases` object, or a float tensor of such a shape; -inf masks.
        scale: factor on ``Q K^T`` that the compute dtype holds; ``Dk ** -0.5`` by default.
        softcap: bound on the scores, > 0, at least the compute dtype's smallest normal number; None, inf and anything
            from 1e30 on for none.
        sink: a logit per query head ``(Hq,)`` that takes its share of the softmax and gives nothing.
        dropout_p: the share of weights dropped, in [0, 1]; 0 draws no random number.
        q_start: the key slot at which query 0 stands, an int or ``(B,)``; ``Tk - Tq`` by default: the queries are the
            last slots.
        return_lse: also return the log-sum-exp of the scores over the allowed keys (the sink excluded), differentiable.
        backend: a backend by name instead of the first that can.

    Returns:
        ``(B, Hq, Tq, Dv)`` in q's dtype; with `return_lse`, also ``(B, Hq, Tq)`` in nats, in the compute dtype, -inf
        where no key is allowed. A row that may attend to nothing is exactly 0 with zero gradients. Keys that no query
        of their batch row may read may hold anything.

    Raises:
        ValueError, TypeError: an argument of the wrong shape, type or range; the text names it.
        BackendUnsupported: `backend` (or `use_backend`) names one that cannot run the call.

    Cost: 2 B Hq Tq Tk (Dk + Dv) FLOPs less what the mask's empty blocks save. Memory beside the inputs: O(Tq + Tk) on
        `chunked` always, and on `native` and `sdpa` for the masks and biases that they know by rule; others they write
        out densely (at most 2**24 pairs, else they leave the call to `chunked`); O(Hq Tq Tk) on `reference`.

    Vaswani et al. 2017, arXiv:1706.03762, eq. 1.

    >>> import torch, regard
    >>> from regard.masks import Causal
    >>> q, k, v = torch.randn(1, 8, 16, 64), torch.randn(1, 2, 16, 64), torch.randn(1, 2, 16, 32)
    >>> regard.attention(q, k, v, mask=Causal()).shape
    torch.Size([1, 8, 16, 32])
    """
    call = _call(q, k, v, mask, bias, sink, dropout_p, q_start, return_lse, scale=scale, softcap=softcap)
    out, lse = _run(call, backend)
    return (out, lse) if return_lse else out


def attention_weights(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    **options: Unpack[AttentionOptions],
) -> tuple[Tensor, Tensor, Tensor]:
    """`attention` and its weights: ``(out, weights, lse)``; for looking, so `out` is what `attention` gives.

    Weights are ``(B, Hq, Tq, Tk)`` in the compute dtype, before dropout and without the sink's column (with a sink,
    rows sum to less than 1), differentiable, with O(Tq Tk) memory. Arguments and errors as `attention` (`return_lse`
    changes nothing here).

    >>> import torch, regard
    >>> q = torch.randn(1, 1, 3, 4)
    >>> _, weights, _ = regard.attention_weights(q, q, q)
    >>> torch.allclose(weights.sum(-1), torch.ones(1, 1, 3))
    True
    """
    given, backend = _named("attention_weights", options)
    call = _call(q, k, v, **given)
    out, _ = _run(call, backend)
    with without_autocast(q):
        weights, lse = reference.weights(call)
    return out, weights, lse


def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    **options: Unpack[AttentionOptions],
) -> Explanation:
    """Which backend would run this call of `attention`, and why the others would not; nothing is computed.

    Arguments as `attention`. Tensors may be on the meta device.

    >>> import torch, regard
    >>> q = torch.randn(1, 2, 64, 8)
    >>> regard.explain(q.double(), q.double(), q.double(), softcap=30.0).chosen
    'chunked'
    """
    given, backend = _named("explain", options)
    call = _call(q, k, v, **given)
    return backends.explain_call(call, backend)


def _run(call: AttentionCall, backend: str | None) -> tuple[Tensor, Tensor]:
    """(out, lse) of the selected backend, the sink's share taken, in q's dtype."""
    if autocasting(call.q):  # off: it would lower the sums that are kept in the compute dtype
        with torch.autocast(call.q.device.type, enabled=False):
            return _run(call, backend)
    chosen = backends.select(call, backend)
    if call.dropout_p > 0:  # drawn only once it is sure that the call runs
        call = dataclasses.replace(call, seed=draw_seed(call.q.device))
    out, lse, *low = backends.run(call, chosen)
    if call.sink is not None:
        out = out * sink_share(lse, call.sink, *low).unsqueeze(-1)
    return (out if out.dtype == call.q.dtype else out.to(call.q.dtype)), lse


def _named(name: str, options: AttentionOptions) -> tuple[dict[str, Any], str | None]:
    """The options given to the function `name`, and apart from them the backend."""
    known = AttentionOptions.__annotations__
    for option in options:
        if option not in known:
            raise TypeError(f"{option}: {name} has no such argument; expected {', '.join(known)}")
    given: dict[str, Any] = dict(options)
    return given, given.pop("backend", None)


def _call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Any = None,
    bias: Any = None,
    sink: Any = None,
    dropout_p: Any = 0.0,
    q_start: Any = None,
    return_lse: bool = False,
    **scores: Any,
) -> AttentionCall:
    """The checked record of a call; `scores` are the fields of `ScoreOptions`."""
    for x in (q, k, v):
        if not isinstance(x, Tensor) or x.ndim != 4:
            _refuse_operand("q" if x is q else "k" if x is k else "v", x)
        is_dense("q, k, v", x)
    if autocasting(q):
        low = torch.get_autocast_dtype(q.device.type)
        q, k, v = (x.to(low) if x.dtype in (torch.float32, torch.float16, torch.bfloat16) else x for x in (q, k, v))
    if not (q.dtype == k.dtype == v.dtype):
        raise TypeError(f"q, k, v: expected one dtype, got {q.dtype}, {k.dtype}, {v.dtype}")
    is_number_type("q, k, v", q)
    device = q.device
    if not (device == k.device and device == v.device):
        raise ValueError(f"q, k, v: expected one device, got {device}, {k.device}, {v.device}")
    batch, q_heads, q_len, width = q.shape
    k_batch, kv_heads, k_len, k_width = k.shape
    v_batch, v_heads, v_len, _ = v.shape
    if k_batch != batch or k_width != width:
        raise ValueError(f"k: expected ({batch}, Hkv, Tk, {width}) to go with q {tuple(q.shape)}, got {tuple(k.shape)}")
    if v_batch != batch or v_heads != kv_heads or v_len != k_len:
        raise ValueError(f"v: expected {tuple(k.shape[:3])} before the value size, as k has, got {tuple(v.shape)}")
    if not kv_heads or q_heads % kv_heads:
        raise ValueError(
            f"k: expected a number of key heads that divides the query heads, got Hq={q_heads}, Hkv={kv_heads}"
        )
    mask, bias = as_mask(mask), as_bias(bias)
    packing = split_packing(mask) if mask is not None and mask.offsets() is None else None
    if packing is not None and q_start is not None:
        raise ValueError(
            "q_start: packed lengths place the queries themselves; leave q_start=None with Segments.from_lengths"
        )
    if mask is not None:
        mask.refresh()
        mask.check(batch, q_heads, q_len, k_len)
    if bias is not None:
        bias.check(batch, q_heads, q_len, k_len)
    p = _probability(dropout_p)
    start = k_len - q_len if q_start is None else _start(q_start, batch)
    coordinates = Coordinates(batch, q_heads, q_len, k_len, start, packing, device)
    return AttentionCall(
        q,
        k,
        v,
        mask,
        bias,
        ScoreOptions.of(width, q.dtype, **scores),
        _sink(sink, q_heads),
        p,
        coordinates,
        return_lse,
    )


def _refuse_operand(name: str, x: Any) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: expected a tensor (B, H, T, D), got {describe(x)}")
    is_dense(name, x)
    raise ValueError(f"{name}: expected 4 dimensions (B, H, T, D), got shape {tuple(x.shape)}")


def _sink(sink: Any, heads: int) -> Tensor | None:
    if sink is None:
        return None
    if not isinstance(sink, Tensor) or not sink.is_floating_point():
        raise TypeError(f"sink: expected a float tensor ({heads},), got {describe(sink)}")
    is_dense("sink", sink)
    is_number_type("sink", sink)
    if sink.shape != (heads,):
        raise ValueError(f"sink: expected one logit per query head, ({heads},), got shape {tuple(sink.shape)}")
    return sink


def _probability(p: float) -> float:
    p = real("dropout_p", p, "a number in [0, 1]")
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"dropout_p: expected a number in [0, 1], got {p}")
    return p


def _start(q_start: Any, batch: int) -> int | Tensor:
    if isinstance(q_start, Tensor):
        if q_start.is_floating_point() or q_start.dtype == torch.bool or q_start.shape not in ((), (batch,), (1,)):
            raise ValueError(f"q_start: expected an int or an integer tensor ({batch},), got {describe(q_start)}")
        return q_start.expand(batch) if q_start.ndim else q_start.reshape(1).expand(batch)
    if isinstance(q_start, bool) or not isinstance(q_start, (int, torch.SymInt)):
        raise TypeError(f"q_start: expected an int or an integer tensor ({batch},), got {describe(q_start)}")
    return q_start  # type: ignore[return-value]  # a SymInt stands for an int
